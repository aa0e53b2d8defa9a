"""Plan, the answer of a plan, and Run, its resolved arguments. Plans by closed forms and simulated
plans share them.
"""

from dataclasses import dataclass, field, replace

from hfpatch.budget.choice import HOST_SHARE, reserve
from hfpatch.budget.formula import GiB, ModelShape
from hfpatch.budget.hardware import FLOAT8_GPUS, Gpu
from hfpatch.budget.policy import Checkpointing, Policy, parse_checkpointing
from hfpatch.budget.sequence import why_not_shared_out
from hfpatch.budget.shape import UnknownFamily
from hfpatch.lab.models import LANGUAGE_TOWER, resolve, text_config_of
from hfpatch.lab.stock import STOCK, STOCK_CHECKPOINTING
from hfpatch.planner.limits import parse_bytes
from hfpatch.planner.machine import card
from hfpatch.planner.placements import FLOAT8_RECIPES, Resident, float8_bytes, resident
from hfpatch.planner.towers import Tower, tower_in_front

PROCESS_BYTES = 4 * GiB  # Python, torch and CUDA on the host, for each rank; assumed
WHOLE = ("off", STOCK, STOCK_CHECKPOINTING)  # values of checkpointing under which layers run whole


@dataclass(frozen=True)
class Plan:
    """The answer for one run, in bytes and seconds. gpu_* are of one GPU, host_* of one machine.

    Attributes:
        policy: the resolved Policy as a dict, or one word if layers run whole.
        split: gpu_bytes["activations"] by checkpoints, layer, loss and workspace, at the moment of
            the peak.
        first_step: the extra seconds of the first step (lab/first_step.py).
        frontier: the steps that more or less GPU memory allows (evaluate.frontier_of).
        longest: {"every", "seq_len", "host_peak_bytes"} of the longest sequence as asked, and of
            the longest sequences with fewer layers' inputs kept.
        adapters: the adapters trained over a frozen base; None if all weights are trained.
        sp_size: GPUs that share each sequence.
        closed_form: False if no closed form describes the model, so that the step was simulated.
        visual_tokens: the tokens of seq_len that are images or videos.
        faster: {"placement", "step_seconds"} of a later placement that fits and is faster by more
            than the plan's error.
    """

    model: str
    gpu: str
    gpus: int
    batch: int
    seq_len: int
    placement: str
    fits: bool
    gpu_peak_bytes: int
    gpu_usable_bytes: int
    gpu_bytes: dict
    host_peak_bytes: int
    host_usable_bytes: int | None
    step_seconds: float
    tokens_per_second: float
    mfu: float
    policy: dict | str
    why: str
    suggestions: list
    moment: str
    split: dict
    seconds: dict
    link_bytes: int
    flops: float
    rates: str
    first_step: dict = field(default_factory=dict)
    frontier: list = field(default_factory=list)
    max_seq_len: int | None = None
    longest: list = field(default_factory=list)
    adapters: dict | None = None
    sp_size: int = 1
    closed_form: bool = True
    num_layers: int | None = None
    visual_tokens: int = 0
    faster: dict = field(default_factory=dict)

    def to_dict(self) -> dict:
        """All fields, ready for JSON."""
        return dict(vars(self))

    def __str__(self) -> str:
        from hfpatch.planner.show import text

        return text(self)


@dataclass(frozen=True)
class Run:
    """The resolved arguments of plan(), without the placement.

    Attributes:
        seq_len: tokens of a row; of one rank's part where ranks share rows (shape.ranks).
        tower: the image tower in front of the text model if rows have images, else None.
    """

    name: str
    shape: ModelShape
    gpu: Gpu
    gpus: int
    host: int | None
    batch: int
    seq_len: int
    checkpointing: Checkpointing | str
    tower: Tower | None = None

    @property
    def on_disk(self) -> bool:
        """Whether checkpoints wait in files."""
        return self.checkpointing not in WHOLE and self.checkpointing.directory is not None

    @property
    def rates(self) -> Gpu:
        """The GPU's rates when all GPUs of the machine run."""
        return replace(self.gpu, sharing=self.gpus)

    @property
    def ranks(self) -> int:
        return getattr(self.shape, "ranks", 1)


