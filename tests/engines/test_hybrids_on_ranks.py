"""Hybrids whose rows ranks share (layer/time_ranks.py): each gradient and each step of Trainer is
that of one process. Mixers alone, on more borders: tests/layer/test_time_ranks.py.
"""

import pytest
import tiny
from test_launch import launch, torchrun

CLOSE = 1e-11  # of a gradient's largest value, in float64 over several layers

pytestmark = tiny.not_before_transformers((5, 16), "hands mixers their states by other ways")


def check(reports: list[dict], n_cases: int) -> None:
    for report in reports:
        assert len(report["worst"]) == n_cases
        assert not {name: error for name, error in report["worst"].items() if not error <= CLOSE}
        off, unproved, short = report["said"]
        assert "mixes tokens by something other than attention too" in off
        assert "mixes tokens by something other than attention too" in unproved
        assert short.startswith(
            "hfpatch: each rank must get at least 4 tokens of each sequence, got 3"
        )


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_gradients_are_those_of_one_process(ranks, tmp_path):
    """A delta net, Mamba 2, a convolution; chunks in order and in zigzag; packed, padded over a
    whole rank, LoRA, every, attention beside a mixer, attention that is not saved.
    """
    check(torchrun("hybrid_worker.py", "short", folder=tmp_path, ranks=ranks), 4)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_family_and_kind(ranks, tmp_path):
    reports = torchrun("hybrid_worker.py", "all", folder=tmp_path, ranks=ranks, seconds=1500)
    check(reports, 4 + 6 * 2 * 3)


@pytest.mark.long
@pytest.mark.parametrize("engine", ["ulysses", "context"])
def test_trainers_steps_are_those_of_one_process(engine, tmp_path):
    """Packed rows of several tiles on each of two ranks: losses and norms.
    1e-4 from float64, or twice what float32 loses in one process."""
    (one,) = launch("hybrid_worker.py", "one", tmp_path / "one", folder=tmp_path / "one")
    for report in torchrun("hybrid_worker.py", engine, folder=tmp_path):
        for found, numbers, exact in zip(report["found"], one["found"], one["exact"], strict=True):
            lost = max(abs(a - b) / b for a, b in zip(numbers, exact))
            assert found == pytest.approx(exact, rel=max(1e-4, 2 * lost)) and lost < 1e-2
