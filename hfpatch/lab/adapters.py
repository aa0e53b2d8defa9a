"""LoRA and QLoRA as sizes: the Linear layers of a decoder, the adapters over them, and the bytes of
a frozen base. Standard library only.
"""

from dataclasses import dataclass

# NF4: BLOCK weights share an 8-bit scale, NESTED scales share a float32 scale (double quantisation)
BLOCK = 64
NESTED = 256
# Bytes of one weight of a quantised Linear: codes and scales as bitsandbytes stores them. None: the
# model's dtype.
BASES = {"bf16": None, "8bit": 1.0, "4bit": 0.5 + 1 / BLOCK + 4 / (BLOCK * NESTED)}
ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class Adapters:
    """Low-rank adapters over a base whose own parameters are all frozen.

    Attributes:
        rank: LoRA's r.
        base: a key of BASES, the storage of the base's Linear weights. Embedding, head, norms,
            biases and experts (which are no Linear layers) stay in the model's dtype.
        targets: names of Linear layers; empty for all but the head.
        itemsize: bytes of an adapter's element; None for the model's (PEFT's default is float32).

    Raises:
        ValueError: a rank below 1, or an unknown base.
    """

    rank: int = 16
    base: str = "bf16"
    targets: tuple = ()
    itemsize: int | None = None

    def __post_init__(self):
        if not isinstance(self.rank, int) or self.rank < 1:
            raise ValueError(
                f"hfpatch: a LoRA rank must be 1 or more, got {self.rank!r}. Pass one such as 16."
            )
        if self.base not in BASES:
            raise ValueError(
                f"hfpatch: a base must be one of {', '.join(BASES)}, got {self.base!r}. Pass one of "
                "them."
            )
        object.__setattr__(self, "targets", tuple(self.targets))  # a list has no hash

    @classmethod
    def of(cls, rank: int, base: str = "bf16", targets=ALL_LINEAR) -> "Adapters":
        """From flags. targets: "all-linear", or names in a list or with commas. ValueError without
        a name.
        """
        names = targets.split(",") if isinstance(targets, str) else targets
        named = [n.strip() for n in names if n.strip()]
        if not named:
            raise ValueError(
                f"hfpatch: --lora-target must name Linear layers, got {targets!r}. Write "
                f"{ALL_LINEAR}."
            )
        return cls(rank, base, () if named == [ALL_LINEAR] else named)
