"""Each group of heads hands kernels an lse with the strides of a new tensor."""

from types import SimpleNamespace

import pytest
import torch

from hfpatch.attention import heads
from hfpatch.attention.attention import CAUSAL
from hfpatch.attention.heads import Attention


@pytest.mark.parametrize("B", [1, 2])
def test_groups_have_the_strides_of_their_own_rows(B, monkeypatch):
    """For one row a slice of all heads' lse counts as contiguous with the stride of all heads on
    its first axis, and plans that are kept by strides (cuDNN's in torch 2.14) are made again."""
    seen, backward = [], heads.attention_backward

    def noting(dout, q, k, v, out, lse, *args, **kwargs):
        seen.append((lse.shape, lse.stride()))
        return backward(dout, q, k, v, out, lse, *args, **kwargs)

    monkeypatch.setattr(heads, "attention_backward", noting)
    monkeypatch.setattr(
        heads, "groups_of", lambda *_: [(slice(0, 2), slice(0, 1)), (slice(2, 4), slice(1, 2))]
    )
    T, E = 24, 8
    g = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(B, T, h, E, generator=g).double() for h in (4, 2, 2, 4))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    exact = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in leaves), is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    wanted = torch.autograd.grad(exact, leaves, dout)
    attention = Attention()
    asked = SimpleNamespace(scale=E**-0.5, pattern=CAUSAL, sinks_H=None)
    outs, lses = attention.forward([asked], [], [q, k, v])
    torch.testing.assert_close(outs[0], exact.detach(), rtol=1e-10, atol=1e-10)
    lses = [lse.contiguous() for lse in lses]  # as kernels on a GPU give it
    into = [None] * 3
    attention.backward([q, k, v], [dout], outs.__getitem__, lses, into)
    for got, grad in zip(into, wanted):
        torch.testing.assert_close(got, grad, rtol=1e-10, atol=1e-10)
    assert seen == [((B, 2, T), (2 * T, T, 1))] * 2
