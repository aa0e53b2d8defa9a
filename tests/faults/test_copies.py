"""No copy races with anything, in any way of training; and each synchronisation is there for a
reason that is shown.

The rows of REMOVALS were found by leaving each out of every scenario: one that catches it stands
    beside it.
"""

import itertools

import pytest
import torch

from hfpatch.store import disk
from hfpatch.store.disk import File
from hfpatch.store.transfers import FetchQueue, Ticket, Transfers
from tests.faults import scenarios
from tests.faults.checker import CheckedDevice

# Every action, tier and way once; the long run has their product.
SHORT = [
    ("host", "tiles", "step"), ("disk", "tiles", "step"), ("gpu", "tiles", "packed"),
    ("host", "one", "retain"),
    ("disk", "tiles", "two forwards"), ("host", "tiles", "other order"),
    ("host", "tiles", "side stream"),
    ("disk", "one again", "lengths"), ("host", "tiles", "partial"), ("disk", "tiles", "partial"),
    ("host", "tiles", "raise in mlp"), ("host", "tiles", "raise in q"),
    ("disk", "every 2", "raise in mlp"),
    ("host", "every 3", "raise in gradient"), ("gpu", "every 2", "raise in q"),
    ("host", "tiles again", "raise in q"),
    ("host", "one", "whole step"), ("disk", "one", "whole partial"),
    ("host", "one", "whole retain"),
    ("host", "one", "whole other order"), ("host", "one", "whole raise"),
    ("host", "one", "whole side stream"),
    ("host", "tiles", "handed over"), ("host", "keep", "step"), ("disk", "keep", "retain"),
    ("host", "Keep one", "lengths"),
    ("host", "keep two", "partial"), ("disk", "plain", "step"), ("gpu", "keep", "retain"),
    ("host", "keep", "raise in gradient"),
    ("host", "one again alone", "step"), ("host", "one keeps less", "retain"), ("gpu", "weights", "written at rest"),
    ("host", "weights", "other order"), ("gpu", "weights every 2", "raise in mlp"),
    ("gpu", "weights one", "side stream"),
    ("host", "keep", "cut short"), ("disk", "one", "cut short"), ("host", "tiles", "padded"),
    ("host", "shared", "step"), ("host", "shared every 2", "step"),
]  # fmt: skip
ALL = [
    row
    for row in itertools.product(scenarios.TIERS, scenarios.WAYS, scenarios.ACTIONS)
    if row not in SHORT and not (row[1] in scenarios.REFUSED and row[2].startswith("whole"))
]


@pytest.mark.parametrize(
    "tier, way, action", [*SHORT, *(pytest.param(*row, marks=pytest.mark.long) for row in ALL)]
)
def test_no_copy_races(tier, way, action, tmp_path):
    device = CheckedDevice()
    assert scenarios.run(device, tier, way, action, tmp_path) == []


def test_the_short_rows_name_everything():
    named = [set(column) for column in zip(*SHORT)]
    assert named == [set(scenarios.TIERS), set(scenarios.WAYS), set(scenarios.ACTIONS)]


STEP, DISK = ("host", "tiles", "step"), ("disk", "tiles", "step")
PARTIAL, LENGTHS, HANDED = (
    ("host", "tiles", "partial"),
    ("host", "one", "lengths"),
    ("host", "tiles", "handed over"),
)
KEEP, WEIGHTS = ("host", "keep", "step"), ("gpu", "weights", "step")
# The synchronisation -> a scenario that races without it. Found to be redundant, and dropped, as
# ordered through the compute stream: the wait of a fetch for the copy to the host (settle is before
# it), that of a save for the last fetch from its block (a ticket's end is before it), and the
# host's waits before blocks are let go (each waits as it is unpinned).
REMOVALS = {
    "Transfers._write: device.wait(complete, self.to_host)": STEP,
    "Transfers.settle: self.device.wait(copied, stream)": STEP,
    "Transfers.fetch: device.wait(device.mark() if slot is None else slot.after, self.to_device)": STEP,
    "Kept._room_for_outs: "
    "transfers.device.wait(transfers.device.mark(), transfers.to_device)": STEP,
    "Ticket.wait: self.device.wait(self.ready, self.user)": STEP,
    "Ticket.done: device.wait(self.ready or device.mark(self.side), self.owner)": PARTIAL,
    "Ticket.done: device.wait(device.mark(self.user), self.owner)": HANDED,
    "Packed._to_host: device.synchronize(device.mark())": ("gpu", "weights one", "side stream"),
    "StreamedWeights._on_device: device.synchronize(ticket.ready)": (
        "gpu",
        "weights",
        "written at rest",
    ),
    "DiskDirectory._write: self.device.synchronize(event)": DISK,
    "DiskDirectory._read: self.device.synchronize(copied)": DISK,
    "_unpin: device.synchronize()": LENGTHS,
}