def assembled(run: Run, placement: str, policy, why: str, memory, flops, time, moved: int) -> Plan:
    """The Plan under one placement, from the text model's memory, FLOPs, seconds and bytes over the
    link in a step. Adds those of the image tower.
    """
    stays, tower = stays_of(run, placement, policy), run.tower
    seconds, step_flops, model_flops = time.parts(), flops.total, flops.model
    if tower is not None:
        asked = run.batch, run.checkpointing, bool(run.shape.adapters)
        memory, own = tower.beside(memory, *asked), tower.flops(*asked)
        step_flops, model_flops = step_flops + own.total, model_flops + own.model
        seconds["image_tower"] = tower.seconds(run.gpu, *asked)
        moved += 2 * tower.host(*asked)
    step_seconds = sum(seconds.values())
    # If all gradients are kept, each moment counts those that exist then. Otherwise the placement
    # has a constant number of bytes for them.
    gradients = (lambda m: m.gradients) if stays.gradients is None else (lambda m: stays.gradients)
    moment = max(memory.moments, key=lambda m: gradients(m) + m.beyond)
    parts = {
        "parameters": stays.parameters, "gradients": gradients(moment),
        "optimizer": stays.optimizer,
        "activations": moment.beyond,
    }  # fmt: skip
    parts["slack"] = reserve(sum(parts.values()))
    peak = sum(parts.values())
    on_host = 0 if run.on_disk else memory.host
    host_peak = stays.host + run.gpus * (on_host + PROCESS_BYTES)
    host_usable = None if run.host is None else int(HOST_SHARE * run.host)
    fits = peak <= run.gpu.usable_bytes and (host_usable is None or host_peak <= host_usable)
    return Plan(
        model=run.name, gpu=run.gpu.name, gpus=run.gpus, batch=run.batch,
        seq_len=run.seq_len * run.ranks,
        placement=placement,
        fits=fits, gpu_peak_bytes=peak, gpu_usable_bytes=run.gpu.usable_bytes, gpu_bytes=parts,
        host_peak_bytes=host_peak, host_usable_bytes=host_usable, step_seconds=step_seconds,
        tokens_per_second=run.gpus * run.batch * run.seq_len / step_seconds,
        mfu=model_flops / step_seconds / run.gpu.data_sheet_flops,
        policy=vars(policy) if isinstance(policy, Policy) else policy, why=why,
        suggestions=[], moment=moment.name,
        split={n: getattr(moment, n) for n in ("checkpoints", "layer", "loss", "workspace")},
        seconds=seconds, link_bytes=moved, flops=step_flops, rates=run.gpu.source,
        adapters=dict(vars(run.shape.adapters)) if run.shape.adapters else None, sp_size=run.ranks,
        closed_form=isinstance(run.shape, ModelShape), num_layers=run.shape.num_layers,
        visual_tokens=0 if tower is None else tower.tokens,
    )  # fmt: skip


def stays_of(run: Run, placement: str, policy) -> Resident:
    """placements.resident, with the bytes of the image tower and of casts to float8."""
    stays = resident(placement, run.shape, run.gpus, policy)
    if run.tower is not None:
        stays = run.tower.resident(stays, run.shape.parameters, bool(run.shape.adapters))
    if run.gpu.float8 == 1:
        return stays
    more = float8_bytes(run.shape, run.batch * run.seq_len)
    return replace(stays, parameters=stays.parameters + more, passed=stays.passed + more)


