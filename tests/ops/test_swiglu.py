"""swiglu: HF's activations times up, their gradients, and names that must not be taken for SiLU."""

import pytest
import tiny
import torch
from oracle import BF16, DEVICE, FP16, FP32, FP64, INTERPRET, check, opcheck, randn
from transformers.activations import ACT2FN

from hfpatch.ops.swiglu import ACTIVATIONS, swiglu, swiglu_ref

COMPUTED = ["silu", "gelu", "gelu_tanh"]
HF_NAMES = {"gelu_tanh": "gelu_pytorch_tanh"}


def both(activation):
    act = ACT2FN[HF_NAMES.get(activation, activation)]
    op = lambda g, u: swiglu(g, u, activation=activation)  # noqa: E731
    return op, lambda g, u: act(g) * u, lambda g, u: swiglu_ref(g, u, activation=activation)


# 1 and 7: tiny and odd; 1023 and 1025: about one block; 14336: Llama-8B, three rows.
@pytest.mark.parametrize(
    "shape, dtype, activation",
    tiny.covering(
        [(1, 1), (2, 3, 7), (1023,), (5, 1025), (3, 14336)], [BF16, FP16, FP32], COMPUTED
    ),
    ids=str,
)
def test_values_and_gradients(shape, dtype, activation):
    # Scale 4 reaches the flat ends of the activations, where cancellation hides.
    gate, up = randn(*shape, dtype=dtype, scale=4.0), randn(*shape, dtype=dtype, seed=1)
    check(*both(activation), (gate, up), retain=True)


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_every_name_is_what_hf_computes(activation):
    if activation == "gelu_tanh" or activation in ACT2FN:
        check(*both(activation), (randn(5, 64), randn(5, 64, seed=1)))
    else:
        assert activation == "swish"  # HF's older name of silu
        x = randn(5, 64)
        assert torch.equal(swiglu(x, x, activation="swish"), swiglu(x, x))


@pytest.mark.parametrize("activation", COMPUTED)
def test_nan_stays_nan(activation):
    x = torch.full((4,), torch.nan, device=DEVICE)
    assert swiglu(x, torch.ones_like(x), activation=activation).isnan().all()


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_far_ends_stay_finite(activation):
    gate = torch.tensor(
        [-1e4, -200.0, -88.0, 0.0, 88.0, 200.0, 1e4], device=DEVICE
    ).requires_grad_()
    y = swiglu(gate, torch.ones_like(gate), activation=activation)
    (dgate,) = torch.autograd.grad(y.sum(), gate)
    torch.testing.assert_close(
        y, torch.tensor([0.0, 0, 0, 0, 88, 200, 1e4], device=DEVICE), rtol=1e-6, atol=1e-30
    )
    torch.testing.assert_close(
        dgate, torch.tensor([0, 0, 0, 0.5, 1, 1, 1], device=DEVICE), rtol=1e-6, atol=1e-30
    )


@pytest.mark.parametrize("gate_dtype, up_dtype", [(BF16, FP32), (FP32, BF16), (FP16, FP32)])
def test_mixed_dtypes(gate_dtype, up_dtype):
    check(*both("silu"), (randn(5, 64, dtype=gate_dtype), randn(5, 64, dtype=up_dtype, seed=1)))


@pytest.mark.parametrize("activation", COMPUTED)
def test_autocast_gives_stock_dtypes(activation):
    with torch.autocast(DEVICE, BF16):
        check(*both(activation), (randn(5, 64, dtype=BF16), randn(5, 64, dtype=BF16, seed=1)))


@pytest.mark.parametrize("needs", [(True, False), (False, True), (False, False)])
def test_any_subset_of_gradients(needs):
    check(*both("silu"), (randn(5, 64), randn(5, 64, seed=1)), needs=needs)


# The halves of one projection, rows that are not dense, and tensors whose last dimension is
# strided.
@pytest.mark.parametrize("width", [14, 2600])
@pytest.mark.parametrize("layout", ["halves", "transposed", "strided", "expanded"])
def test_layouts(layout, width):
    views = {
        "halves": lambda x, y: x.chunk(2, -1),
        "transposed": lambda x, y: (x.transpose(0, 1), y.transpose(0, 1)),
        "strided": lambda x, y: (x[..., ::2], y[..., ::2]),
        "expanded": lambda x, y: (x[:1].expand(4, -1, -1), y),
    }
    x, y = randn(4, 3, width, dtype=BF16), randn(4, 3, width, dtype=BF16, seed=1)
    needs = [True, layout != "halves"]
    check(*both("silu"), (x, y), view=views[layout], needs=needs)


@pytest.mark.parametrize("activation", COMPUTED)
def test_gradcheck(activation):
    inputs = [randn(3, 4, 8, dtype=FP64, seed=i).requires_grad_() for i in (0, 1)]
    assert torch.autograd.gradcheck(both(activation)[0], inputs)


@pytest.mark.skipif(INTERPRET, reason="about registration, which does not depend on the kernel")
def test_opcheck():
    gate, up = randn(3, 5).requires_grad_(), randn(3, 5, seed=1).requires_grad_()
    opcheck("swiglu", gate, up, "silu")
    opcheck("swiglu", gate, up.to(BF16).detach(), "gelu")
    opcheck("swiglu_bwd", gate.detach(), gate.detach(), up.detach(), "gelu_tanh")


def test_second_derivative_is_refused():
    gate, up = randn(3, 8).requires_grad_(), randn(3, 8)
    (dgate,) = torch.autograd.grad(swiglu(gate, up).sum(), gate, create_graph=True)
    with pytest.raises(RuntimeError, match="hfpatch: swiglu has no second derivative"):
        dgate.sum().backward()


def test_wrong_calls_are_refused():
    with pytest.raises(ValueError, match="got 'gelu_10'"):
        swiglu(randn(3, 8), randn(3, 8), activation="gelu_10")
    with pytest.raises(ValueError, match="must have one shape"):
        swiglu(randn(3, 8), randn(1, 8))
    with pytest.raises(ValueError, match="got torch.int64"):
        swiglu(torch.ones(3, 8).long(), torch.ones(3, 8).long())
