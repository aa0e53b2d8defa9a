"""Every kernel against float64 at Llama-3.1-8B's widths, bf16, fp16 and fp32, to 131,073 tokens and past 2^31 elements.

python scripts/gpu/01b_float64.py --out $OUT
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import common
import torch
import torch.nn.functional as F
from cases import LLAMA_8B, OPS, TINY, Error, Widths, errors

from hfpatch import ops
from hfpatch.ops.attention import CAUSAL, Documents, Pattern, attention_backward, attention_forward, attention_ref
from hfpatch.ops.linear_cross_entropy import linear_cross_entropy_ref

WORDS = """
A row passes where every output and every gradient errs at most twice what plain PyTorch errs in the same dtype,
plus one rounding step of the largest value; `share` is the worst error over that budget, and `where` names it. Row
tensors of the giants have more than 2^31 elements; their first, middle and last tokens are compared, as are those of
attention over 131,073 tokens and more. Attention is called on slices of wider tensors, as the layer calls it.
"""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
GIANT = 524288 + 65  # rows of 4096: 2^31 elements and some


def note(sheet, what: str, dtype, T: int, found: dict, **more) -> None:
    worst = max(found, key=lambda k: _share(found[k], dtype))
    passed = all(e.within(dtype) for e in found.values())
    sheet.add(
        what=what, dtype=str(dtype).removeprefix("torch."), tokens=T, passed=passed,
        share=_share(found[worst], dtype), where=worst, max_error=found[worst].got, allowed=found[worst].allowed(dtype),
        relative=max(e.relative for e in found.values()), **more,
    )  # fmt: skip


def _share(error: Error, dtype) -> float:
    share = error.got / error.allowed(dtype) if error.allowed(dtype) else (0.0 if error.got == 0 else float("inf"))
    return float("inf") if share != share else share  # NaN is the worst of all


def ends(T: int) -> list:
    """The first, middle and last tokens."""
    return [(0, 16), (T // 2, T // 2 + 16), (T - 16, T)]


def element_wise(sheet, op, dtype, T, widths, only=None) -> None:
    rows, shared, fixed = op.make(T, widths, dtype, sheet.args.device, seed=T)
    g = torch.Generator(device=sheet.args.device).manual_seed(1)
    part = [t.narrow(d, 0, 1) for t, d in zip(rows, op.dims)]
    first = op.plain(*part, *shared, *(t.narrow(d, 0, 1) for t, d in zip(fixed, op.fixed_dims)))
    ups = []
    for out, d in zip(first, op.out_dims):
        shape = list(out.shape)
        shape[d] = T
        ups.append(torch.randn(shape, device=out.device, generator=g, dtype=out.dtype))
    found = errors(op, op.ours, rows, shared, fixed, ups, chunk=4096, only=only, copy=False)
    note(sheet, op.name, dtype, T, found, elements=max(t.numel() for t in rows))


def plain_loss(x, weight, labels):
    """transformers' loss from whole logits."""
    return F.cross_entropy(F.linear(x, weight).float(), labels, reduction="sum")


def loss(sheet, dtype, T, widths: Widths, masked=0.0, chunk=2048, only=None) -> None:
    device = sheet.args.device
    g = torch.Generator(device=device).manual_seed(T)
    x = torch.randn(T, widths.hidden, device=device, generator=g, dtype=dtype).requires_grad_()
    weight = (0.02 * torch.randn(widths.vocab, widths.hidden, device=device, generator=g)).to(dtype).requires_grad_()
    labels = torch.randint(0, widths.vocab, (T,), device=device, generator=g)
    if masked:
        labels[torch.rand(T, device=device, generator=g) < masked] = -100
    valid = int((labels != -100).sum())
    value = ops.linear_cross_entropy(x, weight, labels, num_valid=valid)
    dx, dw = torch.autograd.grad(value, [x, weight])
    names = ("dx",) if only else ("loss", "dx", "dw")
    found = {name: Error() for name in names}
    wide, narrow = weight.detach().double().requires_grad_(), weight.detach().requires_grad_()
    sums = [[0.0, torch.zeros(1 if only else weight.shape, dtype=torch.float64, device=device)] for _ in range(2)]
    for a, b in only or [(a, min(a + chunk, T)) for a in range(0, T, chunk)]:
        one, other = (x[a:b].detach().to(d).requires_grad_() for d in (torch.float64, dtype))
        true = linear_cross_entropy_ref(one, wide, labels[a:b], reduction="sum").loss / valid
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
    name = "linear_cross_entropy" + (f", masked {masked:.0%}" if masked else "")
    note(sheet, name, dtype, T, found, elements=max(x.numel(), weight.numel()))


