"""Run, a plan's resolved arguments, and how a Plan follows from a step's cost."""

from collections import Counter
from dataclasses import dataclass, replace

from hfpatch.budget.measured import HOST_SHARE, PIN_BYTES_PER_SECOND
from hfpatch.budget.policy import Checkpointing, parse_checkpointing
from hfpatch.lab.hardware import HOST_BYTES_PER_SECOND, GiB, Gpu
from hfpatch.lab.models import LANGUAGE_TOWER, text_config_of
from hfpatch.lab.shallow import STOCK, Model, Sizes, Values, model_of, shared
from hfpatch.lab.steps import Cost
from hfpatch.planner.float8 import cast_bytes
from hfpatch.planner.limits import parse_bytes
from hfpatch.planner.machine import card, host_limit
from hfpatch.planner.placements import Resident, resident
from hfpatch.planner.result import Advice, GpuMemory, HostMemory, Plan, PlannedRun, StepTime
from hfpatch.planner.towers import Tower, tower_in_front

# Bytes that stay free on the device: a share of the step's, and at least RESERVE_LEAST.
RESERVE_SHARE = 0.04
RESERVE_LEAST = 256 << 20
PROCESS_BYTES = 4 * GiB  # Python, torch and CUDA on the host, for each rank; assumed


@dataclass(frozen=True)
class Run:
    """The resolved arguments of plan(), without the placement.

    Attributes:
        seq_len: tokens of a row; of one rank's part where ranks share rows (shape.ranks).
        tower: the image tower in front of the text model if rows have images, else None.
        accumulates: a step has several batches, and is planned by its later ones.
        host_assumed: host is a common machine's, as none was given.
        stock: a word of shallow.STOCK for transformers without hfpatch, whose checkpointing is "off".
    """

    name: str
    model: Model
    shape: Sizes
    gpu: Gpu
    gpus: int
    host: int | None
    batch: int
    seq_len: int
    checkpointing: Checkpointing
    tower: Tower | None = None
    accumulates: bool = False
    stock: str = ""
    host_assumed: bool = False

    @property
    def on_disk(self) -> bool:
        """Whether checkpoints wait in files."""
        return self.checkpointing.directory is not None

    @property
    def ranks(self) -> int:
        return self.shape.ranks


COMPILE_SECONDS = 12 * 240 / 1518  # a dozen of 1,518 variants of kernels (profiles/kernels)


def _engine_wait(gpu: Gpu, cost: Cost, stays: Resident) -> float:
    """Seconds of an engine's gathers and copies that the two passes do not hide. It sends weights
    to the device in both passes, and gradients to the host in backward: a third of its bytes each.
    """
    third = stays.link / 3
    passes = (1, cost.forward, cost.up, third), (2, cost.backward, third, cost.down + third)
    waits = 0.0
    for gathers, work, up, down in passes:
        link = max(up, down) / gpu.link_rate
        peers = gathers * stays.gathers / gpu.peer_rate
        # GPUs without links to each other exchange over the host link.
        copies = max(link, peers) if gpu.peer else link + peers
        waits += max(0.0, copies - work)
    return waits


def gradients_of(run: Run, stays: Resident) -> int:
    """Bytes of the gradients on one GPU once the last layer's exist."""
    return run.shape.trained_bytes if stays.gradients is None else stays.gradients


def optimizer_seconds(run: Run, stays: Resident) -> float:
    """Seconds of the optimizer's step. The norm reads every gradient, the clip reads and writes it,
    the step reads it; it reads and writes parameters and optimizer states."""
    if stays.host_optimizer:
        return stays.host_optimizer / HOST_BYTES_PER_SECOND
    stepped = stays.parameters - stays.skipped + stays.optimizer
    return (4 * gradients_of(run, stays) + 2 * stepped) / run.gpu.memory_rate


def seconds_of(run: Run, cost: Cost, stays: Resident) -> dict:
    """Seconds of a step by part."""
    seconds = cost.seconds | {"optimizer": optimizer_seconds(run, stays)}
    if stays.link or stays.gathers:
        seconds["copy_wait"] = max(seconds["copy_wait"], _engine_wait(run.gpu, cost, stays))
        # nothing hides the first layer's gather and the last layer's gradients
        seconds["exchange"] += 2 * stays.gathers / run.shape.num_layers / run.gpu.peer_rate
    return seconds


