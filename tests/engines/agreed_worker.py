"""Two gloo processes that must run the same plan, on devices of which one has less memory and the
other a slower link: which layers run untiled on each, and that the gradients are right.
"""

import contextlib
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import common
import torch.distributed as dist
import tp_worker

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import tiny
import torch

import hfpatch
from hfpatch.context.ranks import row_ranks_of, sharded
from hfpatch.layer import policies
from hfpatch.layer.meter import Counters, Gauge, Meter
from hfpatch.parallel import exchange, shards
from hfpatch.store.device import Speed

LAYERS, MiB = 4, 1 << 20
# Of a forward, over a link of a byte a second: one of two tiled layers can keep gate and up. Layers
# that are split keep none.
SECONDS = 56_832
LENGTHS = 24, 24, 16, 24, 24, 16, 24, 24, 24, 24, 24  # nine steps of the first, two of the second


class Card(Gauge):
    """Each layer of a step that keeps all takes a MiB until the next step begins; each read finds a KiB more.

    free: bytes beside what is allocated; seconds: that a forward takes; step: the one that runs.
    """

    free, seconds = 0, 0.0

    def __init__(self, device):
        super().__init__(device)
        self.reads, self.top, self.step = 0, 0, None

    def read(self):
        self.reads += 1
        now = (self.reads << 10) + (sum(self.step.kept_all) if self.step else 0) * MiB
        self.top = max(self.top, now)
        return Counters(now, self.top)

    def limit(self):
        return self.free + self.read().allocated

    def card(self):
        return 1

    def clock(self):
        took = 1000 * self.seconds
        return SimpleNamespace(elapsed_time=lambda other: took, query=lambda: True)


class Noted:
    """own: the plans that this rank's meter made; ran: the policy of each step, and which layers
    kept all; asked: how often the ranks agreed, policies of first steps left out."""

    def __init__(self):
        self.own, self.ran, self.asked, self.plan = [], [], 0, Meter.next_policy
        self.least = shards.least_of

    @contextlib.contextmanager
    def on(self, card):
        """Every device is such a card."""
        with (
            mock.patch.object(policies, "metered", lambda device: True),
            mock.patch.object(policies, "Gauge", card),
            mock.patch.object(
                policies, "gradient_order_matters", lambda: False
            ),  # DeepSpeed is imported
            mock.patch.object(Speed, "now", lambda _: 1.0),
            mock.patch.object(Meter, "next_policy", lambda *args: self.planning(*args)),
            mock.patch.object(policies, "least_of", self.leasting),
            mock.patch.object(exchange, "least_of", self.leasting),
        ):
            yield

    def planning(self, meter, *args):
        meter.gauge.step = meter.step
        self.own.append(self.plan(meter, *args))
        return self.own[-1]

    def leasting(self, group, numbers):
        self.asked += len(numbers) == 3
        return self.least(group, numbers)

    def stepped(self, model):
        (meter,) = model.model._hfpatch.runtime.meters.values()
        self.ran.append((plan_of(meter.step.plan.policy), list(meter.step.kept_all)))

    def report(self) -> dict:
        return {"own": [*map(plan_of, self.own)], "ran": self.ran, "asked": self.asked}


def plan_of(policy) -> list:
    return [policy.plain, policy.tile, policy.keep]


def row(tokens: int) -> dict:
    """A row of two documents."""
    ids = tiny.ids(1, tokens)
    positions = torch.cat([torch.arange(9), torch.arange(tokens - 9)])[None]
    labels = torch.nn.functional.pad(ids, (0, 1), value=-100)[:, 1:].contiguous()
    labels[0, 8] = -100
    return {"input_ids": ids, "position_ids": positions, "shift_labels": labels, "labels": ids}


def rows(group, noted: Noted) -> float:
    """The worst error of the gradients of ranks that share each row, relative to the largest."""
    rank, size = dist.get_rank(), dist.get_world_size()
    made = lambda: tiny.exact(tiny.llama(num_hidden_layers=LAYERS, head_dim=8))  # noqa: E731
    stock, ours, worst = made(), made(), 0.0
    hfpatch.apply(ours)
    for tokens in LENGTHS:
        whole, t = row(tokens), tokens // size
        items = (whole["shift_labels"] != -100).sum()
        stock(**whole, num_items_in_batch=items, use_cache=False).loss.backward()
        mine = {n: x[:, rank * t : (rank + 1) * t].contiguous() for n, x in whole.items()}
        with sharded(row_ranks_of(group)), noted.on(Card):
            ours(**mine, num_items_in_batch=items, use_cache=False).loss.backward()
        noted.stepped(ours)
        for a, b in zip(ours.parameters(), stock.parameters()):
            dist.all_reduce(a.grad)
            worst = max(worst, ((a.grad - b.grad).abs().max() / b.grad.abs().max()).item())
            a.grad = b.grad = None
    return worst


def weights(folder: Path, noted: Noted, untiled: bool = False) -> float:
    """The worst error of the gradients of tensor-parallel ranks, over its budget. untiled: by a
    user's hooks.
    """
    given = {"num_hidden_layers": LAYERS}
    make, worst = common.make_config, 0.0
    common.make_config = lambda *args, **more: make(*args, **given | more)
    ours = tp_worker.load(folder / "model")
    hfpatch.apply(ours)
    for layer in ours.model.layers if untiled else ():
        layer.self_attn.register_forward_hook(lambda *_: None)
    ours.register_forward_hook(lambda *_: noted.stepped(ours))
    for _ in range(3):
        with noted.on(Card):
            found = tp_worker.gradients(ours)
        worst = max(worst, *common.worst("plain", found).values())
    return worst


def main(chosen: str, free: str, speeds: str, folder: str) -> None:
    """chosen: how ranks share; free: MiB of each rank's device; speeds: of each rank's link."""
    common.quiet()
    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), {}
    Card.free = int(float(free.split(",")[rank]) * MiB)
    group = dist.new_group(range(2))
    ways = {
        "rows": lambda n: rows(group, n),
        "weights": lambda n: weights(Path(folder), n),
        "untiled": lambda n: weights(Path(folder), n, untiled=True),
    }
    Card.seconds = SECONDS * float(speeds.split(",")[rank])
    for way in chosen.split(","):
        noted = Noted()
        found[way] = {"worst": ways[way](noted), **noted.report()}
    common.report(folder, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
