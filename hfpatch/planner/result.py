"""Plan, the answer of a plan. Standard library only."""

from dataclasses import asdict, dataclass, field

from hfpatch.budget.policy import Checkpointing


@dataclass(frozen=True)
class Plan:
    """The answer for one run, in bytes and seconds. gpu_* are of one GPU, host_* of one machine.

    Attributes:
        policy: what layers keep, with no field left "auto"; Checkpointing("off") without
            checkpoints of hfpatch. keeps: the same in words.
        first_step: the extra seconds of the first step.
        max_seq_len: the longest sequence, max_seq_len_host_bytes: the host's memory there.
        adapters: the adapters trained over a frozen base; None if all weights are trained.
        sp_size: GPUs that share each sequence.
        visual_tokens: the tokens of seq_len that are images or videos.
        host_assumed: no memory of the machine was given, so a common machine's is assumed.
        positions: of the model, None if unknown.
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
    policy: Checkpointing
    keeps: str
    why: str
    suggestions: list
    moment: str
    seconds: dict
    link_bytes: int
    flops: float
    rates: str
    first_step: dict = field(default_factory=dict)
    max_seq_len: int | None = None
    max_seq_len_host_bytes: int = 0
    adapters: dict | None = None
    sp_size: int = 1
    visual_tokens: int = 0
    host_assumed: bool = False
    positions: int | None = None
    faster: dict = field(default_factory=dict)

    def to_dict(self) -> dict:
        """All fields, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        from hfpatch.planner.show import text

        return text(self)