# Where weights alone are copied, the same stand for them.
FOR_WEIGHTS = [site for site in REMOVALS if site.startswith(("Transfers.fetch", "Ticket.wait"))]


@pytest.mark.parametrize(
    "site, row",
    [*REMOVALS.items(), *((site, WEIGHTS) for site in FOR_WEIGHTS)],
    ids=lambda x: str(x).split("(")[0],
)
def test_each_synchronisation_is_needed(site, row, tmp_path):
    device = CheckedDevice(without={site})
    assert scenarios.run(device, *row, tmp_path), "nothing races without it: is it redundant?"
    assert site in device.sites


def test_the_table_has_every_synchronisation(tmp_path):
    met = set()
    for row in {
        *REMOVALS.values(),
        ("disk", "tiles", "raise in q"),
        ("host", "one", "whole partial"),
    }:
        device = CheckedDevice()
        assert scenarios.run(device, *row, tmp_path) == []
        met |= set(device.sites)
    ours = {site for site in met if site.split(":")[0] not in ("handed_over", "side_stream")}
    assert ours == set(REMOVALS)


# What is no call on the device but keeps copies right as well: (a patch that takes it away, a
#     scenario).
def forget_sources(patch):
    save = Transfers.save

    def without(self, x):
        saved = save(self, x)
        self.unsettled.clear()
        return saved

    patch.setattr(Transfers, "save", without)


def let_go_of_tiles_at_once(patch):
    settle = Transfers.settle

    def without(self, under_way=0, room=0):
        if under_way:
            self.unsettled.clear()
        else:
            settle(self)

    patch.setattr(Transfers, "settle", without)


def leave_sources_as_a_pass_begins(patch):
    """What the pass before left under way goes on."""
    begin, settle = FetchQueue.begin, Transfers.settle
    beginning = []

    def without(self):
        beginning.append(self)
        begin(self)
        beginning.pop()

    patch.setattr(FetchQueue, "begin", without)
    patch.setattr(
        Transfers, "settle", lambda self, *a, **k: None if beginning else settle(self, *a, **k)
    )


def forget_the_end_of_tickets(patch):
    patch.delattr(Ticket, "__del__")


def forget_the_last_use_of_slots(patch):
    done = Ticket.done

    def without(self):
        after = self.slot
        event = after and after.after
        done(self)
        if after is not None:
            after.after = event

    patch.setattr(Ticket, "done", without)


def read_before_it_is_written(patch):
    patch.setattr(File, "wait_written", lambda self: None)


def reuse_bounces_at_once(patch):
    patch.setattr(disk, "_ended", lambda job: None)


@pytest.mark.parametrize("removal, row", [
    (forget_the_last_use_of_slots, WEIGHTS),
    (leave_sources_as_a_pass_begins, ("host", "keep", "cut short")),
    (forget_sources, LENGTHS), (let_go_of_tiles_at_once, KEEP),
    (forget_the_end_of_tickets, PARTIAL),
    (forget_the_last_use_of_slots, STEP),
    (read_before_it_is_written, DISK), (reuse_bounces_at_once, DISK),
])  # fmt: skip
def test_each_owner_is_needed(removal, row, tmp_path, monkeypatch):
    removal(monkeypatch)
    device = CheckedDevice()
    try:
        problems = scenarios.run(device, *row, tmp_path)
    except OSError as error:  # a file that ends early
        problems = [error]
    assert problems


def test_memory_is_one_whatever_storage_names_it():
    """A weight at rest is a storage of its own over pinned memory, which a copy may read under
    way.
    """
    device = CheckedDevice()
    block = torch.zeros(64, dtype=torch.uint8)
    device.pin(block)
    rest = torch.from_numpy(block.numpy())
    assert rest.untyped_storage()._cdata != block.untyped_storage()._cdata
    with device:
        side = device.stream()
        with device.on(side):
            torch.empty(32, dtype=torch.uint8).copy_(block[:32])
        rest[32:].fill_(1)
        assert not device.problems
        rest[:32].fill_(1)
    assert len(device.problems) == 1 and "fill_" in device.problems[0]


def test_memory_that_is_seen_piece_by_piece_is_one():
    device = CheckedDevice()
    block = torch.zeros(64, dtype=torch.uint8)
    low, high = (torch.from_numpy(block.numpy()[s]) for s in (slice(0, 32), slice(32, 64)))
    with device:
        side = device.stream()
        low.fill_(1), high.fill_(1)
        assert len(device.memory) == 2
        device.wait(device.mark(), side)
        with device.on(side):
            block.add_(1)  # grows over both
        assert len(device.memory) == 1 and not device.problems
        high.add_(1)
    assert len(device.problems) == 1
