"""Tensors with heads, stored by groups of heads, for devices without room for the whole.

Written and read like a tensor on the device: by tiles of tokens, x[:, a:b], or by groups of heads,
x[:, :, hs]. A read prefetches the next tile or group.

B batch, T tokens, H heads, E head dim; t tokens of a tile, G heads of a group.
"""

import torch
from torch import Tensor

from hfpatch.store.transfers import Saved, Transfers

UNDER_WAY = 2  # copies to the tier that may run while the next piece is computed


class ByGroups:
    """A tensor [B, T, H, E] on the device, written by tiles of tokens and read by groups of heads.

    Each group is contiguous, so kernels take it without a copy.
    """

    def __init__(self, like: Tensor, tokens: int, groups: int):
        B, _, H, E = like.shape
        self.width = H // groups
        self.parts = like.new_empty(groups, B, tokens, self.width, E)

    def __setitem__(self, where, x: Tensor) -> None:
        self.parts[:, :, where[1]] = x.unflatten(2, (-1, self.width)).movedim(2, 0)

    def __getitem__(self, where) -> Tensor:
        return self.parts[where[2].start // self.width]


class InTier:
    """One tensor [B, T, ...] in the tier, read by tiles of tokens."""

    def __init__(self, transfers: Transfers, saved: Saved):
        self.transfers, self.saved, self.coming = transfers, saved, {}

    def __getitem__(self, where) -> Tensor:
        a, b = where[1].start or 0, where[1].stop or self.saved.shape[1]
        now = self.coming.pop((a, b), None) or self._fetch(a, b)
        after = (b, min(2 * b - a, self.saved.shape[1]))
        if after[0] < after[1]:
            self.coming[after] = self._fetch(*after)
        return now.wait()[0]

    def _fetch(self, a: int, b: int):
        return self.transfers.fetch([(self.saved, a, b, None)])


class Grouped:
    """A tensor [B, T, H, E] in the tier, stored as one tensor per group of heads."""

    def __init__(self, transfers: Transfers, like: Tensor, tokens: int, groups: int):
        """like: any tile of the tensor. A read needs settled writes."""
        B, _, H, E = like.shape
        self.transfers, self.width, self.shape = transfers, H // groups, (B, tokens, H, E)
        shape = (B, tokens, self.width, E)
        self.parts = [InTier(transfers, transfers.room(shape, like.dtype)) for _ in range(groups)]
        self.coming = {}

    def __setitem__(self, where, x: Tensor) -> None:
        if len(where) == 3:
            self.transfers.put(self.parts[where[2].start // self.width].saved, 0, x)
        else:
            for part, piece in zip(self.parts, x.split(self.width, 2)):
                self.transfers.put(part.saved, where[1].start, piece)
        self.transfers.settle(under_way=UNDER_WAY)

    def __getitem__(self, where) -> Tensor:
        if len(where) == 2:
            return torch.cat([part[where] for part in self.parts], 2)
        g = where[2].start // self.width
        now = self.coming.pop(g, None) or self._fetch(g)
        if g + 1 < len(self.parts):
            self.coming[g + 1] = self._fetch(g + 1)
        return now.wait()[0]

    def beside(self, out: Tensor) -> InTier:
        """Moves the output of a group of heads to the same tier."""
        saved = self.transfers.save(out)
        self.transfers.settle(under_way=1)
        return InTier(self.transfers, saved)

    def _fetch(self, g: int):
        saved = self.parts[g].saved
        return self.transfers.fetch([(saved, 0, saved.shape[1], None)])
