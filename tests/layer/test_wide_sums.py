"""Weight gradients over several tiles that add up in float32 in their matmuls, as a device that can
does it; here plain torch stands for its kernel.
"""

import pytest
import tiny
import torch
from torch import nn

import hfpatch
from hfpatch.layer import weight_gradients as weights

pytestmark = pytest.mark.usefixtures("exact_loss")


def in_float32(out, a, b, first):
    out.copy_(a.float() @ b.float()) if first else out.addmm_(a.float(), b.float())


def gradients(model, ids):
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("tile", [4, 64])
def test_gradients_add_up_in_their_matmuls(tile, monkeypatch):
    """Each Linear's of each tile, dead ones too, none by autograd; closer to float64 than what is
    rounded a tile. One tile has no sums.
    """
    added = []
    monkeypatch.setattr(
        weights,
        "add_product",
        lambda out, a, b, first: added.append(first) or in_float32(out, a, b, first),
    )
    ids = torch.randint(0, 32, (1, 64), generator=torch.Generator().manual_seed(1))
    exact = gradients(tiny.llama().to(torch.bfloat16).double(), ids)
    errors, hooked = [], []
    for able in (False, True):
        monkeypatch.setattr(
            weights, "sums_in_matmul", lambda x, dtype, able=able: able and dtype == torch.bfloat16
        )
        model = tiny.llama().to(torch.bfloat16)
        hfpatch.apply(model, checkpointing=hfpatch.Checkpointing(offload="gpu", tile=tile, plain=0))
        linears = [m for m in model.model.layers.modules() if isinstance(m, nn.Linear)]
        linears[0].register_full_backward_hook(
            tiny.OfAnEngine(lambda *_, able=able: hooked.append(able))
        )
        found = gradients(model, ids)
        errors.append(sum((found[n].double() - exact[n]).norm() for n in exact if "_proj" in n))
        assert len(added) == (able and tile < 64) * len(linears) * 64 // tile
    assert sum(added) == (tile < 64) * len(linears)  # the first of each is no sum yet
    assert errors[1] <= errors[0] and hooked.count(True) == hooked.count(False) >= 64 // tile
