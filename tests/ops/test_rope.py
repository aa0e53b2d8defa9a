"""rope: transformers' apply_rotary_pos_emb, its gradients, layouts read as they lie, the caller's
tensors untouched.
"""

import pytest
import tiny
import torch
from oracle import BF16, DEVICE, FP16, FP32, FP64, INTERPRET, check, opcheck, randn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from hfpatch.ops.rope import rope, rope_ref


def cos_sin(batch, tokens, width, dtype=FP32, start=0):
    """As HF's rotary embedding makes them, with other positions in each row of a batch."""
    positions = torch.arange(tokens)[None] + start + 3 * torch.arange(batch)[:, None]
    angles = positions[..., None] / 100.0 ** (torch.arange(0, width, 2) / width)
    angles = torch.cat((angles, angles), -1)
    return angles.cos().to(DEVICE, dtype), angles.sin().to(DEVICE, dtype)


def both(cos, sin, **options):
    op = lambda q, k: rope(q, k, cos, sin, **options)  # noqa: E731
    exact = lambda q, k: rope_ref(q, k, cos.to(q.dtype), sin.to(q.dtype))  # noqa: E731
    return op, lambda q, k: apply_rotary_pos_emb(q, k, cos, sin), exact


def heads_last(q, k):
    """[B, T, H, E] leaves seen as [B, H, T, E]: what a projection's output looks like to HF's
    attention.
    """
    return q.transpose(1, 2), k.transpose(1, 2)


# (B, T, H, K, E): one of each; odd counts; heads that are no power of two, E of 80 and 96; Llama-8B
# and -1B heads.
SHAPES = [
    (1, 1, 1, 1, 2),
    (2, 5, 3, 1, 6),
    (1, 37, 6, 3, 80),
    (2, 3, 40, 5, 96),
    (2, 9, 32, 8, 128),
    (1, 33, 32, 8, 64),
]


@pytest.mark.parametrize(
    "shape, dtype, layout",
    tiny.covering(SHAPES, [BF16, FP16, FP32], ["BTHE", "BHTE"]),
    ids=str,
)
def test_values_and_gradients(shape, dtype, layout):
    B, T, H, K, E = shape
    if layout == "BTHE":
        q, k, view = (
            randn(B, T, H, E, dtype=dtype),
            randn(B, T, K, E, dtype=dtype, seed=1),
            heads_last,
        )
    else:
        q, k, view = (
            randn(B, H, T, E, dtype=dtype),
            randn(B, K, T, E, dtype=dtype, seed=1),
            lambda q, k: (q, k),
        )
    for batch in {1, B}:
        check(*both(*cos_sin(batch, T, E, dtype)), (q, k), view=view, retain=True)


def test_halves_that_differ():
    # HF repeats the first half of cos and sin; where the halves differ, negating the sine would be
    # a wrong gradient.
    q, k = randn(2, 5, 3, 8), randn(2, 5, 1, 8, seed=1)
    check(*both(randn(1, 5, 8, seed=2), randn(1, 5, 8, seed=3)), (q, k), view=heads_last)


@pytest.mark.parametrize(
    "dtype, auto, angles",
    [(BF16, BF16, torch.float32), (FP16, FP16, torch.float32), (BF16, BF16, FP16)],
)
def test_mixed_dtypes(dtype, auto, angles):
    # Under autocast q and k are half and HF's cos is float32: so are the results, and the gradients
    # are half again.
    q, k = randn(2, 5, 4, 8, dtype=dtype), randn(2, 5, 2, 8, dtype=dtype, seed=1)
    with torch.autocast(DEVICE, auto):
        check(*both(*(x.to(angles) for x in cos_sin(1, 5, 8))), (q, k), view=heads_last)