def with_float8(run: Run, recipe: str) -> Run:
    """The run with its layers' matmuls in float8 by this recipe. ValueError if that is not
    possible."""
    if recipe not in FLOAT8_RECIPES:
        raise ValueError(
            f"hfpatch: --fp8 must be {' or '.join(FLOAT8_RECIPES)}, got {recipe!r}. Pass one of "
            "them."
        )
    if not isinstance(run.shape, ModelShape) or run.shape.adapters:
        raise ValueError(
            "hfpatch: --fp8 is planned for all weights of a model that closed forms describe "
            "only. Leave it out."
        )
    if not run.gpu.measured and run.gpu.name not in FLOAT8_GPUS:
        raise ValueError(
            f"hfpatch: --fp8 needs a GPU that multiplies in float8, got {run.gpu.name}. Pass one "
            f"of {', '.join(FLOAT8_GPUS)}."
        )
    return replace(run, gpu=replace(run.gpu, float8=FLOAT8_RECIPES[recipe]))


def shared(shape: ModelShape, sp_size: int, gpus: int) -> ModelShape:
    """The shape for sp_size ranks that share each row. ValueError if sp_size does not divide the
    GPUs, or the heads."""
    if gpus % sp_size:
        raise ValueError(
            f"hfpatch: --sp-size must divide --gpus, got {sp_size} and {gpus}. Pass a divisor of "
            f"{gpus}."
        )
    heads = shape.num_heads, shape.num_kv_heads
    if heads[0] > 1 and (why := why_not_shared_out(*heads, sp_size)):  # 1: it has no attention
        raise ValueError(f"hfpatch: {why}. Pass another --sp-size.")
    return replace(shape, ranks=sp_size)


FLOAT8 = (
    "float8 products at the rate of torchtitan's published steps, which were compiled; not measured "
    "here"
)


def settings_of(checkpointing) -> Checkpointing | str:
    """The Checkpointing that plan() was asked for, or one word of WHOLE. Raises ValueError."""
    words = checkpointing if isinstance(checkpointing, list) else [checkpointing]
    return words[0] if len(words) == 1 and words[0] in WHOLE else parse_checkpointing(checkpointing)


def make_run(model, *, seq_len, batch=1, gpu="h100", gpus=1, host_ram=None, checkpointing="auto",
             sp_size=1, images=0, video_tokens=0, shape=None) -> Run:  # fmt: skip
    """Checks and resolves the arguments of plan(). ValueError with one sentence for a wrong one.
    shape: the Counted of a model that no closed form describes, else None.
    """
    checkpointing = settings_of(checkpointing)
    name, shape = (text_config_of(model)[0], shape) if shape else resolve(model)[:2]
    for what, value in (
        ("seq_len", seq_len),
        ("batch", batch),
        ("gpus", gpus),
        ("sp_size", sp_size),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(
                f"hfpatch: {what} must be a positive whole number, got {value!r}. Pass 1 or more."
            )
    tower = tower_in_front(model, images, video_tokens, seq_len)
    if tower is not None and sp_size > 1:
        raise ValueError(
            f"hfpatch: --images and --sp-size {sp_size} cannot be combined. Leave one out."
        )
    name = name if tower is None else name.removesuffix(LANGUAGE_TOWER)
    reason = getattr(shape, "whole_because", "")
    if gpu == "this" and reason:  # the same check as a layer's on this GPU
        from hfpatch.planner.measure import why_no_kernels

        reason = why_no_kernels(max(shape.head_dim, shape.v_head_dim), shape.softcap or None)
    if reason and checkpointing not in WHOLE:
        raise UnknownFamily(f"{name}, whose layers run whole ({reason}),")
    if sp_size > 1:
        shape, seq_len = shared(shape, sp_size, gpus), -(-seq_len // sp_size)
    if gpu == "this":
        from hfpatch.planner.machine import host_limit
        from hfpatch.planner.measure import measure_this

        row, host_ram = measure_this(), host_limit() if host_ram is None else host_ram
    else:
        row = gpu if isinstance(gpu, Gpu) else card(gpu)
    host = None if host_ram is None else parse_bytes(host_ram)
    return Run(name, shape, row, gpus, host, batch, seq_len, checkpointing, tower)
