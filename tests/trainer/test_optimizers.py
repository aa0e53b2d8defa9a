"""Optimizers of the user's own see the gradients that they would see without hfpatch: a few steps
end in the same weights.
"""

import pytest
import tiny
import torch
from own_optimizers import made
from transformers.optimization import Adafactor

import hfpatch


def trained(name: str, model):
    torch.manual_seed(0)  # of a random projection
    optimizers = [Adafactor(model.parameters())] if name == "transformers" else made(name, model)
    for optimizer in optimizers:
        getattr(optimizer, "train", lambda: None)()
    for step in range(3):
        model(tiny.ids(seed=step)).logits.square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return model


# GaLore's and APOLLO's packages call what torch has retired.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    ["muon", "adafactor", "transformers", "schedule-free", "apollo", "galore"],
)
def test_trains_as_with_stock(name):
    """In float64, where gradients are the same but for algebra: Muon, which rounds to bf16 inside,
    sees no other bit. transformers: its Adafactor, whose states are float32.
    """
    model = tiny.llama()
    stock, ours = tiny.exact(model), tiny.exact(model)
    hfpatch.apply(ours, checkpointing=tiny.TILED)
    trained(name, ours)
    trained(name, stock)
    before = dict(tiny.exact(model).named_parameters())
    for (key, mine), theirs in zip(ours.named_parameters(), stock.parameters()):
        moved = (theirs - before[key]).norm()
        assert moved > 0 and (mine - theirs).norm() <= 1e-5 * moved, key
