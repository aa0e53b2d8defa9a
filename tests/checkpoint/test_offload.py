"""Tiers of saved tensors: exact bytes, re-use, the order of fetches, and files that do not outlive their process."""

import os
import subprocess
import sys

import pytest
import torch
from tiny import gradients, largest_difference, stock_loss

import hfpatch
from hfpatch.checkpoint.disk import sweep
from hfpatch.checkpoint.offload import FetchQueue, HostPool, Transfers
from tests.checkpoint.deep import pair, tiny_llama, tokens


def test_pool_takes_exact_sizes_and_reuses_them():
    pool = HostPool(pinned=False)
    odd = 131073 * 4096 * 2 // 512
    a = pool.take(odd)
    assert a.numel() == odd and pool.bytes_held == odd
    pool.give(a)
    assert pool.take(odd).data_ptr() == a.data_ptr() and pool.bytes_held == odd
    b = pool.take(odd - 1000)  # nothing free: a block of its own
    pool.give(b)
    assert pool.take(odd // 2 + 1).data_ptr() == b.data_ptr(), "a block less than twice as large serves"
    pool.give(b)
    pool.keep_only([odd * 3])
    assert pool.bytes_held == odd
    pool.reserve({odd: 2, 10: 3})
    assert pool.bytes_held == 3 * odd + 30
    pool.close()
    assert pool.bytes_held == odd  # the one that is in use


def test_pinned_blocks_are_registered_and_unregistered(monkeypatch):
    """Through a stub of the CUDA runtime: each block once, by its exact size, and undone before its memory goes."""
    calls = []

    class Runtime:
        def cudaHostRegister(self, pointer, nbytes, flags):
            calls.append(("register", pointer, nbytes))
            return 0 if nbytes < 1 << 30 else 2

        def cudaHostUnregister(self, pointer):
            calls.append(("unregister", pointer))
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    pool = HostPool(pinned=True)
    block = pool.take(12345)
    block.fill_(7)
    pool.give(block)
    pool.close()
    assert calls == [("register", block.data_ptr(), 12345), ("unregister", block.data_ptr())]
    with pytest.raises(MemoryError, match="pin 1.00 GiB.*every=2"):
        pool.take(1 << 30)


@pytest.mark.parametrize("tier", ["gpu", "host", "disk"])
def test_rows_come_back_as_saved(tier, tmp_path):
    transfers = Transfers(torch.device("cpu"), tier, str(tmp_path))
    x = torch.randn(2, 50, 3, 5, dtype=torch.float64)
    saved = transfers.save(x)
    transfers.settle()
    assert saved.resident == (tier == "gpu")
    for a, b in ((0, 50), (7, 20), (49, 50)):
        ticket = transfers.fetch([(saved, a, b, None)])
        assert torch.equal(transfers.wait(ticket)[0], x[:, a:b])
    saved.release()
    if tier == "host":
        assert transfers.pool.take(x.numel() * 8).numel() == x.numel() * 8
    transfers.close()
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_queue_keeps_as_many_under_way_as_there_are_slots(tier, tmp_path):
    transfers = Transfers(torch.device("cpu"), tier, str(tmp_path))
    x = torch.arange(40.0).view(1, 40, 1)
    saved = transfers.save(x)
    queue = FetchQueue(transfers)
    transfers.make_ring(3, 1024)
    tiles = [(a, a + 4) for a in range(0, 40, 4)]
    first, second = object(), object()
    queue.push(first, [lambda a=a, b=b: [(saved, a, b, None)] for a, b in tiles])
    queue.push(second, [lambda: [(saved, 0, 2, None)]])
    assert len(queue.under_way) == 3 and queue.starts_with(first)
    for a, b in tiles:
        ticket, tensors = queue.next()
        assert torch.equal(tensors[0], x[:, a:b])
        queue.release(ticket)
    assert queue.starts_with(second) and not queue.starts_with(first)
    queue.reset()
    assert len(transfers.free_slots) == 3
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
    assert len(list(tmp_path.iterdir())) == 1
    assert not list(next(tmp_path.iterdir()).iterdir()), "files of released tensors stay"
    hfpatch.undo(model)
    assert not list(tmp_path.iterdir())


def test_files_go_at_exit_and_after_a_crash(tmp_path):
    program = (
        "import os, sys, torch; from hfpatch.checkpoint.offload import Transfers;"
        f"t = Transfers(torch.device('cpu'), 'disk', {str(tmp_path)!r});"
        "s = t.save(torch.ones(1, 100, 4)); s.file.wait_written(); print(len(os.listdir(t.disk.path)));"
        "os.kill(os.getpid(), 9) if sys.argv[1] == 'crash' else None"
    )
    done = subprocess.run([sys.executable, "-c", program, "exit"], capture_output=True, text=True)
    assert done.stdout.strip() == "1" and done.returncode == 0 and not os.listdir(tmp_path)
    done = subprocess.run([sys.executable, "-c", program, "crash"], capture_output=True, text=True)
    assert done.returncode == -9 and len(os.listdir(tmp_path)) == 1
    (tmp_path / "somebody-elses.txt").write_text("stays")
    alive = Transfers(torch.device("cpu"), "disk", str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == sorted([os.path.basename(alive.disk.path), "somebody-elses.txt"])
    assert sweep(str(tmp_path)) == [], "a living process's files were swept"
    alive.close()


def test_a_live_folder_of_another_pid_namespace_stays(tmp_path):
    """Its pid is nobody's here: the lock says that it lives."""
    program = (
        "import sys, torch; from hfpatch.checkpoint import disk; disk.os.getpid = lambda: 4194305;"  # beyond any pid
        f"path, _ = disk.own_folder({str(tmp_path)!r}); print(path, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as there:
        path = there.stdout.readline().strip()
        assert "-4194305@" in path and sweep(str(tmp_path)) == [] and os.path.isdir(path)
        there.stdin.close()
    assert sweep(str(tmp_path)) == [path] and not os.path.isdir(path)


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
