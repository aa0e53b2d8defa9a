"""A step's bytes and seconds: the real code on fake tensors and a clock, at a few depths and, for
long rows, a few lengths, carried on to all layers and tokens."""

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import NamedTuple

import torch

from hfpatch.budget.cuts import heads_per_group
from hfpatch.budget.measured import Abilities
from hfpatch.budget.policy import ALL, Checkpointing
from hfpatch.lab.clock import COPIES, EXCHANGES, TO_DEVICE, TO_HOST, run_on_clock
from hfpatch.lab.device import one_line
from hfpatch.lab.hardware import Gpu
from hfpatch.lab.shallow import STOCK, Model, Sizes, layers_of, trained_bytes_of
from hfpatch.lab.shorter_rows import as_at_full_length, to_full_length
from hfpatch.lab.simulate.ledger import kept_bytes, moments_of

# The most operations of a simulated step (or one a token, if that is more). Code that loops over
# single tokens exceeds it.
OPERATIONS = 400_000
FREE = (None, None)  # `ahead`: the sources of copies have all the room that a run gives them
LONG = 6  # tiles of a batch beyond which a step is carried on from shorter rows
# Longer rows are carried on from rows of at least three tiles, because in backward the first tile
# finds no sums of gradients and the last tile no states, and of at least LEAST tokens.
LEAST = 12288  # tokens: below, the embedding's backward and the loss go other ways


class Moment(NamedTuple):
    """A peak of the step: bytes of gradients, and of all beyond parameters and gradients."""

    name: str
    gradients: int
    beyond: int


@dataclass(frozen=True)
class Cost:
    """A step, without its optimizer and its engine.

    Attributes:
        moments: the peaks at the two ends of backward.
        host: bytes of checkpoints on the host.
        seconds: of kernels and waits, by part.
        forward, backward: seconds of the two passes.
        up, down: bytes over the host link, to the host and to the device.
        flops, model: FLOPs, and those of the usual convention, without recomputation.
        whole: reason -> number of layers that run untiled for it.
        whole_row_layers: number of layers with a mixer that takes whole rows.
        stands, loss, after, tiled: bytes that layer/meter.py measured of the step
            (budget.measured.Call). exact: `tiled` was the step's peak.
        layers_forward: seconds of the layers' forward, as measured there.
        kinds: of a few layers, able: what they can do.
    """

    moments: tuple
    host: int
    seconds: dict
    forward: float
    backward: float
    up: int
    down: int
    flops: float
    model: float
    whole: dict
    whole_row_layers: int
    stands: float = 0.0
    loss: float = 0.0
    after: float = 0.0
    tiled: float = 0.0
    layers_forward: float = 0.0
    exact: bool = False
    kinds: tuple = ()
    able: Abilities | None = None


# Fields of a Cost that grow with the layers.
COUNTED = ("host", "forward", "backward", "up", "down", "flops", "model", "whole_row_layers")
MEASURED = ("stands", "loss", "after", "tiled", "layers_forward")


class _Ran(NamedTuple):
    """One simulated step of a cut model, as numbers that grow by layers, and its peaks."""

    numbers: Counter
    early: dict
    late: dict
    meter: dict


