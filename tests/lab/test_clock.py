"""The clock: copies that hide, and copies that do not once the overlap is broken on purpose."""

import dataclasses
from collections import Counter
from functools import cache, partial
from unittest import mock

import pytest

from hfpatch.budget.hardware import GPUS
from hfpatch.budget.policy import Policy
from hfpatch.lab import clock as lab
from hfpatch.lab.adapters import Adapters
from hfpatch.lab.presets import preset_config
from hfpatch.lab.simulate.implementations import build, prepare
from hfpatch.layer import policies
from hfpatch.layer.backward import Backward
from hfpatch.parallel.shards import Shards
from hfpatch.store.transfers import Transfers

# A Llama's true layer, of which four tell as much as thirty-two; the head is small, so that it
# hides nothing.
CONFIG = preset_config("llama-3.1-8b") | {"num_hidden_layers": 4, "vocab_size": 1000}
TOKENS = 8192
WAYS = {
    "one tile": Policy("host", tile=TOKENS, again=0),
    "tiles": Policy("host", tile=2048, again=0, wide=True),
    "one tile, plain": Policy("host", tile=TOKENS, again=0, plain=2),
}


@cache
def model():
    return prepare(build(CONFIG), "hfpatch")


class Found:
    """A clocked step: seconds of each turn, and how long compute waited for copies."""

    def __init__(self, patched, gpu, policy, tokens=TOKENS, **more):
        with mock.patch.object(lab, "LAUNCH_SECONDS", 0.0):
            self.simulation, self.clock, follower = lab.run_on_clock(
                patched, gpu, policy, batch=1, seq_len=tokens, **more
            )
        begins, end = follower.begins, self.clock.compute.now
        turn = begins["backward"]
        self.seconds = {"forward": turn - begins["forward"], "backward": end - turn}
        self.passed = follower.meter.step.forward.clocks

    def exposed(self, turn: str) -> float:
        """Share of the turn."""
        return sum(self.waits(turn).values()) / self.seconds[turn]

    def waits(self, turn: str) -> Counter:
        """Seconds by layer."""
        found = Counter()
        for wait in self.clock.rows[lab.WAITS]:
            found[wait.layer] += (wait.end - wait.start) * (wait.turn == turn)
        return found

    def busy(self, row: str) -> float:
        return sum(s.end - s.start for s in self.clock.rows.get(row, ()))

    def moved(self, row: str) -> int:
        return sum(s.nbytes for s in self.clock.rows.get(row, ()))


@cache
def unhurried(policy: Policy) -> tuple[float, float]:
    """(bytes that a tiled layer saves, seconds of a layer's forward) where no copy waits."""
    found = Found(model(), dataclasses.replace(GPUS["h100"], link=1e15), policy)
    saved = found.simulation.host_peak_bytes / (4 - policy.plain)
    begin, end = found.passed
    return saved, (end - begin) / 4


def step(policy: Policy, share: float = 0.7) -> Found:
    """One step on an H100 whose link takes `share` of a layer's forward for what that layer
    saves.
    """
    saved, forward = unhurried(policy)
    gpu = GPUS["h100"]
    rates = {"peak_flops": gpu.matmul_flops, "bandwidth": gpu.memory_rate}
    link = saved / (share * forward)
    return Found(model(), dataclasses.replace(gpu, measured=True, link=link, **rates), policy)


whole = cache(step)


@pytest.mark.parametrize("way", ["one tile", "tiles"])
def test_copies_hide(way):
    """The last layer's have no layer beside them: what it saves last, and its first tile's way
    back.
    """
    found = whole(WAYS[way])
    for turn, most in (("forward", 0.7 / 4), ("backward", 0.7 / 8)):
        for layer, seconds in found.waits(turn).items():
            assert layer == "layer 3" or seconds < 0.005 * found.seconds[turn], (layer, seconds)
        assert found.exposed(turn) < most
    assert found.busy(lab.UP) > 0.5 * found.seconds["forward"], "nothing to hide"


@pytest.mark.parametrize("way", ["one tile", "tiles"])
def test_it_shows_sources_that_are_let_go_at_the_end_of_a_layer(way):
    settle, unbroken = Transfers.settle, whole(WAYS[way]).exposed("forward")
    with mock.patch.object(
        Transfers, "settle", lambda self, under_way=0, room=0: settle(self, under_way)
    ):
        assert step(WAYS[way]).exposed("forward") > 2 * unbroken + 0.03


