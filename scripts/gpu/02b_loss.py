"""Linear cross-entropy forward, backward and both: time, matmul share, memory and error beside
peers.

python scripts/gpu/02b_loss.py --out $OUT
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import common
import torch
import torch.nn.functional as F
from cases import LLAMA_8B, TINY, Error

from hfpatch import ops
from hfpatch.ops.linear_cross_entropy import linear_cross_entropy_ref

WORDS = """
hidden [T, 4096] x head [128256, 4096] in bf16, mean loss, gradients of both. `eager` is plain HF:
whole logits, upcast to float32. `share` is 6 T D V FLOPs over the time of forward and backward,
over the rate of an 8192-cube matmul in the same run (a form that computes the logits twice does 8 T
D V and is given 6 like the others). `extra` is held beyond the gradients. `masked 90%` ignores nine
labels of ten. Errors are relative to float64. Targets: share 0.7 at 131,072, never slower than
eager at 4,096, ahead of Liger and torch everywhere, extra at most 512 MiB, masked at least 5x
faster than unmasked.
"""
TOKENS = (4096, 131072, 8192, 32768, 131073, 8191, 49999)
EXACT_UP_TO = 8192  # tokens for which the gradients are held against float64


def forms(args) -> dict:
    """name -> loss of (hidden, weight, labels, how many labels are valid)."""

    def eager(x, w, y, n):
        return F.cross_entropy(F.linear(x, w).float(), y)

    found = {
        "hfpatch": lambda x, w, y, n: ops.linear_cross_entropy(x, w, y, num_valid=n),
        "eager": eager,
    }
    if args.cuda and not args.small:
        found["compile"] = torch.compile(eager, dynamic=False)
    if args.cuda:
        try:
            from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

            found["liger"] = lambda x, w, y, n: liger_fused_linear_cross_entropy(x, w, y)
        except ImportError:
            found["liger"] = "not installed"
        try:
            from cut_cross_entropy import linear_cross_entropy

            found["cce"] = lambda x, w, y, n: linear_cross_entropy(x, w, y)
            found["cce unfiltered"] = lambda x, w, y, n: linear_cross_entropy(
                x, w, y, filter_eps=None
            )
        except ImportError:
            found["cce"] = "not installed"
    else:
        found["liger"] = found["cce"] = "no GPU for it"
    if hasattr(F, "linear_cross_entropy"):
        options = torch.nn.LinearCrossEntropyOptions
        found["torch"] = lambda x, w, y, n: F.linear_cross_entropy(x, w, y, options=options())
    else:
        found["torch"] = f"torch {torch.__version__} has no linear_cross_entropy"
    return found


def make(T, w, device, masked, seed=0):
    g = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn(T, w.hidden, device=device, generator=g).bfloat16().requires_grad_()
    weight = (
        (0.02 * torch.randn(w.vocab, w.hidden, device=device, generator=g))
        .bfloat16()
        .requires_grad_()
    )
    labels = torch.randint(0, w.vocab, (T,), device=device, generator=g)
    if masked:
        labels[torch.rand(T, device=device, generator=g) < masked] = -100
    return x, weight, labels, int((labels != -100).sum())


def exact(x, weight, labels, chunk=2048):
    """Loss and gradients in float64, a chunk of tokens at a time."""
    wide, count = weight.detach().double().requires_grad_(), (labels != -100).sum()
    loss, dx, dw = 0.0, [], torch.zeros_like(wide)
    for a in range(0, len(x), chunk):
        part = x[a : a + chunk].detach().double().requires_grad_()
        value = linear_cross_entropy_ref(part, wide, labels[a : a + chunk], reduction="sum") / count
        one_dx, one_dw = torch.autograd.grad(value, [part, wide])
        loss, dw = loss + value.detach(), dw.add_(one_dw)
        dx.append(one_dx)
    return loss, torch.cat(dx), dw


def relative(got, true) -> float:
    error = Error()
    for a in range(0, len(got), 16384):
        error.see(got[a : a + 16384], got[a : a + 16384], true[a : a + 16384].double())
    return error.relative


def measure(sheet, impl, function, T, widths, masked, truth):
    x, weight, labels, valid = make(T, widths, sheet.args.device, masked)

    def stages(i, mark):
        loss = function(x, weight, labels, valid)
        mark()
        found = torch.autograd.grad(loss, [x, weight])
        mark()
        return loss, *found

    # A run of 131,072 tokens takes about a second: three are enough there, and one set of inputs
    #     outgrows any cache.
    forward, backward = common.timed(stages, budget_ms=1500, least=3, most=20)
    held = common.peak_bytes(lambda: stages(0, lambda: None))
    grads = (x.numel() + weight.numel()) * x.element_size()
    row = {}
    if truth is not None:
        loss, dx, dw = stages(0, lambda: None)
        true_loss, true_dx, true_dw = truth
        row = {
            "err_loss": abs(loss.item() - true_loss.item()) / abs(true_loss.item()),
            "err_dx": relative(dx, true_dx),
            "err_dw": relative(dw, true_dw),
        }
    _, matmul = sheet.ceilings()
    both = forward + backward
    rate = 6 * valid * widths.hidden * widths.vocab / (both / 1e3)
    sheet.add(
        impl=impl + (f", masked {masked:.0%}" if masked else ""), tokens=T, valid=valid,
        fwd_ms=forward, bwd_ms=backward, both_ms=both, tflop_s=rate / 1e12, share=rate / matmul,
        extra_mib=(held - grads) / 2**20 if sheet.args.cuda else None, **row,
    )  # fmt: skip


def main(argv=None) -> int:
    args = common.parse(common.parser("02b_loss", __doc__), argv)
    sheet = common.Sheet(args)
    sheet.ceilings()
    widths, lengths = (TINY, (33,)) if args.small else (LLAMA_8B, TOKENS)
    functions = {}
    for impl, function in forms(args).items():
        if isinstance(function, str):
            sheet.skip(impl, function)
        else:
            functions[impl] = function
    for T in lengths:
        truth = None
        if T <= EXACT_UP_TO:
            truth = exact(*make(T, widths, args.device, 0.0)[:3])
        jobs = [(impl, function, 0.0) for impl, function in functions.items()]
        if T in lengths[:2]:
            jobs += [
                (impl, functions[impl], 0.9)
                for impl in ("hfpatch", "liger", "torch")
                if impl in functions
            ]
        for impl, function, masked in jobs:
            if sheet.late(f"{impl} {T}"):
                continue
            # Whole logits in bf16 and float32, and the gradients of both: none compiles for a size
            #     that cannot be.
            if (
                impl in ("eager", "compile")
                and args.cuda
                and 10 * T * widths.vocab > torch.cuda.mem_get_info()[1]
            ):
                sheet.skip(f"{impl} {T}", "whole logits are larger than the device")
                continue
            try:
                measure(sheet, impl, function, T, widths, masked, None if masked else truth)
            except Exception as error:  # a peer may run out of memory or refuse; ours may not
                if impl == "hfpatch":
                    raise
                sheet.skip(f"{impl} {T}", common.one_line(error))
            common.clean()
        del truth
        torch.compiler.reset()
        common.clean()

    def draw(axes):
        full = [r for r in sheet.rows if "masked" not in r["impl"]]
        common.lines(
            axes[0],
            full,
            "tokens",
            "share",
            "impl",
            title="share of the matmul rate, forward + backward",
        )
        axes[0].axhline(0.7, linestyle=":", color="gray")
        common.lines(axes[1], full, "tokens", "extra_mib", "impl", title="MiB beyond the gradients")
        axes[1].set_yscale("symlog")

    sheet.page("Linear cross-entropy beside its peers", WORDS, picture=sheet.picture(draw, wide=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
