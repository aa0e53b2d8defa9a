"""Pinned memory that cannot be had, that a fork must not inherit, and that is let go in order;
several devices; the way out.
"""

import contextlib
import mmap
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import hfpatch
from hfpatch.context.documents import find_rows
from hfpatch.context.masks import Batch
from hfpatch.store import device as device_module
from hfpatch.store import pool as pool_module
from hfpatch.store.device import CudaDevice, Device, host_empty
from hfpatch.store.pool import HostPool
from tests.faults.test_exceptions import assert_same, patched, step
from tests.layer.devices import standing_in

CPU = torch.device("cpu")


class Pinning(Device):
    """Notes what is pinned; refuses after `limit` bytes."""

    pins = True

    def __init__(self, limit=1 << 60):
        super().__init__(CPU)
        self.limit, self.calls, self.held = limit, [], 0

    def pin(self, block):
        if self.held + block.numel() > self.limit:
            return 2
        self.held += block.numel()
        self.calls.append(("pin", block.data_ptr(), block.numel()))
        return 0

    def unpin(self, block):
        self.held -= block.numel()
        self.calls.append(("unpin", block.data_ptr(), block.numel()))

    def synchronize(self, event=None):
        self.calls.append("wait") if event is None else None


def test_where_pinning_fails_copies_run_from_pageable_memory():
    """One warning, the same gradients, and a policy that is resolved."""
    expected = {n: g.clone() for n, g in step(patched("host", "tiles", None)).items()}
    model = patched("host", "tiles", None)
    with standing_in(CPU, Pinning(limit=20_000)) as device:
        with pytest.warns(
            UserWarning, match="CUDA could not pin .* \\(2\\); copies run from pageable memory"
        ) as told:
            assert_same(step(model), expected)
        assert len(told) == 1 and device.held <= 20_000
        assert_same(step(model), expected)
        hfpatch.undo(model)
        assert device.held == 0


def test_after_a_step_without_host_memory_the_next_one_runs(monkeypatch):
    expected = {n: g.clone() for n, g in step(patched("host", "tiles", None)).items()}
    model = patched("host", "tiles", None)
    made = []

    def scarce(nbytes, mapped):
        made.append(nbytes)
        if len(made) == 3:
            raise MemoryError("planted")
        return host_empty(nbytes, mapped)

    monkeypatch.setattr(device_module, "host_empty", scarce)
    with standing_in(CPU, Pinning()) as device:
        with pytest.raises(MemoryError, match="planted"):
            step(model)
        assert_same(step(model), expected)
        hfpatch.undo(model)
        assert device.held == 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_forked_processes_do_not_keep_pinned_memory():
    """A data loader's workers would keep shared pages alive after they are freed here."""
    block = host_empty(1 << 20, mapped=True)
    with open("/proc/self/smaps") as smaps:
        areas = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", smaps.read())
    for area in areas:
        first, last = (int(n, 16) for n in area.split(" ", 1)[0].split("-"))
        if first <= block.data_ptr() < last:
            flags = area.split("VmFlags:")[1]
            assert area.split(" ")[1] == "rw-p" and " dc" in flags
            assert " hg" in flags or not os.path.exists("/sys/kernel/mm/transparent_hugepage")
            return
    raise AssertionError("no such area")


def test_a_system_without_these_flags_of_mmap_gives_memory_too(monkeypatch):
    """Windows has none of them, nor the argument."""
    for name in ("MAP_PRIVATE", "MADV_DONTFORK", "MADV_HUGEPAGE"):
        monkeypatch.delattr(mmap, name, raising=False)
    host_empty(8192, mapped=True).fill_(1)


def test_no_block_is_larger_than_a_registration(monkeypatch):
    """A driver that refuses to register more than 64 GiB at once."""
    monkeypatch.setattr(pool_module, "PINNED_AT_ONCE", 1024)
    monkeypatch.setattr(pool_module, "rank_host_free", lambda: None)
    device = Pinning()
    pool = HostPool(device)
    loans = [pool.take(640) for _ in range(3)]
    del loans
    loans = [pool.take(896) for _ in range(3)]  # twice the bytes of before, in three blocks
    pinned = [call[2] for call in device.calls if call[0] == "pin"]
    assert pinned == [640, 640, 640, 1024, 1024, 1024, 768]
    assert len({loan.block for loan in loans}) == 3


