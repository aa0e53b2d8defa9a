"""LoRA and QLoRA in plans."""

import json

import families
import pytest

from hfpatch.budget.measured import PIN_BYTES_PER_SECOND
from hfpatch.budget.policy import Checkpointing
from hfpatch.lab.adapters import Adapters
from hfpatch.lab.hardware import GPUS
from hfpatch.planner.answer import PROCESS_BYTES
from hfpatch.planner.plan import plan


@pytest.mark.long
def test_the_command_takes_adapters(capsys):
    from hfpatch.cli.main import main

    run = ["plan", "--model", "llama-3.2-1b", "--seq-len", "8k", "--gpu", "rtx4090"]
    run += ["--host-ram", "32GiB", "--placement", "gpu8bit"]
    assert main([*run, "--lora-r", "16", "--base", "4bit", "--max-seq-len", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["advice"]["max_seq_len"] > 65536 and found["run"]["adapters"]["base"] == "4bit"
    assert found["advice"]["max_seq_len_host_bytes"] <= 0.9 * (32 << 30)
    assert main([*run, "--base", "4bit"]) == 2 and "--lora-r" in capsys.readouterr().err
    assert main([*run, "--lora-r", "8", "--lora-target", "nonesuch"]) == 2
    assert "got nonesuch" in capsys.readouterr().err
    run[run.index("gpu8bit")] = "zero3-offload"
    assert main([*run, "--lora-r", "8"]) == 2


def test_a_base_that_does_not_fit_waits_on_the_host():
    run = {"gpu": "rtx4090", "host_ram": "384GiB", "adapters": Adapters(16)}
    large = plan("llama-3.1-70b", seq_len=8192, **run)
    assert large.fits and large.policy.frozen_weights == "host" and large.policy.plain == 0
    assert large.gpu.peak_bytes <= 23 << 30 and large.host.peak_bytes > 128 << 30
    pinned = large.host.peak_bytes - PROCESS_BYTES  # checkpoints and weights
    assert large.time.first_step["pinning"] == pytest.approx(pinned / PIN_BYTES_PER_SECOND)
    # The step takes at least what the weights take over the link, twice.
    assert large.time.step_seconds > 1.9 * 2 * 68e9 / GPUS["rtx4090"].link_rate
    # One that fits stays, and goes where it is asked to.
    small = plan("llama-3.2-3b", seq_len=4096, **run)
    assert small.policy.frozen_weights == "gpu"
    settings = Checkpointing(frozen_weights="host")
    asked = plan("llama-3.2-3b", seq_len=4096, **run, checkpointing=settings)
    assert asked.gpu.parts["parameters"] < 0.5 * small.gpu.parts["parameters"]
    with pytest.raises(
        ValueError, match="^hfpatch: weights on the host must be a frozen base's[^\n]*$"
    ):
        plan("llama-3.1-8b", seq_len=8192, checkpointing=Checkpointing(frozen_weights="host"))
    # A run leaves them on GPUs that share rows.
    shared = run | {"seq_len": 8192, "gpus": 8, "sp_size": 8, "checkpointing": settings}
    with pytest.raises(
        ValueError,
        match="^hfpatch: frozen_weights=.host. and --sp-size 8 cannot be combined[^\n]*$",
    ):
        plan("llama-3.1-70b", **shared)


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
        assert (
            said.startswith("hfpatch: LoRA's targets must be Linear layers that PEFT adapts")
            and why in said
        )
        assert said.endswith("Name others with --lora-target.")
