"""What `--gpu` and `--seq-len` accept."""

import pytest

from hfpatch.budget.limits import parse_length
from hfpatch.lab.hardware import GPUS, gpu_named, gpu_row
from hfpatch.planner.machine import card


def test_drivers_names_of_cards():
    for name, row in (("NVIDIA L4", "l4"), ("NVIDIA A10G", "a10g"), ("NVIDIA L40S", "l40s")):
        assert gpu_named(name) is GPUS[row]
    assert gpu_named("NVIDIA RTX A6000") is gpu_row("a6000")
    assert gpu_named("NVIDIA L40") is gpu_named("NVIDIA A10") is None, "other cards than l4, a10g"


def test_any_card_by_its_memory():
    found = card("16 GiB")
    assert found.memory_bytes == 16 << 30 and found.peak_flops == GPUS["l4"].peak_flops
    assert found.source.startswith("those of l4, the known card nearest in memory")
    assert card("RTX 3090") is GPUS["rtx3090"]
    with pytest.raises(ValueError, match="got gtx3090. Did you mean rtx3090"):
        card("gtx3090")


def test_lengths():
    for text in ("131072", "131,072", "131_072", "128k", 131072):
        assert parse_length(text) == 131072
    for text in ("131,07", "1,31072", ",072", "128kk", ""):
        with pytest.raises(ValueError, match="a length must be tokens"):
            parse_length(text)
