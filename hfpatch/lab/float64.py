"""Ops against float64: outputs and gradients, next to plain PyTorch's in the same dtype.

Each function returns {"out" or a gradient's name: Error}. The allowed error is twice plain
PyTorch's.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from hfpatch import ops
from hfpatch.attention.attention import (
    CAUSAL,
    Documents,
    Pattern,
    attention_backward,
    attention_forward,
)
from hfpatch.lab.elementwise import OPS, Error, Op, Widths, errors
from hfpatch.ops.linear_cross_entropy import linear_cross_entropy_ref


def worst_of(found: dict[str, Error], dtype: torch.dtype) -> str:
    """The name of the result with the largest share of its allowed error."""
    return max(found, key=lambda name: found[name].share(dtype))


def of_the_cpu(dtype, widths: Widths, device) -> dict[str, Error]:
    """A product and a norm on the device against float64 on the CPU, which another computes.

    Every other reference here is computed on the device that it checks: of one that computes
    nothing they are all zeros, and equal.
    """
    tokens = 67
    g = torch.Generator().manual_seed(tokens)
    x, w = (torch.randn(n, widths.hidden, generator=g).to(dtype) for n in (tokens, 131))
    scale = torch.rand(widths.hidden, generator=g).to(dtype) + 1
    norm = OPS["rms_norm"]
    got = {
        "product": x.to(device) @ w.to(device).T,
        "rms_norm": norm.ours(x.to(device), scale.to(device))[0],
    }
    plain = {"product": x @ w.T, "rms_norm": norm.plain(x, scale)[0]}
    wide = x.double(), w.double(), scale.double()
    true = {"product": wide[0] @ wide[1].T, "rms_norm": norm.exact(wide[0], wide[2])[0]}
    found = {name: Error() for name in got}
    for name, error in found.items():
        error.see(got[name].cpu(), plain[name], true[name])
    return found


def element_wise(op: Op, dtype, T: int, widths: Widths, device, only=None) -> dict[str, Error]:
    """One element-wise op over T tokens. only: ranges of tokens that are compared."""
    rows, shared, fixed = op.make(T, widths, dtype, device, seed=T)
    g = torch.Generator(device=device).manual_seed(1)
    part = [t.narrow(d, 0, 1) for t, d in zip(rows, op.dims)]
    first = op.plain(*part, *shared, *(t.narrow(d, 0, 1) for t, d in zip(fixed, op.fixed_dims)))
    ups = []
    for out, d in zip(first, op.out_dims):
        shape = list(out.shape)
        shape[d] = T
        ups.append(torch.randn(shape, device=out.device, generator=g, dtype=out.dtype))
    return errors(op, op.ours, rows, shared, fixed, ups, chunk=4096, only=only, copy=False)


def plain_loss(x, weight, labels):
    """transformers' loss from whole logits."""
    return F.cross_entropy(F.linear(x, weight).float(), labels, reduction="sum")


def loss(
    dtype, T: int, widths: Widths, device, masked=0.0, chunk=2048, only=None
) -> dict[str, Error]:
    """linear_cross_entropy over T tokens. masked: the share of tokens without a label."""
    g = torch.Generator(device=device).manual_seed(T)
    x = torch.randn(T, widths.hidden, device=device, generator=g, dtype=dtype).requires_grad_()
    weight = (
        (0.02 * torch.randn(widths.vocab, widths.hidden, device=device, generator=g))
        .to(dtype)
        .requires_grad_()
    )
    labels = torch.randint(0, widths.vocab, (T,), device=device, generator=g)
    if masked:
        labels[torch.rand(T, device=device, generator=g) < masked] = -100
    valid = int((labels != -100).sum())
    value = ops.linear_cross_entropy(x, weight, labels, num_valid=valid)
    dx, dw = torch.autograd.grad(value, [x, weight])
    names = ("dx",) if only else ("loss", "dx", "dw")
    found = {name: Error() for name in names}
    wide, narrow = weight.detach().double().requires_grad_(), weight.detach().requires_grad_()
    sums = [
        [0.0, torch.zeros(1 if only else weight.shape, dtype=torch.float64, device=device)]
        for _ in range(2)
    ]
    for a, b in only or [(a, min(a + chunk, T)) for a in range(0, T, chunk)]:
        one, other = (x[a:b].detach().to(d).requires_grad_() for d in (torch.float64, dtype))
        true = linear_cross_entropy_ref(one, wide, labels[a:b], reduction="sum") / valid
        plain = plain_loss(other, narrow, labels[a:b]) / valid
        true_dx, true_dw = torch.autograd.grad(true, [one, wide])
        plain_dx, plain_dw = torch.autograd.grad(plain, [other, narrow])
        found["dx"].see(dx[a:b], plain_dx, true_dx)
        if not only:
            for total, part, grad in zip(sums, (true, plain), (true_dw, plain_dw)):
                total[0] = total[0] + part.detach().double()
                total[1] += grad.double()
    if not only:
        found["loss"].see(value.detach(), sums[1][0], sums[0][0])
        found["dw"].see(dw, sums[1][1], sums[0][1])
    return found


