"""LongCat's experts, of which some compute nothing and some are chosen by no token."""

import copy

import families
import pytest
import test_families
import torch

import hfpatch


@pytest.mark.parametrize("chosen", ["all", "one", "none"])
def test_experts_that_no_token_chose_have_zeros_as_in_stock(chosen):
    """None would leave weight decay and moments out, and an engine's hooks waiting."""
    model = families.small_model("longcat_flash")
    for router in model.modules():
        if type(router).__name__ == "LongcatFlashTopkRouter" and chosen != "all":
            bias = router.e_score_correction_bias.zero_()
            bias[-1] = 100.0  # computes nothing
            bias[-2 if chosen == "none" else 1] = 100.0
    stock, ours = copy.deepcopy(model), copy.deepcopy(model)
    hfpatch.apply(ours, checkpointing=hfpatch.Checkpointing(tile=8))
    batch = test_families.batch()
    _, loss, got = test_families.step(ours, batch)
    _, wanted_loss, wanted = test_families.step(stock, batch)
    assert got.keys() == wanted.keys() and abs(loss - wanted_loss) < 1e-5
    for name, grad in got.items():
        torch.testing.assert_close(grad, wanted[name], rtol=1e-3, atol=1e-5)
        assert "experts" not in name or bool(((grad == 0) == (wanted[name] == 0)).all())
    if chosen == "one":
        down = got["model.layers.0.mlp.experts.down_proj"]
        assert not down[0].any() and down[1].any()