def _first_step(run: Run, cost: Cost, stays: Resident, policy: Checkpointing) -> dict:
    """Seconds by which the first step is longer: pinning host memory, compiling kernels."""
    pinned = 0
    if policy.offload != "off" and not run.on_disk:
        pinned = cost.host + (stays.host // run.gpus if run.shape.adapters else 0)
    return {"pinning": pinned / PIN_BYTES_PER_SECOND, "compiling": COMPILE_SECONDS}


def assembled(run: Run, placement: str, policy: Checkpointing, advice: Advice, cost: Cost) -> Plan:
    """The Plan under one placement, from the text model's step. Adds the image tower's."""
    # [Step 1] The text model's step, and the image tower's.
    stays = stays_of(run, placement, policy)
    seconds = seconds_of(run, cost, stays)
    moments = cost.moments
    pictures: Counter = Counter()
    if run.tower is not None:
        pictures.update(run.tower.cost(run).numbers)
        moments = run.tower.beside(moments, run)
        seconds["image_tower"] = pictures["seconds"]
    step_seconds = sum(seconds.values())
    # [Step 2] The GPU's memory at its highest.
    most = max(m.gradients for m in moments) if stays.gradients is None else stays.gradients

    def gradients(m):  # that exist then
        return most if gradients_stand(run, placement) else min(m.gradients, most)

    moment = max(moments, key=lambda m: gradients(m) + m.beyond)
    parts = {
        "parameters": stays.parameters, "gradients": gradients(moment),
        "optimizer": stays.optimizer, "activations": moment.beyond
    }  # fmt: skip
    parts["slack"] = max(RESERVE_LEAST, int(RESERVE_SHARE * sum(parts.values())))
    peak = sum(parts.values())
    # [Step 3] The host's.
    waiting = 0 if run.on_disk else cost.host + int(pictures["host"])
    host_peak = stays.host + run.gpus * (PROCESS_BYTES + waiting)
    host_usable = None if run.host is None else int(HOST_SHARE * run.host)
    # [Step 4] The parts of the plan.
    return Plan(
        fits=peak <= run.gpu.usable_bytes and (host_usable is None or host_peak <= host_usable),
        run=PlannedRun(
            run.name, run.gpu.name, run.gpus, run.batch, run.seq_len * run.ranks, placement,
            sp_size=run.ranks, adapters=dict(vars(run.shape.adapters)) if run.shape.adapters else None,
            visual_tokens=round(pictures["tokens"] / run.batch),
            positions=run.model.config.get("max_position_embeddings"),
        ),
        gpu=GpuMemory(peak, run.gpu.usable_bytes, parts, moment.name),
        host=HostMemory(
            host_peak, host_usable, run.host_assumed,
            link_bytes=stays.link + cost.up + cost.down + 2 * int(pictures["host"]),
        ),
        time=StepTime(
            step_seconds, seconds, _first_step(run, cost, stays, policy),
            tokens_per_second=run.gpus * run.batch * run.seq_len / step_seconds,
            mfu=(cost.model + pictures["model"]) / step_seconds / run.gpu.data_sheet_flops,
            flops=cost.flops + pictures["flops"], rates=run.gpu.source,
        ),
        policy=policy, advice=advice,
    )  # fmt: skip


def gradients_stand(run: Run, placement: str) -> bool:
    """Whether all gradients exist as a step begins: those of earlier batches, or DeepSpeed's buffers."""
    return run.accumulates or placement.startswith("zero3")


def stays_of(run: Run, placement: str, policy: Checkpointing) -> Resident:
    """placements.resident, with the bytes of the image tower and of casts to float8."""
    stays = resident(placement, run.shape, run.gpus, policy)
    if run.tower is not None:
        stays = run.tower.resident(stays, run.shape.parameters, bool(run.shape.adapters))
    more = cast_bytes(run)
    return replace(stays, parameters=stays.parameters + more, skipped=stays.skipped + more)


def make_run(model, *, seq_len, batch=1, gpu="h100", gpus=1, host_ram=None, checkpointing="auto",
             sp_size=1, images=0, video_tokens=0, adapters=None,
             gradient_accumulation_steps=1) -> Run:  # fmt: skip
    """Checks and resolves the arguments of plan(). ValueError with one sentence for a wrong one."""
    # [Step 1] What cannot be.
    stock = next((word for word in STOCK if checkpointing in (word, [word])), "")
    checkpointing = parse_checkpointing("off" if stock else checkpointing)
    on_host = checkpointing.frozen_weights == "host"
    if on_host and not adapters:
        raise ValueError(
            "hfpatch: weights on the host must be a frozen base's, and all weights train. Pass "
            "adapters (--lora-r 16), or --placement zero3-offload."
        )
    if on_host and sp_size > 1:
        raise ValueError(
            f'hfpatch: frozen_weights="host" and --sp-size {sp_size} cannot be combined: its '
            "engines shard the weights. Leave frozen_weights out."
        )
    sizes = {
        "seq_len": (seq_len, 1), "batch": (batch, 1), "gpus": (gpus, 1), "sp_size": (sp_size, 1),
        "gradient_accumulation_steps": (gradient_accumulation_steps, 1),
        "images": (images, 0), "video_tokens": (video_tokens, 0),
    }  # fmt: skip
    for what, (value, least) in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(
                f"hfpatch: {what} must be a whole number, got {value!r}. Pass {least} or more."
            )
    if sp_size > 1 and (images or video_tokens):
        raise ValueError(
            f"hfpatch: --images and --sp-size {sp_size} cannot be combined. Leave one out."
        )
    if sp_size > 1 and stock:
        raise ValueError(
            f"hfpatch: stock steps and --sp-size {sp_size} cannot be combined. Leave one out."
        )
    # [Step 2] The model.
    name, values = text_config_of(model)
    tower = tower_in_front(model, images, video_tokens)
    name = name if tower is None else name.removesuffix(LANGUAGE_TOWER)
    made = model_of(Values(values), adapters)
    shape = made.sizes
    if sp_size > 1:
        shape = shared(shape, sp_size, gpus)
        seq_len = -(-seq_len // sp_size)
    # [Step 3] The machine.
    if gpu == "this":
        from hfpatch.planner.measure import measure_this

        gpu = measure_this()
        host_ram = host_limit() if host_ram is None else host_ram
    row = gpu if isinstance(gpu, Gpu) else card(gpu)
    host = None if host_ram is None else parse_bytes(host_ram)
    run = Run(
        name, made, shape, row, gpus, host, batch, seq_len, checkpointing, tower,
        gradient_accumulation_steps > 1, stock
    )  # fmt: skip
    if tower is not None and tower.tokens(run) > seq_len:
        raise ValueError(
            f"hfpatch: --seq-len must be at least the {tower.tokens(run):,} visual tokens of its "
            f"images and videos, got {seq_len:,}. Raise it: it counts text and images together."
        )
    return run