def plain_attention(q, k, v, scale, pattern: Pattern, sinks):
    """Attention as a stock model computes it: scaled_dot_product_attention, with a mask if needed;
    eager for caps and sinks."""
    B, T, repeat = q.shape[0], q.shape[1], q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(repeat, 1) for x in (k, v))
    mask = None if pattern.plain else pattern.allowed(range(T), range(T), B, T, q.device)
    if sinks is None and pattern.softcap is None:
        return F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, scale=scale
        ).transpose(1, 2)
    scores = q @ k.transpose(-1, -2) * scale
    if pattern.softcap is not None:
        scores = pattern.softcap * torch.tanh(scores / pattern.softcap)
    allowed = pattern.allowed(range(T), range(T), B, T, q.device)
    scores = scores.float().masked_fill(~allowed, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.float()[:, None, None].expand(B, -1, T, 1)), -1)
    return (scores.softmax(-1)[..., :T].to(q.dtype) @ v).transpose(1, 2)


def attention_ref(
    q_BTHE: Tensor,
    k_BTKE: Tensor,
    v_BTKE: Tensor,
    *,
    scale: float,
    pattern: Pattern = CAUSAL,
    sinks_H: Tensor | None = None,
):
    """Plain causal attention, in promote_types(q.dtype, float32): the oracle of the tests.

    sinks_H: one score per head, which enters the softmax but has no value (Xiao et al., 2023;
    gpt-oss). Returns out_BTHE, lse_BHT.
    """
    dtype = torch.promote_types(q_BTHE.dtype, torch.float32)
    B, T, H, E = q_BTHE.shape
    repeat = H // k_BTKE.shape[2]
    q = q_BTHE.to(dtype).transpose(1, 2)
    k, v = (x.to(dtype).transpose(1, 2).repeat_interleave(repeat, 1) for x in (k_BTKE, v_BTKE))
    scores = q @ k.transpose(-1, -2) * scale
    if pattern.softcap is not None:
        scores = pattern.softcap * torch.tanh(scores / pattern.softcap)
    scores = scores.masked_fill(~pattern.allowed(range(T), range(T), B, T, q.device), float("-inf"))
    lse = scores.logsumexp(-1)
    if sinks_H is not None:
        lse = torch.logaddexp(lse, sinks_H.to(dtype)[:, None])
    out = ((scores - lse[..., None]).exp() @ v).transpose(1, 2)
    if pattern.blind_BT is not None:
        out = out.masked_fill(pattern.blind_BT[:, :, None, None], 0)
    return out.to(q_BTHE.dtype), lse


def attention(
    key: str,
    dtype,
    T: int,
    widths: Widths,
    device,
    group: int = 1,
    pattern: Pattern = CAUSAL,
    sinks=False,
) -> dict[str, Error]:
    """Backend `key` on slices of wider tensors, as a layer calls it: `group` KV heads, not the
    first ones."""
    scale = widths.head_dim**-0.5
    g = torch.Generator(device=device).manual_seed(T)
    repeat = widths.heads // widths.kv_heads
    whole = [
        torch.randn(1, T, n, widths.head_dim, device=device, generator=g).to(dtype)
        for n in (widths.heads, widths.kv_heads, widths.kv_heads, widths.heads)
    ]
    # Not the first heads, so that the slices have an offset.
    heads, kv_heads = slice(repeat, (1 + group) * repeat), slice(1, 1 + group)
    q, k, v, dout = (x[:, :, heads if i in (0, 3) else kv_heads] for i, x in enumerate(whole))
    given = [q, k, v] + (
        [torch.randn(group * repeat, device=device, generator=g).to(dtype)] if sinks else []
    )
    options = {
        "scale": scale,
        "pattern": pattern,
        "backend": key,
        "sinks_H": given[3] if sinks else None,
    }
    out, lse, state = attention_forward(q, k, v, **options)
    grads = attention_backward(dout, q, k, v, out, lse, state, **options)
    results = []
    for function, dt in (
        (lambda q, k, v, s=None: plain_attention(q, k, v, scale, pattern, s), dtype),
        (
            lambda q, k, v, s=None: attention_ref(q, k, v, scale=scale, pattern=pattern, sinks_H=s)[
                0
            ],
            torch.float64,
        ),
    ):
        leaves = [t.detach().to(dt).requires_grad_() for t in given]
        made = function(*leaves)
        results.append([made.detach(), *torch.autograd.grad(made, leaves, dout.to(dt))])
    found = {name: Error() for name in ("out", "dq", "dk", "dv", "dsink")[: 1 + len(given)]}
    for error, got, plain, true in zip(found.values(), (out, *grads), *results):
        error.see(got, plain, true)
    # dq and dk of one token are zero, so their errors have no scale.
    if T == 1:
        del found["dq"], found["dk"]
    return found


def patterns(T: int, device) -> dict:
    """name -> (pattern, whether with sinks) of attention other than plain causal, T >= 30."""
    bounds = (0, T // 3, T // 3 + 1, T)
    documents = Documents(bounds, torch.tensor(bounds, dtype=torch.int32, device=device))
    return {
        "packed": (Pattern(documents), False),
        "window": (Pattern(window=T // 3), False),
        "packed, window": (Pattern(documents, window=T // 5), False),
        "cap": (Pattern(softcap=20.0), False),
        "sinks": (CAUSAL, True),
        "window, sinks": (Pattern(window=T // 3), True),
    }
