"""rms_norm and add_rms_norm: the orders of transformers' families, their gradients, and what breaks naive kernels."""

from typing import NamedTuple

import pytest
import tiny
import torch
from oracle import BF16, DEVICE, FP16, FP32, INTERPRET, check, opcheck, randn

from hfpatch.ops.rms_norm import CASTS, add_rms_norm, rms_norm, rms_norm_ref

EPS = 1e-5


class Family(NamedTuple):
    """A norm of transformers and the options that say the same."""

    module: str
    name: str
    offset: float = 0.0
    cast: str = "before"
    weight: bool = True
    arguments: dict = {}

    def stock(self, x, *weight):
        """HF's own module, called on our tensors."""
        file = pytest.importorskip(f"transformers.models.{self.module}.modeling_{self.module}")
        module = getattr(file, self.name)(*(w.shape[0] for w in weight), eps=EPS, **self.arguments)
        return torch.func.functional_call(module, dict(zip(["weight"], weight)), (x,))

    def both(self):
        """ops.rms_norm, the stock module and the oracle, each a function of x and, where there is
        one, the weight.
        """
        options = {"offset": self.offset, "cast": self.cast}
        op = lambda x, w=None: rms_norm(x, w, EPS, **options)  # noqa: E731
        return op, self.stock, lambda x, w=None: rms_norm_ref(x, w, EPS, **options)


FAMILIES = {
    "llama": Family("llama", "LlamaRMSNorm"),
    "gemma": Family("gemma", "GemmaRMSNorm", 1.0, "after"),
    "olmo2": Family("olmo2", "Olmo2RMSNorm", 0.0, "after"),
    "gemma3n": Family(
        "gemma3n", "Gemma3nRMSNorm", 0.0, "after", False, {"dim": 1, "with_scale": False}
    ),
}
LLAMA = FAMILIES["llama"]


def weights(family, width, dtype):
    return (randn(width, dtype=dtype, seed=1),) if family.weight else ()


# 1, 7: odd and tiny; 96: no power of two; 128: a norm over one head; 4096: Llama-8B; 33 rows: no
#     block divides it.
SHAPES = [(1, 1), (2, 3, 7), (33, 96), (5, 128), (9, 4096)]


@pytest.mark.parametrize(
    "shape, dtype, name", tiny.covering(SHAPES, [BF16, FP16, FP32], [*FAMILIES]), ids=str
)
def test_values_and_gradients(shape, dtype, name):
    family = FAMILIES[name]
    x, w = randn(*shape, dtype=dtype), weights(family, shape[-1], dtype)
    check(*family.both(), (x, *w), retain=True)


# The budget cannot tell the orders apart, since rounding less is always within it: the bits can.
@pytest.mark.parametrize(
    "x_dtype, w_dtype", [(BF16, BF16), (BF16, FP32), (FP16, FP16), (FP16, FP32), (FP32, FP16)]
)
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_rounds_where_the_family_rounds(family, x_dtype, w_dtype):
    if INTERPRET and BF16 in (x_dtype, w_dtype):
        pytest.skip("Triton's interpreter truncates to bf16")
    x, w = randn(64, 96, dtype=x_dtype), weights(family, 96, w_dtype)
    stock = family.stock(x, *w)
    differ = {
        cast: float("inf") if out.dtype != stock.dtype else (out != stock).double().mean().item()
        for cast in CASTS
        for out in [rms_norm(x, *(w or (None,)), EPS, offset=family.offset, cast=cast)]
    }
    # The kernel's rsqrt may err by a bit of float32, which shifts a rounding now and then (of
    # float32: a third).
    allowed = 0.0 if not INTERPRET and DEVICE == "cpu" else 0.01 if stock.dtype != FP32 else 1.0
    assert differ[family.cast] <= allowed
    if x_dtype == w_dtype:
        # Without a weight both round the same number.
        others = [share for cast, share in differ.items() if w and cast != family.cast]
        assert all(share > 0.05 for share in others), "the test can tell"


# 5120: masked half of a block; 8192 and 16384: 70B and 405B.
@pytest.mark.parametrize("width", [5120, 8192, 16384, 12289])
def test_wide(width):
    x, w = randn(6, width, dtype=BF16), randn(width, dtype=BF16, seed=1)
    check(*LLAMA.both(), (x, w))


# A program of the backward walks several steps of rows, the last one short: 4 programs stand for a
#     GPU's hundreds.
@pytest.mark.parametrize("width", [96, 12289])
def test_many_rows(width):
    rows = (300 if width == 96 else 71) if DEVICE == "cpu" else 9001
    x, w = randn(rows, width, dtype=BF16), randn(width, dtype=BF16, seed=1)
    check(*LLAMA.both(), (x, w))


