"""The peak and what is alive at it, from allocations written by hand."""

from hfpatch.lab.profile.advice import focus, sentences
from hfpatch.lab.profile.timeline import (
    CATEGORIES,
    Allocation,
    Run,
    measure,
)

MIB = 1 << 20


def a_run(impl="hf", scale=1, **changes):
    """Weights all along, a checkpoint through the backward, logits around its start: 10, 2 and 5
    MiB times scale.
    """
    run = Run(
        impl=impl, seq_len=128, phases=[["forward", 0.0, 1.0], ["backward", 1.0, 3.0]], **changes
    )
    blocks = [
        Allocation(10 * MIB, 0.0, None, "parameters", "", "before the step"),
        Allocation(
            2 * MIB * scale,
            0.2,
            2.5,
            "checkpoints",
            "model.layers.0",
            "forward",
            "aten::add",
        ),
        Allocation(5 * MIB * scale, 0.8, 1.5, "loss", "lm_head", "forward", "aten::mm"),
        Allocation(
            4 * MIB * scale,
            1.5,
            2.0,
            "working set",
            "model.layers.3.mlp",
            "backward",
            "aten::mm",
        ),
    ]
    return measure(run, blocks)


def test_peak_and_split():
    run = a_run()
    assert run.peak_bytes == 17 * MIB
    assert run.peak_at == 0.8 and run.peak_phase == "forward"
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
