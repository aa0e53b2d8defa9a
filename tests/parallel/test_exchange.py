"""Where tokens of shared rows lie, and rounds whose tensors pass 2^31 elements; ranks are
simulated.
"""

from types import SimpleNamespace

import pytest
import torch

from hfpatch.attention.attention import CAUSAL
from hfpatch.budget import sequence
from hfpatch.lab.simulate.sequence import LoneRank
from hfpatch.parallel import exchange

pytestmark = pytest.mark.usefixtures("exact_loss")


@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("B", [1, 2])
def test_dealt_rows_come_together_in_order(B, zigzag):
    ranks = LoneRank(4)
    ranks.zigzag = zigzag
    rows = torch.arange(B * 16 * 3).view(B, 16, 3)
    parts = ranks.dealt(rows).contiguous()
    assert parts.shape == (4, B, 4, 3)
    assert torch.equal(ranks.in_order(parts), rows)
    first = torch.arange(4) if not zigzag else torch.tensor([0, 1, 14, 15])
    assert torch.equal(parts[0], rows[:, first])
    # One row of plain chunks is handed to the kernel as it came.
    shares = ranks.in_order(parts).data_ptr() == parts.data_ptr()
    assert shares is (B == 1 and not zigzag)


def test_rounds_beyond_two_to_the_31(monkeypatch):
    """4,194,304 tokens, four heads of 128: offsets of the last tokens do not fit 32 bits."""
    T, P = 1 << 22, 8
    monkeypatch.setattr(sequence, "BLOCKS", 4 * T // 128)
    seen = []
    forward, backward = exchange.attention_forward, exchange.attention_backward
    monkeypatch.setattr(
        exchange, "attention_forward", lambda q, *a, **k: seen.append(q) or forward(q, *a, **k)
    )
    monkeypatch.setattr(
        exchange, "attention_backward", lambda *a, **k: seen.extend(a[:2]) or backward(*a, **k)
    )
    q, k = (
        torch.empty(1, T // P, 32, 128, device="meta"),
        torch.empty(1, T // P, 8, 128, device="meta"),
    )
    attention = exchange.ExchangedAttention(LoneRank(P))
    asked = SimpleNamespace(scale=1.0, pattern=CAUSAL, sinks_H=None)
    outs, lses = attention.forward([asked], [], [q, k, k])
    (out,) = attention.join(outs)
    assert out.shape == q.shape and [lse.shape for lse in lses] == [(1, 4, T)]
    grads = [torch.empty_like(x) for x in (q, k, k)]
    attention.backward([q, k, k], [out], outs.__getitem__, lses, grads)
    assert len(seen) == 3
    for x in seen:
        assert x.shape == (1, T, 4, 128) and x.is_contiguous() and x.numel() == 1 << 31
