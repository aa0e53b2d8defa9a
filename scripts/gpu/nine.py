"""The decisive rows of one GPU in nine minutes, most informative first.

python scripts/gpu/nine.py --out $OUT             all parts, in the order of PARTS
python scripts/gpu/nine.py --parts loss step_8k   some of them
python scripts/gpu/nine.py --small                the whole path at tiny size, also on a CPU

Every row is in nine.jsonl the moment it is known. The parts run in one worker process; if it dies,
a new one goes on with the next part.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import common
import torch
import torch.nn.functional as F

import hfpatch
from hfpatch.attention import heads
from hfpatch.attention.backends import BACKENDS
from hfpatch.lab import float64
from hfpatch.lab.checks import batch_of, compared, ways
from hfpatch.lab.device import clean, copy_rate, host_rates, matmul_rate
from hfpatch.lab.elementwise import LLAMA_8B, OPS, TINY, Error, run
from hfpatch.lab.made import made
from hfpatch.lab.watch import pinned_gib, policy_used
from hfpatch.ops import linear_cross_entropy
from hfpatch.ops.linear_cross_entropy import linear_cross_entropy_ref

GiB = 1 << 30
H100_FLOPS = 989e12  # dense bf16 of the data sheet: what MFU is a share of


class Rows:
    """nine.jsonl: a line a row, stamped once by its first line."""

    def __init__(self, args):
        self.args = args
        self.began = float(os.environ.get("NINE_BEGAN", time.time()))
        self.file = open(Path(args.out) / "nine.jsonl", "a", encoding="utf-8")

    def left(self) -> float:
        return self.args.seconds - (time.time() - self.began)

    def add(self, **row) -> None:
        row = {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in row.items()}
        row["at"] = round(time.time() - self.began, 1)
        line = json.dumps(row, default=str)
        print(line, flush=True)
        self.file.write(line + "\n")
        self.file.flush()


def seconds(function, runs: int = 3) -> float:
    """The median seconds of a call on the device, after one that warms up."""
    return common.timed(lambda i, mark: (function(), mark()), least=runs, most=20)[0] / 1e3


# --- is it right ----------------------------------------------------------------------------------


def machine(rows) -> None:
    device, small = rows.args.device, rows.args.small
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, 256, dtype=torch.float64, generator=g) for _ in range(2))
    true, got = a @ b, (a.to(device) @ b.to(device)).cpu()
    rows.add(part="machine", what="float64 product against the CPU's",
             passed=bool((got - true).abs().max() < 1e-9) and got.norm().item() > 0)  # fmt: skip
    memory = (
        dict(line.split(":") for line in open("/proc/meminfo"))
        if Path("/proc/meminfo").exists()
        else {}
    )
    rows.add(part="machine", what="memory", total=memory.get("MemTotal", "").strip(),
             available=memory.get("MemAvailable", "").strip(), cpus=os.cpu_count())  # fmt: skip
    rows.add(part="machine", what="rates", copy_gb_s=copy_rate(device, small) / 1e9,
             to_host_gb_s=host_rates(device, small)[0] / 1e9,
             to_device_gb_s=host_rates(device, small)[1] / 1e9)  # fmt: skip
    shapes = [(8192, 8192, 8192), (8192, 14336, 4096), (8192, 4096, 14336), (8192, 4096, 4096),
              (2048, 14336, 4096), (14336, 4096, 8192), (8192, 128256, 4096)]  # fmt: skip
    for m, n, k in shapes[:1] if small else shapes:
        rows.add(part="machine", what="matmul", m=m, n=n, k=k,
                 tflop_s=matmul_rate(device, small, m=m, n=n, k=k) / 1e12)  # fmt: skip
    for gib in () if device.type != "cuda" else (1, 4):
        from hfpatch.store.device import Block, device_for

        begin = time.perf_counter()
        block = Block(device_for(torch.device("cuda:0")), gib << (20 if small else 30), True)
        took = time.perf_counter() - begin
        rows.add(part="machine", what="pin", gib=gib, gib_s=gib / took, status=block.status)
        del block


def on_cpu(rows) -> None:
    """Every op of bf16 training on this device against float64 on the CPU, at 8B's widths."""
    device, widths = rows.args.device, TINY if rows.args.small else LLAMA_8B
    T, dtype, cpu = 131, torch.bfloat16, torch.device("cpu")
    for op in OPS.values():
        given = op.make(T, widths, dtype, cpu, seed=T)
        first = op.plain(*given[0], *given[1], *given[2])
        ups = [torch.randn(o.shape, dtype=o.dtype) for o in first]
        groups = [[t.to(device) for t in group] for group in (*given, ups)]
        got = [t.cpu() for group in run(op.ours, *groups) for t in group]
        plain = [t for group in run(op.plain, *given, ups) for t in group]
        true = [t for group in run(op.exact, *given, ups, torch.float64) for t in group]
        report(rows, "on_cpu", op.name, T, dtype, got, plain, true)
    for V in (211,) if rows.args.small else (32768, 32769):
        x = torch.randn(T, widths.hidden, dtype=dtype)
        w = (0.02 * torch.randn(V, widths.hidden)).to(dtype)
        y = torch.randint(0, V, (T,))
        y[::5] = -100
        results = []
        for where, dt, form in (
            (device, dtype, linear_cross_entropy),
            (cpu, dtype, lambda x, w, y: F.cross_entropy(F.linear(x, w).float(), y)),
            (cpu, torch.float64, linear_cross_entropy_ref),
        ):
            leaves = [t.to(where, dt).requires_grad_() for t in (x, w)]
            loss = form(*leaves, y.to(where))
            results.append([t.detach().cpu() for t in (loss, *torch.autograd.grad(loss, leaves))])
        report(rows, "on_cpu", f"linear_cross_entropy, V = {V:,}", T, dtype, *results)
    experts(rows, cpu)


