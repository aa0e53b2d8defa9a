"""Ranks that share each sequence, under both contracts: exact gradients, whole rows' documents, one decision for all."""

import pytest
from test_launch import torchrun

CLOSE = 1e-12  # float64 of one process, relative to the largest value; sums over ranks come in another order
# A float64 model of these families rounds norms, rotations or routers to float32: one step of that.
CLOSE_FAMILY = 1e-5


def check(reports: list[dict], n_cases: int) -> None:
    for report in reports:
        exact = dict(list(report["worst"].items())[:n_cases])
        assert len(exact) == n_cases
        assert not {name: error for name, error in exact.items() if not error <= CLOSE}
        assert not {name: error for name, error in report["worst"].items() if not error <= CLOSE_FAMILY}


def test_gradients_are_those_of_one_process(tmp_path):
    """Fewer KV heads than ranks, batch 1 and 2, packed, padded, zigzag, LoRA, every, tiers, saved or not, no label on a rank."""
    reports = torchrun("sequence_worker.py", "short", folder=tmp_path)
    check(reports, 12)
    for report in reports:
        assert report["calls"] > 12 * 3  # every layer's attention was exchanged
        positions, packed = report["said"]
        assert positions.startswith("hfpatch: expected position_ids where a row's tokens lie on several ranks")
        assert packed.startswith("hfpatch: expected one document a row where sequence parallelism runs sdpa itself")
        assert report["evaluation"] <= 1e-6  # whole rows, one a rank, as accelerate evaluates
        assert report["backend"] == "rank 0" and report["least"] == [10, 19, None]


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_way_and_family(ranks, tmp_path):
    check(torchrun("sequence_worker.py", "all", folder=tmp_path, ranks=ranks), 84)
