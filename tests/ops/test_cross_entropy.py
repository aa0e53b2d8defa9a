"""cross_entropy over given logits: what linear_cross_entropy computes, from logits that the caller
holds.
"""

import pytest
import tiny
import torch

from hfpatch.ops._library import INTERPRET
from hfpatch.ops.cross_entropy import cross_entropy, cross_entropy_ref
from tests.ops.oracle import opcheck
from tests.ops.test_linear_cross_entropy import (
    DEVICE,
    DTYPES,
    OPTIONS,
    exact,
    near,
    options_for,
    plain,
)


def make(shape, dtype, ignored=0.4):
    g = torch.Generator().manual_seed(sum(shape))
    logits = torch.randn(*shape, generator=g).mul(3).to(DEVICE, dtype).requires_grad_()
    labels = torch.randint(0, shape[-1], shape[:-1], generator=g)
    labels[torch.rand(shape[:-1], generator=g) < ignored] = -100
    return logits, labels.to(DEVICE)


# 101: part of a block; 8193: a block and one lane more, where every row is a program's two steps.
@pytest.mark.parametrize(
    "name, dtype, shape",
    tiny.covering(
        ["mean", "sum", "none", "num_items", "all, mean", "all, none"],
        DTYPES,
        [(2, 9, 101), (3, 8193)],
    ),
    ids=str,
)
def test_values_and_gradients(name, dtype, shape):
    logits, labels = make(shape, dtype)
    runs, asked = [], {"return_accuracy": True, "return_predicted": True}
    for op, (x,), extra in (
        (cross_entropy, (logits,), asked),
        (cross_entropy_ref, plain([logits]), {}),
        (cross_entropy_ref, exact([logits]), {}),
    ):
        out = op(x, labels, **options_for(name, shape[-1]), **extra)
        up = torch.randn(out.loss.shape, generator=torch.Generator().manual_seed(0)).to(out.loss)
        runs.append(
            [
                out.loss.detach(),
                *torch.autograd.grad((out.loss * up).sum(), x),
                out.accuracy,
                out.predicted,
            ]
        )
    for what, got, usual, best in zip(("loss", "d_logits"), *runs):
        near(got, usual, best, what, dtype if what == "d_logits" else got.dtype)
    if "softcap" not in OPTIONS[name]:  # which makes words equal
        assert torch.equal(runs[0][2], runs[1][2]) and torch.equal(runs[0][3], runs[1][3])


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("right", [False, True])
def test_peaked(right, dtype):
    """Logits about 100: neither the loss of a word that is nearly sure nor its gradient has an
    error of lse's rounding.
    """
    logits, labels = make((2, 33, 101), dtype)
    logits = logits.detach().mul(30).requires_grad_()
    labels = logits.argmax(-1).where(labels != -100, labels) if right else labels
    runs = []
    for op, (x,) in (
        (cross_entropy, (logits,)),
        (cross_entropy_ref, plain([logits])),
        (cross_entropy_ref, exact([logits])),
    ):
        loss = op(x, labels)
        loss = getattr(loss, "loss", loss)
        runs.append([loss.detach(), *torch.autograd.grad(loss, x)])
    for what, got, usual, best in zip(("loss", "d_logits"), *runs):
        near(got, usual, best, what, dtype if what == "d_logits" else got.dtype)


def test_equal_to_the_loss_of_transformers():
    loss_utils = pytest.importorskip("transformers.loss.loss_utils")
    logits, labels = make((2, 9, 101), torch.bfloat16)
    for items in (None, 7):
        stock = loss_utils.ForCausalLMLoss(logits, labels, 101, num_items_in_batch=items)
        ours = cross_entropy(logits, labels, shift=True, num_items=items)
        best = cross_entropy_ref(logits.double(), labels, shift=True, num_items=items).loss
        assert ours.dtype == stock.dtype
        near(ours.detach(), stock.detach(), best.detach(), "loss", torch.float32)


def test_logits_of_any_layout_and_no_label():
    logits, labels = make((4, 6, 10), torch.float32)
    want = torch.autograd.grad(cross_entropy(logits, labels), logits)[0]
    turned = logits.detach().transpose(0, 2).contiguous().transpose(0, 2).requires_grad_()
    assert torch.equal(torch.autograd.grad(cross_entropy(turned, labels), turned)[0], want)
    loss = cross_entropy(logits, torch.full_like(labels, -100), num_items=3)
    assert loss == 0.0 and not torch.autograd.grad(loss, logits)[0].any()


def test_gradcheck():
    logits, labels = make((2, 4, 7), torch.float64)
    assert torch.autograd.gradcheck(
        lambda x: cross_entropy(x, labels, **options_for("all", 7)), (logits,)
    )


def test_second_derivative_is_refused():
    logits, labels = make((2, 4, 7), torch.float32)
    (d,) = torch.autograd.grad(cross_entropy(logits, labels), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="hfpatch: cross_entropy has one derivative"):
        d.sum().backward()


@pytest.mark.skipif(INTERPRET, reason="about registration, which does not depend on the kernel")
def test_opcheck_and_compile():
    logits, labels = make((6, 7), torch.float32)
    options = (-100, 0.1, 0.45, 2.0, 0.1)
    opcheck("cross_entropy", logits, labels, None, True, *options)

    def step(x, y):
        out = cross_entropy(x * 2.0, y, **options_for("all", 7), return_accuracy=True)
        return out.loss * out.accuracy.sum()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(logits, labels)
    eager = step(logits, labels)
    torch.testing.assert_close(*(torch.autograd.grad(loss, logits) for loss in (compiled, eager)))
    torch._dynamo.reset()


def test_wrong_arguments_are_named():
    logits, labels = make((2, 4, 7), torch.float32)
    for change, message in (
        ({"labels": labels.clamp(0) + 7}, r"must lie in \[0, 7\)"),
        ({"logits": logits.long()}, "floating-point logits"),
        ({"labels": labels[0]}, "labels of shape"),
    ):
        with pytest.raises(ValueError, match=f"hfpatch: .*{message}"):
            cross_entropy(**{"logits": logits, "labels": labels, **change})
