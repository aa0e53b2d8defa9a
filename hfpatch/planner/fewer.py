"""A step of few layers and few tokens that stands for one of many."""

import math
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest import mock

from hfpatch.attention import heads
from hfpatch.budget.flops import Flops
from hfpatch.budget.formula import StepMemory
from hfpatch.decoder.small_instance import kind_of
from hfpatch.parallel import exchange

# Tiles of the lengths that stand for longer ones: in a backward of several, the first tile finds no
# sums of gradients, the last no states.
STRETCHED = 3, 4, 5
SQUARE = 0.02  # of what a tile adds: so much more than the tile before is a square's


def _pattern(kinds: list) -> tuple[int, int]:
    """(first, period): from the first layer on, each is as the one `period` layers before it."""
    n = len(kinds)
    ways = (
        (first, period)
        for period in range(1, n + 1)
        for first in range(n)
        if kinds[first : n - period] == kinds[first + period :]
    )
    return min(ways, key=lambda way: way[0] + 2 * way[1])


def depths(layers, every: int = 1, top: int = 0) -> tuple[int, int, int, int]:
    """(fewer, more, times, bottom) of a stack's layers: a step of all of them takes what one of
    `more` takes and, `times` over, what it takes beyond one of `fewer`, since layers of a pattern
    take the same each. bottom: its lowest layers, which hold one of each kind. All layers, and 0
    times, where too few repeat. every: layers a checkpoint; top: the last layers, of which the
    policy says something else, and which stand on the rest in whole periods.
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
    """By operation and module, (gradients, bytes beyond parameters and gradients) when those beyond
    are the most, and when both are the most after all but `bottom` bytes of the gradients have
    come: the two ends of a backward, between which layers of a pattern go one way.
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
    """model.layers.3 of model.layers.3.mlp.up_proj: of what stands lower, the module that was
    called last is no sign in a backward.
    """
    names = module.split(".")
    return ".".join(names[: next((i + 1 for i, n in enumerate(names) if n.isdigit()), 1)])


def stretched(step, tokens: int, tile: int) -> tuple[StepMemory, Flops, dict, int]:
    """step(tokens) by what three shorter lengths take: the bytes at each operation grow by a line
    once there are several tiles, FLOPs by tokens and their square. For models whose mixers loop over
    the tokens. A mixer of whole rows may hold a mask of [tokens, tokens], whose bytes grow with the
    square.
    """
    one, two, three = (n * tile for n in STRETCHED)
    (a, *_), (b, fb, *_), (c, fc, whole, rows) = (step(n) for n in (one, two, three))
    beyond = (tokens - three) / tile

    def onward(x, y, z):
        bend = z - 2 * y + x
        if rows and bend > SQUARE * (z - y) > 0:
            return z + round(beyond * (z - y + bend / 2 * (beyond + 1)))
        # What one length alone adds is another instant's bytes, and no growth.
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
    """Within, attention goes by groups of so many KV heads, and ranks exchange so many query heads
    a round, as at the length that is meant.
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
