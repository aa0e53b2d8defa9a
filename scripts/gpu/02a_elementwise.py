"""RMSNorm, add + RMSNorm, RoPE and SwiGLU forward, backward and both: time, bandwidth, memory and
error beside peers.

python scripts/gpu/02a_elementwise.py --out $OUT
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import common
import torch
from cases import LLAMA_8B, OPS, TINY, errors, liger_forms

WORDS = """
Each op at Llama-3.1-8B's widths in bf16, eager (transformers' own lines), the same compiled, Liger
and hfpatch. `share` is the rate at which the bytes that must move were moved (each input read once,
each output written once), over the rate of a large copy in the same run. `extra` is what a forward
and backward hold beyond inputs, outputs and gradients. Errors are relative (norm of the difference
over norm of the float64 result): the worst output, the worst gradient. Target: 0.75 forward and
backward from 8,192 tokens on, ahead of Liger everywhere.
"""
# Lengths people train at, and one token more or less, where a tiling by powers of two falls over.
TOKENS = (8192, 32768, 131072, 4096, 131073, 8191, 49999)
COMPILED = (8192, 131072)  # each compilation takes seconds: last


def measure(sheet, op, impl, function, T, widths, small):
    device, dtype = sheet.args.device, torch.bfloat16
    tokens_bytes = T * op.bwd_elements(widths) * 2
    sets = []
    for i in range(common.rotation(tokens_bytes, small)):
        rows, shared, fixed = op.make(T, widths, dtype, device, seed=i)
        leaves = [t.requires_grad_() for t in (*rows, *shared)]
        ups = [torch.randn_like(o) for o in function(*(t.detach() for t in leaves), *fixed)]
        sets.append((leaves, fixed, ups))

    def stages(i, mark):
        leaves, fixed, ups = sets[i]
        # Liger writes over inputs and upstream gradients: its values drift from run to run, its
        #     time does not.
        outs = function(*leaves, *fixed)
        mark()
        torch.autograd.grad(outs, leaves, ups)
        mark()

    forward, backward = common.timed(stages, sets=len(sets))
    leaves, fixed, ups = sets[0]
    held = common.peak_bytes(lambda: stages(0, lambda: None))
    outs = sum(u.numel() * u.element_size() for u in ups)
    grads = sum(t.numel() * t.element_size() for t in leaves)
    sets.clear()
    del leaves
    rows, shared, fixed = op.make(T, widths, dtype, device, seed=99)
    ups = [torch.randn_like(o) for o in op.plain(*rows, *shared, *fixed)]
    off = errors(op, function, rows, shared, fixed, ups)
    copy, _ = sheet.ceilings()
    rate = lambda elements, ms: T * elements(widths) * 2 / (ms / 1e3)  # noqa: E731
    sheet.add(
        op=op.name, impl=impl, tokens=T, fwd_ms=forward, bwd_ms=backward,
        both_ms=forward + backward,
        fwd_gb_s=rate(op.fwd_elements, forward) / 1e9, bwd_gb_s=rate(op.bwd_elements,
                                                                     backward) / 1e9,
        fwd_share=rate(op.fwd_elements, forward) / copy,
        bwd_share=rate(op.bwd_elements, backward) / copy,
        peak_mib=held / 2**20 if device.type == "cuda" else None,
        extra_mib=(held - outs - grads) / 2**20 if device.type == "cuda" else None,
        err_out=max(e.relative for k, e in off.items() if k.startswith("out")),
        err_grad=max(e.relative for k, e in off.items() if k.startswith("grad")),
        within_budget=all(e.within(dtype) for e in off.values()),
    )  # fmt: skip


def main(argv=None) -> int:
    args = common.parse(common.parser("02a_elementwise", __doc__), argv)
    sheet = common.Sheet(args)
    sheet.ceilings()
    widths, lengths = (TINY, (33,)) if args.small else (LLAMA_8B, TOKENS)
    liger = liger_forms(args.device)
    if not liger:
        sheet.skip("liger", "not installed, or no GPU for it")
    for T, compiled in [
        *((T, False) for T in lengths),
        *((T, True) for T in COMPILED if args.cuda and not args.small),
    ]:
        for op in OPS.values():
            forms = {"hfpatch": op.ours, "eager": op.plain, "liger": liger.get(op.name)}
            if compiled:
                forms = {"compile": torch.compile(op.plain, dynamic=False)}
            for impl, function in forms.items():
                if function is None or sheet.late(f"{op.name} {impl} {T}"):
                    continue
                try:
                    measure(sheet, op, impl, function, T, widths, args.small)
                except Exception as error:  # a peer may fail in its own way; ours may not
                    if impl == "hfpatch" and not common.is_out_of_memory(error):
                        raise
                    sheet.skip(f"{op.name} {impl} {T}", common.one_line(error))
                common.clean()
            torch.compiler.reset()

    def draw(axes):
        for axis, (name, which) in zip(axes, ((n, w) for n in OPS for w in ("fwd", "bwd"))):
            rows = [r for r in sheet.rows if r["op"] == name]
            common.lines(
                axis,
                rows,
                "tokens",
                f"{which}_share",
                "impl",
                title=f"{name} {which}: share of copy rate",
            )
            axis.axhline(0.75, linestyle=":", color="gray")

    sheet.page("Element-wise ops beside their peers", WORDS, picture=sheet.picture(draw, wide=8))
    return 0


if __name__ == "__main__":
    sys.exit(main())
