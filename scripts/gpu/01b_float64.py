"""Every kernel against float64 at Llama-3.1-8B's widths, bf16, fp16 and fp32, to 131,073 tokens and
past 2^31 elements.

python scripts/gpu/01b_float64.py --out $OUT
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import common
import torch
from cases import LLAMA_8B, OPS, TINY, Error, Widths

from hfpatch.attention.attention import CAUSAL, attention_backward, attention_forward
from hfpatch.lab import float64

WORDS = """
A row passes where every output and every gradient errs at most twice what plain PyTorch errs in the
same dtype, plus one rounding step of the largest value; `share` is the worst error over that
budget, and `where` names it. Row tensors of the giants have more than 2^31 elements; their first,
middle and last tokens are compared, as are those of attention over 131,073 tokens and more.
Attention is called on slices of wider tensors, as the layer calls it.
"""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
GIANT = 524288 + 65  # rows of 4096: 2^31 elements and some


def note(sheet, what: str, dtype, T: int, found: dict, **more) -> None:
    worst = float64.worst_of(found, dtype)
    passed = all(e.within(dtype) for e in found.values())
    sheet.add(
        what=what, dtype=str(dtype).removeprefix("torch."), tokens=T, passed=passed,
        share=found[worst].share(dtype), where=worst, max_error=found[worst].got,
        allowed=found[worst].allowed(dtype),
        relative=max(e.relative for e in found.values()), **more,
    )  # fmt: skip


def ends(T: int) -> list:
    """The first, middle and last tokens."""
    return [(0, 16), (T // 2, T // 2 + 16), (T - 16, T)]


def element_wise(sheet, op, dtype, T, widths, only=None) -> None:
    found = float64.element_wise(op, dtype, T, widths, sheet.args.device, only)
    note(sheet, op.name, dtype, T, found, elements=elements(op, T, widths))


def elements(op, T, widths) -> int:
    """Of the largest of an op's rows."""
    rows, _, _ = op.make(1, widths, torch.bfloat16, torch.device("cpu"), seed=0)
    return T * max(t.numel() for t in rows)


def loss(sheet, dtype, T, widths: Widths, masked=0.0, chunk=2048, only=None) -> None:
    found = float64.loss(dtype, T, widths, sheet.args.device, masked, chunk, only)
    name = "linear_cross_entropy" + (f", masked {masked:.0%}" if masked else "")
    note(sheet, name, dtype, T, found, elements=max(T, widths.vocab) * widths.hidden)


def attention(sheet, what, key, dtype, T, widths, group: int, pattern, sinks=False) -> None:
    found = float64.attention(key, dtype, T, widths, sheet.args.device, group, pattern, sinks)
    size = T * group * widths.heads // widths.kv_heads * widths.head_dim
    note(sheet, f"attention {key}{what}", dtype, T, found, elements=size, group=group)


def at_rows(q, k, v, dout, scale, a: int, b: int, dtype) -> list:
    """[out, dq, dk, dv] of queries a to b, and of keys a to b what these queries give them: a KV
    head at a time. q, dout [1, T, H, E], k, v [1, T, K, E]; computed in dtype.
    """
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
    """Forward of all heads at once and backward of the last KV head's, as the layer has them,
    compared at the first, middle and last tokens; keys' gradients at the last alone, since those of
    earlier keys come of all later queries.
    """
    device, scale = sheet.args.device, widths.head_dim**-0.5
    g = torch.Generator(device=device).manual_seed(T)
    q, k, v, dout = (
        torch.randn(1, T, n, widths.head_dim, device=device, generator=g, dtype=dtype)
        for n in (widths.heads, widths.kv_heads, widths.kv_heads, widths.heads)
    )
    out, lse, state = attention_forward(q, k, v, scale=scale, backend=key)
    repeat = widths.heads // widths.kv_heads
    last = [t[:, :, -n:] for t, n in ((dout, repeat), (q, repeat), (k, 1), (v, 1), (out, repeat))]
    dq, dk, dv = attention_backward(
        *last, lse[:, -repeat:].contiguous(), state, scale=scale, backend=key
    )
    found = {}
    for place, (a, b) in zip(("first", "middle", "last"), ends(T)):
        plain, true = (at_rows(*last[1:4], last[0], scale, a, b, d) for d in (dtype, torch.float64))
        got = {"out": out[:, a:b, -repeat:], "dq": dq[:, a:b], "dk": dk[:, a:b], "dv": dv[:, a:b]}
        for i, (name, x) in enumerate(got.items()):
            if name in ("out", "dq") or b == T:
                found[f"{name}, {place}"] = Error()
                found[f"{name}, {place}"].see(x, plain[i], true[i])
    note(sheet, f"attention {key}", dtype, T, found, elements=q.numel(), group=widths.kv_heads)


def first(job) -> tuple:
    """Sorts jobs, most informative first: bf16 before the rest, and of each the longest, where
    addresses and sums grow.
    """
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
                jobs += [
                    ("loss", loss, (dtype, T, widths)),
                    ("loss", loss, (dtype, T, widths, 0.9 if T > 1 else 0.0)),
                ]
    keys = {torch.float32: ["efficient"]} if args.cuda else {torch.float32: ["cpu"]}
    for dtype in dtypes[:-1]:
        keys[dtype] = (
            ["flash", "cudnn", *([] if common.why_no_fa3() else ["fa3"])] if args.cuda else ["cpu"]
        )
    for dtype, names in keys.items():
        for T in (37,) if args.small else (1, 127, 1000, 4097):
            groups = (1,) if args.small else (1, 2)
            jobs += [
                ("attention", attention, ("", key, dtype, T, widths, g, CAUSAL))
                for key in names
                for g in groups
            ]
            if T > 30 and (dtype != torch.float32 or not args.cuda):
                for what, (pattern, sinks) in float64.patterns(T, args.device).items():
                    # Windows, documents and caps have one kernel; holes and plain sinks have every
                    # backend's.
                    for key in names if what in ("holes", "sinks") else names[:1]:
                        jobs.append(
                            (
                                what,
                                attention,
                                (f", {what}", key, dtype, T, widths, 1, pattern, sinks),
                            )
                        )
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
        except (
            RuntimeError
        ) as error:  # a backend may refuse a shape, a size not fit: said, and the rest goes on
            label = " ".join(
                [name, *(str(a) for a in arguments if isinstance(a, (int, str, torch.dtype)))]
            )
            if common.is_out_of_memory(error) or {"cudnn", "fa3", "efficient"}.intersection(
                map(str, arguments)
            ):
                sheet.skip(label, common.one_line(error))
            else:
                sheet.add(what=label, passed=False, error=common.one_line(error))
        common.clean()
    failed = [r for r in sheet.rows if not r["passed"]]
    sheet.page(
        f"Kernels against float64: {len(sheet.rows) - len(failed)} of {len(sheet.rows)} rows pass",
        WORDS,
    )
    for row in failed:
        print(
            "  FAILED",
            *(row.get(k) for k in ("what", "dtype", "tokens", "where", "share", "error")),
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
