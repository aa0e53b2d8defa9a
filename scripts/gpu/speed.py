"""How fast: rates of attention, the loss and the element-wise ops, and steps of whole models."""

import time
from functools import partial

import common
import torch
from common import copy_rate, matmul_rate, timed
from elementwise import EPS, LLAMA_8B, OPS, TINY

import hfpatch
from hfpatch.attention.backends import BACKENDS
from hfpatch.lab.checks import batch_of
from hfpatch.lab.device import clean, synchronize
from hfpatch.lab.made import made
from hfpatch.lab.watch import pinned_bytes, policy_used
from hfpatch.ops import linear_cross_entropy

GiB = common.GiB
H100_FLOPS = 989e12  # dense bf16 of the data sheet: what MFU is a share of


def seconds(function, *given) -> float:
    """The median seconds of a call on the device."""

    def stages(i, mark):
        function(*given)
        mark()

    return timed(stages, least=3, most=20)[0] / 1e3


# --- ops ------------------------------------------------------------------------------------------


def attention(rows, part: str) -> None:
    """Causal attention of 8B's heads: TFLOP/s, and the seconds of a length's first call."""
    for T in (256,) if rows.args.small else (8192, 32768, 131072):
        for name in ("flash", "cudnn"):
            _attention(rows, part, name, T)


def _attention(rows, part: str, name: str, T: int) -> None:
    forward, backward = BACKENDS[name]
    make = partial(torch.randn, device=rows.args.device, dtype=torch.bfloat16)
    q, k, v, dout = (make(1, T, heads, 128).transpose(1, 2) for heads in (32, 8, 8, 32))
    scale, flops = 128**-0.5, 2 * 32 * T * T * 128  # causal, forward
    begin = time.perf_counter()
    out, lse, state = forward(q, k, v, scale)
    synchronize()
    first = time.perf_counter() - begin
    fwd = seconds(forward, q, k, v, scale)
    bwd = seconds(backward, dout, q, k, v, out, lse, state, scale)
    rows.add(
        part=part, backend=name, tokens=T, first_s=first, fwd_tflop_s=flops / fwd / 1e12,
        bwd_tflop_s=2.5 * flops / bwd / 1e12,
    )  # fmt: skip


def liger_forms(cuda: bool) -> dict:
    """Liger's form of each op, by name; empty where it is absent or has no device to run on."""
    try:
        from liger_kernel.transformers import functional as liger
    except ImportError:
        return {}
    forms = {
        "rms_norm": lambda x, w: (liger.liger_rms_norm(x, w, EPS),),
        "rope": lambda q, k, cos, sin: tuple(liger.liger_rope(q, k, cos, sin)),
        "swiglu": lambda g, u: (liger.liger_swiglu(g, u),),
        "loss": lambda x, w, y: liger.liger_fused_linear_cross_entropy(x, w, y),
    }
    return forms if cuda else {}


def elementwise(rows, part: str) -> None:
    """Each op's rate as a share of a large copy's, beside Liger's."""
    copy = copy_rate(rows.args.device, rows.args.small)
    liger = liger_forms(rows.args.cuda)
    for T in (33,) if rows.args.small else (32768, 8192):
        for op in OPS.values():
            for impl, form in (("hfpatch", op.ours), ("liger", liger.get(op.name))):
                if form is not None:
                    _elementwise(rows, part, op, impl, form, T, copy)
            clean()


def _elementwise(rows, part: str, op, impl: str, form, T: int, copy: float) -> None:
    widths = TINY if rows.args.small else LLAMA_8B
    own, shared, fixed = op.make(T, widths, torch.bfloat16, rows.args.device, seed=0)
    leaves = [t.requires_grad_() for t in (*own, *shared)]
    ups = [torch.randn_like(o) for o in op.plain(*leaves, *fixed)]

    def stages(i, mark):
        outs = form(*leaves, *fixed)
        mark()
        torch.autograd.grad(outs, leaves, ups)
        mark()

    fwd, bwd = timed(stages, budget_ms=60)
    fwd_bytes = 2 * T * op.fwd_elements(widths)
    bwd_bytes = 2 * T * op.bwd_elements(widths)
    rows.add(
        part=part, op=op.name, impl=impl, tokens=T, fwd_ms=fwd, bwd_ms=bwd,
        fwd_share=fwd_bytes / (fwd / 1e3) / copy, bwd_share=bwd_bytes / (bwd / 1e3) / copy,
    )  # fmt: skip


