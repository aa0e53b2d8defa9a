"""Writes the generated parts of docs/: `python scripts/docs.py [NAME]...`, all by default.

models: docs/models.md, from scripts/families.py (minutes). memory: docs/assets/memory.svg, from
profiles/plan/results.csv. description: DESCRIPTION.md, from README.md.
untiled: docs/internals/untiled.md, from the list in hfpatch/layer/why_whole.py.
Tests hold each to what it would be now.
"""

import argparse
import csv
import dataclasses
import importlib
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
TOKENS = "131072"
PARAMETERS = 8_030_261_248  # of Llama-3.1-8B
# (name in the picture, implementation and policy in profiles/plan/results.csv)
BARS = (
    ("transformers' checkpointing", "hf-ckpt", ""),
    ("Liger in the ALST recipe", "liger-tiled-offload", ""),
    ("hfpatch", "hfpatch", ""),
    ('hfpatch, "least"', "hfpatch", "least"),
)
TRAIN = """hfpatch train [CONFIG.yaml | CONFIG.json] --model M --data D [flags]
accelerate launch -m hfpatch train CONFIG.yaml [flags]"""


def cli() -> str:
    """The page of all commands."""
    from hfpatch.cli.failures import Parser
    from hfpatch.cli.main import COMMANDS, MODELS

    os.environ["COLUMNS"] = "90"
    out = ["# Command line", "", "Each command's `--help`. Lengths may be written `8192`, `128k` or `1M`. "
           "Exit codes: 0 done, 2 bad input, 1 a failure of the machine, 3 a plan that does not fit. `--debug` shows a "
           "failure's traceback.", ""]  # fmt: skip
    out += [f"- [`hfpatch {name}`](#hfpatch-{name}): {summary}"
            for name, (_, summary) in COMMANDS.items()]  # fmt: skip
    for name, (module, summary) in COMMANDS.items():
        out += ["", f"## hfpatch {name}", ""]
        if name == "train":
            out += [f"{summary[0].upper()}{summary[1:]}.", "", "```text", TRAIN, "```", ""]
            out += train_flags()
            continue
        loaded = importlib.import_module(module)
        if name == "run":
            out += ["```text", loaded.__doc__.strip(), "```"]
            continue
        parser = Parser(
            prog=f"hfpatch {name}", description=summary,
            formatter_class=lambda prog: argparse.HelpFormatter(prog, width=90),
        )  # fmt: skip
        if name in MODELS:
            parser.usage = f"hfpatch {name} MODEL [flags] | RUN.yaml [flags]"
        loaded.add_arguments(parser)
        out += ["```text", parser.format_help().strip(), "```"]
    return "\n".join(out) + "\n"


def train_flags() -> list[str]:
    """hfpatch's own flags of `hfpatch train`, a table; transformers' are its own."""
    from hfpatch.trainer.flags import CLASSES, TrainArguments

    out = ["All flags of transformers' `TrainingArguments` work too; `hfpatch train --help` lists "
           "them.", "", "| flag | default | what it says |", "| --- | --- | --- |"]  # fmt: skip
    for kind in CLASSES:
        for field in dataclasses.fields(kind):
            if kind is TrainArguments and field.name not in vars(TrainArguments)["__annotations__"]:
                continue
            made = field.default_factory
            default = made() if made is not dataclasses.MISSING else field.default
            shown = "" if default in (None, "", []) or field.name == "report_to" else f"`{default}`"
            words = field.metadata["help"].replace("|", "\\|")
            choices = field.metadata.get("choices")
            words += f" One of {', '.join(map(str, choices))}." if choices else ""
            out.append(f"| `--{field.name}` | {shown} | {words} |")
    return out


def models() -> str:
    """The page of models."""
    from scripts.families import every_family

    return MODELS.format(table=every_family())


MODELS = """# Models

Any causal decoder of transformers 5 can be patched. hfpatch has no code for any family. It first runs
a small instance of the model stock and patched, forward and backward, full, packed and masked.
If a gradient differs, all layers run untiled; a layer with a module unknown to hfpatch does so alone.
Untiled layers are correct and take more memory. Check your own model, by a hub id, a path or a preset:

```bash
hfpatch check llama-3.1-8b
```

## What to expect

Default configs of transformers 5.24, by `scripts/families.py`. *Verdict* is the comparison of the
small instance with stock.

{table}

In models with [images](guides/images.md) the language model runs in tiles; mixers of [hybrids](guides/hybrids.md) run in tiles
through time if the test shows that this is exact. Qwen4 and GLM-5-Next build their own attention masks, so their
attention runs over whole rows.

## Attention

Whatever `attn_implementation` names (eager, sdpa, flash_attention_2, a kernel of the hub), attention
runs in cuDNN on H100 and B200 and in FlashAttention-2 on other GPUs. `HFPATCH_ATTENTION=flash`, `cudnn`,
`fa3` or `efficient` selects another kernel (`fa3` needs the package flash_attn_interface). FlashAttention-2 also
runs windows, packed rows, heads of more than 128 columns, and all attention in a process that has met more than four
sequence lengths. No kernel has soft caps of scores (Gemma 2): such
attention runs in blocks (plain PyTorch). Heads of more than 256 columns (Gemma 4 has 512) use
torch's memory-efficient kernel.

## Versions

Tested with Python 3.11; torch 2.13 (CPU); triton 3.9; transformers 5.5 to 5.24; accelerate 1.15;
deepspeed 0.19.8; liger-kernel 0.8.5; trl 1.16; peft 0.21. The oldest that work are torch 2.11 and
transformers 5.5. Some features need newer versions:

| you want | you need |
| --- | --- |
| mixers of hybrids in tiles through time; Qwen3-Next with flash-linear-attention | transformers 5.16 |
| FSDP config files in a Trainer | transformers 5.17 |
| Ulysses | accelerate 1.12 |
| tensor parallelism that saves | transformers 5.18 |

Kernels are written for sm_80, sm_89, sm_90, sm_100, sm_120 and gfx942. Each compiles for these without
spills ([kernels](../profiles/kernels/README.md)), the norm's backward up to 8,192 columns; none has
run on them.
"""


