"""Small answers of the device that the host needs before it goes on."""

import torch
from torch import Tensor


class ToHost:
    """A small device tensor on its way to the host, on a side stream: waiting for it does not wait for the layers."""

    _streams: dict = {}

    def __init__(self, x: Tensor):
        self.event = None
        if x.device.type != "cuda":
            self.host = x
            return
        if x.device not in self._streams:
            self._streams[x.device] = torch.cuda.Stream(x.device)
        stream = self._streams[x.device]
        stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(stream):
            self.source = x  # alive until the copy has been waited for
            self.host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
            self.host.copy_(x, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record(stream)

    def get(self) -> Tensor:
        if self.event is not None:
            self.event.synchronize()
            self.event = self.source = None
        return self.host
