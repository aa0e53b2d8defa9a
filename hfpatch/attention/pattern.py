"""Restrictions of causal attention: packed documents, a window; and a soft cap of scores."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Documents:
    """Documents of packed rows: ranges of the flattened [B*T] tokens. A token attends only to its
    document.

    bounds: ascending offsets on the host, from 0 to B*T. cu_seqlens: the same on the device, int32.
    """

    bounds: tuple[int, ...]
    cu_seqlens: Tensor

    @property
    def longest(self) -> int:
        return max(b - a for a, b in zip(self.bounds, self.bounds[1:]))

    def numbers(self, B: int, T: int) -> Tensor:
        """[B, T]: the number of each token's document."""
        # cu_seqlens, not bounds: a copy from the host would make the host wait.
        ends = self.cu_seqlens[1:].long()
        tokens = torch.arange(B * T, device=ends.device)
        return torch.bucketize(tokens, ends, right=True).view(B, T)


@dataclass(frozen=True)
class Pattern:
    """Restrictions of causal attention, and the soft cap of its scores.

    Attributes:
        documents: ranges that attend only within themselves.
        window: how many tokens a query sees, itself included.
        softcap: scores become softcap * tanh(scores / softcap).
        blind_BT: True where a token gets zeros, as padding before a row does in transformers.
    """

    documents: Documents | None = None
    window: int | None = None
    softcap: float | None = None
    blind_BT: Tensor | None = None

    @property
    def causal_only(self) -> bool:
        """Whether every row is one causal sequence."""
        return all(x is None for x in vars(self).values())

    def allowed(self, queries, keys, B: int, T: int, device) -> Tensor:
        """bool [B or 1, 1, queries, keys]: whether a query sees a key. queries, keys: ranges or
        slices."""
        q = torch.arange(queries.start, queries.stop, device=device)[:, None]
        k = torch.arange(keys.start, keys.stop, device=device)
        allowed = (k <= q)[None]
        if self.window is not None:
            allowed = allowed & (k > q - self.window)
        if self.documents is not None:
            of_BT = self.documents.numbers(B, T)
            allowed = allowed & (of_BT[:, q] == of_BT[:, None, k])
        return allowed[:, None]


CAUSAL = Pattern()
