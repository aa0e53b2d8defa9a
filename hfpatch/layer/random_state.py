"""Saved states of the random number generators, so that a rerun tile draws the same numbers."""

from contextlib import contextmanager, nullcontext

import torch


class Generators:
    """The state of the host's random number generator and, for a GPU, of its generator."""

    def __init__(self, device: torch.device):
        self.device = device
        self.states = [torch.default_generator.get_state()]
        if device.type == "cuda":
            self.states.append(torch.cuda.get_rng_state(device))

    def drew(self) -> bool:
        """Whether a number was drawn since. Compared on the host, without an operator."""
        now = Generators(self.device).states
        return any(a.numpy().tobytes() != b.numpy().tobytes() for a, b in zip(self.states, now))

    def put_back(self) -> None:
        host, *cuda = self.states
        torch.set_rng_state(host)
        for state in cuda:
            torch.cuda.set_rng_state(state, self.device)


def replayed(states: dict | None, key, device: torch.device):
    """Context that draws the same random numbers as its first use under this key. The first use
    saves the generators' state in `states`. An empty context where `states` is None.
    """
    return nullcontext() if states is None else _replayed(states, key, device)


@contextmanager
def _replayed(states: dict, key, device: torch.device):
    before = states.get(key)
    if before is None:
        states[key] = Generators(device)
        yield
        return
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        before.put_back()
        yield
