"""Attention backends: forward and backward, whole and per group of KV heads, at 8k, 32k and 128k
tokens.

python scripts/gpu/04_attention.py --out $OUT
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import common
import torch
from cases import LLAMA_8B, TINY, Error

from hfpatch.attention.attention import (
    BACKENDS,
    attention_backward,
    attention_forward,
    pick,
)
from hfpatch.budget.cuts import heads_per_group
from hfpatch.lab.float64 import attention_ref

WORDS = """
Causal attention of Llama-3.1-8B (32 query and 8 KV heads of 128), bf16, one sequence, by the ops
that the layer engine calls. `group` KV heads go through a call together (in the engine forward
takes all 8, backward a group); the times are those of all 8 KV heads, so rows of one length
compare. TFLOP/s count the causal half: 2 T^2 H E forward, 2.5 times that backward. `scratch` is
what one backward call holds beyond its gradients. `new_length_ms` is what the first calls of a
length take beyond the second ones: cuDNN builds a plan for each, which batches of many lengths pay
for again and again. Errors are relative to float64. `chosen` marks what the engine takes at that
length, by its own measurement.
"""
TOKENS = (8192, 131072, 32768)
EXACT = 2048  # tokens of the comparison with float64, whose scores exist whole


def backends(args, sheet):
    """name -> (key of BACKENDS, a function that turns it on, one that turns it off)."""
    nothing = lambda: None  # noqa: E731
    if not args.cuda:
        return {"cpu": ("cpu", nothing, nothing)}
    found = {"FA2": ("flash", nothing, nothing), "cuDNN": ("cudnn", nothing, nothing)}
    absent = common.why_no_fa3()
    if absent:
        sheet.skip("FA3", absent)
    else:
        found["FA3"] = ("fa3", nothing, nothing)
    # The engine never asks for FA4, which torch takes for the whole process.
    switch = getattr(torch.nn.attention, "activate_flash_attention_impl", None)
    back = getattr(torch.nn.attention, "restore_flash_attention_impl", None)
    try:
        switch("FA4")
        back()
        found["FA4"] = ("flash", lambda: switch("FA4"), back)
    except Exception as error:  # whatever an absent package, or function, makes it raise
        sheet.skip("FA4", common.one_line(error))
    return found


def inputs(T, heads, kv_heads, E, device, seed=0):
    g = torch.Generator(device=device).manual_seed(seed)
    sizes = (heads, kv_heads, kv_heads, heads)
    return [
        torch.randn(1, T, n, E, device=device, generator=g, dtype=torch.bfloat16) for n in sizes
    ]


def error_of(key, widths, device, T) -> dict:
    q, k, v, dout = inputs(T, widths.heads // widths.kv_heads, 1, widths.head_dim, device, seed=5)
    scale = widths.head_dim**-0.5
    out, lse, state = attention_forward(q, k, v, scale=scale, backend=key)
    grads = attention_backward(dout, q, k, v, out, lse, state, scale=scale, backend=key)
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    true, _ = attention_ref(*leaves, scale=scale)
    true_grads = torch.autograd.grad(true, leaves, dout.double())
    found = []
    for got, exact in zip((out, *grads), (true.detach(), *true_grads)):
        error = Error()
        error.see(got, got, exact)
        found.append(error.relative)
    return {"err_out": found[0], "err_grad": max(found[1:])}


def chosen(T, group, widths, device) -> str | None:
    """The key that the engine takes at this length, where its backward goes by so many KV heads."""
    if heads_per_group(1, T, widths.heads, widths.kv_heads) != group:
        return None
    q, k, *_ = inputs(T, widths.heads, widths.kv_heads, widths.head_dim, device)
    return pick(q, k, widths.kv_heads // group)


def measure(sheet, name, key, T, group, widths, taken):
    device, scale = sheet.args.device, widths.head_dim**-0.5
    repeat = widths.heads // widths.kv_heads
    q, k, v, dout = inputs(T, widths.heads, widths.kv_heads, widths.head_dim, device)
    # Slices of whole tensors, as in the layer: a group's heads are not contiguous in memory.
    q, k, v, dout = (
        q[:, :, : group * repeat],
        k[:, :, :group],
        v[:, :, :group],
        dout[:, :, : group * repeat],
    )
    calls = widths.kv_heads // group

    def stages(i, mark):
        out, lse, state = attention_forward(q, k, v, scale=scale, backend=key)
        mark()
        attention_backward(dout, q, k, v, out, lse, state, scale=scale, backend=key)
        mark()

    forward, backward = (ms * calls for ms in common.timed(stages, budget_ms=500, least=2, most=10))

    def once(start=8):
        """Milliseconds of both directions at a length that nothing was run at before."""
        given = [x[:, start:] for x in (q, k, v)]
        common.synchronize()
        began = time.perf_counter()
        out, lse, state = attention_forward(*given, scale=scale, backend=key)
        attention_backward(dout[:, start:], *given, out, lse, state, scale=scale, backend=key)
        common.synchronize()
        return (time.perf_counter() - began) * 1e3

    new_length = once() - once()
    out, lse, state = attention_forward(q, k, v, scale=scale, backend=key)
    held = common.peak_bytes(
        lambda: attention_backward(dout, q, k, v, out, lse, state, scale=scale, backend=key)
    )
    grads = sum(t.numel() * t.element_size() for t in (q, k, v))
    one_way = 2 * T**2 * widths.heads * widths.head_dim
    sheet.add(
        backend=name, tokens=T, group=group, fwd_ms=forward, bwd_ms=backward,
        fwd_tflop_s=one_way / forward / 1e9, bwd_tflop_s=2.5 * one_way / backward / 1e9,
        scratch_gib=(held - grads) / 2**30 if sheet.args.cuda else None,
        chosen=taken == key and name != "FA4",
        new_length_ms=new_length,
        lse_shape=str(tuple(lse.shape)), out_strides=str(tuple(out.stride())),
        **error_of(key, widths, device, 64 if sheet.args.small else EXACT),
    )  # fmt: skip


def main(argv=None) -> int:
    made = common.parser("04_attention", __doc__)
    made.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    args = common.parse(made, argv)
    sheet = common.Sheet(args)
    sheet.ceilings()
    widths, lengths = (TINY, (33,)) if args.small else (LLAMA_8B, args.tokens)
    groups = [n for n in (1, 2, 4, 8) if n <= widths.kv_heads and widths.kv_heads % n == 0]
    taken = {(T, group): chosen(T, group, widths, args.device) for T in lengths for group in groups}
    for name, (key, on, off) in backends(args, sheet).items():
        assert key in BACKENDS
        on()
        try:
            for T in lengths:
                for group in groups:
                    if sheet.late(f"{name} {T} group {group}"):
                        continue
                    try:
                        measure(sheet, name, key, T, group, widths, taken[T, group])
                    except (
                        RuntimeError
                    ) as error:  # a backend may not take a shape, or need more memory than there is
                        sheet.skip(f"{name} {T} group {group}", common.one_line(error))
                    common.clean()
        finally:
            off()

    def draw(axes):
        rows = [{**r, "what": f"{r['backend']}, {r['group']} KV heads a call"} for r in sheet.rows]
        common.lines(
            axes[0], rows, "tokens", "fwd_tflop_s", "what", title="forward, TFLOP/s (causal)"
        )
        common.lines(
            axes[1], rows, "tokens", "bwd_tflop_s", "what", title="backward, TFLOP/s (causal)"
        )

    sheet.page("Attention backends", WORDS, picture=sheet.picture(draw, wide=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
