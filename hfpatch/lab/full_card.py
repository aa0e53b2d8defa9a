"""A training step that fills the card, beside its plan: bytes, seconds, and what copies cost."""

import tempfile
import time
from dataclasses import dataclass, replace

import torch

from hfpatch.budget.free import gpu_free, host_free
from hfpatch.budget.limits import GiB
from hfpatch.budget.policy import LEAST, Checkpointing, describe
from hfpatch.lab.device import clean, one_line
from hfpatch.lab.hardware import GPUS, Gpu
from hfpatch.lab.presets import preset_config
from hfpatch.lab.profile.options import Options
from hfpatch.lab.profile.step import measure_steps
from hfpatch.lab.shallow import Values, model_of
from hfpatch.lab.steps import Steps

PRESETS = ("llama-3.1-8b", "llama-3.2-3b", "llama-3.2-1b", "llama-160m")
LENGTHS = (131072, 65536, 32768, 16384, 8192, 4096)
STEPS = 6  # of each way: two to warm up (which take longer), two timed, one recorded
WAYS: dict = {"auto": [], "host": ["host", "every=1", "plain=0"]}


@dataclass(frozen=True)
class Run:
    """A step to run: one row of `tokens` tokens through a preset's model."""

    preset: str
    tokens: int
    dtype: torch.dtype


SMALL = Run("llama-tiny", 96, torch.float32)


def largest(gpu: Gpu, dtype: torch.dtype, seconds: float) -> Run | None:
    """The largest model and longest row that fit this card and take at most `seconds` in all.

    A step keeps as much as there is room for, so a long row fills the card. gpu: this card's
    measured rates. None if nothing fits.
    """
    free = 0.9 * (gpu_free() or 0)
    host = 0.7 * (host_free() or 0)  # others use it too
    for preset in PRESETS:
        parameters = model_of(Values(preset_config(preset))).sizes.parameters
        if 2 * parameters * dtype.itemsize > free * 2 / 3:
            continue  # weights and gradients leave too little; a plan takes seconds
        for tokens in LENGTHS:
            run = Run(preset, tokens, dtype)
            expected = planned(run, LEAST, gpu)
            fits = expected["plan_peak_gib"] * GiB <= free
            fits = fits and expected["plan_host_gib"] * GiB <= host
            if fits and len(WAYS) * STEPS * expected["plan_s"] <= seconds:
                return run
    return None


def planned(run: Run, policy: Checkpointing, gpu: Gpu | None) -> dict:
    """The simulated step's GiB, and its seconds if rates are known."""
    model = model_of(Values(preset_config(run.preset)), wide=run.dtype.itemsize == 4)
    cost = Steps(model, model.sizes, gpu or GPUS["h100"], 1).cost(run.tokens, policy)
    peak = model.sizes.nbytes + max(m.gradients + m.beyond for m in cost.moments)
    found = {"plan_peak_gib": peak / GiB, "plan_host_gib": cost.host / GiB}
    if gpu is not None:
        found["plan_s"] = sum(cost.seconds.values())
    return found


def measure(run: Run, device: torch.device, gpu: Gpu | None, until: float) -> list[dict]:
    """One row for each of WAYS: the default policy, and everything on the host.

    until: a time of time.monotonic() after which nothing begins.
    """
    rows = []
    for way, words in WAYS.items():
        dtype = str(run.dtype).removeprefix("torch.")
        row = {"way": way, "preset": run.preset, "tokens": run.tokens, "dtype": dtype}
        rows.append(row)
        if time.monotonic() > until:
            row["error"] = "not started: the time was over"
            continue
        options = Options(
            model=run.preset, impl="hfpatch", seq_len=run.tokens, steps=2, warmup=2,
            dtype=dtype, optimizer="none", checkpointing=words, device=device.type,
        )  # fmt: skip
        try:
            _measure(row, run, options, gpu)
        except Exception as error:  # any failure of a machine goes into its row
            row["error"] = one_line(error)
        clean()
    return rows


def _measure(row: dict, run: Run, options: Options, gpu: Gpu | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        found, policy = measure_steps(replace(options, folder=folder))
    if found.error:
        row["error"] = found.error
    if found.step_seconds:
        row["step_s"] = min(found.step_seconds)
    if policy is not None:
        layers = model_of(Values(preset_config(run.preset))).layers
        row |= {"kept": describe(policy, layers), **planned(run, policy, gpu)}
    if "reserved_peak_bytes" in found.memory:
        row["peak_gib"] = found.memory["allocated_peak_bytes"] / GiB
        row["reserved_gib"] = found.memory["reserved_peak_bytes"] / GiB
        row["pinned_gib"] = found.memory["pinned_host_peak_bytes"] / GiB
        total = torch.cuda.get_device_properties(0).total_memory
        row["filled"] = found.memory["reserved_peak_bytes"] / total
