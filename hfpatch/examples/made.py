"""A tiny model and made data, for the examples' `--small` on a CPU."""

import json
import sys
import tempfile
from pathlib import Path

_CHAT = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>\n{{ m.content }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>\n{% endif %}"
)
_ROWS = 40


def _sum(n: int) -> tuple[str, str]:
    return f"What is {n} and {n}?", f"It is {2 * n}."


# Form of the data -> a line of its file; "text" is no JSON.
_LINES = {
    "text": lambda ask, answer: f"{ask} {answer}",
    "chat": lambda ask, answer: {
        "messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]
    },
    "pairs": lambda ask, answer: {"prompt": ask, "chosen": f" {answer}", "rejected": " No."},
    "prompts": lambda ask, answer: {"prompt": ask},
}


def small(form: str) -> tuple[str, str, str]:
    """(model's folder, data file, output folder), all in a new temporary folder.

    form: of the data: "text", "chat", "pairs" or "prompts". Compiled functions of this process run
    eagerly from now on: compiling an optimizer takes longer than the steps of an example.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from hfpatch.trainer import tokenizer

    torch.compiler.set_stance("force_eager")
    folder = Path(tempfile.mkdtemp(prefix="hfpatch-example-"))
    lines = [_LINES[form](*_sum(n)) for n in range(_ROWS)]
    data = folder / ("rows.txt" if form == "text" else "rows.jsonl")
    written = [line if form == "text" else json.dumps(line) for line in lines]
    data.write_text("\n".join(written) + "\n", encoding="utf-8")
    made = tokenizer.train((" ".join(_sum(n)) for n in range(_ROWS)), 300)
    made.chat_template = _CHAT
    made.save_pretrained(folder / "model")
    config = LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=512, bos_token_id=0, eos_token_id=1,
        pad_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    return str(folder / "model"), str(data), str(folder / "out")


def run(main, usage: str, form: str, **smaller) -> None:
    """Runs an example's main with the three words of the command line.

    With --small it gets a tiny model, made data of this form, and what is smaller for them.
    """
    if sys.argv[1:] == ["--small"]:
        main(*small(form), **smaller)
    else:
        main(*sys.argv[1:]) if len(sys.argv) == 4 else sys.exit(usage)
