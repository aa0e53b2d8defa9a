"""Which rotation of transformers the fused one replaces."""

import pytest
import torch
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as of_parts
from transformers.models.gpt_oss.modeling_gpt_oss import apply_rotary_pos_emb as of_halves
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as of_wholes

from hfpatch.ops import rope
from hfpatch.parts import rotation
from tests.numerics import assert_close


def given(dtype=torch.float64, width=16):
    """q, k, and cos and sin of half a head's width."""
    g = torch.Generator().manual_seed(0)
    angles = torch.rand(1, 5, width // 2, generator=g, dtype=torch.float64)
    q, k = (torch.randn(2, n, 5, width, generator=g, dtype=torch.float64) for n in (4, 2))
    return tuple(x.to(dtype) for x in (q, k, angles.cos(), angles.sin()))


def gradients(rotate, q, k, cos, sin):
    q, k = q.clone().requires_grad_(), k.clone().requires_grad_()
    out = rotate(q, k, cos, sin)
    return [*out, *torch.autograd.grad([x.sin().sum() for x in out], (q, k))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_angles_of_half_a_head_are_those_of_gpt_oss(dtype, monkeypatch):
    called = []
    monkeypatch.setattr(rotation.ops, "rope", lambda *a, **kw: called.append(1) or rope(*a, **kw))
    ours = gradients(rotation.rotation(of_halves), *given(dtype))
    assert called
    exact = gradients(of_halves, *(x.double() for x in given(dtype)))
    for got, plain, value in zip(ours, gradients(of_halves, *given(dtype)), exact):
        assert_close(got, plain, value)


def test_the_same_angles_rotate_half_of_a_head_elsewhere():
    """GLM rotates the first half of each head, by angles of as many columns."""
    assert rotation.rotates_by_halves(of_halves)
    assert not rotation.rotates_by_halves(of_parts) and not rotation.rotates_by_halves(of_wholes)
    q, k, cos, sin = given()
    for got, plain in zip(rotation.rotation(of_parts)(q, k, cos, sin), of_parts(q, k, cos, sin)):
        assert torch.equal(got, plain)