@pytest.mark.parametrize("needs", [(True, False), (False, True), (False, False)])
def test_any_subset_of_gradients(needs):
    q, k = randn(2, 5, 4, 8), randn(2, 5, 2, 8, seed=1)
    check(*both(*cos_sin(2, 5, 8)), (q, k), view=heads_last, needs=needs)


@pytest.mark.parametrize("used", [0, 1])
def test_a_result_that_nobody_reads_gives_no_gradient(used):
    """Not zero: an optimizer's weight decay would shrink the weights behind it."""
    leaves = [randn(2, 4, 5, 8).requires_grad_(), randn(2, 2, 5, 8, seed=1).requires_grad_()]
    rope(*leaves, *cos_sin(2, 5, 8))[used].square().sum().backward()
    assert leaves[1 - used].grad is None
    torch.testing.assert_close(leaves[used].grad, 2 * leaves[used])  # a rotation keeps lengths


# Slices of one fused projection, a strided last dimension, and keys expanded from one head.
@pytest.mark.parametrize("layout", ["fused", "strided", "expanded"])
def test_layouts(layout):
    views = {
        "fused": lambda q, k: (q[:, :, :3, :8].transpose(1, 2), q[:, :, 3:, :8].transpose(1, 2)),
        "strided": lambda q, k: (q[..., ::2].transpose(1, 2), k[..., ::2].transpose(1, 2)),
        "expanded": lambda q, k: (
            q[..., :8].transpose(1, 2),
            k[:, :, :1, :8].expand(-1, -1, 4, -1).transpose(1, 2),
        ),
    }
    q, k = randn(2, 5, 4, 16), randn(2, 5, 4, 16, seed=1)
    check(*both(*cos_sin(2, 5, 8)), (q, k), view=views[layout], needs=[True, layout != "fused"])


def test_a_view_keeps_its_layout_and_the_callers_tensors():
    q, k = heads_last(randn(2, 5, 4, 8), randn(2, 5, 2, 8, seed=1))
    before = q.clone(), k.clone()
    outs = rope(q, k, *cos_sin(1, 5, 8))
    assert [o.stride() for o in outs] == [q.stride(), k.stride()]
    assert torch.equal(q, before[0]) and torch.equal(k, before[1])


def test_gradcheck_twice():
    q, k = (
        randn(2, 3, 5, 6, dtype=FP64).requires_grad_(),
        randn(2, 1, 5, 6, dtype=FP64, seed=1).requires_grad_(),
    )
    op, _, _ = both(*cos_sin(2, 5, 6, FP64))
    assert torch.autograd.gradcheck(op, (q, k))
    assert torch.autograd.gradgradcheck(op, (q, k))


def test_a_learned_rotation_gets_its_gradient():
    q, k = randn(1, 3, 5, 6, dtype=FP64), randn(1, 1, 5, 6, dtype=FP64, seed=1)
    cos, sin = (x.requires_grad_() for x in cos_sin(1, 5, 6, FP64))
    assert torch.autograd.gradcheck(lambda c, s: rope(q, k, c, s), (cos, sin))


@pytest.mark.skipif(INTERPRET, reason="about registration, which does not depend on the kernel")
def test_opcheck():
    views = heads_last(randn(2, 5, 4, 8), randn(2, 5, 2, 8, seed=1))
    q, k = (x.detach().requires_grad_() for x in views)
    cos, sin = cos_sin(1, 5, 8)
    opcheck("rope", q, k, cos, sin, False, None)
    opcheck("rope", q.detach(), k, cos, sin, True, BF16)


def test_wrong_shapes_are_refused():
    cos, sin = cos_sin(1, 5, 8)
    for q, k in (
        (randn(2, 4, 5, 8), randn(2, 2, 4, 8)),
        (randn(2, 4, 5, 6), randn(2, 2, 5, 6)),
        (randn(4, 5, 8),) * 2,
        (randn(5, 8),) * 2,
    ):
        with pytest.raises(ValueError, match="hfpatch: rope: q must be"):
            rope(q, k, cos, sin)