class Steps:
    """The simulated steps of a run's model on a GPU.

    Args:
        sizes: of the model, with the run's ranks.
        accumulates: gradients of earlier batches exist as a step begins.
        stock: a word of shallow.STOCK for steps of transformers alone. "" for those of hfpatch.
    """

    def __init__(
        self, model: Model, sizes: Sizes, gpu: Gpu, batch: int, accumulates: bool = False,
        stock: str = "",
    ):  # fmt: skip
        self.model = model
        self.sizes = sizes
        self.gpu = gpu
        self.batch = batch
        self.accumulates = accumulates
        self.stock = stock
        self.kinds: dict = {}  # budget.measured.Kind by name, as a run's meter has them
        self._ran = lru_cache(maxsize=None)(self._ran)
        self.cost = lru_cache(maxsize=None)(self.cost)

    def carried_on(self, tokens: int, policy: Checkpointing) -> bool:
        """Whether a step of rows of `tokens` tokens is carried on from shorter rows."""
        tiled = policy.offload != "off"
        return tiled and self.batch * tokens > max(LONG * policy.tile, 2 * LEAST)

    def cost(
        self, tokens: int, policy: Checkpointing, ahead: tuple = FREE, deep: bool = True
    ) -> Cost:
        """The cost of a step of rows of `tokens` tokens (of one rank) under a policy. Under
        Checkpointing("off") layers run untiled.

        ahead: as of lab.step_meter.StepMeter, a pair. deep: False simulates the fewest layers, enough
            for what a meter reads.
        """
        if not self.carried_on(tokens, policy):
            return self._of_all_layers(tokens, policy, None, ahead, deep)
        sizes = self.sizes
        width = heads_per_group(
            self.batch,
            tokens * sizes.ranks,
            max(1, sizes.num_heads // sizes.ranks),
            max(1, sizes.num_kv_heads // sizes.ranks),
        )
        first = max(3, -(-LEAST // policy.tile))
        shorter = [n * policy.tile // self.batch for n in (first, first + 1, first + 2)]
        step = partial(self._of_all_layers, policy=policy, width=width, ahead=ahead, deep=deep)
        steps = [step(n) for n in shorter[:2]]
        # A mixer of whole rows may hold a mask, whose bend takes a third length.
        if steps[0].whole_row_layers:
            steps.append(step(shorter[2]))
        table = sizes.embedding if self.batch == 1 else (0, 0)
        return to_full_length(steps, shorter[: len(steps)], tokens, table)

    def try_keeping_all(self, tokens: int, policy: Checkpointing, ahead: tuple) -> None:
        """Measures what a layer of each kind keeps that keeps all."""
        n, period = self.model.depths(policy.every)
        while self.carried_on(tokens, policy):
            tokens //= 2
        policy = replace(policy, keep=min(policy.keep, 0))
        self._ran(tokens, None, ahead, policy, min(self.model.layers, n + period), period or n)

    def _of_all_layers(self, tokens: int, policy, width, ahead, deep: bool) -> Cost:
        """The cost of all layers from steps of few: it is linear in the number of layers that run
        in tiles, of those that keep everything (the last ones), and of those in tiles whose gate
        and up run again (below them).

        For example 32 layers, the last 6 keep everything: a step of 2 in tiles and 1 that keeps
        everything, 24 times what a third one in tiles adds to two, and 5 times what the one that
        keeps everything adds to two in tiles.
        """
        L = self.model.layers

        def run(policy, layers: int, plain: int = 0) -> _Ran:
            room = ahead if plain else (ahead[0], None)
            return self._ran(tokens, width, room, policy, layers, plain)

        # Layers that run untiled are all of one sort.
        if policy.offload == "off":
            depth, period = self.model.depths()
            base = run(policy, depth)
            times = (L - depth) / max(1, period)
            return self._cost_of(base, [(base, run(policy, depth + period), times)])

        # [Step 1] The layers of each sort, and how many of them the base step has.
        streams = policy.frozen_weights == "host"
        shallow, period = self.model.depths(policy.every, 3 if streams else 2)
        full = replace(policy, plain=0, keep=policy.keep if policy.keep <= 0 else ALL)
        plain = min(policy.plain, L)
        again = max(0, L - plain - policy.keep) if policy.keep > 0 else 0
        depth = L
        kept_here = plain
        if period and plain == L:
            depth = kept_here = shallow
        elif period:
            kept_here = (plain - 1) % period + 1 if plain else 0
            depth = min(L, shallow + (period if plain else 0))

        # [Step 2] The base step: some layers of each sort. They are enough for a meter, unless
        # checkpoints stay on the device, where each layer adds its own.
        base = run(full, depth, kept_here)
        if not deep and policy.offload != "gpu":
            found = self._cost_of(base, [])
            host = found.host * L // max(1, depth - kept_here)  # at most
            return replace(found, host=host, layers_forward=found.layers_forward * L / depth)
        if depth == L:
            if again:
                base = run(replace(full, keep=policy.keep), depth, kept_here)
            return self._cost_of(base, [])

        # [Step 3] What the layers add that the base step lacks: (a step, a deeper one, how often). A
        # tiled layer takes the same bytes and seconds beside others that keep everything.
        grow = []
        tiled = L - depth - (plain - kept_here)
        deeper = shallow + period
        if tiled != again:
            grow.append((run(full, shallow), run(full, deeper), (tiled - again) / period))
        if again:
            kept = run(replace(full, keep=shallow), deeper)
            grow.append((run(full, shallow), kept, again / period))
        if plain > kept_here:
            pair = (run(full, shallow), base)
            if kept_here < period or kept_here == depth:  # a part of a period, or no others
                pair = (base, run(full, depth + period, kept_here + period))
            grow.append((*pair, (plain - kept_here) / period))
        return self._cost_of(base, grow)

    def _ran(self, tokens: int, width, ahead, policy, layers: int, plain: int) -> _Ran:
        tiled = policy.offload != "off"
        implementation = STOCK.get(self.stock, "hfpatch" if tiled else "hfpatch-off")
        model = self.model.cut(layers, implementation)
        autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.model.wide)
        try:
            with as_at_full_length(width), autocast:
                found, clock, follower = run_on_clock(
                    model,
                    self.gpu,
                    replace(policy, plain=plain) if tiled else None,
                    batch=self.batch,
                    seq_len=tokens,
                    ranks=self.sizes.ranks,
                    kinds=self.kinds,
                    ahead=ahead,
                    gradients=0 if self.accumulates else self.sizes.trained_bytes,
                    accumulates=self.accumulates,
                    most_operations=max(OPERATIONS, self.batch * tokens),
                )
        except Exception as error:  # a family's own forward may raise anything
            if str(error).startswith("hfpatch: "):
                raise
            raise ValueError(
                f"hfpatch: the model must run on [{self.batch}, {tokens}] tokens, and does not "
                f"({one_line(error)}). Take a shorter length, or another model."
            ) from error
        # The layers whose backward ends the step: a period of them, in whole segments.
        last = self.model.first + math.lcm(self.model.period, policy.every if tiled else 1)
        return _read(
            found, clock, follower, model, self.model, self.batch * tokens, not self.stock, last
        )

    def _cost_of(self, base: _Ran, grow: list) -> Cost:
        """grow: (shallow, deeper, times): the layers of the model that the base lacks, as often as
        the deeper step has more of their kind."""
        numbers = base.numbers.copy()
        for less, deep, times in grow:
            for key in deep.numbers.keys() | less.numbers.keys():
                numbers[key] += times * (deep.numbers[key] - less.numbers[key])
        further = int(numbers["kept"] - base.numbers["kept"])
        missing = self.sizes.trained_bytes - base.numbers["trained"]
        moments = [
            Moment(f"{at}, at the end", g + missing, b) for at, (g, b) in base.late.items() if b
        ]
        moments += [Moment(at, g, b + further) for at, (g, b) in base.early.items()]
        fields = {name: numbers[name] for name in COUNTED}
        fields["host"] = int(fields["host"])
        # Waits are not linear where copies just hide.
        fields |= {name: max(0.0, numbers[name]) for name in MEASURED}
        for parts in ("seconds", "whole"):
            named = (key for key in numbers if key[0] == parts)
            fields[parts] = {key[1]: max(0.0, numbers[key]) for key in named}
        return Cost(tuple(moments), **fields, **base.meter)


def _read(found, clock, follower, model, asked: Model, rows: int, fused: bool, last: int) -> _Ran:
    """The numbers and peaks of a simulated step. last: layers whose backward ends it."""
    # [Step 1] The seconds of each part. What no part explains, the GPU waits for Python.
    forward = follower.begins["backward"] - follower.begins["forward"]
    backward = clock.compute.now - follower.begins["backward"]

    seconds = Counter({"copy_wait": clock.waited[COPIES], "exchange": clock.waited[EXCHANGES]})
    for (phase, part), spent in follower.parts.items():
        seconds[part] += spent if phase != "setup" else 0.0
    seconds["python_wait"] = max(0.0, forward + backward - sum(seconds.values()))

    # [Step 2] The FLOPs of the model's own products, without what backward runs again.
    matmul = found.flops["matmul"]
    attention = found.flops["attention"]
    # A fused loss makes the head's gradients in its forward.
    head = model.get_output_embeddings().weight
    products = 2 * rows * head.numel()
    times = 2 + head.requires_grad if fused else 1
    inside = matmul.get("forward", 0) - products * times
    once = 3 * attention.get("backward", 0) / 2.5

    # [Step 3] Collect the numbers, each of which is linear in the layers.
    blocks = found.ledger.blocks
    streamed = sum(b.nbytes for b in blocks if b.host and b.category == "parameters")
    numbers = Counter({
        "kept": kept_bytes(found.ledger), "trained": trained_bytes_of(model),
        "host": found.host_peak_bytes - streamed, "forward": forward, "backward": backward,
        "up": clock.carried[TO_HOST], "down": clock.carried[TO_DEVICE],
        "whole_row_layers": found.whole_row_layers,
        "model": (2 if asked.adapters else 3) * (inside + products) + once,
        "flops": sum(matmul.values()) + sum(attention.values()),
    })  # fmt: skip
    numbers.update({("whole", why): n for why, n in found.whole.items()})
    numbers.update({("seconds", part): spent for part, spent in seconds.items()})

    # [Step 4] Add what the meter of a real step would measure.
    meter = follower.meter
    step = meter.step
    measured = {}
    if step is not None and step.forward.ends is not None:
        sizes = step.sizes
        for name in ("stands", "loss", "after", "tiled"):
            numbers[name] = (getattr(sizes, name).points or [[0, 0]])[-1][1]
        numbers["layers_forward"] = step.forward.clocks[1] - step.forward.clocks[0]
        measured = {"exact": step.backward.exact, "kinds": tuple(sizes.kinds), "able": meter.able}
    # [Step 5] Find the peaks at the two ends of backward.
    bottom = sum(trained_bytes_of(m) for m in layers_of(model)[:last])
    bottom += trained_bytes_of(model.get_input_embeddings())
    early, late = moments_of(found.ledger, bottom)
    return _Ran(numbers, early, late, measured)
