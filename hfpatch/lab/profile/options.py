"""The options of one run of `profile`, checked before a process starts. Imports torch only to find
the device.
"""

from dataclasses import dataclass, field

from hfpatch.budget.policy import parse_checkpointing, refuse_unknown
from hfpatch.lab.profile.timeline import IMPLEMENTATIONS

CHOICES = {
    "impl": IMPLEMENTATIONS, "dtype": ("auto", "bfloat16", "float16", "float32"),
    "optimizer": ("adamw", "sgd", "none"),
    "device": ("auto", "cpu", "cuda"),
}  # fmt: skip
LEAST = {"seq_len": 2, "batch": 1, "steps": 1, "warmup": 0}
MOST_TOKENS = (1 << 24) - 1  # transformers counts positions in float32


@dataclass(frozen=True, kw_only=True)
class Options:
    """One run. Raises ValueError for a wrong value.

    model: a preset, a config.json, a folder or a hub id. checkpointing: as of hfpatch.apply, in the
    words of a command line, which JSON can write.
    """

    model: str
    impl: str = "hf"
    seq_len: int = 8192
    batch: int = 1
    steps: int = 3
    warmup: int = 1
    dtype: str = "auto"
    optimizer: str = "adamw"
    gradient_checkpointing: bool = True
    checkpointing: list[str] = field(default_factory=list)
    device: str = "auto"
    folder: str = "."
    simulate: bool = False

    def __post_init__(self):
        for name, among in CHOICES.items():
            refuse_unknown([getattr(self, name)], among, name)
        for name, least in LEAST.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(
                    f"hfpatch: {name} must be a whole number of at least {least}, got {value!r}. "
                    "Change it."
                )
        if self.seq_len > MOST_TOKENS:
            raise ValueError(
                f"hfpatch: seq_len must be at most {MOST_TOKENS:,} tokens, got {self.seq_len:,}. "
                "Pass fewer."
            )
        parse_checkpointing(self.checkpointing)

    @property
    def on(self) -> str:
        import torch

        there = torch.cuda.is_available()
        if self.device == "cuda" and not there:
            raise ValueError(
                "hfpatch: device cuda needs a GPU that torch sees, and there is none. Pass cpu, "
                "or simulate the step."
            )
        found = "cuda" if there else "cpu"
        return found if self.device == "auto" else self.device

    @property
    def torch_dtype(self):
        import torch

        # CPUs without AMX multiply bfloat16 many times slower. The report names the dtype.
        usual = "bfloat16" if self.on == "cuda" else "float32"
        return getattr(torch, usual if self.dtype == "auto" else self.dtype)


def check_together(
    impls: list[str], checkpointing: list[str], gradient_checkpointing: bool
) -> None:
    """ValueError for an option that no implementation of this run uses."""
    if checkpointing and "hfpatch" not in impls:
        raise ValueError(
            f"hfpatch: checkpointing works with impl hfpatch only, got {', '.join(impls)}. Add "
            "hfpatch, or leave checkpointing out."
        )
    if not gradient_checkpointing and not {"hf", "liger"} & set(impls):
        raise ValueError(
            "hfpatch: gradient checkpointing is for hf and liger, got impl hfpatch alone. Pass "
            'checkpointing="off" for it.'
        )
