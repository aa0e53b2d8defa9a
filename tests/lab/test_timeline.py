"""The peak and what is alive at it, from allocations written by hand."""

from hfpatch.lab.profile.advice import focus, sentences
from hfpatch.lab.profile.timeline import CATEGORIES, Run, measure
from hfpatch.lab.simulate.ledger import Block, Ledger

MIB = 1 << 20


def ledger_of(blocks: list[Block]) -> Ledger:
    """The ledger in whose events these blocks are born and die."""
    died = [(b.died, i, -b.nbytes) for i, b in enumerate(blocks) if b.died is not None]
    changes = sorted([*((b.born, i, b.nbytes) for i, b in enumerate(blocks)), *died])
    return Ledger(blocks, [change[1:] for change in changes])


def a_run(impl="hf", scale=1, **changes):
    """Weights all along, a checkpoint through the backward, logits around its start: 10, 2 and 5
    MiB times scale.
    """
    run = Run(impl=impl, seq_len=128, phases=[["forward", 0, 3], ["backward", 3, 7]], **changes)
    blocks = [
        Block(10 * MIB, 0, "given", "", "before the step", category="parameters"),
        Block(2 * MIB * scale, 1, "aten::add", "model.layers.0", "forward", category="checkpoints", died=6),
        Block(5 * MIB * scale, 2, "aten::mm", "lm_head", "forward", category="loss", died=3),
        Block(
            4 * MIB * scale, 4, "aten::mm", "model.layers.3.mlp", "backward", category="working set", died=5
        ),
    ]  # fmt: skip
    return measure(run, ledger_of(blocks))


def test_peak_and_split():
    run = a_run()
    assert run.peak_bytes == 17 * MIB
    assert run.peak_at == 2 and run.peak_phase == "forward"
    assert run.peak_split == dict.fromkeys(CATEGORIES, 0) | {
        "parameters": 10 * MIB,
        "checkpoints": 2 * MIB,
        "loss": 5 * MIB,
    }


def test_two_sentences_name_peak_and_holder():
    runs = [a_run(), a_run(impl="hfpatch", scale=0)]
    assert focus(runs).impl == "hfpatch"
    first, second = sentences([a_run(impl="hf")])
    assert "17.0 MiB" in first and "lm_head" in second and "10.0 MiB" in second
    assert "1.7 times" in sentences(runs)[0]
