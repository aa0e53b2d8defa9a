"""The record of a Follower (follow.py): storages, with their births and deaths."""

from collections import Counter
from dataclasses import dataclass, field
from itertools import accumulate

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


def _layer_of(module: str) -> str:
    """model.layers.3 of model.layers.3.mlp.up_proj. In backward, the module that was called last
    does not identify the operation's module inside the layer.
    """
    names = module.split(".")
    return ".".join(names[: next((i + 1 for i, n in enumerate(names) if n.isdigit()), 1)])


def kept_bytes(ledger) -> int:
    """Bytes on the device that forward keeps for backward. Linear in the layers of each kind."""
    turn = next(at for at, name in ledger.phases if name == "backward")
    alive = ((d, ledger.blocks[i]) for i, d in ledger.events[:turn])
    return sum(d for d, b in alive if not b.host and b.category not in ("parameters", "gradients"))


def moments_of(ledger, bottom: int) -> tuple[dict, dict]:
    """The peaks of each operation at the two ends of backward. Between the ends, bytes change
    monotonically over the layers of a pattern.

    Returns:
        (early, late), dicts "operation in module" -> (bytes of gradients, bytes beyond parameters
        and gradients). early: when the bytes beyond are the most. late: when the sum is the most,
        after all but `bottom` bytes of the gradients exist.
    """
    alive = [(delta, ledger.blocks[i]) for i, delta in ledger.events if not ledger.blocks[i].host]
    alive = [(delta, block) for delta, block in alive if block.category != "parameters"]
    own = (delta for delta, block in alive if block.category == "gradients")
    # they die when the simulation ends; small ones count as 512 bytes
    enough = max(accumulate(own), default=0) - bottom - (1 << 20)
    gradients = beyond = 0
    early: dict = {}
    late: dict = {}
    for delta, block in alive:
        gradient = block.category == "gradients"
        gradients, beyond = (gradients + delta, beyond) if gradient else (gradients, beyond + delta)
        if delta > 0:
            at, now = f"{block.op} in {_layer_of(block.module)}", (gradients, beyond)
            early[at] = max(early.get(at, (0, 0)), now, key=lambda m: m[1])
            late[at] = max(late.get(at, (0, 0)), now, key=sum) if gradients >= enough else (0, 0)
    return early, late
