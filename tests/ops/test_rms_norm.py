"""rms_norm and add_rms_norm: transformers' two orders, their gradients, and what breaks naive kernels."""

import pytest
import torch
from oracle import BF16, DEVICE, FP16, FP32, FP64, INTERPRET, check, opcheck, randn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hfpatch.ops.rms_norm import add_rms_norm, add_rms_norm_ref, rms_norm, rms_norm_ref

EPS = 1e-5


def stock(x, weight, offset=0.0):
    """HF's own module, called on our tensors."""
    module = (GemmaRMSNorm if offset else LlamaRMSNorm)(weight.shape[0], eps=EPS)
    return torch.func.functional_call(module, {"weight": weight}, (x,))


def both(offset):
    op = lambda x, w: rms_norm(x, w, EPS, offset=offset)  # noqa: E731
    exact = lambda x, w: rms_norm_ref(x, w, EPS, offset=offset)  # noqa: E731
    return op, lambda x, w: stock(x, w, offset), exact


def both_add(offset):
    op = lambda x, r, w: add_rms_norm(x, r, w, EPS, offset=offset)  # noqa: E731
    exact = lambda x, r, w: add_rms_norm_ref(x, r, w, EPS, offset=offset)  # noqa: E731
    return op, lambda x, r, w: (stock(r + x, w, offset), r + x), exact


# 1, 7: odd and tiny; 96: no power of two; 128: a norm over one head; 4096: Llama-8B; 33 rows: no block divides it.
SHAPES = [(1, 1), (2, 3, 7), (33, 96), (5, 128), (9, 4096)]


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients(shape, dtype, offset):
    x, w = randn(*shape, dtype=dtype), randn(shape[-1], dtype=dtype, seed=1)
    check(*both(offset), (x, w), retain=True)
    check(*both_add(offset), (x, randn(*shape, dtype=dtype, seed=2), w), retain=True)


# 5120: masked half of a block; 8192 and 16384: 70B and 405B, whose backward takes the piecewise kernel past 8192.
@pytest.mark.parametrize("width", [5120, 8192, 16384, 12289])
def test_wide(width):
    x, w = randn(6, width, dtype=BF16), randn(width, dtype=BF16, seed=1)
    check(*both(0.0), (x, w))
    check(*both_add(0.0), (x, randn(6, width, dtype=BF16, seed=2), w))


# A program of the backward walks several steps of rows, the last one short: 4 programs stand for a GPU's hundreds.
@pytest.mark.parametrize("width", [96, 12289])
def test_many_rows(width):
    rows = (300 if width == 96 else 71) if DEVICE == "cpu" else 9001
    x, w = randn(rows, width, dtype=BF16), randn(width, dtype=BF16, seed=1)
    check(*both(0.0), (x, w))


# The settings of autocast training: fp32 parameters, half activations or an fp32 residual stream.
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("x_dtype, r_dtype, w_dtype", [(BF16, FP32, FP32), (FP32, BF16, BF16), (FP16, FP16, FP32)])
def test_mixed_dtypes(x_dtype, r_dtype, w_dtype, offset):
    x, r, w = randn(5, 64, dtype=x_dtype), randn(5, 64, dtype=r_dtype, seed=2), randn(64, dtype=w_dtype, seed=1)
    check(*both(offset), (x, w))
    check(*both_add(offset), (x, r, w))


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_autocast_changes_nothing(dtype):
    x, w = randn(5, 64, dtype=dtype), randn(64, seed=1)
    with torch.autocast(DEVICE, BF16):
        check(*both(0.0), (x, w))


@pytest.mark.parametrize("needs", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1), (0, 0, 0)])
def test_any_subset_of_gradients(needs):
    x, r, w = randn(5, 64), randn(5, 64, seed=2), randn(64, seed=1)
    needs = [bool(n) for n in needs]
    check(*both_add(0.0), (x, r, w), needs=needs)
    check(*both(0.0), (x, w), needs=[needs[0], needs[2]])


