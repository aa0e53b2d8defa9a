"""The pages have the steps that were simulated, and keep what they promise."""

import csv
from pathlib import Path

import pytest
from tiny import LONG

from hfpatch.planner.answer import make_run
from hfpatch.planner.evaluate import NONE, Ladder

PAGE = Path(__file__).parents[2] / "docs/benchmarks/index.md"
# What the table of benchmarks promises and what was asked of each model: (preset, tokens, GiB at
# the most).
BARS = (
    ("llama-3.1-8b", 131072, 5.7), ("llama-3.1-8b", 32768, 2.4), ("Qwen/Qwen3-8B", 131072, 6.2),
    ("Qwen/Qwen3-8B", 32768, 2.5), ("mistralai/Mistral-7B-v0.3", 131072, 5.9),
    ("google/gemma-3-12b", 131072, 8.6),
    ("Qwen/Qwen3-30B-A3B", 131072, 7.0),
)  # fmt: skip


LEAST = [row if row == BARS[1] else pytest.param(*row, marks=LONG) for row in BARS]


def least(preset: str, tokens: int) -> tuple[float, float]:
    """GiB at most beyond weights and gradients, and of the host."""
    run = make_run(preset, seq_len=tokens, checkpointing="least")
    ladder = Ladder(run, "gpu8bit")
    cost = ladder.steps.cost(tokens, ladder.first, NONE)
    return max(m.beyond for m in cost.moments) / 2**30, cost.host / 2**30


@pytest.mark.parametrize("preset, tokens, most", LEAST)
def test_the_least_memory_stays_below_its_bar(preset, tokens, most):
    assert 0.4 * most < least(preset, tokens)[0] <= most


# The table of a step is simulated: (name there, implementation and policy in profiles/plan).
ROWS = (
    ("transformers, no checkpointing", "hf", ""), ("transformers' checkpointing", "hf-ckpt", ""),
    ("the same with `offload` and TRL's fused head", "trl-offload", ""),
    ("the same with TRL's `selective`", "trl-selective", ""),
    ("Liger's kernels and head, `selective`, `offload`", "liger-selective", ""),
    ("Liger, its tiled MLP, `offload` (the ALST recipe)", "liger-tiled-offload", ""),
    ("hfpatch, inputs and attention on the host", "hfpatch", ""),
    ('hfpatch, `checkpointing="least"`', "hfpatch", "least"),
)  # fmt: skip


# README has the most memory of four of these rows.


def test_the_pages_have_the_steps_that_were_simulated():
    root, shown = Path(__file__).parents[2], 0
    with open(root / "profiles/plan/results.csv") as file:
        found = [r for r in csv.DictReader(file) if r["model"] == "llama-3.1-8b"]
    for name, implementation, policy in ROWS:
        rows = [r for r in found if (r["implementation"], r["policy"]) == (implementation, policy)]
        assert [r["tokens"] for r in rows] == ["8192", "32768", "131072"]
        gib = [[float(r[k]) for k in ("beyond_gib", "most_gib", "host_gib")] for r in rows]
        cells = [name, *(f"{beyond:.1f} / {most:.1f}, {host:.0f}" for beyond, most, host in gib)]
        cells += [rows[-1]["attention"], f"{float(rows[-1]['matmul']):.2f}"]
        assert f"| {' | '.join(cells)} |" in PAGE.read_text()
        readme = (root / "README.md").read_text()
        if f"| {name} |" in readme:
            most = [f"{figures[1]:.1f} | {figures[2]:.0f}" for figures in gib]
            assert " | ".join(["", name, *most, ""]).strip() in readme
            shown += 1
    assert shown == 4
