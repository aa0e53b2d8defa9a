"""One training step on a CPU: seconds and memory of stock, stock with checkpointing and hfpatch,
each in a process of its own. The table of README.md; it needs quiet cores.

python profiles/host/laptop.py              # prints the table, some ten minutes on two cores
python profiles/host/laptop.py --write      # and puts it into README.md, below its mark
python profiles/host/laptop.py 2048         # one length
"""

import json
import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"
MARK = "<!-- made by profiles/host/laptop.py -->"
WAYS = ("stock", "stock, checkpointing", "hfpatch", 'hfpatch, "least"')
MODEL = dict(  # 110M parameters
    vocab_size=32000, hidden_size=768, intermediate_size=2048, num_hidden_layers=12,
    num_attention_heads=12, num_key_value_heads=4, max_position_embeddings=16384,
)  # fmt: skip


def peak() -> float:
    """GiB of the largest resident set so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)


def step(way: str, tokens: int) -> dict:
    """Seconds of a forward and backward after a short one, and GiB above the idle process."""
    from hfpatch.cli.quiet import quiet

    quiet()
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import hfpatch

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**MODEL))
    if way == "stock, checkpointing":
        model.gradient_checkpointing_enable()
    elif way != "stock":
        hfpatch.apply(model, checkpointing="least" if "least" in way else "auto")
    ids = torch.randint(0, MODEL["vocab_size"], (1, tokens))
    model.train()
    model(ids[:, :64], labels=ids[:, :64]).loss.backward()  # gradients exist, code is loaded
    idle, begin = peak(), time.perf_counter()
    model(ids, labels=ids).loss.backward()
    return {"seconds": time.perf_counter() - begin, "gib": peak() - idle}


def cell(way: str, tokens: int) -> str:
    """Seconds and GiB of a step in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, way, str(tokens)], env=os.environ | {"OMP_WAIT_POLICY": "passive"},
        text=True, stdout=subprocess.PIPE, check=True,
    )  # fmt: skip
    found = json.loads(done.stdout.splitlines()[-1])
    digits = 1 if found["seconds"] < 20 else 0
    return f"{found['seconds']:.{digits}f} s, {found['gib']:.1f} GiB"


def table(lengths: list[int]) -> str:
    lines = ['| tokens | stock | stock, checkpointing | hfpatch | hfpatch, `"least"` |']
    lines.append("|" + " ---: |" * (1 + len(WAYS)))
    for tokens in lengths:
        cells = [f"{tokens:,}"]
        for way in WAYS:
            cells.append(cell(way, tokens))
            print(f"{tokens:,} tokens, {way}: {cells[-1]}", file=sys.stderr, flush=True)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv):
        print(__doc__)
    elif sys.argv[1:2] and sys.argv[1] in WAYS:
        print(json.dumps(step(sys.argv[1], int(sys.argv[2]))))
    else:
        made = table([int(n) for n in sys.argv[1:] if n != "--write"] or [2048, 8192])
        print(made)
        if "--write" in sys.argv:
            text = README.read_text()
            README.write_text(re.sub(rf"(?<={MARK}\n\n)(\|.*\n)+", f"{made}\n", text))
