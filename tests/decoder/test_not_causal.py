"""A decoder as an encoder: is_causal=False in the call, in the modules and in the config gives one
answer, transformers' own, with and without gradients.
"""

import pytest
import tiny
import torch

POSITIONS = torch.cat([torch.arange(10), torch.arange(14)]).expand(2, -1)
ONES = torch.ones(2, tiny.TOKENS, dtype=torch.long)
PADDED = ONES.clone()
PADDED[1, -6:] = 0
BATCHES = {
    "plain": {},
    "a mask of ones": {"attention_mask": ONES},
    "padding": {"attention_mask": PADDED},
    "packed": {"position_ids": POSITIONS},
    "packed, and a mask of ones": {"position_ids": POSITIONS, "attention_mask": ONES},
}


def said(model, way: str, batch: dict, layers=slice(None)) -> dict:
    """The batch, and the model told in one of the ways."""
    if way == "call":
        return {**batch, "is_causal": False}
    if way == "config":
        model.config.is_causal = False
    for layer in model.model.layers[layers] if way == "module" else ():
        layer.self_attn.is_causal = False
    return batch


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("way", ["call", "module", "config"])
def test_one_answer_wherever_it_is_said(way, batch, capsys):
    labels = tiny.ids()
    labels[:, -6:] = -100
    given = {**BATCHES[batch], "input_ids": tiny.ids(), "labels": labels}
    stock, ours = tiny.llama(), tiny.patched(tiny.llama())
    stock_given, ours_given = said(stock, "config", given), said(ours, way, given)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            got, wanted = ours(**ours_given).loss, stock(**stock_given).loss
        torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(tiny.step(ours, ours_given), tiny.step(stock, stock_given))
    assert "run untiled, their inputs offloaded: attention that is not causal" in (
        capsys.readouterr().err
    )
    with torch.no_grad():  # and it is not what causal attention gives
        assert abs(tiny.llama()(**given).loss - wanted) > 1e-3


def test_some_layers_of_which_attention_is_not_causal():
    stock, ours = tiny.llama(), tiny.patched(tiny.llama())
    for model in (stock, ours):
        said(model, "module", {}, layers=slice(1))
    torch.testing.assert_close(*(tiny.step(model, tiny.labelled()) for model in (ours, stock)))
    for model in (stock, ours):  # and causal again
        del model.model.layers[0].self_attn.is_causal
    tiny.assert_as_good(ours, tiny.llama(), tiny.labelled())
