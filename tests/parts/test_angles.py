"""apply(rope_float64=True): rotary angles at positions that float32 does not hold."""

import copy

import pytest
import tiny
import torch

import hfpatch
from hfpatch.decoder import stack


def test_far_positions_are_as_exact_as_near_ones():
    stock = tiny.llama()
    ours = copy.deepcopy(stock)
    assert hfpatch.apply(ours, rope_float64=True, checkpointing="off").count("float64 RoPE") == 1
    positions, x = torch.tensor([[5, 1 << 20, (1 << 23) - 1]]), torch.zeros(1)
    angles = positions[..., None].double() * stock.model.rotary_emb.inv_freq.double()
    for part, exact in zip(ours.model.rotary_emb(x, positions), (angles.cos(), angles.sin())):
        assert part.dtype == torch.float32
        assert (part[..., : exact.shape[-1]] - exact).abs().max() <= torch.finfo(torch.float32).eps
    off = stock.model.rotary_emb(x, positions)[0][..., : angles.shape[-1]] - angles.cos()
    assert off[0, 2].abs().max() > 0.01  # what it is for
    hfpatch.undo(ours)
    assert tiny.classes(ours) == tiny.classes(stock)


def test_other_values_are_refused():
    with pytest.raises(ValueError, match="hfpatch: rope_float64 must be True or False, got "):
        hfpatch.apply(tiny.llama(), rope_float64="fp64")


@pytest.mark.parametrize("float64, times", [(False, 1), (True, 0)])
def test_long_rows_are_advised_once(float64, times, monkeypatch, capfd):
    monkeypatch.setattr(stack, "FLOAT32_ANGLES", tiny.TOKENS)
    ours, said = tiny.patched(tiny.llama(), rope_float64=float64), []
    for tokens in (tiny.TOKENS, tiny.TOKENS + 1, tiny.TOKENS + 1):
        ours(input_ids=tiny.ids(1, tokens))
        said.append(capfd.readouterr().err.count("hfpatch.apply(model, rope_float64=True)"))
    assert said == [0, times, 0]