# The settings of autocast training: fp32 parameters, half activations or an fp32 residual stream.
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("x_dtype, w_dtype", [(BF16, FP32), (FP32, BF16), (FP16, FP32)])
def test_mixed_dtypes(x_dtype, w_dtype, family):
    x, w = randn(5, 64, dtype=x_dtype), weights(family, 64, w_dtype)
    check(*family.both(), (x, *w))


# The sum, its norm and every gradient; both results are read. Mixed: an fp32 residual stream.
@pytest.mark.parametrize("x_dtype, r_dtype", [(BF16, BF16), (FP16, FP16), (BF16, FP32)])
def test_a_residual_sum_and_its_norm(x_dtype, r_dtype):
    x, r = randn(5, 64, dtype=x_dtype), randn(5, 64, dtype=r_dtype, seed=2)
    exact = lambda x, r, w: (rms_norm_ref(x + r, w, EPS), x + r)  # noqa: E731
    stock = lambda x, r, w: (LLAMA.stock(x + r, w), x + r)  # noqa: E731
    op = lambda x, r, w: add_rms_norm(x, r, w, EPS)  # noqa: E731
    check(op, stock, exact, (x, r, randn(64, dtype=r_dtype, seed=1)))


@pytest.mark.parametrize("needs", [(1, 0), (0, 1), (1, 1), (0, 0)])
def test_any_subset_of_gradients(needs):
    x, w = randn(5, 64), randn(64, seed=1)
    check(*LLAMA.both(), (x, w), needs=[bool(n) for n in needs])


LAYOUTS = {
    "transposed": lambda x: x.transpose(0, 1),
    "columns": lambda x: x[..., ::2],
    "slice": lambda x: x[..., 3:-1],
    "expanded": lambda x: x[:1].expand(5, -1, -1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    x, w = randn(4, 6, 64, dtype=BF16), randn(64, dtype=BF16, seed=1)
    width = LAYOUTS[layout](x).shape[-1]
    check(*LLAMA.both(), (x, w), view=lambda x, w: (LAYOUTS[layout](x), w[:width]))


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8)])
def test_zero_length(shape):
    x, w = randn(*shape).requires_grad_(), randn(8).requires_grad_()
    normed = rms_norm(x, w)
    normed.sum().backward()
    assert normed.shape == x.grad.shape == torch.Size(shape)
    assert torch.equal(w.grad, torch.zeros_like(w))


def test_large_values_and_the_eps():
    # Squares of 300 overflow fp16: the sum must be float32; zeros leave eps alone in the root.
    x = randn(4, 64, dtype=FP16, scale=300.0)
    x[0] = 0
    check(*LLAMA.both(), (x, randn(64, dtype=FP16, seed=1)))


@pytest.mark.skipif(INTERPRET, reason="about registration, which does not depend on the kernel")
def test_opcheck():
    x, w = randn(3, 5, 8).requires_grad_(), randn(8).requires_grad_()
    opcheck("rms_norm", x, w, 1e-6, 0.0, "before")
    opcheck("rms_norm", x, None, 1e-6, 0.0, "before")
    opcheck("rms_norm", x.to(BF16).detach(), w, 1e-6, 0.0, "after")
    opcheck("rms_norm", x, w, 1e-6, 1.0, "after")
    rstd = randn(3, 5)
    given = x.detach(), x.detach(), w.detach(), rstd, 0.0
    for need_dw in (True, False):
        opcheck("rms_norm_bwd", *given, need_dw)
    opcheck("rms_norm_bwd", x.detach(), x.detach(), None, rstd, 0.0, False)


@pytest.mark.skipif(INTERPRET, reason="about registration, which does not depend on the kernel")
def test_compiles_without_a_break():
    def f(x, w):
        return rms_norm(x * rms_norm(x, w, EPS), w, EPS).sum()

    args = [randn(3, 5, 8).requires_grad_(), randn(8).requires_grad_()]
    eager = torch.autograd.grad(f(*args), args)
    graph = torch.autograd.grad(torch.compile(f, fullgraph=True, backend="aot_eager")(*args), args)
    for got, want in zip(graph, eager):
        torch.testing.assert_close(got, want)


def test_second_derivative_is_refused():
    x, w = randn(3, 8).requires_grad_(), randn(8).requires_grad_()
    (dx,) = torch.autograd.grad(rms_norm(x, w).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="hfpatch: rms_norm has no second derivative"):
        dx.sum().backward()


def test_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match=r"hfpatch: rms_norm: weight must be \[D\]"):
        rms_norm(randn(3, 8), randn(7))
    with pytest.raises(ValueError, match="got torch.int64"):
        rms_norm(torch.ones(3, 8).long(), randn(8))
    with pytest.raises(ValueError, match="cast must be one of before, after, got 'later'"):
        rms_norm(randn(3, 8), randn(8), cast="later")
