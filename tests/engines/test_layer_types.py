"""Layers that accelerate refuses by their types where ranks share rows, through Trainer with our
callback: each step is that of one process. (What it still refuses: tests/trainer/test_sp_size.py.)
"""

import numerics
import pytest
import torch
from test_launch import torchrun

WINDOWS = ("gemma3_text", "gpt_oss", "mistral")


def check(reports: list[dict], names: tuple[str, ...]) -> None:
    """Losses and norms of each step, as of one process that has each document by itself."""
    for report in reports:
        assert set(report["found"]) == set(names)
        for name, found in report["found"].items():
            assert found["calls"] and found["attention"] == found["named"], name
            for i, what in enumerate(("losses", "norms")):
                got, plain, exact = (
                    torch.tensor(found[way][i], dtype=dtype)
                    for way, dtype in (("got", torch.float32), ("plain", torch.float32),
                                       ("exact", torch.float64))
                )  # fmt: skip
                numerics.assert_close(got, plain, exact, f"{what} of {name}")


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
def test_windows_under_context_parallelism(ranks, tmp_path):
    """Packed rows; on four ranks two pairs, with rows of their own."""
    worker = "types_worker.py", "context", ",".join(WINDOWS)
    check(torchrun(*worker, folder=tmp_path, ranks=ranks), WINDOWS)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_mesh_of_two_dimensions_under_ulysses(ranks, tmp_path):
    """On four ranks two pairs, with rows of their own, in each step those of one process. Trainer
    takes the mean over each row there, and then that of the rows.
    """
    names = ("mistral", "gemma3_text")
    worker = "types_worker.py", "ulysses", ",".join(names)
    check(torchrun(*worker, folder=tmp_path, ranks=ranks), names)