@pytest.mark.parametrize(
    "positions, mask, bounds",
    [
        ([0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5], None, (0, 4, 6, 10, 12)),
        # as transformers counts, by position
        ([5, 6, 7, 8, 9, 10, 0, 1, 2, 3, 4, 5], None, (0, 3, 6, 10, 12)),
        ([5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16], None, (0, 4, 8, 12)),
        ([5, 6, 7, 8, 9, 10, 0, 1, 2, 3, 4, 5], [1] * 12, (0, 4, 6, 10, 12)),
        ([0, 0, 0, 1, 2, 3, 4, 5, 0, 1, 2, 3], [0, 0] + [1] * 10, (0, 2, 6, 8, 12)),
    ],
)
def test_chunks_are_counted_inside_documents(positions, mask, bounds):
    given = None if mask is None else torch.tensor([mask])
    batch = Batch(1, 12, CPU, given, torch.tensor([positions]))
    assert find_rows(batch, chunk=4).documents.bounds == bounds


def test_a_process_of_the_second_gpu_keeps_to_it(monkeypatch):
    """Pinning, and a thread that waits for an event, would make a context on the current GPU: half
    a GiB of another rank's.
    """
    current, entered, second = [], [], torch.device("cuda", 1)

    @contextlib.contextmanager
    def on(device):
        entered.append(device)
        yield

    runtime = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda _: 0)
    monkeypatch.setattr(
        torch.cuda, "cudart", lambda: runtime if len(entered) > len(current) else None
    )
    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    device = CudaDevice(second)
    block = torch.zeros(8, dtype=torch.uint8)
    assert device.pin(block) == 0
    device.unpin(block)
    assert entered == [second] * 2
    assert device.threads(1, "waits").submit(lambda: list(current)).result() == [second]


@pytest.mark.parametrize("error", ["directory gone", "disk full"])
def test_disk_errors_are_one_sentence_and_the_next_step_is_exact(error, tmp_path, monkeypatch):
    model = patched("disk", "tiles", tmp_path / "tier")
    expected = {n: g.clone() for n, g in step(model).items()}
    with monkeypatch.context() as patch:
        if error == "disk full":

            def full(*args):
                raise OSError(28, "No space left on device")

            patch.setattr(os, "pwrite", full)
            for _ in range(2):
                with pytest.raises(
                    OSError,
                    match="hfpatch: .* bytes could not be written to .* No space left on device. Free space",
                ):
                    step(model)
        else:
            os.rmdir(tmp_path / "tier")  # a clean-up job: it is made again
    assert_same(step(model), expected)


def test_leaving_makes_no_noise(tmp_path):
    """A graph, a step that was cut short with its frames, threads and pinned blocks are alive when
    Python ends.
    """
    program = f"""
import sys, os, shutil, torch
sys.path.insert(0, "tests")
from tests.layer.devices import standing_in
from tests.faults.test_exceptions import patched, step, raise_in
from tests.faults.test_host_memory import Pinning, CPU
from tests.layer.deep import tokens
standing_in(CPU, Pinning()).__enter__()
for tier in ("host", "disk"):
    model = patched(tier, "tiles", {str(tmp_path / "tier")!r})
    globals()[tier] = model
    step(model)
    globals()["loss" + tier] = model(tokens(2, 11), labels=tokens(2, 11)).loss
    raise_in(model.model.layers[1].mlp, 4)
    try:
        step(model)
    except torch.OutOfMemoryError as error:
        globals()["error" + tier] = error
shutil.rmtree({str(tmp_path / "tier")!r})
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True
    )
    noise = [
        line for line in done.stderr.splitlines() if "torchao" not in line and "_pytree" not in line
    ]
    assert done.returncode == 0 and not noise
    assert not os.listdir(tmp_path)
