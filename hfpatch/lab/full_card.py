"""A training step that fills the card, beside its plan: bytes, seconds, and what copies cost."""

import time
from dataclasses import dataclass

import torch
from torch import nn

import hfpatch
from hfpatch.budget.free import gpu_free, host_free
from hfpatch.budget.policy import LEAST, Checkpointing, describe
from hfpatch.lab.device import clean, is_out_of_memory, one_line, synchronize
from hfpatch.lab.hardware import GPUS, Gpu
from hfpatch.lab.made import made
from hfpatch.lab.presets import preset_config
from hfpatch.lab.shallow import Values, model_of
from hfpatch.lab.steps import Steps
from hfpatch.lab.watch import GiB, pinned_bytes, policy_used

PRESETS = ("llama-3.1-8b", "llama-3.2-3b", "llama-3.2-1b", "llama-160m")
LENGTHS = (131072, 65536, 32768, 16384, 8192, 4096)
# Shares: of the card's free memory for weights and gradients; of the host's, which others use too.
WEIGHTS_SHARE, HOST_SHARE = 0.6, 0.7
STEPS = 4  # of each way: the first (which takes longer, as two), and two timed
WAYS = {"auto": "auto", "host": hfpatch.Checkpointing(offload="host", every=1, plain=0)}


@dataclass(frozen=True)
class Run:
    """A step to run: one row of `tokens` tokens through a preset's model."""

    preset: str
    tokens: int
    dtype: torch.dtype
    changes: tuple = ()

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize


SMALL = Run("llama-tiny", 96, torch.float32)


def largest(gpu: Gpu, dtype: torch.dtype, seconds: float) -> Run | None:
    """The largest model and longest row that fit this card and take at most `seconds` in all.

    A step keeps as much as there is room for, so a long row fills the card. gpu: this card's
    measured rates. None if nothing fits.
    """
    free, host = gpu_free() or 0, HOST_SHARE * (host_free() or 0)
    for preset in PRESETS:
        weights = 2 * model_of(Values(preset_config(preset))).sizes.parameters * dtype.itemsize
        if weights > WEIGHTS_SHARE * free:
            continue  # a plan takes seconds
        for tokens in LENGTHS:
            run = Run(preset, tokens, dtype)
            expected = planned(run, LEAST, gpu)
            fits = expected["plan_peak_gib"] * GiB <= 0.9 * free
            fits = fits and expected["plan_host_gib"] * GiB <= host
            if fits and len(WAYS) * STEPS * expected["plan_s"] <= seconds:
                return run
    return None


def planned(run: Run, policy: Checkpointing, gpu: Gpu | None) -> dict:
    """The simulated step's GiB, and its seconds if rates are known."""
    config = Values(preset_config(run.preset) | dict(run.changes))
    model = model_of(config, wide=run.itemsize == 4)
    steps = Steps(model, model.sizes, gpu or GPUS["h100"], 1)
    cost, sizes = steps.cost(run.tokens, policy), model.sizes
    peak = max(sizes.nbytes + m.gradients + m.beyond for m in cost.moments)
    found = {"plan_peak_gib": peak / GiB, "plan_host_gib": cost.host / GiB}
    return found | ({"plan_s": sum(cost.seconds.values())} if gpu else {})


def measure(run: Run, device: torch.device, gpu: Gpu | None, until: float) -> list[dict]:
    """One row for each of WAYS: the default policy, and everything on the host.

    until: a time of time.monotonic() after which nothing begins.
    """
    rows, model = [], None
    for way, checkpointing in WAYS.items():
        row = {"way": way, "preset": run.preset, "tokens": run.tokens, "dtype": str(run.dtype)[6:]}
        rows.append(row)
        if time.monotonic() > until:
            row["error"] = "not started: the time was over"
            continue
        try:
            if model is None:
                model = made(run.preset, dict(run.changes), device, run.dtype, run.tokens)
            hfpatch.apply(model, checkpointing=checkpointing)
            _measure(row, model, run, device, gpu, until)
        except Exception as error:  # any failure of a machine goes into its row
            row["error"] = "out of memory" if is_out_of_memory(error) else one_line(error)
        if model is not None:
            model.zero_grad(set_to_none=True)
            hfpatch.undo(model)
        clean()
    return rows


def _measure(row: dict, model: nn.Module, run: Run, device, gpu: Gpu | None, until: float) -> None:
    """Fills the row step by step, so that a later failure keeps the earlier figures."""
    ids = torch.randint(3, model.config.vocab_size, (1, run.tokens), device=device)

    def step():
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    def timed() -> float:
        began = time.perf_counter()
        step()
        synchronize()
        took = time.perf_counter() - began
        model.zero_grad(set_to_none=True)
        return took

    row["first_step_s"] = timed()
    policy = policy_used(model)
    if policy is not None:
        row |= {"kept": describe(policy), **planned(run, policy, gpu)}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    row["step_s"] = timed()
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        row |= {"peak_gib": peak / GiB, "reserved_gib": reserved / GiB, "filled": reserved / total}
        row["pinned_gib"] = pinned_bytes(model) / GiB
    if time.monotonic() < until:
        row["step_s"] = min(row["step_s"], timed())
