"""The cache argument of transformers' mixers in a chunked prefill, here with states that carry
gradients.

transformers' cache copies states in place and cuts their graph. The methods here are those that
mixers call since transformers 5.23; `layers` is read from 5.16 on. A mixer that needs another
method raises, and runs untiled.
"""

import inspect

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hfpatch.compat.models import cache_name


def state_argument(module: nn.Module) -> str | None:
    """The argument by which a mixer receives its past states, or None."""
    return cache_name(inspect.signature(type(module).forward).parameters)


class _Layers:
    """The states before a call, as mixers read them before transformers 5.23:
    layers[layer_idx].conv_states[state_idx].
    """

    record_past = True  # as States.is_recording_past

    def __init__(self, before: dict):
        self.conv_states = {
            index: state for (kind, index), state in before.items() if kind == "conv"
        }
        self.recurrent_states = {
            index: state for (kind, index), state in before.items() if kind == "recurrent"
        }

    def __getitem__(self, layer_idx: int) -> "_Layers":
        return self


class States:
    """Replaces the cache in one call of one mixer.

    Attributes:
        before: the states at the start of the call, by ("conv" or "recurrent", state_idx); empty at
            a document's start.
        after: the states at the end of the call.
    """

    def __init__(self, before: dict | None = None):
        self.before: dict[tuple, Tensor] = dict(before or {})
        self.after: dict[tuple, Tensor] = {}

    @property
    def layers(self) -> _Layers:
        return _Layers(self.before)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.before.get(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.before.get(("recurrent", state_idx))

    def update_conv_state(
        self, x_BCt: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size=None, **_
    ) -> Tensor:
        """The last tokens before this tile and the tile's own: the convolution's input."""
        tail = self.before.get(("conv", state_idx))
        width = conv_kernel_size or (x_BCt if tail is None else tail).shape[-1]
        if tail is None:
            full = x_BCt
        elif x_BCt.stride(1) == 1:  # kernels want the projection's layout, channels last
            full = torch.cat([tail.mT, x_BCt.mT], 1).mT
        else:
            full = torch.cat([tail, x_BCt], -1)
        kept = full[..., -width:]
        if kept.shape[-1] < width:  # zeros to the left, as before a document
            kept = F.pad(kept, (width - kept.shape[-1], 0))
        self.after["conv", state_idx] = kept.clone()  # a view would keep the whole tile
        return full

    def update_recurrent_state(
        self, state: Tensor, layer_idx: int, state_idx: int = 0, **_
    ) -> Tensor:
        self.after["recurrent", state_idx] = state
        return state

    def is_recording_past(self, layer_idx: int) -> bool:
        """Always True: otherwise mixers run kernels for a single token, which write states in place
        and have no backward."""
        return True

    def has_previous_state(self, layer_idx=None, state_idx=None) -> bool:
        return bool(self.before)
