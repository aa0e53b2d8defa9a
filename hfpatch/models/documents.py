"""Which tokens may see each other, decided once a step from what the caller passed, never as a [T, T] mask.

Packed documents (position_ids that restart, or cu_seq_lens) and padding (a 2D attention mask) both become ranges of the
flattened tokens. A padded stretch is a range of its own: what it computes is seen by nobody.
"""

import torch
from torch import Tensor

from hfpatch.checkpoint.device import ToHost
from hfpatch.ops.attention import Documents


def _from_bounds(bounds: list[int], B: int, T: int, device) -> Documents | None:
    if bounds == list(range(0, B * T + 1, T)):
        return None
    cuda = device.type == "cuda"  # from pageable memory the copy would wait for the device
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, pin_memory=cuda).to(device, non_blocking=True)
    return Documents(tuple(bounds), cu_seqlens)


def find_documents(
    B: int, T: int, device: torch.device, attention_mask: Tensor | None, position_ids: Tensor | None, cu_seq_lens=None
) -> Documents | None:
    """The ranges of tokens that attend within themselves, or None where every row is one causal sequence.

    attention_mask: [B, T] of 0 and 1, or None; position_ids: [1 or B, T], a new document wherever one is not its predecessor
    plus 1; cu_seq_lens: [n+1] offsets over the flattened tokens (FlashAttention's keyword), which wins.
    ValueError where offsets do not cover the tokens.
    """
    if cu_seq_lens is not None:
        bounds = ToHost(cu_seq_lens).get().tolist()
        if bounds[0] != 0 or bounds[-1] != B * T or any(b < a for a, b in zip(bounds, bounds[1:])):
            raise ValueError(
                f"hfpatch: expected cu_seq_lens to rise from 0 to {B * T} (batch x tokens), {bounds[:3]}...{bounds[-1]} came; "
                "count every token of the batch once."
            )
        rows = set(bounds) | set(range(0, B * T + 1, T))
        return _from_bounds(sorted(rows), B, T, device)
    if attention_mask is None and position_ids is None:
        return None
    given = [x for x in (attention_mask, position_ids) if x is not None]

    def find_starts(*_):
        starts_BT = torch.zeros(B, T, dtype=torch.bool, device=device)
        starts_BT[:, 0] = True
        if position_ids is not None:
            starts_BT[:, 1:] |= position_ids[:, 1:] != position_ids[:, :-1] + 1
        if attention_mask is not None:
            mask_BT = attention_mask[:, -T:].bool()
            starts_BT[:, 1:] |= mask_BT[:, 1:] != mask_BT[:, :-1]
        return starts_BT

    starts = ToHost(find_starts, *given).get().flatten().nonzero().flatten().tolist()
    return _from_bounds([*starts, B * T], B, T, device)