def loss(rows, part: str) -> None:
    """The head and its loss, forward and backward: even and odd vocabularies, beside Liger."""
    small, device = rows.args.small, rows.args.device
    matmul = matmul_rate(device, small)
    forms = {"hfpatch": lambda x, w, y: linear_cross_entropy(x, w, y, num_valid=len(y))}
    liger = liger_forms(rows.args.cuda)
    if liger:
        forms["liger"] = liger["loss"]
    sizes = [(8192, 128256), (8192, 128257), (32768, 128256)]
    D = 32 if small else 4096
    for N, V in [(64, 97)] if small else sizes:
        x = torch.randn(N, D, device=device, dtype=torch.bfloat16, requires_grad=True)
        w = (0.02 * torch.randn(V, D, device=device)).bfloat16().requires_grad_()
        y = torch.randint(0, V, (N,), device=device)
        for impl, form in forms.items():
            took = seconds(lambda form, *given: _loss_step(form, *given), form, x, w, y)
            rate = 6 * N * D * V / took
            rows.add(
                part=part, impl=impl, tokens=N, vocab=V, ms=1e3 * took, tflop_s=rate / 1e12,
                share=rate / matmul,
            )  # fmt: skip
        del x, w, y
        clean()


def _loss_step(form, x, w, y):
    return torch.autograd.grad(form(x, w, y), [x, w])


# --- steps of whole models ------------------------------------------------------------------------


def become(model, impl: str, keep="auto") -> None:
    """Makes a stock model "hfpatch", "stock ckpt", "liger" or "liger ckpt"."""
    if impl == "hfpatch":
        hfpatch.apply(model, checkpointing=keep)
    if impl.startswith("liger"):
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model)
    if impl.endswith("ckpt"):
        model.gradient_checkpointing_enable({"use_reentrant": False})


def memory(model) -> dict:
    """The peaks since they were last reset, in GiB."""
    if not torch.cuda.is_available():
        return {}
    return {
        "peak_gib": torch.cuda.max_memory_allocated() / GiB,
        "reserved_gib": torch.cuda.max_memory_reserved() / GiB,
        "pinned_gib": pinned_bytes(model) / GiB,
        "retries": torch.cuda.memory_stats()["num_alloc_retries"],
    }


def model_flops(model, tokens: int) -> float:
    """FLOPs of a step as MFU counts them: 6 per matmul weight and token, causal attention once."""
    config = model.config.get_text_config()
    matmuls = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    matmuls -= model.get_input_embeddings().weight.numel()
    if config.tie_word_embeddings:  # one weight, which the head does multiply by
        matmuls += model.get_input_embeddings().weight.numel()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = config.num_attention_heads * head_dim
    return 6 * matmuls * tokens + 6 * config.num_hidden_layers * width * tokens**2


def steps(
    rows, part, *, layers, tokens, count, impl="hfpatch", keep="auto", adam=False, trace=False
):
    """Steps of Llama-3.1-8B's widths on random tokens in bf16.

    adam: a fused AdamW steps in the time; else an SGD behind it, which takes no memory. trace: one
    more step under torch's profiler.
    """
    preset, changes = "llama-3.1-8b", {"num_hidden_layers": layers}
    if rows.args.small:
        preset, changes, tokens, count = "llama-tiny", {}, 64, 2
    model = made(preset, changes, rows.args.device, torch.bfloat16, tokens)
    become(model, impl, keep)
    try:
        timed_steps(rows, part, model, tokens, count, adam, trace, {"impl": impl, "keep": keep})
    finally:
        model = None
        clean()


