"""Devices without a GPU: counters that a test sets, and counters of a simulated run's storages."""

from contextlib import contextmanager

import torch

from hfpatch.budget.limits import GiB
from hfpatch.layer import policies
from hfpatch.layer.gauge import Counters, Gauge
from hfpatch.store.device import DEVICES, Device


@contextmanager
def standing_in(device: torch.device, other: Device):
    """Within, `other` stands for the device wherever something is begun."""
    before = DEVICES.get(device)
    DEVICES[device] = other
    try:
        yield other
    finally:
        del DEVICES[device]
        if before is not None:
            DEVICES[device] = before


class Told(Gauge):
    """A device whose counters a test sets. free: bytes beside what is allocated."""

    free, total, counters, rigid = 4 * GiB, 80 * GiB, Counters(), False

    def read(self):
        return Told.counters

    def limit(self):
        return self.free + Told.counters.allocated

    def card(self):
        return self.total

    def clock(self):
        return None


class OfLedger(Told):
    """A device of `size` bytes on which everything lies that a simulated run has made."""

    size = 0

    def __init__(self, device):
        self.device, self.seen, self.now, self.top = device, 0, 0, 0

    def read(self):
        from hfpatch.lab.simulate.follow import current

        ledger = current().ledger
        for index, delta in ledger.events[self.seen :]:
            self.now += 0 if ledger.blocks[index].host else delta
            self.top = max(self.top, self.now)
        self.seen = len(ledger.events)
        return Counters(self.now, self.top)

    def limit(self):
        return self.size

    card = limit


def on_device(monkeypatch, gauge: type, **fields) -> type:
    """Lets every device be one of `gauge`, with these fields."""
    monkeypatch.setattr(policies, "metered", lambda device: True)
    monkeypatch.setattr(policies, "Gauge", gauge)
    for name, value in fields.items():
        monkeypatch.setattr(gauge, name, value)
    return gauge


__all__ = ["Counters", "GiB", "OfLedger", "Told", "on_device", "standing_in"]
