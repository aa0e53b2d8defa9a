"""Where the generators of random numbers stand, so that a tile that runs again draws what it
drew.
"""

from contextlib import contextmanager

import torch


class Generators:
    """The state of the host's generator of random numbers and, of a GPU, of its own."""

    def __init__(self, device: torch.device):
        self.device, self.host = device, torch.default_generator.get_state()
        self.cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def drew(self) -> bool:
        """Whether anything was drawn from them since. On the host, and by no operator."""
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
    """Within, random numbers are those that were drawn under the same key before. At first it notes
    in `states` where the generators stand.
    """
    before = states.get(key)
    if before is None:
        states[key] = Generators(device)
        yield
        return
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        before.put_back()
        yield
