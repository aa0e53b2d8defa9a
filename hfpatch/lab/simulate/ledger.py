"""The record of a Follower (follow.py): storages, with their births and deaths."""

from collections import Counter
from dataclasses import dataclass, field

ROUNDING = 512  # bytes: PyTorch's CUDA allocator hands out multiples of this


@dataclass(slots=True)
class Block:
    """One storage. born and died are indices of the event list (died is None while alive)."""

    nbytes: int
    born: int
    op: str
    module: str
    phase: str
    host: bool = False
    category: str = "activations"
    died: int | None = None


@dataclass
class Ledger:
    """A run's blocks in order of birth, and its events in order of time."""

    blocks: list = field(default_factory=list)
    events: list = field(default_factory=list)  # (block index, signed bytes)
    phases: list = field(default_factory=list)  # (event index, name)
    matmul_flops: Counter = field(default_factory=Counter)  # phase -> FLOPs
    # "forward" | "backward" -> FLOPs, causal
    attention_flops: Counter = field(default_factory=Counter)
    attention_calls: Counter = field(default_factory=Counter)  # "forward" | "backward" -> calls
    # phase -> bytes moved, without matmuls and attention
    traffic: Counter = field(default_factory=Counter)


def round_up(nbytes: int, to: int = ROUNDING) -> int:
    """nbytes rounded up to a multiple of `to`."""
    return -(-nbytes // to) * to
