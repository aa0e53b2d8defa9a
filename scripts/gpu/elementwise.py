"""The element-wise ops at a model's widths: inputs, plain forms, least traffic.

T tokens, D hidden, F intermediate, H and K heads, E head dim. An op's row tensors have T tokens,
`shared` ones (the norm's weight) have none.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hfpatch import ops
from hfpatch.ops.rms_norm import rms_norm_ref
from hfpatch.ops.rope import rope_ref
from hfpatch.ops.swiglu import swiglu_ref

EPS = 1e-5


@dataclass(frozen=True)
class Widths:
    hidden: int = 4096
    intermediate: int = 14336
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    vocab: int = 128256


LLAMA_8B = Widths()
TINY = Widths(hidden=64, intermediate=96, heads=4, kv_heads=2, head_dim=16, vocab=211)


@dataclass(frozen=True)
class Op:
    """make(T, widths, dtype, device, seed) -> (rows, shared, fixed). Only fixed ones have no
    gradient.

    plain, exact and ours take them in this order and return a tuple. *_elements: elements that each
    token must move.
    """

    name: str
    make: Callable
    exact: Callable
    plain: Callable
    ours: Callable
    fwd_elements: Callable[[Widths], int]
    bwd_elements: Callable[[Widths], int]


def _randn(*shape, dtype, device, generator):
    return torch.randn(shape, device=device, generator=generator, dtype=dtype)


def _generator(device, seed):
    return torch.Generator(device=device).manual_seed(seed)


def _make_norm(count):
    def make(T, w, dtype, device, seed):
        g = _generator(device, seed)
        rows = [_randn(T, w.hidden, dtype=dtype, device=device, generator=g) for _ in range(count)]
        weight = (1 + 0.1 * torch.randn(w.hidden, device=device, generator=g)).to(dtype)
        return rows, [weight], []

    return make


def _make_rope(T, w, dtype, device, seed):
    g = _generator(device, seed)
    # As the projections leave them: [1, T, heads, E] seen as [1, heads, T, E].
    rows = [
        _randn(1, T, heads, w.head_dim, dtype=dtype, device=device, generator=g).transpose(1, 2)
        for heads in (w.heads, w.kv_heads)
    ]
    inverse = 500000.0 ** -(
        torch.arange(0, w.head_dim, 2, device=device, dtype=torch.float64) / w.head_dim
    )
    angle = torch.arange(T, device=device, dtype=torch.float64)[None, :, None] * inverse
    angle = torch.cat((angle, angle), -1)
    return rows, [], [angle.cos().to(dtype), angle.sin().to(dtype)]


def _make_swiglu(T, w, dtype, device, seed):
    g = _generator(device, seed)
    return (
        [_randn(T, w.intermediate, dtype=dtype, device=device, generator=g) for _ in range(2)],
        [],
        [],
    )


def eager_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """transformers' LlamaRMSNorm."""
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * wide.to(x.dtype)


def _eager_rope(q, k, cos, sin):
    """transformers' apply_rotary_pos_emb."""

    def rotate_half(x):
        x1, x2 = x.chunk(2, -1)
        return torch.cat((-x2, x1), -1)

    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


OPS = {
    op.name: op
    for op in (
        Op("rms_norm", _make_norm(1),
           exact=lambda x, w: (rms_norm_ref(x, w, EPS),),
           plain=lambda x, w: (eager_rms_norm(x, w),),
           ours=lambda x, w: (ops.rms_norm(x, w, EPS),),
           fwd_elements=lambda w: 2 * w.hidden,
           bwd_elements=lambda w: 3 * w.hidden),
        Op("rope", _make_rope,
           exact=rope_ref, plain=_eager_rope, ours=ops.rope,
           fwd_elements=lambda w: 2 * (w.heads + w.kv_heads) * w.head_dim,
           bwd_elements=lambda w: 2 * (w.heads + w.kv_heads) * w.head_dim),
        Op("swiglu", _make_swiglu,
           exact=lambda g, u: (swiglu_ref(g, u),),
           plain=lambda g, u: (F.silu(g) * u,),
           ours=lambda g, u: (ops.swiglu(g, u),),
           fwd_elements=lambda w: 3 * w.intermediate, bwd_elements=lambda w: 5 * w.intermediate),
    )
}  # fmt: skip


def run(function, rows, shared, fixed, ups, dtype=None):
    """(outputs, gradients of rows and shared) of one call on detached copies in dtype."""
    leaves = [t.detach().to(dtype or t.dtype).requires_grad_() for t in (*rows, *shared)]
    outs = function(*leaves, *(t.to(dtype or t.dtype) for t in fixed))
    grads = torch.autograd.grad(outs, leaves, [u.to(o.dtype) for u, o in zip(ups, outs)])
    return [o.detach() for o in outs], list(grads)
