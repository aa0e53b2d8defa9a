"""Which keys a query sees: packed documents, a window, hidden keys, a soft cap of the scores."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Documents:
    """Token ranges that attend only within themselves, over the flattened [B*T] tokens.

    bounds: ascending offsets, first 0 and last B*T, as host ints; on a device they are also the int32 cu_seqlens.
    """

    bounds: tuple[int, ...]
    cu_seqlens: Tensor

    @property
    def longest(self) -> int:
        return max(b - a for a, b in zip(self.bounds, self.bounds[1:]))


@dataclass(frozen=True)
class Pattern:
    """Which keys a query sees besides causality, and what is done to its scores.

    documents: ranges that attend within themselves; window: a query sees that many tokens, itself counted; hidden_BT: True
    where a key is seen by nobody (holes, padding); softcap: scores become softcap * tanh(scores / softcap); blind_BT: True where a
    query sees nobody (padding before a row), whatever else is said. What sees nobody gets zeros.
    """

    documents: Documents | None = None
    window: int | None = None
    hidden_BT: Tensor | None = None
    softcap: float | None = None
    blind_BT: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether every row is one causal sequence."""
        said = self.documents, self.window, self.hidden_BT, self.softcap, self.blind_BT
        return all(x is None for x in said)

    def allowed(self, queries: range, keys: range, B: int, T: int, device) -> Tensor:
        """Who sees whom, [B or 1, 1, queries, keys] of bool."""
        q, k = (torch.arange(r.start, r.stop, device=device) for r in (queries, keys))
        allowed = (k <= q[:, None])[None]
        if self.window is not None:
            allowed = allowed & (k > q[:, None] - self.window)
        if self.documents is not None:
            ends = self.documents.cu_seqlens[1:].long()  # there already: made here, the host would wait for the device
            document_BT = torch.bucketize(torch.arange(B * T, device=device), ends, right=True).view(B, T)
            allowed = allowed & (document_BT[:, q][:, :, None] == document_BT[:, k][:, None])
        if self.hidden_BT is not None:
            allowed = allowed & ~self.hidden_BT[:, None, keys.start : keys.stop]
        if self.blind_BT is not None:
            allowed = allowed & ~self.blind_BT[:, queries.start : queries.stop, None]
        return allowed[:, None]

    def sees_nobody(self, lse_BHT: Tensor) -> Tensor | None:
        """[B, T, 1 or H, 1] of bool: queries whose output is zeros, by the log-sum-exp of their scores, in which hidden keys count
        for next to nothing; None where each sees itself."""
        if self.hidden_BT is None:
            return None if self.blind_BT is None else self.blind_BT[:, :, None, None]
        blind = (lse_BHT < HIDDEN_SCORE / 2).transpose(1, 2)[..., None]
        return blind if self.blind_BT is None else blind | self.blind_BT[:, :, None, None]


CAUSAL = Pattern()
HIDDEN_SCORE = -1e4  # what a hidden key's score falls by: exp() of it is zero in every dtype