def timed_steps(rows, part, model, tokens, count, adam, trace, said: dict) -> None:
    trained = [p for p in model.parameters() if p.requires_grad]
    if adam:
        optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    else:
        optimizer = torch.optim.SGD(trained, lr=1e-5)
    batch = batch_of(model, tokens, rows.args.device)
    batch["labels"] = batch["input_ids"].clone()
    layers = model.config.get_text_config().num_hidden_layers
    said = said | {"layers": layers, "tokens": tokens, "adam": adam}

    def one():
        model(**batch, use_cache=False).loss.backward()
        if adam:
            optimizer.step()

    if rows.args.cuda:
        torch.cuda.reset_peak_memory_stats()
    for i in range(count):
        synchronize()
        begin = time.perf_counter()
        one()
        queued = time.perf_counter() - begin
        synchronize()
        took = time.perf_counter() - begin
        if not adam:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        rows.add(
            part=part, **said, step=i, s=took, host_s=queued,
            mfu=model_flops(model, tokens) / took / H100_FLOPS, **memory(model),
            policy=str(policy_used(model)),
        )  # fmt: skip
        if rows.left() < 1.3 * took + 5:
            return
    if trace and rows.args.cuda:
        traced(rows, part, said, one)
        optimizer.zero_grad(set_to_none=True)


def lengths(rows, part: str) -> None:
    """Eight lengths with AdamW: seconds and memory of each step."""
    small = rows.args.small
    changes = {} if small else {"num_hidden_layers": 16}
    preset = "llama-tiny" if small else "llama-3.1-8b"
    model = made(preset, changes, rows.args.device, torch.bfloat16, 32768)
    hfpatch.apply(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    found = (64, 96, 48) if small else (12594, 26843, 10259, 16550, 12594, 26843, 20000, 30000)
    for tokens in found:
        batch = batch_of(model, tokens, rows.args.device)
        if rows.args.cuda:
            torch.cuda.reset_peak_memory_stats()
        synchronize()
        begin = time.perf_counter()
        model(**batch, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        synchronize()
        took = time.perf_counter() - begin
        policy = str(policy_used(model))
        rows.add(part=part, tokens=tokens, s=took, **memory(model), policy=policy)


# --- one step's kernels ---------------------------------------------------------------------------

KINDS = {  # of a kernel, by a part of its name: the first that fits
    "copy_host": ("Memcpy DtoH", "Memcpy HtoD"),
    "attention": ("flash", "fmha", "sdpa", "cudnn_generated"),
    "matmul": ("gemm", "nvjet", "cutlass", "cublas", "xmma", "splitK", "gemv"),
    "hfpatch": ("rms_norm", "rope", "swiglu", "cross_entropy"),
}


def traced(rows, part: str, said: dict, one) -> None:
    """One step under torch's profiler: seconds by kind of kernel, and copies that nothing hides."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        one()
        synchronize()
    device = torch.autograd.DeviceType.CUDA
    found = [e for e in profiler.events() if e.device_type == device]
    if not found:
        rows.add(part=part, left_out="trace", why="the profiler saw no kernel")
        return
    kernels, copies, by_kind, by_name = [], [], {}, {}
    for event in found:
        span = event.time_range.start / 1e6, event.time_range.end / 1e6
        kind = kind_of(event.name)
        by_kind[kind] = by_kind.get(kind, 0.0) + span[1] - span[0]
        name = event.name[:70]
        by_name[name] = by_name.get(name, 0.0) + span[1] - span[0]
        (copies if kind == "copy_host" else kernels).append(span)
    whole = max(b for _, b in kernels + copies) - min(a for a, _ in kernels + copies)
    busy = covered(kernels)
    both = covered(kernels + copies)
    rows.add(
        part=part, what="trace", **said, step_s=whole, kernel_s=busy, exposed_copy_s=both - busy,
        idle_s=whole - both, launches=len(found), **by_kind,
    )  # fmt: skip
    top = sorted(by_name.items(), key=lambda item: -item[1])[:14]
    top = {name: round(took, 4) for name, took in top}
    rows.add(part=part, what="kernels", **said, top=top)


def kind_of(name: str) -> str:
    return next((k for k, parts in KINDS.items() if any(p in name for p in parts)), "other")


def covered(spans: list) -> float:
    """Seconds in which at least one of these (start, end) runs."""
    total, end = 0.0, float("-inf")
    for a, b in sorted(spans):
        total += max(0.0, b - max(a, end))
        end = max(end, b)
    return total
