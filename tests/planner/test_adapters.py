"""LoRA and QLoRA as sizes: against PEFT's own adapters, and the closed form against a simulated
step over quantised weights.
"""

import json

import families
import pytest

from hfpatch.budget.hardware import GPUS, PIN_BYTES_PER_SECOND
from hfpatch.budget.policy import Checkpointing
from hfpatch.lab.adapters import Adapters
from hfpatch.planner.answer import PROCESS_BYTES
from hfpatch.planner.plan import plan


def test_the_command_takes_adapters(capsys):
    from hfpatch.cli.main import main

    run = [
        "plan",
        "--model",
        "llama-3.1-8b",
        "--seq-len",
        "128k",
        "--gpu",
        "rtx4090",
        "--host-ram",
        "128GiB",
    ]
    assert main(run) == 3  # all weights do not fit
    assert main([*run, "--lora-r", "16", "--base", "4bit", "--max-seq-len", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.partition("{")[2].join(["{", ""]))
    lengths = [(way["every"], way["seq_len"]) for way in found["longest"]]
    # auto is no worse than the interval set by hand
    assert lengths[0][1] >= lengths[1][1]
    assert [every for every, _ in lengths] == ["auto", 2, 4] and found["max_seq_len"] == lengths[0][
        1
    ] > 131072
    assert all(way["host_peak_bytes"] <= 0.9 * (128 << 30) for way in found["longest"])
    assert main([*run, "--base", "4bit"]) == 2 and "--lora-r" in capsys.readouterr().err
    assert main([*run, "--lora-r", "8", "--lora-target", "q_proj,nonesuch"]) == 2
    assert "'nonesuch' came" in capsys.readouterr().err
    assert main([*run, "--lora-r", "8", "--placement", "zero3-offload"]) == 2


def test_a_base_that_does_not_fit_waits_on_the_host():
    run = {"seq_len": 131072, "gpu": "rtx4090", "host_ram": "384GiB", "adapters": Adapters(16)}
    large = plan("llama-3.1-70b", **run)
    assert large.fits and large.policy["frozen_weights"] == "host" and large.policy["plain"] == 0
    assert large.gpu_peak_bytes <= 23 << 30 and large.host_peak_bytes > 128 << 30
    pinned = large.host_peak_bytes - PROCESS_BYTES  # checkpoints and weights
    assert large.first_step["pinning"] == pytest.approx(pinned / PIN_BYTES_PER_SECOND)
    # Hidden, each layer's 1.6 GiB behind its work on 131,072 tokens, but for what no layer stands
    # behind.
    assert large.seconds["copy_wait"] < 1e-4 * large.step_seconds
    short = plan("llama-3.1-70b", **run | {"seq_len": 2048})
    # No work is long enough there: the step takes at least what the weights take over the link, twice.
    link = GPUS["rtx4090"].link_rate
    assert short.step_seconds > 1.9 * short.link_bytes / 2 / link > 2 * 128 / 32
    assert short.seconds["copy_wait"] > 0.2 * short.step_seconds
    # One that fits stays, and goes where it is asked to.
    small = plan("llama-3.1-8b", **run | {"seq_len": 8192})
    assert small.policy["frozen_weights"] == "gpu"
    asked = plan(
        "llama-3.1-8b",
        **run | {"seq_len": 8192, "checkpointing": Checkpointing(frozen_weights="host")},
    )
    assert asked.gpu_bytes["parameters"] < 0.25 * small.gpu_bytes["parameters"]
    assert asked.host_peak_bytes > 16 << 30 and asked.link_bytes > 24 << 30
    with pytest.raises(
        ValueError, match="^hfpatch: weights on the host are a frozen base's[^\n]*$"
    ):
        plan("llama-3.1-8b", seq_len=8192, checkpointing=Checkpointing(frozen_weights="host"))
    # The session leaves them on GPUs that share rows.
    shared = run | {"seq_len": 8192, "gpus": 8, "sp_size": 8}
    assert plan("llama-3.1-70b", **shared).policy["frozen_weights"] == "gpu"
    with pytest.raises(ValueError, match="^hfpatch: weights on the host [^\n]*--sp-size 8[^\n]*$"):
        plan("llama-3.1-70b", **shared, checkpointing=Checkpointing(frozen_weights="host"))


def test_a_simulated_model_without_such_layers_is_refused_in_a_sentence():
    """PEFT adapts no out_proj of Mamba 2, whose kernel reads the weight itself."""
    from hfpatch.lab.simulate.adapters import adapted

    cases = (
        ("nemotron_h", Adapters(4), "'out_proj' is incompatible with Mamba-based models"),
        ("lfm2", Adapters(4, targets=("nonesuch",)), "{'nonesuch'} not found"),
    )
    for name, adapters, why in cases:
        with pytest.raises(ValueError) as raised:
            adapted(families.small_model(name), adapters)
        said = str(raised.value)
        assert said.startswith("hfpatch: expected Linear layers that PEFT adapts") and why in said
        assert said.endswith("name others with --lora-target.")