def plain_attention(q, k, v, scale, pattern: Pattern, sinks):
    """What a model calls: scaled_dot_product_attention, with a mask where it needs one; eager for caps and sinks."""
    B, T, repeat = q.shape[0], q.shape[1], q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(repeat, 1) for x in (k, v))
    mask = None if pattern.plain else pattern.allowed(range(T), range(T), B, T, q.device)
    if sinks is None and pattern.softcap is None:
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scale).transpose(1, 2)
    scores = q @ k.transpose(-1, -2) * scale
    if pattern.softcap is not None:
        scores = pattern.softcap * torch.tanh(scores / pattern.softcap)
    allowed = pattern.allowed(range(T), range(T), B, T, q.device)
    scores = scores.float().masked_fill(~allowed, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.float()[:, None, None].expand(B, -1, T, 1)), -1)
    return (scores.softmax(-1)[..., :T].to(q.dtype) @ v).transpose(1, 2)


def attention(sheet, what, key, dtype, T, widths: Widths, group: int, pattern: Pattern, sinks=False) -> None:
    device, scale = sheet.args.device, widths.head_dim**-0.5
    g = torch.Generator(device=device).manual_seed(T)
    repeat = widths.heads // widths.kv_heads
    whole = [
        torch.randn(1, T, n, widths.head_dim, device=device, generator=g).to(dtype)
        for n in (widths.heads, widths.kv_heads, widths.kv_heads, widths.heads)
    ]
    heads, kv_heads = slice(repeat, (1 + group) * repeat), slice(1, 1 + group)  # not the first: an offset too
    q, k, v, dout = (x[:, :, heads if i in (0, 3) else kv_heads] for i, x in enumerate(whole))
    given = [q, k, v] + ([torch.randn(group * repeat, device=device, generator=g).to(dtype)] if sinks else [])
    options = {"scale": scale, "pattern": pattern, "backend": key, "sinks_H": given[3] if sinks else None}
    out, lse, state = attention_forward(q, k, v, **options)
    grads = attention_backward(dout, q, k, v, out, lse, state, **options)
    results = []
    for function, dt in (
        (lambda q, k, v, s=None: plain_attention(q, k, v, scale, pattern, s), dtype),
        (lambda q, k, v, s=None: attention_ref(q, k, v, scale=scale, pattern=pattern, sinks_H=s)[0], torch.float64),
    ):
        leaves = [t.detach().to(dt).requires_grad_() for t in given]
        made = function(*leaves)
        results.append([made.detach(), *torch.autograd.grad(made, leaves, dout.to(dt))])
    found = {name: Error() for name in ("out", "dq", "dk", "dv", "dsink")[: 1 + len(given)]}
    for error, got, plain, true in zip(found.values(), (out, *grads), *results):
        error.see(got, plain, true)
    if T == 1:  # dq and dk of one token are zero: what is left of them has nothing to be measured by
        del found["dq"], found["dk"]
    note(sheet, f"attention {key}{what}", dtype, T, found, elements=q.numel(), group=group)


def at_rows(q, k, v, dout, scale, a: int, b: int, dtype) -> list:
    """[out, dq, dk, dv] of queries a to b, and of keys a to b what these queries give them: a KV head at a time.
    q, dout [1, T, H, E], k, v [1, T, K, E]; computed in dtype."""
    found, repeat = [], q.shape[2] // k.shape[2]
    for h in range(k.shape[2]):
        mine = slice(h * repeat, (h + 1) * repeat)
        given = q[:, a:b, mine], k[:, :b, h : h + 1], v[:, :b, h : h + 1]
        leaves = [t.to(dtype).requires_grad_() for t in given]
        one_q, one_k, one_v = (t.transpose(1, 2) for t in leaves)
        later = torch.arange(b, device=q.device) > torch.arange(a, b, device=q.device)[:, None]
        scores = (one_q @ one_k.transpose(2, 3) * scale).masked_fill(later, float("-inf"))
        p = scores.softmax(-1, dtype=torch.promote_types(dtype, torch.float32)).to(dtype)
        out = (p @ one_v).transpose(1, 2)
        dq, dk, dv = torch.autograd.grad(out, leaves, dout[:, a:b, mine].to(dtype))
        found.append((out.detach(), dq, dk[:, a:b], dv[:, a:b]))
    return [torch.cat(parts, 2) for parts in zip(*found)]


def long_attention(sheet, key, dtype, T, widths: Widths) -> None:
    """Forward of all heads at once and backward of the last KV head's, as the layer has them, compared at the first, middle and
    last tokens; keys' gradients at the last alone, since those of earlier keys come of all later queries."""
    device, scale = sheet.args.device, widths.head_dim**-0.5
    g = torch.Generator(device=device).manual_seed(T)
    q, k, v, dout = (
        torch.randn(1, T, n, widths.head_dim, device=device, generator=g, dtype=dtype)
        for n in (widths.heads, widths.kv_heads, widths.kv_heads, widths.heads)
    )
    out, lse, state = attention_forward(q, k, v, scale=scale, backend=key)
    repeat = widths.heads // widths.kv_heads
    last = [t[:, :, -n:] for t, n in ((dout, repeat), (q, repeat), (k, 1), (v, 1), (out, repeat))]
    dq, dk, dv = attention_backward(*last, lse[:, -repeat:].contiguous(), state, scale=scale, backend=key)
    found = {}
    for place, (a, b) in zip(("first", "middle", "last"), ends(T)):
        plain, true = (at_rows(*last[1:4], last[0], scale, a, b, d) for d in (dtype, torch.float64))
        got = {"out": out[:, a:b, -repeat:], "dq": dq[:, a:b], "dk": dk[:, a:b], "dv": dv[:, a:b]}
        for i, (name, x) in enumerate(got.items()):
            if name in ("out", "dq") or b == T:
                found[f"{name}, {place}"] = Error()
                found[f"{name}, {place}"].see(x, plain[i], true[i])
    note(sheet, f"attention {key}", dtype, T, found, elements=q.numel(), group=widths.kv_heads)