@pytest.mark.parametrize("used", [0, 1])
def test_one_output_of_two(used):
    x, r, w = randn(5, 64), randn(5, 64, seed=2), randn(64, seed=1)
    leaves = [t.clone().requires_grad_() for t in (x, r, w)]
    plain = [t.clone().requires_grad_() for t in (x, r, w)]
    add_rms_norm(*leaves, EPS)[used].square().sum().backward()
    add_rms_norm_ref(*plain, EPS)[used].square().sum().backward()
    for got, want in zip(leaves, plain):
        assert (got.grad is None) == (want.grad is None)
        if want.grad is not None:
            torch.testing.assert_close(got.grad, want.grad)


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
    check(*both(0.0), (x, w), view=lambda x, w: (LAYOUTS[layout](x), w[:width]))
    r = randn(4, 6, 64, dtype=BF16, seed=2)
    view = lambda x, r, w: (LAYOUTS[layout](x), LAYOUTS[layout](r).contiguous(), w[:width])  # noqa: E731
    check(*both_add(0.0), (x, r, w), view=view)


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8)])
def test_zero_length(shape):
    x, w = randn(*shape).requires_grad_(), randn(8).requires_grad_()
    normed, total = add_rms_norm(x, x, w)
    (normed.sum() + total.sum() + rms_norm(x, w).sum()).backward()
    assert normed.shape == total.shape == x.grad.shape == torch.Size(shape)
    assert torch.equal(w.grad, torch.zeros_like(w))


def test_large_values_and_the_eps():
    # Squares of 300 overflow fp16: the sum must be float32; zeros leave eps alone in the root.
    x = randn(4, 64, dtype=FP16, scale=300.0)
    x[0] = 0
    check(*both(0.0), (x, randn(64, dtype=FP16, seed=1)))


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_gradcheck(offset):
    x, r, w = (randn(*s, dtype=FP64, seed=i).requires_grad_() for i, s in enumerate([(3, 4, 8), (3, 4, 8), (8,)]))
    op, _, _ = both(offset)
    assert torch.autograd.gradcheck(op, (x, w))
    assert torch.autograd.gradcheck(both_add(offset)[0], (x, r, w))


@pytest.mark.skipif(INTERPRET, reason="about registration, which does not depend on the kernel")
def test_opcheck():
    x, r, w = randn(3, 5, 8).requires_grad_(), randn(3, 5, 8, seed=2).requires_grad_(), randn(8).requires_grad_()
    opcheck("rms_norm", x, w, 1e-6, 0.0)
    opcheck("rms_norm", x.to(BF16).detach(), w, 1e-6, 0.0)
    opcheck("add_rms_norm", x, r, w, 1e-6, 1.0)
    rstd = randn(3, 5)
    for need_dx, need_dw in ((True, True), (False, True), (True, False)):
        opcheck("rms_norm_bwd", x.detach(), r.detach(), x.detach(), w.detach(), rstd, 0.0, need_dx, need_dw)


@pytest.mark.skipif(INTERPRET, reason="about registration, which does not depend on the kernel")
def test_compiles_without_a_break():
    def f(x, r, w):
        y, total = add_rms_norm(x, r, w, EPS)
        return rms_norm(y * total, w, EPS).sum()

    args = [randn(3, 5, 8).requires_grad_(), randn(3, 5, 8, seed=2).requires_grad_(), randn(8).requires_grad_()]
    eager = torch.autograd.grad(f(*args), args)
    graph = torch.autograd.grad(torch.compile(f, fullgraph=True, backend="aot_eager")(*args), args)
    for got, want in zip(graph, eager):
        torch.testing.assert_close(got, want)


def test_second_derivative_is_refused():
    x, w = randn(3, 8).requires_grad_(), randn(8).requires_grad_()
    (dx,) = torch.autograd.grad(rms_norm(x, w).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="hfpatch: rms_norm has one derivative"):
        dx.sum().backward()


def test_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match=r"hfpatch: rms_norm expects weight \[D\]"):
        rms_norm(randn(3, 8), randn(7))
    with pytest.raises(ValueError, match="of one shape"):
        add_rms_norm(randn(3, 8), randn(1, 8), randn(8))
