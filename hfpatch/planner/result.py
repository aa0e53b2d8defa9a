"""Plan, the answer of a plan, in parts. Standard library only."""

from dataclasses import dataclass, field

from hfpatch.budget.policy import Checkpointing


@dataclass(frozen=True)
class PlannedRun:
    """What is planned.

    Attributes:
        model, gpu: their names.
        gpus: the number of GPUs.
        batch: sequences a GPU and step.
        seq_len: tokens of a sequence.
        placement: where weights, gradients and optimizer states are.
        sp_size: GPUs that share each sequence.
        adapters: the adapters trained over a frozen base; None if all weights are trained.
        visual_tokens: the tokens of seq_len that are images or videos.
        positions: of the model, None if unknown.
    """

    model: str
    gpu: str
    gpus: int
    batch: int
    seq_len: int
    placement: str
    sp_size: int
    adapters: dict | None
    visual_tokens: int
    positions: int | None


@dataclass(frozen=True)
class GpuMemory:
    """Bytes of one GPU.

    Attributes:
        peak_bytes: the most that a step takes.
        usable_bytes: what the GPU has for it.
        parts: what the peak is made of: name -> bytes.
        moment: the operation of the peak.
    """

    peak_bytes: int
    usable_bytes: int
    parts: dict
    moment: str


@dataclass(frozen=True)
class HostMemory:
    """Bytes of the machine's memory, for all its GPUs.

    Attributes:
        peak_bytes: the most that the run takes.
        usable_bytes: what it may take; None without a limit.
        assumed: no memory was given, so a common machine's is assumed.
        link_bytes: what one GPU's host link carries in a step, both ways.
    """

    peak_bytes: int
    usable_bytes: int | None
    assumed: bool
    link_bytes: int


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, and how fast it is.

    Attributes:
        step_seconds: of one step.
        parts: the same by part: name -> seconds.
        first_step: the extra seconds of the first step: name -> seconds.
        tokens_per_second: of all GPUs.
        mfu: the share of the GPU's data sheet speed that the model's own FLOPs take.
        flops: of one GPU's step, with recomputation.
        rates: the source of the GPU's speeds.
    """

    step_seconds: float
    parts: dict
    first_step: dict
    tokens_per_second: float
    mfu: float
    flops: float
    rates: str


@dataclass(frozen=True)
class Advice:
    """The plan in words, and what else fits.

    Attributes:
        keeps: the policy in words, or why no layer runs in tiles.
        why: how the plan was made, and what it leaves out.
        suggestions: single changes that make a run fit. Each is a dict of "change", "cost",
            "step_seconds", "gpu_peak_bytes" and "host_peak_bytes".
        faster: {"placement", "step_seconds"} of a later placement that fits and is faster by more
            than the plan's error.
        max_seq_len: the longest sequence that fits, in tokens; None if it was not searched.
        max_seq_len_host_bytes: the host's memory there.
    """

    keeps: str
    why: str
    suggestions: list = field(default_factory=list)
    faster: dict = field(default_factory=dict)
    max_seq_len: int | None = None
    max_seq_len_host_bytes: int = 0


@dataclass(frozen=True)
class Plan:
    """The answer for one run.

    Attributes:
        fits: whether the run fits the GPU and the host.
        policy: what layers keep, with no field left "auto"; where hfpatch keeps no checkpoints,
            Checkpointing("off"), whose other fields say nothing.
    """

    fits: bool
    run: PlannedRun
    gpu: GpuMemory
    host: HostMemory
    time: StepTime
    policy: Checkpointing
    advice: Advice

    @classmethod
    def of(cls, values: dict) -> "Plan":
        """The plan of which these are dataclasses.asdict's values."""
        return cls(
            values["fits"], PlannedRun(**values["run"]), GpuMemory(**values["gpu"]),
            HostMemory(**values["host"]), StepTime(**values["time"]),
            Checkpointing(**values["policy"]), Advice(**values["advice"]),
        )  # fmt: skip

    def __str__(self) -> str:
        from hfpatch.planner.show import text

        return text(self)
