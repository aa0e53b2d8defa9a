"""Tensors that have shapes alone: the meta device, and torch's fake tensors. What trains stock
there trains patched.
"""

import pytest
import tiny
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaForCausalLM

import hfpatch

SETTINGS = {"off": "off", "tiled": hfpatch.Checkpointing(offload="host", tile=16)}
ONES = torch.ones(1, 40, dtype=torch.long)
BATCHES = {
    "plain": {},
    "masked": {"attention_mask": ONES},
    "packed": {
        "position_ids": ONES.cumsum(1),
        "cu_seq_lens_q": torch.tensor([0, 40], dtype=torch.int32),
    },
}


def trained(like, **given):
    """The loss's kind, and how many parameters have gradients, of a step on tensors that `like`
    makes; then an evaluation.
    """
    model = LlamaForCausalLM(tiny.config(attn_implementation="eager"))
    hfpatch.apply(model, checkpointing=given.pop("checkpointing"))
    ids, given = like(ONES), {name: like(x) for name, x in given.items()}
    loss = model.train()(input_ids=ids, labels=ids, use_cache=False, **given).loss
    loss.backward()
    with torch.no_grad():
        assert model.eval()(input_ids=ids).logits.shape == (1, 40, tiny.VOCAB)
    assert all(p.grad is not None for p in model.parameters()) and loss.shape == ()
    return loss


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("how", SETTINGS)
def test_a_step_on_the_meta_device(how, name):
    with torch.device("meta"):
        assert trained(lambda x: x.to("meta"), checkpointing=SETTINGS[how], **BATCHES[name]).is_meta


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("how", SETTINGS)
def test_a_step_on_fake_tensors(how, name):
    with FakeTensorMode() as mode:
        trained(mode.from_tensor, checkpointing=SETTINGS[how], **BATCHES[name])
