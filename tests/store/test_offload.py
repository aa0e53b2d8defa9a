"""Tiers of saved tensors: exact bytes, re-use, the order of fetches, and files that do not outlive
their process.
"""

import os
import random
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from tiny import gradients, largest_difference, stock_loss

import hfpatch
from hfpatch.store.device import Device
from hfpatch.store.pool import Area
from hfpatch.store.transfers import Transfers
from tests.layer.deep import pair, tokens

pytestmark = pytest.mark.usefixtures("exact_loss")


def test_pieces_never_overlap_and_gaps_are_found():
    """Any order of taking and giving back: what is lent is apart, and what fits is served without
    another block.
    """
    draw, area, lent = random.Random(0), Area(SimpleNamespace(bytes=range(1000)), 1000), []
    for _ in range(5000):
        if lent and draw.random() < 0.5:
            lent.pop(draw.randrange(len(lent)))
        else:
            n = draw.randrange(1, 120)
            got = area.take(n)
            pieces = [loan.bytes for loan in lent]
            places = sorted((piece.start, piece.stop) for piece in pieces)
            gaps = [b - a for (_, a), (b, _) in zip([(0, 0), *places], [*places, (1000, 1000)])]
            assert (got is not None) == (max(gaps) >= n)
            if got is not None:
                lent.append(got)
            del got
        pieces = [loan.bytes for loan in lent]
        places = sorted((piece.start, piece.stop) for piece in pieces)
        assert all(b <= c for (_, b), (c, _) in zip(places, places[1:]))
        assert area.taken == sum(b - a for a, b in places) and all(
            0 <= a < b <= 1000 for a, b in places
        )


@pytest.mark.parametrize("tier", ["gpu", "host", "disk"])
def test_rows_come_back_as_saved(tier, tmp_path):
    transfers = Transfers(torch.device("cpu"), tier, str(tmp_path))
    x = torch.randn(2, 50, 3, 5, dtype=torch.float64)
    saved = transfers.save(x)
    transfers.settle()
    assert saved.resident == (tier == "gpu")
    for a, b in ((0, 50), (7, 20), (49, 50)):
        assert torch.equal(transfers.fetch([(saved, a, b, None)]).wait()[0], x[:, a:b])
    del saved
    if tier == "host":
        assert transfers.pool.bytes_free == 12032  # whole lines of 64 bytes
    transfers.close()
    assert transfers.pool.bytes_held == 0 and not any(tmp_path.iterdir())


def test_a_source_that_stays_must_not_be_written_to_and_holds_no_graph():
    transfers, x = Transfers(torch.device("cpu"), "host"), torch.zeros(1, 3, 8, requires_grad=True)
    y = x * 2
    transfers.save(y)
    transfers.settle(room=1000)
    assert transfers.copied[0][0][0][0].grad_fn is None
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified in place"):
        transfers.settle()
    transfers.settle()  # said once


@pytest.mark.parametrize("pins", [False, True])
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_device_without_events_waits_for_its_copies(tier, pins, tmp_path, monkeypatch):
    """Those of MPS, XPU and others: nothing here knows when a copy there is done that returns
    before.
    """
    waits, copy = [], torch.Tensor.copy_

    def noted(self, other, non_blocking=False):
        waits.append(not non_blocking)
        return copy(self, other)

    monkeypatch.setattr(Device, "pins", pins)
    monkeypatch.setattr(torch.Tensor, "copy_", noted)
    transfers, x = (
        Transfers(torch.device("cpu"), tier, str(tmp_path)),
        torch.arange(24.0).view(2, 3, 4),
    )
    saved = transfers.save(x)
    transfers.settle()
    assert transfers.fetch([(saved, 0, 3, None)]).wait()[0].equal(x)
    assert len(waits) >= 2 and set(waits) == {not pins}
    transfers.close()


def test_gradients_through_the_disk_tier(tmp_path):
    stock, model = pair()
    settings = hfpatch.Checkpointing(offload=str(tmp_path), tile=14, every=1)
    hfpatch.apply(model, checkpointing=settings)
    ids = tokens()
    for _ in range(2):
        stock_loss(stock, ids, input_ids=ids).backward()
        model(ids, labels=ids).loss.backward()
    assert largest_difference(gradients(stock), gradients(model)) < 8192 * 2.0**-52
    hfpatch.undo(model)
    assert not list(tmp_path.iterdir())


def test_files_go_with_their_tensors_and_with_the_process(tmp_path):
    """No name in the directory at any time, so that nothing can stay, and nobody else's can be
    swept.
    """
    program = (
        "import os, torch; from hfpatch.store.transfers import Transfers;"
        f"t = Transfers(torch.device('cpu'), 'disk', {str(tmp_path)!r});"
        "held = [t.save(torch.ones(1, 100, 4)) for _ in range(3)]; t.settle();"
        "held[0].file.wait_written(); del held[1];"
        "print(len(held), flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == -9 and done.stdout.strip() == "2" and not os.listdir(tmp_path)
