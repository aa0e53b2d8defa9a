"""The clock: copies that hide, exchanges that do not on a slow link, and the card's own kernels."""

import dataclasses
from functools import cache
from unittest import mock

import pytest

from hfpatch.budget.policy import ALL, LEAST, Checkpointing
from hfpatch.lab import clock as lab
from hfpatch.lab.hardware import GPUS
from hfpatch.lab.presets import preset_config
from hfpatch.lab.simulate.implementations import build, prepare
from hfpatch.ops import experts

# A Llama's true layer, of which four tell as much as thirty-two; the head is small, so that it
# hides nothing.
CONFIG = preset_config("llama-3.1-8b") | {"num_hidden_layers": 4, "vocab_size": 1000}
TOKENS = 8192
WAYS = {
    "one tile": dataclasses.replace(LEAST, tile=TOKENS, keep=ALL),
    "tiles": dataclasses.replace(LEAST, tile=2048, keep=ALL, aim="fastest"),
    "one tile, plain": dataclasses.replace(LEAST, tile=TOKENS, keep=ALL, plain=2),
}


@cache
def model():
    return prepare(build(CONFIG), "hfpatch")


class Found:
    """A clocked step, and the seconds of each pass."""

    def __init__(self, patched, gpu, policy, tokens=TOKENS, **more):
        with mock.patch.object(lab, "LAUNCH_SECONDS", 0.0):
            self.simulation, self.clock, follower = lab.run_on_clock(
                patched, gpu, policy, batch=1, seq_len=tokens, **more
            )
        begins, end = follower.begins, self.clock.compute.now
        turn = begins["backward"]
        self.seconds = {"forward": turn - begins["forward"], "backward": end - turn}
        self.passed = follower.meter.step.forward.clocks


@cache
def unhurried(policy: Checkpointing) -> tuple[float, float]:
    """(bytes that a tiled layer saves, seconds of a layer's forward) where no copy waits."""
    found = Found(model(), dataclasses.replace(GPUS["h100"], link=1e15), policy)
    saved = found.simulation.host_peak_bytes / (4 - policy.plain)
    begin, end = found.passed
    return saved, (end - begin) / 4


def step(policy: Checkpointing, share: float = 0.7) -> Found:
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
    clock, forward, backward = found.clock, *found.seconds.values()
    assert clock.waited[lab.COPIES] < 0.7 * (forward / 4 + backward / 8)
    assert clock.carried[lab.TO_HOST] / clock.gpu.link_rate > 0.5 * forward, "nothing to hide"


def test_exchanges_of_ranks_take_their_bytes():
    """Behind attention on NVLink they hide; over a link of a fortieth compute waits for them."""
    policy, gpu, waits = dataclasses.replace(LEAST, tile=2048), GPUS["h100"], []
    for one in (gpu, dataclasses.replace(gpu, peer=gpu.peer / 40)):
        found = Found(model(), one, policy, tokens=4096, ranks=4)
        # q, k, v and out of each layer, and their gradients, of which a rank keeps a quarter
        heads, keys = 32 * 128, 8 * 128
        once = (2 * heads + 2 * keys) + (3 * heads + 2 * keys) + (heads + 2 * keys)
        sent = 2 * 4096 * once * 4 * 3 / 4
        assert found.clock.carried[lab.EXCHANGES] == pytest.approx(sent, rel=0.05)
        waits.append(found.clock.waited[lab.EXCHANGES] / sum(found.seconds.values()))
    assert waits[0] < 0.05 < waits[1]


@pytest.mark.parametrize("card, runs", [("a100-80gb", False), ("h100", True), ("rtx5090", False)])
def test_products_of_experts_are_those_that_the_card_runs(card, runs):
    """torch's grouped product is a kernel on sm_90 and sm_100 alone."""
    sizes = {"num_hidden_layers": 1, "num_experts": 8, "vocab_size": 1000}
    patched = prepare(build(preset_config("qwen3-30b-a3b") | sizes), "hfpatch")
    with mock.patch.object(experts, "grouped_mm", wraps=experts.grouped_mm) as seen:
        Found(patched, GPUS[card], dataclasses.replace(LEAST, tile=256), tokens=256)
    assert seen.called is runs
