"""Host memory is registered with the device once: batches of mixed lengths run in what the longest
took.
"""

from math import ceil, log2
from random import Random

import pytest

import hfpatch
from hfpatch.layer import policies as session_module
from hfpatch.store.transfers import HostPool
from tests.faults.checker import standing_in
from tests.faults.test_host_memory import CPU, Pinning
from tests.layer.deep import tiny_llama, tokens

pytestmark = pytest.mark.usefixtures("exact_loss")

STEPS, LAYERS = 200, 8
BOUND = 1 << 24
# Bytes a token and layer by policy, from 8k to 32k scaled down to 512 to 2,048 tokens: what is
#     short keeps more.
KEPT = {"short": (128, 128, 8, 96, 160), "long": (128, 128, 8)}


def registered(device: Pinning) -> list[int]:
    return [nbytes for call, _, nbytes in filter(lambda c: c[0] == "pin", device.calls)]


def sizes_of(T: int) -> list[int]:
    kept = KEPT["short" if T < 900 else "long"]
    return [T * width for _ in range(LAYERS) for width in kept]


def step(pool: HostPool, T: int) -> None:
    """What a step of that length takes in forward, and gives back in reverse."""
    sizes = sizes_of(T)
    pool.reserve({n: sizes.count(n) for n in sizes}, BOUND)
    leases = [pool.take(n) for n in sizes]
    while leases:
        leases.pop()


@pytest.mark.parametrize("lengths", ["mixed", "little by little", "from the longest"])
def test_lengths_of_all_kinds_register_few_times(lengths):
    draw = Random(0)
    found = {
        "mixed": [draw.randrange(512, 2048) for _ in range(STEPS)],
        "little by little": [512 + 7 * i for i in range(STEPS)],
        "from the longest": [2048 - 7 * i for i in range(STEPS)],
    }[lengths]
    device, most, by_step = Pinning(), 0, []
    pool = HostPool(device)
    for T in found:
        needed = sum(-(-n // 64) * 64 for n in sizes_of(T))
        before = len(registered(device))
        step(pool, T)
        by_step.append(registered(device)[before:])
        assert not by_step[-1] or needed > most, "what was covered registers nothing"
        assert len(by_step[-1]) <= 1 and pool.bytes_held == device.held <= BOUND
        most = max(most, needed)
    first = sum(-(-n // 64) * 64 for n in sizes_of(found[0]))
    assert sum(map(len, by_step)) <= ceil(log2(most / first)) + 1
    assert pool.bytes_held < 2 * most and pool.bytes_free == pool.bytes_held


def test_the_policys_bound_holds_before_twice():
    device = Pinning()
    pool = HostPool(device)
    for nbytes in (640, 704, 1408, 1472):
        pool.reserve({nbytes: 1}, 1500)
        assert pool.bytes_held <= 1500 and pool.bytes_free >= nbytes
    assert registered(device) == [640, 1280, 1472]
    pool.reserve({2048: 1}, 1500)  # a policy whose settings ask for more than there should be
    assert pool.bytes_held == 2048


def test_a_graph_that_is_alive_keeps_its_memory_while_a_longer_one_comes():
    device = Pinning()
    pool = HostPool(device)
    pool.reserve({640: 2})
    alive = [pool.take(640), pool.take(640)]
    pool.reserve({1280: 2}, 3000)
    longer = [pool.take(1280), pool.take(1280)]
    assert pool.bytes_free == pool.bytes_held - 3840 and len(registered(device)) == 2
    del alive, longer
    pool.reserve({1280: 2}, 3000)
    assert len(registered(device)) == 2


def test_steps_of_a_model_pin_once(monkeypatch):
    """Bytes that are registered by step, and under pressure no more than the step takes."""
    free = [1 << 40]
    monkeypatch.setattr(session_module.memory, "host_free", lambda *_: free[0])
    with standing_in(CPU, Pinning()) as device:
        model = tiny_llama(num_hidden_layers=2)
        settings = hfpatch.Checkpointing(offload="host", tile=16, save_attention=True)
        hfpatch.apply(model, checkpointing=settings)
        by_step = []
        for T in (20, 12, 21, 8, 30, 40, 39, 41, 12):
            ids, before = tokens(1, T), len(registered(device))
            model(ids, labels=ids).loss.backward()
            by_step.append(registered(device)[before:])
        row = 2 * (64 * 8 + 64 * 8 + 4 * 8)
        assert (
            by_step == [[20 * row], [], [40 * row], [], [], [], [], [80 * row], []]
            and device.held == 80 * row
        )
        free[0] = 1 << 30
        ids = tokens(1, 24)
        model(ids, labels=ids).loss.backward()
        assert device.held == 24 * row
        hfpatch.undo(model)
        assert device.held == 0