def test_it_shows_a_layer_that_fetches_its_own_last():
    run = Backward.run

    slow = partial(step, WAYS["one tile"], share=2.2)  # about the seconds of a backward
    unbroken = slow().exposed("backward")

    def last(self, dy, before):
        if before is not None:
            before.prefetch()
        return run(self, dy, None)

    with mock.patch.object(Backward, "run", last):
        assert slow().exposed("backward") > unbroken + 0.03


def test_exchanges_of_ranks_take_their_bytes():
    """Behind attention on NVLink they hide; over a link of a fortieth compute waits for them."""
    policy, gpu, waits = Policy("host", tile=2048), GPUS["h100"], []
    for one in (gpu, dataclasses.replace(gpu, peer=gpu.peer / 40)):
        found = Found(model(), one, policy, tokens=4096, ranks=4)
        # q, k, v and out of each layer, and their gradients, of which a rank keeps a quarter
        heads, keys = 32 * 128, 8 * 128
        once = (2 * heads + 2 * keys) + (3 * heads + 2 * keys) + (heads + 2 * keys)
        sent = 2 * 4096 * once * 4 * 3 / 4
        assert found.busy(lab.EXCHANGES) == pytest.approx(sent / one.peer_rate, rel=0.05)
        waits.append(found.busy(lab.RANK_WAITS) / sum(found.seconds.values()))
    assert waits[0] < 0.05 < waits[1]


@pytest.mark.parametrize("tile, passes", [(TOKENS, 1), (2048, 3)])
def test_tensor_parallel_ranks_gather_what_each_keeps_a_part_of(tile, passes, monkeypatch):
    """Half of each input goes to the host; each pass over its tiles gathers the other half, and
    waits for no more than its bytes take between GPUs. Products are not cut: no rank's are shown.
    """
    policy, found, clocks = Policy("host", tile=tile), {}, []
    init = lab.ClockDevice.__init__
    monkeypatch.setattr(
        lab.ClockDevice, "__init__", lambda self, *a: (init(self, *a), clocks.append(self))[0]
    )

    class Two(Shards):
        def __init__(self, group):
            self.group, self.rank, self.world, self.buffer = group, 0, 2, None

        def whole(self, part_BtD, length):
            clocks[-1].wait(clocks[-1].exchange(part_BtD.nbytes))
            B, t, D = part_BtD.shape
            return part_BtD.new_empty(B, 2 * t, D)[:, :length]

    for ranks in (1, 2):
        if ranks == 2:
            monkeypatch.setattr(policies, "tensor_parallel_group", lambda layer: "two")
            monkeypatch.setattr(policies, "together", lambda group, work: work())
            monkeypatch.setattr(policies, "least_of", lambda group, numbers: numbers)
            monkeypatch.setattr(policies, "Shards", Two)
        found[ranks] = Found(prepare(build(CONFIG), "hfpatch"), GPUS["h100"], policy)
    x = 2 * TOKENS * CONFIG["hidden_size"]
    one, two = found.values()
    sent = two.moved(lab.EXCHANGES)
    assert one.moved(lab.UP) - two.moved(lab.UP) == 4 * x / 2 and sent == 4 * passes * x / 2
    waits, seconds = two.busy(lab.RANK_WAITS), sum(two.seconds.values())
    assert 0 < waits <= 1.001 * sent / GPUS["h100"].peer_rate and waits < 0.02 * seconds
    assert two.busy(lab.WAITS) <= one.busy(lab.WAITS) + waits


def test_streamed_weights_are_copies_on_the_clock():
    """Each layer's weights come in the forward and in the backward."""
    config, adapters = CONFIG | {"num_hidden_layers": 6}, Adapters(16, "4bit")
    policy = Policy("gpu", tile=TOKENS, frozen_weights="host")
    patched = prepare(build(config, adapters=adapters), "hfpatch")
    weights = 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336) * 0.516
    found = Found(patched, GPUS["rtx4090"], policy)
    assert 2 * 4 * weights < found.moved(lab.DOWN) < 2 * 6.1 * weights


def test_files_that_a_disk_writes_in_time_hold_up_nothing():
    """Each of a layer's tensors is more than the bounce buffers hold, so the host waits, but behind
    work that it has launched; a disk that eight GPUs share holds compute up.
    """
    patched, policy = model(), Policy("disk", tile=16384, plain=1)
    alone, shared = GPUS["a100-80gb"], dataclasses.replace(GPUS["h100"], sharing=8)
    assert Found(patched, alone, policy, tokens=131072).exposed("forward") < 0.002
    found = Found(patched, shared, dataclasses.replace(policy, tile=8192), tokens=32768)
    assert sum(found.waits("forward").values()) > 0.05 * sum(found.seconds.values())
