"""Which kernels targets.py compiles: each row calls a launcher with tensors on the meta device,
at a real shape.

A new kernel adds its rows to ROWS.
"""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import NamedTuple

import torch

from hfpatch.kernels import cross_entropy, experts, rms_norm, rope, scale, swiglu

NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int64: "i64",
    torch.int32: "i32",
}
NAMES |= {torch.int8: "i8", torch.uint8: "u8", torch.bool: "i1", torch.float64: "fp64"}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
I32, I64 = torch.int32, torch.int64


class Row(NamedTuple):
    """One compilation.

    call: a launcher with its arguments. variant, shape: labels for the table.
    """

    variant: str
    dtype: str
    shape: str
    call: Callable[[], object]
    short: bool = False  # also in the quick test


def meta(*shape: int, dtype=BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


# What families do: (name, weight, offset, cast), as ops/rms_norm.py has it.
NORMS = (
    ("", True, 0.0, "before"),
    (" gemma", True, 1.0, "after"),
    (" olmo2", True, 0.0, "after"),
    (" no weight", False, 0.0, "before"),
)


def _rms_norm_rows():
    # Hidden sizes of Llama 3.2 1B and 3B, 8B, Llama 2 13B, 70B, 405B; 128 is a norm over one head
    # (Qwen3).
    for D in (128, 2048, 3072, 4096, 5120, 8192, 16384):
        for x_dtype, w_dtype in ((BF16, BF16), (FP16, FP16), (FP32, FP32), (BF16, FP32)):
            if D != 4096 and x_dtype != BF16:
                continue
            x, w, rstd = (
                meta(8192, D, dtype=x_dtype),
                meta(D, dtype=w_dtype),
                meta(8192, dtype=FP32),
            )
            label, short = NAMES[x_dtype], D == 4096 and x_dtype is w_dtype is BF16
            if x_dtype != w_dtype:
                label += "+" + NAMES[w_dtype]
            for order, has_weight, offset, cast in NORMS if D == 4096 else NORMS[:1]:
                if order in (" olmo2", " no weight") and not short:
                    continue
                weight = w if has_weight else None
                y_dtype = x_dtype if cast == "after" else torch.promote_types(x_dtype, w_dtype)
                dy = meta(8192, D, dtype=y_dtype)
                yield Row(
                    f"rms_norm{order} fwd",
                    label,
                    f"[*,{D}]",
                    partial(rms_norm.rms_norm_fwd, (dy, rstd), x, weight, 1e-6, offset, cast),
                    short,
                )
                yield Row(
                    f"rms_norm{order} bwd",
                    label,
                    f"[*,{D}]",
                    partial(rms_norm.rms_norm_bwd, (x, w), dy, x, weight, rstd, offset, has_weight),
                    short,
                )


def _swiglu_rows():
    for activation in ("silu", "gelu", "gelu_tanh"):
        for dtype in (BF16, FP16, FP32):
            whole, both = meta(8192, 14336, dtype=dtype), meta(8192, 28672, dtype=dtype)
            for layout, gate, up in (("", whole, whole), (" halves", *both.chunk(2, -1))):
                shape, short = f"[*,14336]{layout}", dtype == BF16 and activation == "silu"
                yield Row(
                    f"{activation} fwd",
                    NAMES[dtype],
                    shape,
                    partial(swiglu.swiglu_fwd, whole, gate, up, activation),
                    short,
                )
                yield Row(
                    f"{activation} bwd",
                    NAMES[dtype],
                    shape,
                    partial(swiglu.swiglu_bwd, (whole, whole), whole, gate, up, activation),
                    short,
                )


def _experts_rows():
    # Qwen3-30B-A3B's experts and gpt-oss-20b's, 4,096 tokens.
    for name, E, K, D, F, bias in (("silu", 128, 8, 2048, 768, False),
                                   ("clamped", 32, 4, 2880, 2880, True)):  # fmt: skip
        for dtype in (BF16, FP32):
            S, short, label = 4096 * K, dtype == BF16, NAMES[dtype]
            gu, a, z = (meta(S, n, dtype=dtype) for n in (2 * F, F, D))
            ids, at, offs = meta(S, dtype=I64), meta(4096, K, dtype=I64), meta(E, dtype=I32)
            b, w = meta(E, 2 * F, dtype=dtype) if bias else None, meta(S, dtype=FP32)
            kind, out = (name, 1.702, 7.0, bias), meta(E, D, F, dtype=FP32)
            w2 = meta(E, D, F, dtype=dtype).transpose(1, 2)
            calls = {
                "act": partial(experts.expert_act, a, gu, w, b, ids, *kind),
                "act bwd": partial(
                    experts.expert_act_bwd, (gu, a, w), a, gu, w, b, ids, *kind, True
                ),
                "product": partial(experts.expert_product, z, a, w2, offs),
                "combine": partial(experts.expert_combine, z[:4096], z, at),
                "sums": partial(experts.expert_sums, out, z, a, offs, False),
            }
            for part, call in calls.items():
                yield Row(f"experts {name} {part}", label, f"[{S},{F}]", call, short)


def _rope_rows():
    # Heads of 8B, 70B, 405B (128) and of Llama 3.2 1B (64); a projection's view [B, T, H, E] and a
    # contiguous q.
    for heads, kv_heads, width in ((32, 8, 128), (64, 8, 128), (128, 8, 128), (32, 8, 64)):
        for dtype in (BF16, FP16, FP32) if heads == 32 and width == 128 else (BF16,):
            cos = meta(1, 8192, width, dtype=dtype)
            for layout in ("BTHE", "BHTE"):
                if layout == "BTHE":
                    qk = [
                        meta(1, 8192, h, width, dtype=dtype).transpose(1, 2)
                        for h in (heads, kv_heads)
                    ]
                else:
                    qk = [meta(1, h, 8192, width, dtype=dtype) for h in (heads, kv_heads)]
                for transpose in (False, True):
                    yield Row(
                        "rope bwd" if transpose else "rope fwd",
                        NAMES[dtype],
                        f"{heads}+{kv_heads} x {width} {layout}",
                        partial(rope.rope, qk, *qk, cos, cos, transpose, None),
                        dtype == BF16 and heads == 32 and width == 128,
                    )


def _logits(V: int, dtype: torch.dtype) -> tuple:
    """Of 4,096 tokens: logits, labels, the factor of a loss; labels of a Row."""
    x, y = meta(4096, V, dtype=dtype), meta(4096, dtype=I64)
    short = dtype == BF16 and V == 128256
    return x, y, meta(dtype=FP32), NAMES[dtype], f"V={V}", short


VOCABULARIES = 128256, 32000  # of Llama 3 and of Llama 2
SOFTCAP = 1 / 30.0, 30.0  # (inner, outer)


def _cross_entropy_rows():
    # Each kind: its name, (inner, outer), smoothing, z-loss, outputs, factors of the backward.
    kinds = (
        ("", (0.0, 1.0), 0.0, 0.0, 3, 3),
        (" smoothing softcap z", SOFTCAP, 0.1, 1e-4, 4, 4),
    )
    fwd, bwd = cross_entropy.cross_entropy_fwd, cross_entropy.cross_entropy_bwd
    for V, dtype, (kind, z, smoothing, z_loss, outs, factors) in product(
        VOCABULARIES, (BF16, FP16, FP32), kinds
    ):
        x, y, scale, *labels, short = _logits(V, dtype)
        rest = meta(outs, 4096, dtype=FP32), -100, *z, scale, smoothing, z_loss, outs == 4
        for grad, name in ((True, "loss+grad"), (False, "loss")):
            yield Row(f"{name}{kind}", *labels, partial(fwd, x, y, *rest, grad), short and grad)
        call = partial(bwd, x, y, meta(factors, 4096, dtype=FP32), -100, *z)
        yield Row(f"loss bwd{kind}", *labels, call, short)


def _log_prob_rows():
    fwd, bwd = cross_entropy.cross_entropy_fwd, cross_entropy.cross_entropy_bwd
    kinds = ("", (0.0, 1.0)), (" softcap", SOFTCAP)
    for V, dtype, (kind, z) in product(VOCABULARIES, (BF16, FP16, FP32), kinds):
        x, y, scale, *labels, short = _logits(V, dtype)
        rows = meta(7, 4096, dtype=FP32)
        call = partial(fwd, x, y, rows, -100, *z, scale, 0.0, 0.0, True, False)
        yield Row(f"log prob{kind}", *labels, call, short)
        yield Row(f"log prob bwd{kind}", *labels, partial(bwd, x, y, rows, -100, *z), short)


def _scale_rows():
    for dtype in (BF16, FP16, FP32):
        call = partial(scale.scale_, meta(128256, 4096, dtype=dtype), meta(dtype=FP32))
        yield Row("scale", NAMES[dtype], "[128256,4096]", call)


ROWS = (
    _rms_norm_rows, _swiglu_rows, _experts_rows, _rope_rows, _cross_entropy_rows, _log_prob_rows,
    _scale_rows
)  # fmt: skip