def memory() -> str:
    """The picture of README: most GiB of a step at 131,072 tokens, one bar each."""
    with open(ROOT / "profiles/plan/results.csv") as file:
        rows = [r for r in csv.DictReader(file) if r["model"] == "llama-3.1-8b"]
    found = {
        (r["implementation"], r["policy"]): float(r["beyond_gib"])
        for r in rows
        if r["tokens"] == TOKENS
    }
    # bf16 weights and gradients; of the activations what stands at the highest total.
    states = 4 * PARAMETERS / 2**30
    full, high = 290, 46  # room for "254 GiB" in a wide font
    scale = full / (states + max(found[name, policy] for _, name, policy in BARS))
    dark = "@media (prefers-color-scheme: dark) { text { fill: #e6e6e6 } }"
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 380 {high * len(BARS) + 76}" '
           'font-family="sans-serif" font-size="15">',
           f"<style>text {{ fill: #24292f }} {dark}</style>",
           '<text x="8" y="22" font-weight="bold">GPU memory of one step (simulated)</text>',
           ]  # fmt: skip
    for i, (words, name, policy) in enumerate(BARS):
        gib, y = states + found[name, policy], 34 + high * i
        colour = "#5c6bc0" if name == "hfpatch" else "#9e9e9e"
        out += [f'<text x="8" y="{y + 15}">{escaped(words)}</text>',
                f'<rect x="8" y="{y + 20}" width="{gib * scale:.1f}" height="16" fill="{colour}"/>',
                f'<text x="{14 + gib * scale:.1f}" y="{y + 33}">{gib:.0f} GiB</text>',
                ]  # fmt: skip
    y = 34 + high * len(BARS) + 16
    out += [f'<text x="8" y="{y}" font-size="13">Llama-3.1-8B, bf16, batch 1, 131,072 tokens;</text>',
            f'<text x="8" y="{y + 18}" font-size="13">30 GiB of each are weights and gradients.</text>',
            "</svg>"]  # fmt: skip
    return "\n".join(out) + "\n"


def description() -> str:
    """README for a package index, which has neither the pictures nor the pages that it links to."""
    text = re.sub(r"\n<!-- docs: \w+ -->(?=\n)", "", (ROOT / "README.md").read_text())
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)\n\n", "", text)
    return re.sub(r"\[([^\]]+)\]\((?!https?:)[^)]*\)", r"\1", text)


def untiled() -> str:
    """The page of the reasons why a layer runs untiled."""
    from hfpatch.layer import why_whole

    stages = why_whole.__doc__.split("known:\n\n")[1].split("\n\n")[0].splitlines()
    out = ["# Why a layer runs untiled", "",
           "Made from `REASONS` in `hfpatch/layer/why_whole.py` by `python scripts/docs.py untiled`. The first "
           "reason that holds decides.", "",
           "An untiled layer gives the same numbers as transformers' own. Its input is offloaded like a "
           "tiled layer's, and backward runs the whole layer again from it (`layer/whole.py`), so long sequences "
           "still work. With a reason marked *keeps everything* the layer is not checkpointed.", "",
           "Each reason is checked at one stage:", ""]  # fmt: skip
    for line in stages:
        stage, facts = line.split(maxsplit=1)
        out.append(f"- *{stage}*: {re.sub(r' [(][^)]*[)]$', '', facts)}")
    out += ["", "The report has the reasons that are known at `apply`. Most others are printed once, at the first "
            "step where it holds, with details in place of the words in italics:", ""]  # fmt: skip
    for number, reason in enumerate(why_whole.REASONS, 1):
        keeps = ", keeps everything" if reason.keeps else ""
        said = re.sub(r"{(.+?)}", r"*\1*", reason.sentence)
        out.append(f"{number}. **{reason.name}** ({reason.when}{keeps}): {said}")
    return "\n".join(out) + "\n"


def escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;")


WRITTEN = {
    "models": (models, "docs/models.md"),
    "untiled": (untiled, "docs/internals/untiled.md"),
    "memory": (memory, "docs/assets/memory.svg"),
    "description": (description, "DESCRIPTION.md"),
}

if __name__ == "__main__":
    for name in sys.argv[1:] or WRITTEN:
        make, path = WRITTEN[name]
        (ROOT / path).write_text(make())
        print(f"wrote {path}")