def patterns(T: int, device) -> dict:
    """name: (pattern, whether with sinks) besides plain causal attention, of at least 30 tokens."""
    bounds = (0, T // 3, T // 3 + 1, T)
    documents = Documents(bounds, torch.tensor(bounds, dtype=torch.int32, device=device))
    hidden = torch.zeros(1, T, dtype=torch.bool, device=device)
    hidden[:, T // 4 : T // 3] = True
    return {
        "packed": (Pattern(documents), False),
        "window": (Pattern(window=T // 3), False),
        "packed, window": (Pattern(documents, window=T // 5), False),
        "holes": (Pattern(hidden_BT=hidden), False),
        "cap": (Pattern(softcap=20.0), False),
        "sinks": (CAUSAL, True),
        "window, sinks": (Pattern(window=T // 3), True),
    }


def first(job) -> tuple:
    """Sorts jobs, most informative first: bf16 before the rest, and of each the longest, where addresses and sums grow."""
    _, _, arguments = job
    longest = max(a for a in arguments if type(a) is int)
    return torch.bfloat16 not in arguments, -longest


def main(argv=None) -> int:
    args = common.parse(common.parser("01b_float64", __doc__), argv)
    sheet = common.Sheet(args)
    widths = TINY if args.small else LLAMA_8B
    lengths = (37,) if args.small else (1, 127, 4097, 131073)
    jobs, dtypes = [], DTYPES[::2] if args.small else DTYPES
    for dtype in dtypes:
        for T in lengths:
            jobs += [(op.name, element_wise, (op, dtype, T, widths)) for op in OPS.values()]
            if T <= 4097 or dtype == torch.bfloat16:
                jobs += [("loss", loss, (dtype, T, widths)), ("loss", loss, (dtype, T, widths, 0.9 if T > 1 else 0.0))]
    keys = {torch.float32: ["efficient"]} if args.cuda else {torch.float32: ["cpu"]}
    for dtype in dtypes[:-1]:
        keys[dtype] = ["flash", "cudnn", *([] if common.why_no_fa3() else ["fa3"])] if args.cuda else ["cpu"]
    for dtype, names in keys.items():
        for T in (37,) if args.small else (1, 127, 1000, 4097):
            groups = (1,) if args.small else (1, 2)
            jobs += [("attention", attention, ("", key, dtype, T, widths, g, CAUSAL)) for key in names for g in groups]
            if T > 30 and (dtype != torch.float32 or not args.cuda):
                for what, (pattern, sinks) in patterns(T, args.device).items():
                    # Windows, documents and caps have one kernel; holes and plain sinks have every backend's.
                    for key in names if what in ("holes", "sinks") else names[:1]:
                        jobs.append((what, attention, (f", {what}", key, dtype, T, widths, 1, pattern, sinks)))
    jobs += [
        ("attention", long_attention, (key, torch.bfloat16, T, widths))
        for T in ((64,) if args.small else (131073, GIANT))
        for key in keys[torch.bfloat16]
    ]
    for op in OPS.values():
        # The giants: swiglu's rows are wider, so it needs fewer of them.
        T = 64 if args.small else 150001 if op.name == "swiglu" else GIANT
        jobs.append((f"giant {op.name}", element_wise, (op, torch.bfloat16, T, widths, ends(T))))
    T, short = (64, widths) if args.small else (GIANT, Widths(vocab=1024))
    jobs.append(("giant loss", loss, (torch.bfloat16, T, short, 0.0, 2048, ends(T))))
    for name, job, arguments in sorted(jobs, key=first):
        if sheet.late(name):
            break
        try:
            job(sheet, *arguments)
        except RuntimeError as error:  # a backend may refuse a shape, a size not fit: said, and the rest goes on
            label = " ".join([name, *(str(a) for a in arguments if isinstance(a, (int, str, torch.dtype)))])
            if common.is_out_of_memory(error) or {"cudnn", "fa3", "efficient"}.intersection(map(str, arguments)):
                sheet.skip(label, common.one_line(error))
            else:
                sheet.add(what=label, passed=False, error=common.one_line(error))
        common.clean()
    failed = [r for r in sheet.rows if not r["passed"]]
    sheet.page(f"Kernels against float64: {len(sheet.rows) - len(failed)} of {len(sheet.rows)} rows pass", WORDS)
    for row in failed:
        print("  FAILED", *(row.get(k) for k in ("what", "dtype", "tokens", "where", "share", "error")))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
