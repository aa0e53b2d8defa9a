"""Host memory is registered with the device once: batches of mixed lengths run in what the longest
took.
"""

import gc
from collections import Counter
from random import Random

import pytest
import torch

import hfpatch
from hfpatch.budget import free as memory
from hfpatch.budget.limits import GiB
from hfpatch.budget.measured import HOST_SHARE, PINNED_MOST
from hfpatch.store import device as store_device
from hfpatch.store.transfers import HostPool
from tests.faults.test_host_memory import CPU, Pinning
from tests.layer.deep import tiny_llama, tokens
from tests.layer.devices import standing_in

pytestmark = pytest.mark.usefixtures("exact_loss")

# Llama-3.1-8B on an H100 with 256 GiB of host memory; pages that nobody writes cost none.
STEPS, SHORTEST, LONGEST, APART = 200, 8192, 32768, 8192
# bytes per token of tiny_llama in float64: input, attention's output and its log-sum-exp of two layers,
# and the gradient of one's input, which waits while attention's backward runs
ROW = 2 * (64 * 8 + 64 * 8 + 4 * 8) + 64 * 8
BOUND = min(int(HOST_SHARE * 256 * GiB), PINNED_MOST)


def sizes_of(T: int) -> Counter:
    """Input, attention's output and its log-sum-exp of each layer."""
    return Counter({T * 4096 * 2: 64, T * 32 * 4: 32})


def bytes_of(T: int) -> int:
    return sum(-(-n // 64) * 64 * count for n, count in sizes_of(T).items())


def registered(device: Pinning) -> list[int]:
    return [nbytes for call, _, nbytes in filter(lambda c: c[0] == "pin", device.calls)]


def step(pool: HostPool, T: int) -> None:
    """What a step of that length takes in forward, and gives back in reverse."""
    leases = [pool.take(n) for n in sizes_of(T).elements()]
    while leases:
        leases.pop()


@pytest.mark.parametrize("lengths", ["mixed", "little by little", "from the longest"])
def test_lengths_of_all_kinds_register_few_times(lengths, monkeypatch):
    """200 steps of 8,192 to 32,768 tokens: bytes registered by step."""
    monkeypatch.setattr(memory, "host_free", lambda: 256 * GiB)
    on_meta = lambda nbytes, mapped: torch.empty(nbytes, dtype=torch.uint8, device="meta")  # noqa: E731
    monkeypatch.setattr(store_device, "host_empty", on_meta)
    draw, apart = Random(0), (LONGEST - SHORTEST) // (STEPS - 1)
    found = {
        "mixed": [draw.randint(SHORTEST, LONGEST) for _ in range(STEPS)],
        "little by little": [SHORTEST + apart * i for i in range(STEPS)],
        "from the longest": [LONGEST - apart * i for i in range(STEPS)],
    }[lengths]
    device, most, by_step = Pinning(), 0, []
    pool = HostPool(device)
    for T in found:
        needed, before = bytes_of(T), len(registered(device))
        assert 3 * GiB < needed <= BOUND
        step(pool, T)
        by_step.append(registered(device)[before:])
        assert not by_step[-1] or needed > most, "what was covered registers nothing"
        assert pool.bytes_held == device.held
        most = max(most, needed)
    assert sum(map(sum, by_step)) <= 3 * most
    assert pool.bytes_held < 2 * most and pool.bytes_free == pool.bytes_held


def test_steps_of_a_model_pin_once(monkeypatch):
    """Only a step longer than all before registers memory."""
    monkeypatch.setattr(memory, "host_free", lambda *_: 1 << 40)
    with standing_in(CPU, Pinning()) as device:
        model = tiny_llama(num_hidden_layers=2)
        settings = hfpatch.Checkpointing(offload="host", tile=16, keep="attention")
        hfpatch.apply(model, checkpointing=settings)
        by_step = []
        for T in (20, 12, 21, 8, 30, 40, 39, 41, 12):
            ids, before = tokens(1, T), len(registered(device))
            model(ids, labels=ids).loss.backward()
            by_step.append(sum(registered(device)[before:]))
        assert by_step[0] == 20 * ROW
        assert [i for i, nbytes in enumerate(by_step) if nbytes] == [0, 2, 7]  # 20, 21, 41
        assert device.held <= 2 * 41 * ROW
        hfpatch.undo(model)
        assert device.held == 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_host_memory_that_the_user_gives_is_all_that_is_pinned(ranks, monkeypatch):
    """What pools hold counts once: lengths that grow never take more than HFPATCH_HOST_MEMORY."""
    gc.collect()
    monkeypatch.setattr(memory, "_held", 0)  # of models that other tests keep
    monkeypatch.setenv("HFPATCH_HOST_MEMORY", str(ranks * 100 * ROW))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    with standing_in(CPU, Pinning()) as device:
        model = tiny_llama(num_hidden_layers=2)
        settings = hfpatch.Checkpointing(offload="host", tile=16, keep="attention")
        hfpatch.apply(model, checkpointing=settings)
        for T in (20, 30, 45, 60, 85, 20):
            ids = tokens(1, T)
            model(ids, labels=ids).loss.backward()
            assert T * ROW <= device.held or T == 20
            assert device.held <= 100 * ROW
        ids = tokens(1, 110)
        with pytest.raises(ValueError, match="checkpoints need"):
            model(ids, labels=ids)
        assert device.held <= 100 * ROW
        hfpatch.undo(model)