def experts(rows, cpu) -> None:
    """Experts, one of them without a token, against float64 on the CPU."""
    from hfpatch.ops.experts import Layout, experts, experts_ref

    N, D, I, E, dtype = (37, 64, 96, 4, torch.bfloat16)
    if not rows.args.small:
        N, D, I, E = 259, 1024, 512, 8
    for interleaved in (False, True):
        layout = Layout("silu", interleaved=interleaved)
        g = torch.Generator().manual_seed(0)
        ids = torch.randint(0, E - 1, (N, 2), generator=g)
        values = [torch.randn(N, D, generator=g), torch.rand(N, 2, generator=g)]
        values += [0.05 * torch.randn(E, 2 * I, D, generator=g)]
        values += [0.05 * torch.randn(E, D, I, generator=g)]
        up, results = torch.randn(N, D, generator=g), []
        for where, dt, form in (
            (rows.args.device, dtype, experts),
            (cpu, dtype, experts_ref),
            (cpu, torch.float64, experts_ref),
        ):
            x, w, w1, w2 = (t.to(dtype).to(where, dt).requires_grad_() for t in values)
            y = form(x, ids.to(where), w, w1, w2, layout=layout)
            grads = torch.autograd.grad(y, [x, w, w1, w2], up.to(where, y.dtype))
            results.append([t.detach().cpu() for t in (y, *grads)])
        name = "experts" + (", interleaved" if interleaved else "")
        report(rows, "on_cpu", name, N, dtype, *results)


def report(rows, part: str, what: str, tokens: int, dtype, got, plain, true) -> None:
    found = {i: Error() for i in range(len(got))}
    for i, error in found.items():
        error.see(got[i], plain[i], true[i].double())
    worst = float64.worst_of(found, dtype)
    share = found[worst].share(dtype)
    exact = [e.got == 0 and t.numel() > 1 for e, t in zip(found.values(), got)]
    rows.add(part=part, what=what, tokens=tokens, share=share, where=worst,
             zero=any(exact), passed=share <= 1)  # fmt: skip


def gradients(rows) -> None:
    """Two layers of 8B's widths, each way of keeping, both attention kernels, against float64."""
    T, changes = 2051, {"hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 32768,
                        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}  # fmt: skip
    if rows.args.small:
        T, changes = 45, {"hidden_size": 64, "intermediate_size": 112, "vocab_size": 97}
    changes = changes | {"num_hidden_layers": 2, "initializer_range": 0.02}
    model = made("llama-tiny", changes, rows.args.device, torch.bfloat16)
    batch, chosen = batch_of(model, T, rows.args.device), heads.pick
    settings = ways(16 if rows.args.small else 256)
    names = ("host, all kept", "host, attention again", "one tile", "auto")
    settings = {k: settings[k] for k in names}
    for key in ("flash", "cudnn") if rows.args.cuda else ("cpu",):
        heads.pick = lambda *_, key=key: key
        try:
            for way, share, where in compared(model, batch, settings, torch.bfloat16):
                rows.add(part="gradients", backend=key, way=way, share=share, where=where,
                         passed=0 < share <= 1)  # fmt: skip
        finally:
            heads.pick = chosen


# --- how fast -------------------------------------------------------------------------------------


