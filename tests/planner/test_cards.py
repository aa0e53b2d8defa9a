"""What `--gpu`, `--host-ram` and `--seq-len` accept, and what a plan says of them."""

import math

import pytest
from tiny import LONG

import hfpatch
from hfpatch.budget.limits import parse_length
from hfpatch.lab.adapters import Adapters
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


def test_without_host_ram_a_common_machine_is_assumed():
    found = hfpatch.plan("llama-tiny", seq_len=4096, gpu="a100-80gb")
    assert found.host.assumed and found.host.usable_bytes == int(0.9 * (160 << 30))
    line = next(line for line in str(found).splitlines() if line.startswith("host memory"))
    assert line.endswith("of 144.0 GiB, of 160 GiB assumed (yours: --host-ram)")
    needed = math.ceil(found.host.peak_bytes / 0.9 / 2**30)
    assert str(found).splitlines()[0].endswith(f": fits, with {needed} GiB of RAM")
    small = hfpatch.plan("llama-tiny", seq_len=4096, gpu="8GiB")
    assert small.host.usable_bytes == int(0.9 * (64 << 30))
    given = hfpatch.plan("llama-tiny", seq_len=4096, gpu="8GiB", host_ram="32GiB")
    assert not given.host.assumed and "assumed (yours" not in str(given)


@LONG  # test_plan.py: the command offers them
def test_where_all_weights_do_not_fit_adapters_are_offered():
    asked = {"seq_len": 8192, "gpu": "4GiB", "placement": "gpu8bit", "host_ram": "16GiB"}
    found = hfpatch.plan("llama-3.2-1b", **asked)
    offered = next(s for s in found.advice.suggestions if s["change"].startswith("--lora-r"))
    base = "4bit" if "4bit" in offered["change"] else "bf16"
    taken = hfpatch.plan("llama-3.2-1b", **asked, adapters=Adapters(16, base))
    assert not found.fits and taken.fits
    assert taken.gpu.peak_bytes == offered["gpu_peak_bytes"]
    seconds = [round(s["step_seconds"], 1) for s in found.advice.suggestions]
    assert seconds == sorted(seconds)


def test_a_sequence_beyond_the_positions_is_reported():
    """llama-tiny has 4,096 of them."""
    assert "positions" not in str(hfpatch.plan("llama-tiny", seq_len=4096))
    said = str(hfpatch.plan("llama-tiny", seq_len=8192))
    assert "\npositions       the model has 4,096 positions and the sequence 8,192 tokens." in said
    assert '{"rope_type": "yarn", "factor": 2.0, ...}' in said
