"""Is it right: this device's results against float64 results of the CPU."""

import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from common import copy_rate, host_rates, matmul_rate
from elementwise import LLAMA_8B, OPS, TINY, run

from hfpatch.attention import heads
from hfpatch.lab.budget import share_of_allowed
from hfpatch.lab.checks import batch_of, compared, ways
from hfpatch.lab.made import made
from hfpatch.ops import linear_cross_entropy
from hfpatch.ops.experts import Layout, experts, experts_ref
from hfpatch.ops.linear_cross_entropy import linear_cross_entropy_ref
from hfpatch.store.device import Block, device_for

CPU = torch.device("cpu")


def machine(rows, part: str) -> None:
    device, small = rows.args.device, rows.args.small
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, 256, dtype=torch.float64, generator=g) for _ in range(2))
    true, got = a @ b, (a.to(device) @ b.to(device)).cpu()
    rows.add(part=part, what="float64 product against the CPU's",
             passed=bool((got - true).abs().max() < 1e-9) and got.norm().item() > 0)  # fmt: skip
    memory = (
        dict(line.split(":") for line in open("/proc/meminfo"))
        if Path("/proc/meminfo").exists()
        else {}
    )
    rows.add(part=part, what="memory", total=memory.get("MemTotal", "").strip(),
             available=memory.get("MemAvailable", "").strip(), cpus=os.cpu_count())  # fmt: skip
    rows.add(part=part, what="rates", copy_gb_s=copy_rate(device, small) / 1e9,
             to_host_gb_s=host_rates(device, small)[0] / 1e9,
             to_device_gb_s=host_rates(device, small)[1] / 1e9)  # fmt: skip
    shapes = [(8192, 8192, 8192), (8192, 14336, 4096), (8192, 4096, 14336), (8192, 4096, 4096),
              (2048, 14336, 4096), (14336, 4096, 8192), (8192, 128256, 4096)]  # fmt: skip
    for m, n, k in shapes[:1] if small else shapes:
        rows.add(part=part, what="matmul", m=m, n=n, k=k,
                 tflop_s=matmul_rate(device, small, m=m, n=n, k=k) / 1e12)  # fmt: skip
    for gib in () if device.type != "cuda" else (1, 4):
        begin = time.perf_counter()
        block = Block(device_for(torch.device("cuda:0")), gib << (20 if small else 30), True)
        took = time.perf_counter() - begin
        rows.add(part=part, what="pin", gib=gib, gib_s=gib / took, status=block.status)
        del block


def rounded_logits(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Plain cross-entropy in x's dtype. The products run in float32 and are rounded: some processors
    multiply bf16 a thousand times slower."""
    logits = F.linear(x.float(), w.float()).to(x.dtype)
    return F.cross_entropy(logits.float(), y)


def on_cpu(rows, part: str) -> None:
    """Every op of bf16 training on this device against float64 on the CPU, at 8B's widths."""
    device, widths = rows.args.device, TINY if rows.args.small else LLAMA_8B
    T, dtype = 131, torch.bfloat16
    for op in OPS.values():
        given = op.make(T, widths, dtype, CPU, seed=T)
        first = op.plain(*given[0], *given[1], *given[2])
        ups = [torch.randn(o.shape, dtype=o.dtype) for o in first]
        groups = [[t.to(device) for t in group] for group in (*given, ups)]
        got = [t.cpu() for group in run(op.ours, *groups) for t in group]
        plain = [t for group in run(op.plain, *given, ups) for t in group]
        true = [t for group in run(op.exact, *given, ups, torch.float64) for t in group]
        report(rows, part, op.name, T, dtype, got, plain, true)
    for V in (211,) if rows.args.small else (32768, 32769):
        x = torch.randn(T, widths.hidden, dtype=dtype)
        w = (0.02 * torch.randn(V, widths.hidden)).to(dtype)
        y = torch.randint(0, V, (T,))
        y[::5] = -100
        results = []
        for where, dt, form in (
            (device, dtype, linear_cross_entropy),
            (CPU, dtype, rounded_logits),
            (CPU, torch.float64, linear_cross_entropy_ref),
        ):
            leaves = [t.to(where, dt).requires_grad_() for t in (x, w)]
            loss = form(*leaves, y.to(where))
            results.append([t.detach().cpu() for t in (loss, *torch.autograd.grad(loss, leaves))])
        report(rows, part, f"linear_cross_entropy, V = {V:,}", T, dtype, *results)
    expert_products(rows, part)


def expert_products(rows, part: str) -> None:
    """Experts, one of them without a token, against float64 on the CPU."""
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
            (CPU, dtype, experts_ref),
            (CPU, torch.float64, experts_ref),
        ):
            x, w, w1, w2 = (t.to(dtype).to(where, dt).requires_grad_() for t in values)
            y = form(x, ids.to(where), w, w1, w2, layout=layout)
            grads = torch.autograd.grad(y, [x, w, w1, w2], up.to(where, y.dtype))
            results.append([t.detach().cpu() for t in (y, *grads)])
        name = "experts" + (", interleaved" if interleaved else "")
        report(rows, part, name, N, dtype, *results)


def report(rows, part: str, what: str, tokens: int, dtype, got, plain, true) -> None:
    shares = [share_of_allowed(*x, dtype) for x in zip(got, plain, (t.double() for t in true))]
    exact = [share == 0 and t.numel() > 1 for share, t in zip(shares, got)]
    rows.add(part=part, what=what, tokens=tokens, share=max(shares),
             where=shares.index(max(shares)), zero=any(exact), passed=max(shares) <= 1)  # fmt: skip


def gradients(rows, part: str) -> None:
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
            # The CPU would take the minutes of everything else; `on_cpu` shows that this device
            # computes.
            found = compared(model, [batch], settings, torch.bfloat16, rows.args.device)
            for check in found:
                rows.add(part=part, backend=key, way=check.what, share=check.share,
                         where=check.where, passed=check.passed)  # fmt: skip
        finally:
            heads.pick = chosen
