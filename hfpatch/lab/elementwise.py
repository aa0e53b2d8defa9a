"""The element-wise ops at a model's widths: inputs, plain forms, least traffic, errors.

T tokens, D hidden, F intermediate, H and K heads, E head dim. An op's row tensors have T at `dims`;
`shared` ones (the norm's weight) have no T. Errors against float64 are computed chunk by chunk, so
that 131,073 tokens fit in memory.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from hfpatch import ops
from hfpatch.lab.budget import allowed_error
from hfpatch.ops.rms_norm import add_rms_norm_ref, rms_norm_ref
from hfpatch.ops.rope import rope_ref
from hfpatch.ops.swiglu import swiglu_ref

EPS = 1e-5
CHUNK = 16384  # tokens of one comparison with float64


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
    dims: tuple[int, ...]
    out_dims: tuple[int, ...]
    fwd_elements: Callable[[Widths], int]
    bwd_elements: Callable[[Widths], int]
    fixed_dims: tuple[int, ...] = ()
    peers: dict = field(default_factory=dict)


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


def _eager_add(x, residual, weight):
    total = x + residual
    return eager_rms_norm(total, weight), total


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
           dims=(0,), out_dims=(0,), fwd_elements=lambda w: 2 * w.hidden,
           bwd_elements=lambda w: 3 * w.hidden),
        Op("add_rms_norm", _make_norm(2),
           exact=lambda x, r, w: add_rms_norm_ref(x, r, w, EPS),
           plain=_eager_add,
           ours=lambda x, r, w: ops.add_rms_norm(x, r, w, EPS),
           dims=(0, 0), out_dims=(0, 0), fwd_elements=lambda w: 4 * w.hidden,
           bwd_elements=lambda w: 4 * w.hidden),
        Op("rope", _make_rope,
           exact=rope_ref, plain=_eager_rope, ours=ops.rope,
           dims=(2, 2), out_dims=(2, 2), fixed_dims=(1, 1),
           fwd_elements=lambda w: 2 * (w.heads + w.kv_heads) * w.head_dim,
           bwd_elements=lambda w: 2 * (w.heads + w.kv_heads) * w.head_dim),
        Op("swiglu", _make_swiglu,
           exact=lambda g, u: (swiglu_ref(g, u),),
           plain=lambda g, u: (F.silu(g) * u,),
           ours=lambda g, u: (ops.swiglu(g, u),),
           dims=(0, 0), out_dims=(0,),
           fwd_elements=lambda w: 3 * w.intermediate, bwd_elements=lambda w: 5 * w.intermediate),
    )
}  # fmt: skip


def run(function, rows, shared, fixed, ups, dtype=None):
    """(outputs, gradients of rows and shared) of one call on detached copies in dtype."""
    leaves = [t.detach().to(dtype or t.dtype).requires_grad_() for t in (*rows, *shared)]
    outs = function(*leaves, *(t.to(dtype or t.dtype) for t in fixed))
    grads = torch.autograd.grad(outs, leaves, [u.to(o.dtype) for u, o in zip(ups, outs)])
    return [o.detach() for o in outs], list(grads)


@dataclass
class Error:
    """A result's distance from float64, and the allowed one: twice that of plain PyTorch in the
    same dtype.
    """

    got: float = 0.0
    plain: float = 0.0
    largest: float = 0.0
    squares: float = 0.0
    exact_squares: float = 0.0

    def see(self, got: Tensor, plain: Tensor, exact: Tensor) -> None:
        off = got.double() - exact
        self.got = _larger(self.got, off.abs().max().item())
        self.plain = _larger(self.plain, (plain.double() - exact).abs().max().item())
        self.largest = _larger(self.largest, exact.abs().max().item())
        self.squares += off.square().sum().item()
        self.exact_squares += exact.square().sum().item()

    def allowed(self, dtype: torch.dtype) -> float:
        return allowed_error(self.plain, torch.finfo(dtype).eps * self.largest)

    def within(self, dtype: torch.dtype) -> bool:
        return self.got <= self.allowed(dtype)

    def share(self, dtype: torch.dtype) -> float:
        """The error over the allowed one: above 1 it fails, and NaN is infinite.

        A reference of zeros is infinite too: it shows nothing, and a device that computes nothing
        gives it.
        """
        allowed = self.allowed(dtype)
        if self.exact_squares == 0:
            return float("inf")
        if self.got == 0:
            return 0.0
        share = self.got / allowed if allowed else float("inf")
        return float("inf") if share != share else share

    @property
    def relative(self) -> float:
        return (self.squares / self.exact_squares) ** 0.5 if self.exact_squares else 0.0


def _larger(a: float, b: float) -> float:
    """The larger one, or NaN if one is NaN, so that a NaN stays and fails every comparison."""
    return a if a >= b or a != a else b


def errors(
    op: Op, function, rows, shared, fixed, ups, *, chunk=CHUNK, only: list | None = None, copy=True
) -> dict:
    """{"out0": Error, ..., "grad0": ...} of function against float64.

    only: [a, b) ranges of tokens to compare. copy: call function on copies, because Liger's writes
    over its arguments.
    """
    given = rows, shared, fixed, ups
    outs, grads = run(
        function, *([[t.clone() for t in group] for group in given] if copy else given)
    )
    T = rows[0].shape[op.dims[0]]
    found = {f"out{i}": Error() for i in range(len(outs))} | {
        f"grad{i}": Error() for i in range(len(grads))
    }
    sums = [[torch.zeros_like(s, dtype=torch.float64) for _ in range(2)] for s in shared]
    ranges = only or [(a, min(a + chunk, T)) for a in range(0, T, chunk)]
    for a, b in ranges:
        part = [t.narrow(d, a, b - a) for t, d in zip(rows, op.dims)]
        still = [t.narrow(d, a, b - a) for t, d in zip(fixed, op.fixed_dims)]
        up = [t.narrow(d, a, b - a) for t, d in zip(ups, op.out_dims)]
        exact_outs, exact_grads = run(op.exact, part, shared, still, up, torch.float64)
        plain_outs, plain_grads = run(op.plain, part, shared, still, up)
        for i, d in enumerate(op.out_dims):
            found[f"out{i}"].see(outs[i].narrow(d, a, b - a), plain_outs[i], exact_outs[i])
        for i, d in enumerate(op.dims):
            found[f"grad{i}"].see(grads[i].narrow(d, a, b - a), plain_grads[i], exact_grads[i])
        for j, (exact_sum, plain_sum) in enumerate(sums):
            exact_sum += exact_grads[len(rows) + j]
            plain_sum += plain_grads[len(rows) + j].double()
    for j, (exact_sum, plain_sum) in enumerate(sums):
        name = f"grad{len(rows) + j}"
        if only:
            del found[name]
        else:
            found[name].see(grads[len(rows) + j], plain_sum, exact_sum)
    return found
