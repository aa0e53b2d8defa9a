"""Saved states of the random number generators, so that a rerun tile draws the same numbers."""

from contextlib import contextmanager

import torch


class Generators:
    """The state of the host's random number generator and, for a GPU, of its generator."""

    def __init__(self, device: torch.device):
        self.device = device
        self.host = torch.default_generator.get_state()
        self.cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def drew(self) -> bool:
        """Whether a number was drawn since. Compared on the host, without an operator."""
        now = Generators(self.device)
        if self.host.numpy().tobytes() != now.host.numpy().tobytes():
            return True
        return self.cuda is not None and self.cuda.numpy().tobytes() != now.cuda.numpy().tobytes()

    def put_back(self) -> None:
        torch.set_rng_state(self.host)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)


@contextmanager
def replayed(states: dict, key, device: torch.device):
    """Context that draws the same random numbers as its first use under this key. The first use
    saves the generators' state in `states`.
    """
    before = states.get(key)
    if before is None:
        states[key] = Generators(device)
        yield
        return
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        before.put_back()
        yield
