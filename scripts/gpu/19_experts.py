"""Experts forward and backward: hfpatch beside transformers' grouped products, Liger and the plain
loop; time, memory, rate and error.

python scripts/gpu/19_experts.py --out $OUT
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import common
import torch

from hfpatch.ops.experts import CLAMPED, Layout, experts, experts_ref

WORDS = """
One layer's fused experts in bf16, routed evenly at random: Qwen3-30B-A3B's (128 experts, 8 a token)
and gpt-oss-20b's (32, 4 a token, biases, clamped). `loop` is plain torch, expert by expert; grouped
is transformers' own `grouped_mm`; Liger has no form with biases. `tflop_s` counts the three products
of the chosen experts forward and twice that backward. Errors are relative, against float64 over the
first tokens: the output, the worst gradient.
"""
# name: (D, F, experts, experts a token, layout)
SHAPES = {
    "qwen3-30b-a3b": (2048, 768, 128, 8, Layout("silu")),
    "gpt-oss-20b": (
        2880, 2880, 32, 4, Layout(CLAMPED, 1.702, 7.0, interleaved=True, transposed=True),
    ),
}  # fmt: skip
TINY = (32, 16, 4, 2)
EXACT = 512  # tokens compared with float64


def inputs(shape, T: int, device, dtype, seed: int = 0) -> tuple[list, torch.Tensor]:
    """([x, routing weights, w1, w2] and biases where the layout has them, expert ids)."""
    D, F, E, k, layout = shape
    generator = torch.Generator(device).manual_seed(seed)
    draw = lambda *size: torch.randn(*size, generator=generator, device=device)  # noqa: E731
    scores = draw(T, E).softmax(-1).topk(k, -1)
    one, two = (E, 2 * F, D), (E, D, F)
    if layout.transposed:
        one, two = (E, D, 2 * F), (E, F, D)
    made = [draw(T, D), scores.values, draw(*one) * D**-0.5, draw(*two) * F**-0.5]
    if layout.activation == CLAMPED:
        made += [draw(E, 2 * F) * 0.1, draw(E, D) * 0.1]
    return [x.to(dtype).requires_grad_() for x in made], scores.indices


def forms(shape, device) -> dict:
    """impl -> function(x, weights, w1, w2, *biases, ids)."""
    layout = shape[4]

    def by(function):
        def run(x, w, w1, w2, *biases, ids):
            b1, b2 = biases or (None, None)
            return function(x, ids, w, w1, w2, layout=layout, b1=b1, b2=b2)

        return run

    found = {"hfpatch": by(experts), "loop": by(experts_ref), "grouped": grouped(shape)}
    if device.type == "cuda" and layout == Layout("silu"):
        try:
            from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

            found["liger"] = lambda x, w, w1, w2, ids: LigerFusedMoEFunction.apply(
                x, w1, w2, ids.to(torch.int32), w
            )
        except ImportError:
            pass
    return found


def grouped(shape):
    """transformers' own experts by torch's grouped product; its class, with the weights given."""
    from transformers import GptOssConfig, Qwen3MoeConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    D, F, E, k, layout = shape
    sizes = {"hidden_size": D, "num_experts_per_tok": k}
    if layout.activation == CLAMPED:
        config = GptOssConfig(intermediate_size=F, num_local_experts=E, **sizes)
        kind, names = GptOssExperts, ("gate_up_proj", "down_proj")
        names += tuple(f"{n}_bias" for n in names)
    else:
        config = Qwen3MoeConfig(moe_intermediate_size=F, num_experts=E, **sizes)
        kind, names = Qwen3MoeExperts, ("gate_up_proj", "down_proj")
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        module = kind(config)

    def run(x, w, *weights, ids):
        return torch.func.functional_call(module, dict(zip(names, weights)), (x, ids, w))

    return run


def errors(shape, function, T: int, device) -> tuple[float, float]:
    """(relative error of the output, of the worst gradient) over few tokens against float64."""
    given, ids = inputs(shape, min(T, EXACT), device, torch.bfloat16, seed=7)
    wide = [x.detach().double().requires_grad_() for x in given]
    ours, exact = function(*given, ids=ids), forms(shape, device)["loop"](*wide, ids=ids)
    up = torch.randn_like(ours)
    got = torch.autograd.grad(ours, given, up)
    expected = torch.autograd.grad(exact, wide, up.double())
    off = lambda a, b: ((a.double() - b).norm() / b.norm()).item()  # noqa: E731
    return off(ours, exact), max(map(off, got, expected))


def measure(sheet, name: str, shape, impl: str, function, T: int) -> None:
    device = sheet.args.device
    given, ids = inputs(shape, T, device, torch.bfloat16)
    up = torch.randn(T, shape[0], device=device, dtype=torch.bfloat16)

    def stages(i, mark):
        out = function(*given, ids=ids)
        mark()
        torch.autograd.grad(out, given, up)
        mark()

    forward, backward = common.timed(stages)
    held = common.peak_bytes(lambda: stages(0, lambda: None))
    err_out, err_grad = errors(shape, function, T, device)
    D, F, _, k, _ = shape
    flops = 3 * 6 * T * k * D * F  # forward, and twice that backward
    sheet.add(
        model=name, impl=impl, tokens=T, fwd_ms=forward, bwd_ms=backward,
        both_ms=forward + backward, tflop_s=flops / (forward + backward) / 1e9,
        peak_mib=held / 2**20 if device.type == "cuda" else None, err_out=err_out,
        err_grad=err_grad,
    )  # fmt: skip


def main(argv=None) -> int:
    made = common.parser("19_experts", __doc__)
    made.add_argument("--tokens", type=int, nargs="+", default=[8192, 2048, 32768])
    args = common.parse(made, argv)
    sheet = common.Sheet(args)
    sheet.ceilings()
    shapes, lengths = SHAPES, args.tokens
    if args.small:
        shapes = {n: (*TINY, s[4]) for n, s in SHAPES.items()}
        lengths = [33]
    for T in lengths:
        for name, shape in shapes.items():
            for impl, function in forms(shape, args.device).items():
                if sheet.late(f"{name} {impl} {T}"):
                    continue
                try:
                    measure(sheet, name, shape, impl, function, T)
                except Exception as error:  # a peer may fail in its own way; ours may not
                    if impl == "hfpatch" and not common.is_out_of_memory(error):
                        raise
                    sheet.skip(f"{name} {impl} {T}", common.one_line(error))
                common.clean()

    def draw(axes):
        for axis, name in zip(axes, shapes):
            rows = [r for r in sheet.rows if r["model"] == name]
            common.lines(axis, rows, "tokens", "both_ms", "impl", title=f"{name}: ms")

    sheet.page("Experts beside their peers", WORDS, picture=sheet.picture(draw, wide=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
