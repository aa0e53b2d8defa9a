"""Extrapolates a step of many layers and tokens from steps of few."""

import math
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest import mock

from hfpatch.attention import heads
from hfpatch.budget.flops import Flops
from hfpatch.budget.formula import StepMemory
from hfpatch.decoder.small_instance import kind_of
from hfpatch.parallel import exchange

# The lengths, in tiles, from which longer ones are extrapolated. At least three, because in
# backward the first tile finds no sums of gradients and the last tile no states.
STRETCHED = 3, 4, 5
SQUARE = 0.02  # growth is quadratic if a tile adds more than the tile before by above this share


def _pattern(kinds: list) -> tuple[int, int]:
    """(first, period): from layer `first` on, layers repeat with this period."""
    n = len(kinds)
    ways = (
        (first, period)
        for period in range(1, n + 1)
        for first in range(n)
        if kinds[first : n - period] == kinds[first + period :]
    )
    return min(ways, key=lambda way: way[0] + 2 * way[1])


def depths(layers, every: int = 1, top: int = 0) -> tuple[int, int, int, int]:
    """The numbers of layers to simulate in place of all layers of a stack.

    Layers of a repeating pattern take the same bytes and FLOPs. So a step of all layers takes
    step(more) + times * (step(more) - step(fewer)).

    Args:
        layers: the stack's layers.
        every: layers a checkpoint.
        top: the number of last layers that have another policy.

    Returns:
        (fewer, more, times, bottom). bottom: the number of lowest layers that have one of each
        kind. If too few layers repeat, more is all layers and times is 0.
    """
    kinds = [(kind_of(m), [(n, p.shape) for n, p in m.named_parameters()]) for m in layers]
    first, period = _pattern(kinds)
    period = math.lcm(period, every)
    more = (
        first
        + (len(kinds) - first) % period
        + period * (max(2, -(-4 // period)) + -(-top // period))
    )
    if more >= len(kinds):
        return 0, len(kinds), 0, first + period
    return more - period, more, (len(kinds) - more) // period, first + period


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
    enough = sum(delta for delta, block in alive if block.category == "gradients") - bottom
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


def _layer_of(module: str) -> str:
    """model.layers.3 of model.layers.3.mlp.up_proj. In backward, the module that was called last
    does not identify the operation's module inside the layer.
    """
    names = module.split(".")
    return ".".join(names[: next((i + 1 for i, n in enumerate(names) if n.isdigit()), 1)])


def stretched(step, tokens: int, tile: int) -> tuple[StepMemory, Flops, dict, int]:
    """step(tokens), extrapolated from three shorter lengths, for models whose mixers loop over the
    tokens. With several tiles, the bytes at each operation grow linearly, and FLOPs have a linear
    and a quadratic term. A mixer of whole rows may hold a mask of [tokens, tokens], whose bytes
    grow quadratically.
    """
    one, two, three = (n * tile for n in STRETCHED)
    (a, *_), (b, fb, *_), (c, fc, whole, rows) = (step(n) for n in (one, two, three))
    beyond = (tokens - three) / tile

    def onward(x, y, z):
        bend = z - 2 * y + x
        if rows and bend > SQUARE * (z - y) > 0:
            return z + round(beyond * (z - y + bend / 2 * (beyond + 1)))
        # A jump at one length alone comes from another instant and is not growth.
        return z + round(beyond * max(0, min(z - y, y - x)))

    def curve(x, y):
        square = (y / three - x / two) / tile
        return (x / two - square * two) * tokens + square * tokens**2

    before, between = ({m.name: m.layer for m in memory.moments} for memory in (a, b))
    moments = []
    for moment in c.moments:
        y = between.get(moment.name, moment.layer)
        layer = onward(before.get(moment.name, y), y, moment.layer)
        moments.append(replace(moment, layer=layer))
    flops = Flops(*(curve(x, y) for x, y in zip(vars(fb).values(), vars(fc).values())))
    memory = replace(c, moments=tuple(moments), host=onward(a.host, b.host, c.host))
    return memory, flops, whole, rows


@contextmanager
def groups_of_width(width: int | None):
    """A context for steps of shorter lengths. As at the full length, attention takes `width` KV
    heads a group, or ranks exchange `width` query heads a round. None changes nothing.
    """
    groups, rounds = heads.heads_per_group, exchange.rounds_of

    def group(B: int, T: int, H: int, K: int) -> int:
        return groups(B, T, H, K) if K % width else width

    def round_of(*sizes: int):
        found = rounds(*sizes)
        return found if found.own % width else replace(found, width=width)

    with ExitStack() as stack:
        if width is not None:
            stack.enter_context(mock.patch.object(heads, "heads_per_group", group))
            stack.enter_context(mock.patch.object(exchange, "rounds_of", round_of))
        yield
