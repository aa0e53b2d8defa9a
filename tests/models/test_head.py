"""The head stays transformers' own Linear: the fused loss is its forward for the time of one call."""

import copy
import warnings

import pytest
import tiny
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.flop_counter import FlopCounterMode

import hfpatch


def test_the_head_is_a_plain_linear_before_during_and_after():
    """quantize_dynamic, and whoever else looks for nn.Linear by its class, finds it."""
    ours = tiny.patched(tiny.llama())
    seen = []
    ours.lm_head.register_forward_hook(lambda m, args, out: seen.append((type(m), len(args), out.dim())))
    tiny.step(ours, tiny.labelled())
    assert seen == [(nn.Linear, 1, 0)], "called once, with hidden states alone, for the loss"
    assert type(ours.lm_head) is nn.Linear and "forward" not in vars(ours.lm_head)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch retires it
        quantised = torch.ao.quantization.quantize_dynamic(copy.deepcopy(ours).eval(), {nn.Linear})
    assert type(quantised.lm_head).__module__.startswith("torch.ao.nn.quantized")
    with pytest.warns(UserWarning, match="whole logits, as lm_head is a torch.ao.nn.quantized"), torch.no_grad():
        assert quantised(**tiny.labelled()).loss.isfinite()


def test_a_loss_that_raises_leaves_the_head_alone():
    ours = tiny.patched(tiny.llama())
    with pytest.raises(ValueError, match="hfpatch: labels must lie in"):
        ours(tiny.ids(), labels=tiny.ids() + tiny.VOCAB)
    assert "forward" not in vars(ours.lm_head) and ours(tiny.ids()).logits.shape[-1] == tiny.VOCAB


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x

    def right_inverse(self, x):
        return x / 2


@pytest.mark.parametrize("order", ["parametrize first", "apply first"])
@pytest.mark.parametrize("name", ["lm_head", "model.norm", "model.embed_tokens"])
def test_parametrize_then_apply_undo_and_apply_again(name, order):
    """parametrize puts a class of its own over ours, or ours comes over its: each is taken off without the other."""
    stock, ours = tiny.llama(), tiny.llama()
    if order == "apply first":
        hfpatch.apply(ours, checkpointing=tiny.TILED)
    for model in (stock, ours):
        parametrize.register_parametrization(model.get_submodule(name), "weight", Doubled())
    hfpatch.apply(ours, checkpointing=tiny.TILED)
    tiny.assert_as_good(ours, stock, tiny.labelled())
    assert ours(**tiny.labelled()).logits is None
    hfpatch.undo(ours)
    assert [k.__mro__[1:] for k in tiny.classes(ours)] == [k.__mro__[1:] for k in tiny.classes(stock)]
    got, wanted = tiny.step(ours, tiny.labelled()), tiny.step(stock, tiny.labelled())
    assert all(torch.equal(got[n], wanted[n]) for n in wanted)
    hfpatch.apply(ours, checkpointing=tiny.TILED)
    for model in (ours, stock):
        parametrize.remove_parametrizations(model.get_submodule(name), "weight")
    tiny.assert_as_good(ours, stock, tiny.labelled())
    hfpatch.undo(ours)
    assert tiny.classes(ours) == tiny.classes(stock)


@pytest.mark.parametrize("checkpointing", ["off", hfpatch.Checkpointing(tile=512), tiny.TILED, "theirs"])
def test_flops_and_modules_are_counted(checkpointing):
    """FlopCounterMode and ModuleTracker hook every tensor that says it wants a gradient: none may say so without a graph."""
    ours = tiny.patched(tiny.llama(), checkpointing="off" if checkpointing == "theirs" else checkpointing)
    if checkpointing == "theirs":
        tiny.checkpoint(ours)
    batch = tiny.labelled()
    with FlopCounterMode(display=False) as counter:
        ours(**batch).loss.backward()
    tokens, kept = batch["input_ids"].numel(), int((batch["labels"][:, 1:] != -100).sum())
    D, K, F, V = 64, 32, 112, tiny.VOCAB
    matmuls = {"q": D * D, "k": D * K, "v": D * K, "o": D * D, "gate": D * F, "up": D * F, "down": D * F}
    again = 0 if checkpointing == "off" else sum(matmuls.values()) - matmuls["down"]
    layer = tokens * 2 * (3 * sum(matmuls.values()) + again)
    counts = {name: sum(of.values()) for name, of in counter.get_flop_counts().items()}
    square = "LlamaForCausalLM.model.layers.1"
    attention = sum(n for op, n in counter.get_flop_counts()[square].items() if "attention" in str(op))
    assert counts[square] == layer + attention
    assert counts["Global"] == 2 * (layer + attention) + 6 * kept * D * V
