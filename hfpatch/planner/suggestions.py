"""Finds single changes that make a run fit."""

from dataclasses import dataclass, field, replace

from hfpatch.budget.policy import Checkpointing
from hfpatch.budget.sequence import why_not_shared_out
from hfpatch.lab.adapters import Adapters
from hfpatch.lab.hardware import GPUS, GiB
from hfpatch.lab.shallow import model_of
from hfpatch.planner.answer import Run
from hfpatch.planner.evaluate import FIRST, SETTLED, best, longest, placements, possible
from hfpatch.planner.placements import ADAPTED
from hfpatch.planner.result import Plan

# GiB of host memory that machines have.
MACHINES = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)


def suggestions(run: Run, plan: Plan, placement: str) -> list:
    """The single changes that make the run fit, each with its cost. The quickest step comes first,
    of equally quick ones the one with less memory."""
    offers = Offers(plan)
    names = placements(run, placement)
    _of_settings(run, names, plan.run.placement, offers)
    if not run.shape.adapters and run.ranks == 1:
        freed = "" if placement in ("auto", *ADAPTED) else " --placement auto"
        if not _of_adapters(f"--lora-r 16{freed}", Adapters(16), run, offers):
            _of_adapters(f"--lora-r 16 --base 4bit{freed}", Adapters(16, "4bit"), run, offers)
    _of_more_gpus(run, names, offers)
    _of_a_larger_gpu(run, names, offers)
    if run.host is not None:
        _of_more_host_memory(run, names, offers)
    if length := longest(run, names):
        offers.add(f"--seq-len {length}", replace(run, seq_len=length // run.ranks), names,
                   f"{1 - length / (run.seq_len * run.ranks):.0%} of the context")  # fmt: skip
    return sorted(
        offers.found,
        key=lambda o: (round(o["step_seconds"], 1), o["gpu_peak_bytes"] + o["host_peak_bytes"]),
    )


@dataclass
class Offers:
    """The changes that make a planned run fit. found: a dict each, as in Advice.suggestions."""

    plan: Plan
    found: list = field(default_factory=list)

    def add(self, change: str, run: Run, names: list, cost: str = "") -> bool:
        """Adds the change if the changed run fits, and returns whether it does. cost: the text of
        its cost; by default the seconds of its step."""
        names = possible(run, names)
        if not names:
            return False
        other = best(run, names, FIRST if cost else SETTLED)
        if not other.fits:
            return False
        slower = other.time.step_seconds / self.plan.time.step_seconds - 1
        self.found.append({
            "change": change,
            "cost": cost or f"step {other.time.step_seconds:.1f} s ({slower:+.0%})",
            "step_seconds": other.time.step_seconds,
            "gpu_peak_bytes": other.gpu.peak_bytes, "host_peak_bytes": other.host.peak_bytes,
        })  # fmt: skip
        return True


def _of_settings(run: Run, names: list, placement: str, offers: Offers) -> None:
    lora = run.shape.adapters
    if lora and lora.base != "4bit":
        _of_adapters("--base 4bit", replace(lora, base="4bit"), run, offers)
    for name in placements(run, "auto"):
        if name != placement and name not in names:
            offers.add(f"--placement {name}", run, [name])
    if run.checkpointing != Checkpointing():
        auto = replace(run, checkpointing=Checkpointing(), stock="")
        offers.add("--checkpointing auto", auto, names)
    if run.checkpointing.offload in ("auto", "host"):
        disk = replace(run.checkpointing, offload="./checkpoints")
        offers.add("--checkpointing DIR (an NVMe folder)", replace(run, checkpointing=disk), names)
    if run.batch > 1:
        offers.add("--batch 1", replace(run, batch=1, accumulates=True), names,
                   f"{run.batch} accumulation steps for the same batch")  # fmt: skip


def _of_adapters(change: str, adapters: Adapters, run: Run, offers: Offers) -> bool:
    made = model_of(run.model.config, adapters)
    changed = replace(run, model=made, shape=made.sizes)
    return offers.add(change, changed, placements(changed, "auto"))


def _of_more_gpus(run: Run, names: list, offers: Offers) -> None:
    if run.gpu.float8 > 1:  # several GPUs need an engine, which float8 excludes
        return
    for gpus in [n for n in (2, 4, 8) if n > run.gpus]:
        wider = replace(run, gpus=gpus)
        if offers.add(f"--gpus {gpus}", wider, placements(wider, "auto"), f"{gpus} GPUs"):
            break
    heads = (run.shape.num_heads, run.shape.num_kv_heads)
    for size in range(2, run.gpus + 1):
        if run.ranks > 1 or run.gpus % size or why_not_shared_out(*heads, size):
            continue
        part = replace(run, shape=replace(run.shape, ranks=size), seq_len=-(-run.seq_len // size))
        if offers.add(f"--sp-size {size}", part, names):
            break


def _of_a_larger_gpu(run: Run, names: list, offers: Offers) -> None:
    larger = [gpu for gpu in GPUS.values() if gpu.memory_bytes > run.gpu.memory_bytes]
    for gpu in sorted(larger, key=lambda gpu: gpu.memory_bytes):
        # beside the rates whose steps are simulated already
        there = replace(run, gpu=replace(run.gpu, memory_bytes=gpu.memory_bytes))
        words = f"a GPU of {gpu.memory_bytes / GiB:.0f} GiB"
        if offers.add(f"--gpu {gpu.name}", there, names, words):
            break


def _of_more_host_memory(run: Run, names: list, offers: Offers) -> None:
    for size in [n for n in MACHINES if n * GiB > run.host]:
        words = f"a machine with {size} GiB of memory"
        if offers.add(f"--host-ram {size}GiB", replace(run, host=size * GiB), names, words):
            break
