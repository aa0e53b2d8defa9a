"""Seconds by kind of kernel, and compute's waits for copies, from names and intervals of events."""

import re

# The first match counts. Names are those of CUDA kernels (cuBLAS, cuDNN, FlashAttention, Triton,
# ATen) and of CPU operators.
FAMILIES = (
    ("copy host-device", re.compile(r"memcpy (htod|dtoh)", re.I)),
    (
        "copy on device",
        re.compile(
            r"memcpy|^aten::(copy_|clone|contiguous|cat|_to_copy)$|direct_copy|CatArray", re.I
        ),
    ),
    ("communication", re.compile(r"nccl|gloo|c10d|all_?gather|all_?reduce|reduce_scatter", re.I)),
    ("attention", re.compile(r"flash|fmha|attention|cudnn.*sdpa|sdpa", re.I)),
    (
        "optimizer",
        re.compile(r"adam|multi_tensor_apply|_foreach_|lpnorm|clip_grad|_fused_sgd", re.I),
    ),
    ("loss", re.compile(r"cross_entropy|softmax|nll_loss|logsumexp", re.I)),
    ("norm", re.compile(r"rms_?norm|layer_?norm|aten::(mean|rsqrt)", re.I)),
    ("rope", re.compile(r"rope|rotary", re.I)),
    ("swiglu", re.compile(r"swiglu|silu", re.I)),
    (
        "matmul",
        re.compile(
            r"gemm|gemv|cutlass|xmma|cublas|nvjet|splitk|aten::(mm|addmm|bmm|baddbmm|linear)$", re.I
        ),
    ),
    ("embedding", re.compile(r"embedding|index_select|indexing_backward", re.I)),
    ("fill", re.compile(r"memset|aten::(zero_|fill_)$|FillFunctor", re.I)),
    (
        "elementwise",
        re.compile(
            r"elementwise|vectorized|aten::(add|mul|sub|div|neg|pow|sum|exp|sigmoid)_?$|reduce_",
            re.I,
        ),
    ),
)


def family(name: str) -> str:
    """'void cutlass_80_tensorop_...' -> 'matmul'; 'other' without a match."""
    return next((kind for kind, pattern in FAMILIES if pattern.search(name)), "other")


def by_family(times) -> dict:
    """(name, seconds) pairs -> {family: seconds}, largest first."""
    totals: dict = {}
    for name, seconds in times:
        kind = family(name)
        totals[kind] = totals.get(kind, 0.0) + seconds
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def _merged(intervals):
    out = []
    for start, end in sorted(intervals):
        if out and start <= out[-1][1]:
            out[-1][1] = max(out[-1][1], end)
        else:
            out.append([start, end])
    return out


def copy_wait(kernels) -> float:
    """Seconds in which the compute stream was idle while another stream copied between host and
    device.

    kernels: (name, stream, start, end) of device events, in seconds. The compute stream is the one
    with the most work other than copies. Idle time without a copy, when compute waits for the host,
    does not count.
    """
    busy: dict = {}
    for name, stream, start, end in kernels:
        if not family(name).startswith("copy host"):
            busy[stream] = busy.get(stream, 0.0) + end - start
    if not busy:
        return 0.0
    compute = max(busy, key=busy.get)
    work = _merged((s, e) for _, stream, s, e in kernels if stream == compute)
    copies = _merged(
        (s, e)
        for n, stream, s, e in kernels
        if stream != compute and family(n).startswith("copy host")
    )
    gaps = [(a[1], b[0]) for a, b in zip(work, work[1:])]
    return sum(max(0.0, min(e, gap[1]) - max(s, gap[0])) for s, e in copies for gap in gaps)