def attention(rows) -> None:
    device = rows.args.device
    for T in (256,) if rows.args.small else (8192, 32768, 131072):
        q, k, v, dout = (
            torch.randn(1, T, h, 128, device=device, dtype=torch.bfloat16).transpose(1, 2)
            for h in (32, 8, 8, 32)
        )
        flops = 2 * 32 * T * T * 128  # causal, forward
        for name in ("flash", "cudnn"):
            forward, backward = BACKENDS[name]
            begin = time.perf_counter()
            out, lse, state = forward(q, k, v, 128**-0.5)
            common.synchronize()
            first = time.perf_counter() - begin
            fwd = seconds(lambda: forward(q, k, v, 128**-0.5))
            bwd = seconds(lambda: backward(dout, q, k, v, out, lse, state, 128**-0.5))
            rows.add(part="attention", backend=name, tokens=T, first_s=first,
                     fwd_tflop_s=flops / fwd / 1e12, bwd_tflop_s=2.5 * flops / bwd / 1e12)  # fmt: skip


def elementwise(rows) -> None:
    """Each op's rate as a share of a copy's, beside Liger's."""
    from cases import liger_forms

    device, widths = rows.args.device, TINY if rows.args.small else LLAMA_8B
    copy = copy_rate(device, rows.args.small)
    liger = liger_forms(device)
    for T in (33,) if rows.args.small else (32768, 8192):
        for op in OPS.values():
            given = op.make(T, widths, torch.bfloat16, device, seed=0)
            leaves = [t.requires_grad_() for t in (*given[0], *given[1])]
            ups = [torch.randn_like(o) for o in op.plain(*leaves, *given[2])]
            for impl, form in (("hfpatch", op.ours), ("liger", liger.get(op.name))):
                if form is None:
                    continue

                def stages(i, mark):
                    outs = form(*leaves, *given[2])
                    mark()
                    torch.autograd.grad(outs, leaves, ups)
                    mark()

                fwd, bwd = common.timed(stages, budget_ms=60)
                bytes_fwd, bytes_bwd = (
                    T * 2 * f(widths) for f in (op.fwd_elements, op.bwd_elements)
                )
                rows.add(part="elementwise", op=op.name, impl=impl, tokens=T,
                         fwd_share=bytes_fwd / (fwd / 1e3) / copy,
                         bwd_share=bytes_bwd / (bwd / 1e3) / copy)  # fmt: skip
            del given, leaves, ups
            clean()


def loss(rows) -> None:
    """The head and its loss, forward and backward: an even and an odd vocabulary, beside Liger."""
    device, small = rows.args.device, rows.args.small
    matmul = matmul_rate(device, small)
    D = 32 if small else 4096
    forms = {"hfpatch": lambda x, w, y: linear_cross_entropy(x, w, y, num_valid=len(y))}
    try:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        forms["liger"] = lambda x, w, y: liger_fused_linear_cross_entropy(x, w, y)
    except ImportError:
        rows.add(part="loss", left_out="liger", why="not installed")
    if not rows.args.cuda:
        forms.pop("liger", None)
    sizes = [(8192, 128256), (8192, 128257), (32768, 128256)]
    for N, V in [(64, 97)] if small else sizes:
        x = torch.randn(N, D, device=device, dtype=torch.bfloat16, requires_grad=True)
        w = (0.02 * torch.randn(V, D, device=device)).bfloat16().requires_grad_()
        y = torch.randint(0, V, (N,), device=device)
        for impl, form in forms.items():
            if impl == "liger" and N > 8192:
                continue
            took = seconds(lambda: torch.autograd.grad(form(x, w, y), [x, w]))
            rate = 6 * N * D * V / took
            rows.add(part="loss", impl=impl, tokens=N, vocab=V, ms=1e3 * took,
                     tflop_s=rate / 1e12, share=rate / matmul)  # fmt: skip
        del x, w, y
        clean()


def policy_of(model) -> str:
    try:
        return str(policy_used(model))
    except Exception as error:  # a row without its policy is still a row
        return common.one_line(error)


