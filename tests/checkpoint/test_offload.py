"""Tiers of saved tensors: exact bytes, re-use, the order of fetches, and files that do not outlive their process."""

import os
import subprocess
import sys

import pytest
import torch
from tiny import gradients, largest_difference, stock_loss

import hfpatch
from hfpatch.checkpoint.device import Device
from hfpatch.checkpoint.offload import FetchQueue, HostPool, Transfers
from tests.checkpoint.deep import pair, tiny_llama, tokens


def test_pool_takes_exact_sizes_and_reuses_them():
    pool = HostPool(Device(torch.device("cpu")))
    odd = 131073 * 4096 * 2 // 512
    a = pool.take(odd)
    first = a.thing
    assert first.bytes.numel() == odd and pool.bytes_held == odd and pool.bytes_free == 0
    del a
    a = pool.take(odd)
    assert a.thing is first and pool.bytes_held == odd
    b = pool.take(odd - 1000)  # nothing free: a block of its own
    second = b.thing
    del b
    b = pool.take(odd // 2 + 1)
    assert b.thing is second, "a block less than twice as large serves"
    del b, second
    pool.keep_only([odd * 3])
    assert pool.bytes_held == odd
    pool.reserve({odd: 2, 10: 3})
    assert pool.bytes_held == 3 * odd + 30
    pool.keep_only(())
    assert pool.bytes_held == odd  # the one that is in use


@pytest.mark.parametrize("tier", ["gpu", "host", "disk"])
def test_rows_come_back_as_saved(tier, tmp_path):
    transfers = Transfers(torch.device("cpu"), tier, str(tmp_path))
    x = torch.randn(2, 50, 3, 5, dtype=torch.float64)
    saved = transfers.save(x)
    transfers.settle()
    assert saved.resident == (tier == "gpu")
    for a, b in ((0, 50), (7, 20), (49, 50)):
        assert torch.equal(transfers.fetch([(saved, a, b, None)]).wait()[0], x[:, a:b])
    saved.release()
    assert transfers.pool.bytes_free == (x.numel() * 8 if tier == "host" else 0)
    transfers.close()
    assert transfers.pool.bytes_held == 0 and not any(tmp_path.iterdir())


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_queue_keeps_as_many_under_way_as_there_are_slots(tier, tmp_path):
    transfers = Transfers(torch.device("cpu"), tier, str(tmp_path))
    x = torch.arange(40.0).view(1, 40, 1)
    saved = transfers.save(x)
    queue = FetchQueue(transfers)
    queue.make_ring(3, 1024)
    tiles = [(a, a + 4) for a in range(0, 40, 4)]
    first, second = object(), object()
    queue.push(first, [lambda a=a, b=b: [(saved, a, b, None)] for a, b in tiles])
    queue.push(second, [lambda: [(saved, 0, 2, None)]])
    assert len(queue.under_way) == 3
    for a, b in tiles:
        ticket = queue.next()
        assert torch.equal(ticket.wait()[0], x[:, a:b])
        queue.release(ticket)
    queue.push(first, [lambda: [(saved, 4, 6, None)]])
    assert queue.is_for(first), "what second was promised goes"
    assert torch.equal(queue.next().wait()[0], x[:, 4:6]) and not queue.is_for(second)
    assert queue.ring.free == 3
    transfers.close()


@pytest.mark.parametrize("pins", [False, True])
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_device_without_events_waits_for_its_copies(tier, pins, tmp_path, monkeypatch):
    """Those of MPS, XPU and others: nothing here knows when a copy there is done that returns before."""
    waits, copy = [], torch.Tensor.copy_

    def noted(self, other, non_blocking=False):
        waits.append(not non_blocking)
        return copy(self, other)

    monkeypatch.setattr(Device, "pins", pins)
    monkeypatch.setattr(torch.Tensor, "copy_", noted)
    transfers, x = Transfers(torch.device("cpu"), tier, str(tmp_path)), torch.arange(24.0).view(2, 3, 4)
    saved = transfers.save(x)
    transfers.settle()
    assert transfers.fetch([(saved, 0, 3, None)]).wait()[0].equal(x)
    assert len(waits) >= 2 and set(waits) == {not pins}
    transfers.close()


def test_gradients_through_the_disk_tier(tmp_path):
    stock, model = pair()
    settings = hfpatch.Checkpointing(offload=str(tmp_path), tile=14, save_attention=True, every=1)
    hfpatch.apply(model, checkpointing=settings)
    ids = tokens()
    for _ in range(2):
        stock_loss(stock, ids, input_ids=ids).backward()
        model(ids, labels=ids).loss.backward()
    assert largest_difference(gradients(stock), gradients(model)) < 8192 * 2.0**-52
    hfpatch.undo(model)
    assert not list(tmp_path.iterdir())


def test_files_go_with_their_tensors_and_with_the_process(tmp_path):
    """No name in the directory at any time, so that nothing can stay, and nobody else's can be swept."""
    program = (
        "import os, torch; from hfpatch.checkpoint.offload import Transfers;"
        f"t = Transfers(torch.device('cpu'), 'disk', {str(tmp_path)!r});"
        "held = [t.save(torch.ones(1, 100, 4)) for _ in range(3)]; held[0].file.wait_written(); del held[1];"
        "print(len(held), flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == -9 and done.stdout.strip() == "2" and not os.listdir(tmp_path)


def test_engine_is_copied_and_pickled_with_its_settings_only(tmp_path):
    import copy
    import io

    model = tiny_llama()
    settings = hfpatch.Checkpointing(offload="host", tile=14)
    hfpatch.apply(model, checkpointing=settings)
    ids = tokens()
    model(ids, labels=ids).loss.backward()
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        session = twin.model._hfpatch_session
        assert session.checkpointing == settings and session.transfers is None
        assert session is not model.model._hfpatch_session
        twin.zero_grad()
        twin(ids, labels=ids).loss.backward()
        assert largest_difference(gradients(twin), gradients(model)) == 0
