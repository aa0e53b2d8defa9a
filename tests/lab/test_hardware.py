"""Cards and sizes by name."""

import pytest

from hfpatch.lab.hardware import GPUS, gpu_named, gpu_row
from hfpatch.planner.limits import parse_bytes


def test_hardware_rows():
    assert gpu_row("A100-80GB") is gpu_row("a100") is GPUS["a100-80gb"]
    assert gpu_row("RTX 4090") is GPUS["rtx4090"]
    # As drivers give them; two cards of one name differ by their memory, and its rate.
    for name, row in (
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"), ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"), ("AMD Instinct MI300X", "mi300x"),
    ):  # fmt: skip
        assert gpu_named(name) is GPUS[row]
    assert gpu_named("NVIDIA H100 PCIe") is gpu_named("NVIDIA A10") is None
    with pytest.raises(ValueError, match="a100-40gb, a100-80gb, h100, .*got gtx"):
        gpu_row("gtx")
    assert all(row.source and row.usable_bytes < row.memory_bytes for row in GPUS.values())


@pytest.mark.parametrize(
    "text, expected", [("256GiB", 256 << 30), ("1.5 TB", 1_500_000_000_000), (12, 12), ("7B", 7)]
)
def test_sizes(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    "text", ["x", "12 parsecs", "-3GiB", "", None, True, "256", "1e400GiB", "nanGB", float("inf")]
)
def test_sizes_refused(text):
    with pytest.raises(ValueError, match="^hfpatch: a size must be"):
        parse_bytes(text)