def steps(rows, part, layers, tokens, count, impl="hfpatch", keep="auto", adam=False, trace=False):
    """Steps of Llama-3.1-8B's widths on random tokens, in bf16; `trace`: one more, profiled."""
    device = rows.args.device
    preset, changes = "llama-3.1-8b", {"num_hidden_layers": layers}
    if rows.args.small:
        preset, changes, tokens, layers = "llama-tiny", {}, 64, 2
    if rows.args.cuda:
        torch.cuda.reset_peak_memory_stats()
    model = made(preset, changes, device, torch.bfloat16, tokens)
    if impl == "hfpatch":
        hfpatch.apply(model, checkpointing=keep)
    if impl.startswith("liger"):
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(model=model)
    if impl.endswith("checkpointing"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if adam:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    else:  # not timed: it shows hfpatch that no optimizer's states are to come
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    head = model.lm_head.weight.numel()
    matmuls = sum(p.numel() for p in model.parameters() if p.dim() > 1) - head  # less the embedding
    width = model.config.num_attention_heads * model.config.head_dim
    flops = 6 * matmuls * tokens + 6 * layers * width * tokens**2
    batch = batch_of(model, tokens, device)
    batch["labels"] = batch["input_ids"].clone()

    def one():
        model(**batch, use_cache=False).loss.backward()
        if adam:
            optimizer.step()

    try:
        for i in range(count):
            common.synchronize()
            begin = time.perf_counter()
            one()
            queued = time.perf_counter() - begin
            common.synchronize()
            took = time.perf_counter() - begin
            if not adam:
                optimizer.step()
            model.zero_grad(set_to_none=True)
            memory = {}
            if rows.args.cuda:
                memory = {"peak_gib": torch.cuda.max_memory_allocated() / GiB,
                          "reserved_gib": torch.cuda.max_memory_reserved() / GiB,
                          "retries": torch.cuda.memory_stats()["num_alloc_retries"],
                          "pinned_gib": pinned_gib(model)}  # fmt: skip
            rows.add(part=part, impl=impl, keep=str(keep), adam=adam, layers=layers, tokens=tokens,
                     step=i, s=took, host_s=queued, mfu=flops / took / H100_FLOPS, **memory,
                     policy=policy_of(model) if impl == "hfpatch" else "")  # fmt: skip
            if rows.left() < 1.3 * took + 5:
                return
        if trace and rows.args.cuda:
            traced(rows, part, impl, layers, tokens, one)
            model.zero_grad(set_to_none=True)
    finally:
        del model, optimizer
        clean()


KINDS = {  # of a kernel by a part of its name, the first that fits
    "attention": ("flash", "fmha", "sdpa", "cudnn_generated", "cutlass_fused"),
    "matmul": ("gemm", "nvjet", "cutlass", "cublas", "sm90_xmma", "splitK", "gemv"),
    "copy host": ("Memcpy DtoH", "Memcpy HtoD", "Memcpy dtoh", "Memcpy htod"),
    "copy device": ("Memcpy DtoD", "Memset", "copy_kernel", "CatArray"),
    "hfpatch": ("rms_norm", "rope", "swiglu", "cross_entropy", "_kernel"),
}


def traced(rows, part, impl, layers, tokens, one) -> None:
    """One step under torch's profiler: seconds by kind of kernel, and what no kernel hides."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        one()
        common.synchronize()
    events = [
        (e.name, e.time_range.start / 1e6, e.time_range.end / 1e6)
        for e in profiler.events()
        if e.device_type == torch.autograd.DeviceType.CUDA
    ]
    if not events:
        rows.add(part=part, left_out="trace", why="the profiler saw no kernel")
        return
    spans, by_kind, by_name = {}, {}, {}
    for name, start, end in events:
        kind = next((k for k, parts in KINDS.items() if any(p in name for p in parts)), "other")
        by_kind[kind] = by_kind.get(kind, 0.0) + end - start
        by_name[name[:60]] = by_name.get(name[:60], 0.0) + end - start
        spans.setdefault("copies" if kind == "copy host" else "kernels", []).append((start, end))
    kernels, copies = (union(spans.get(k, [])) for k in ("kernels", "copies"))
    whole = max(e[2] for e in events) - min(e[1] for e in events)
    busy = sum(b - a for a, b in kernels)
    both = sum(b - a for a, b in union(spans.get("kernels", []) + spans.get("copies", [])))
    rows.add(part=part, what="trace", impl=impl, layers=layers, tokens=tokens, step_s=whole,
             kernel_s=busy, exposed_copy_s=both - busy, idle_s=whole - both,
             copy_s=sum(b - a for a, b in copies), launches=len(events), **by_kind)  # fmt: skip
    top = sorted(by_name.items(), key=lambda kv: -kv[1])[:14]
    rows.add(part=part, what="kernels", impl=impl, layers=layers, tokens=tokens,
             top={k: round(v, 4) for k, v in top})  # fmt: skip


def union(spans: list) -> list:
    """Spans of time without what they share."""
    found: list = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1][1] = max(found[-1][1], end)
        else:
            found.append([start, end])
    return found


def lengths(rows) -> None:
    """Eight lengths with AdamW: seconds, memory and pinned memory of each step."""
    device, small = rows.args.device, rows.args.small
    changes = {} if small else {"num_hidden_layers": 16}
    model = made("llama-tiny" if small else "llama-3.1-8b", changes, device, torch.bfloat16, 32768)
    hfpatch.apply(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    found = (64, 96, 48) if small else (12594, 26843, 10259, 16550, 12594, 26843, 20000, 30000)
    for tokens in found:
        batch = batch_of(model, tokens, device)
        common.synchronize()
        if rows.args.cuda:
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        model(**batch, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        common.synchronize()
        memory = {}
        if rows.args.cuda:
            stats = torch.cuda.memory_stats()
            memory = {"peak_gib": torch.cuda.max_memory_allocated() / GiB,
                      "reserved_gib": torch.cuda.max_memory_reserved() / GiB,
                      "retries": stats["num_alloc_retries"],
                      "pinned_gib": pinned_gib(model)}  # fmt: skip
        rows.add(part="lengths", tokens=tokens, s=time.perf_counter() - begin, **memory,
                 policy=policy_of(model))  # fmt: skip


# Name: (seconds that must be left, what runs). Liger last: it writes into transformers' own module.
PARTS = {
    "machine": (10, machine),
    "on_cpu": (15, on_cpu),
    "gradients": (40, gradients),
    "step_8k": (25, lambda r: steps(r, "step_8k", 32, 8192, 5, trace=True)),
    "step_32k": (30, lambda r: steps(r, "step_32k", 32, 32768, 4, trace=True)),
    "step_131k_8": (60, lambda r: steps(r, "step_131k_8", 8, 131072, 3, trace=True)),
    "attention": (20, attention),
    "loss": (15, loss),
    "elementwise": (15, elementwise),
    "step_131k_32": (120, lambda r: steps(r, "step_131k_32", 32, 131072, 2, adam=True)),
    "lengths": (40, lengths),
    "least_131k_8": (60, lambda r: steps(r, "least_131k_8", 8, 131072, 2, keep="least")),
    "stock_8k": (20, lambda r: steps(r, "stock_8k", 32, 8192, 2, "stock checkpointing")),
    "liger_8k": (15, lambda r: steps(r, "liger_8k", 32, 8192, 3, "liger")),
    "liger_8k_ckpt": (15, lambda r: steps(r, "liger_8k_ckpt", 32, 8192, 3, "liger checkpointing")),
    "liger_32k_ckpt": (
        25, lambda r: steps(r, "liger_32k_ckpt", 32, 32768, 3, "liger checkpointing", trace=True)
    ),
}  # fmt: skip


def work(rows, names: list[str]) -> None:
    for name in names:
        least, part = PARTS[name]
        rows.add(part=name, begins=True)
        if not rows.args.cuda and name.startswith(("liger", "attention")):
            continue
        if rows.left() < least and not rows.args.small:
            rows.add(part=name, left_out=f"{rows.left():.0f} s left, {least} needed")
            continue
        try:
            part(rows)
        except Exception as error:  # the next part may still work
            rows.add(part=name, failed=True, **common.failure(error))
            if "CUDA error" in str(error):
                raise
        clean()
        rows.add(part=name, ends=True)


def main(argv=None) -> int:
    parser = common.parser("nine", __doc__)
    parser.set_defaults(seconds=530.0)
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=PARTS)
    parser.add_argument("--worker", action="store_true", help="run the parts in this process")
    args = common.parse(parser, argv)
    Path(args.out).mkdir(parents=True, exist_ok=True)
    rows = Rows(args)
    if args.worker:
        work(rows, args.parts)
        return 0
    rows.add(device=common.device_name(args.device), commit=common.commit_of(args.commit),
             command=args.command, versions=" ".join(f"{k}={v}" for k, v in common.versions().items()),
             date=time.strftime("%Y-%m-%d"))  # fmt: skip
    names = list(args.parts)
    while names:
        options = ["--small"] * args.small + ["--seconds", str(args.seconds), "--out", args.out]
        command = [sys.executable, __file__, "--worker", *options, "--parts", *names]
        env = os.environ | {"NINE_BEGAN": str(rows.began)}
        try:
            done = subprocess.run(command, env=env, timeout=max(5, rows.left() + 25)).returncode
        except subprocess.TimeoutExpired:
            rows.add(left_out="the rest", why="the time was over")
            break
        if done == 0:
            break
        lines = open(Path(args.out) / "nine.jsonl", encoding="utf-8").read().splitlines()
        begun = [r["part"] for r in map(json.loads, lines) if r.get("begins")]
        names = names[names.index(begun[-1]) + 1 :]
    rows.add(what="end", seconds=time.time() - rows.began)
    return 0


if __name__ == "__main__":
    sys.exit(main())
