"""The record of a Follower (follow.py): storages, with their births and deaths, and the bytes on the
device over time. Standard library only."""

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


def _layer_of(module: str) -> str:
    """model.layers.3 of model.layers.3.mlp.up_proj. In backward, the module that was called last
    does not identify the operation's module inside the layer.
    """
    names = module.split(".")
    return ".".join(names[: next((i + 1 for i, n in enumerate(names) if n.isdigit()), 1)])


def levels(ledger: Ledger):
    """Yields (event index, signed bytes, block, category -> bytes on the device) for each event of a
    block on the device. The mapping is the state after the event, and changes with the next one."""
    level: Counter = Counter()
    for at, (index, delta) in enumerate(ledger.events):
        block = ledger.blocks[index]
        if not block.host:
            level[block.category] += delta
            yield at, delta, block, level


def beyond(level: Counter) -> int:
    """The bytes of a level that are neither parameters nor gradients."""
    return sum(level.values()) - level["parameters"] - level["gradients"]


def alive_at(ledger: Ledger, at: int) -> list[Block]:
    """The blocks on the device after an event."""
    born = [b for b in ledger.blocks if not b.host and b.born <= at]
    return [b for b in born if b.died is None or b.died > at]


def kept_bytes(ledger: Ledger) -> int:
    """Bytes on the device that forward keeps for backward. Linear in the layers of each kind."""
    turn = next(at for at, name in ledger.phases if name == "backward")
    alive = ((delta, ledger.blocks[index]) for index, delta in ledger.events[:turn])
    return sum(d for d, b in alive if not b.host and b.category not in ("parameters", "gradients"))


def moments_of(ledger: Ledger, bottom: int) -> tuple[dict, dict]:
    """The peaks of each operation at the two ends of backward. Between the ends, bytes change
    monotonically over the layers of a pattern.

    Returns:
        (early, late), dicts "operation in module" -> (bytes of gradients, bytes beyond parameters
        and gradients). early: when the bytes beyond are the most. late: when the sum is the most,
        after all but `bottom` bytes of the gradients exist.
    """
    most = max((level["gradients"] for *_, level in levels(ledger)), default=0)
    enough = most - bottom - (1 << 20)  # small gradients count as 512 bytes
    early: dict = {}
    late: dict = {}
    for _, delta, block, level in levels(ledger):
        if delta <= 0 or block.category == "parameters":
            continue
        name = f"{block.op} in {_layer_of(block.module)}"
        now = (level["gradients"], beyond(level))
        early[name] = max(early.get(name, (0, 0)), now, key=lambda m: m[1])
        if level["gradients"] < enough:
            late[name] = (0, 0)
        else:
            late[name] = max(late.get(name, (0, 0)), now, key=sum)
    return early, late
