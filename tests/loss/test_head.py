"""The ends of a model. The head stays transformers' own Linear: the fused loss is its forward for
the time of one call.
"""

import copy
import types
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
    ours.lm_head.register_forward_pre_hook(lambda m, args: seen.append((type(m), len(args))))
    tiny.step(ours, tiny.labelled())
    assert seen == [(nn.Linear, 1)], "called once, with hidden states alone"
    assert type(ours.lm_head) is nn.Linear and "forward" not in vars(ours.lm_head)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch retires it
        quantised = torch.ao.quantization.quantize_dynamic(copy.deepcopy(ours).eval(), {nn.Linear})
    assert type(quantised.lm_head).__module__.startswith("torch.ao.nn.quantized")
    with (
        pytest.warns(UserWarning, match="whole logits, as lm_head is a torch.ao.nn.quantized"),
        torch.no_grad(),
    ):
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
@pytest.mark.parametrize(
    "name", ["lm_head", "model.norm", "model.embed_tokens", "model.layers.0.mlp.up_proj"]
)
def test_parametrize_then_apply_undo_and_apply_again(name, order):
    """parametrize puts a class of its own over ours, or ours comes over its: each is taken off
    without the other.
    """
    stock, ours = tiny.llama(), tiny.llama()
    if order == "apply first":
        hfpatch.apply(ours, checkpointing=tiny.TILED)
    for model in (stock, ours):
        parametrize.register_parametrization(model.get_submodule(name), "weight", Doubled())
    hfpatch.apply(ours, checkpointing=tiny.TILED)
    tiny.assert_as_good(ours, stock, tiny.labelled())
    assert ours(**tiny.labelled()).logits is None
    hfpatch.undo(ours)
    assert [k.__mro__[1:] for k in tiny.classes(ours)] == [
        k.__mro__[1:] for k in tiny.classes(stock)
    ]
    got, wanted = tiny.step(ours, tiny.labelled()), tiny.step(stock, tiny.labelled())
    assert all(torch.equal(got[n], wanted[n]) for n in wanted)
    hfpatch.apply(ours, checkpointing=tiny.TILED)
    for model in (ours, stock):
        parametrize.remove_parametrizations(model.get_submodule(name), "weight")
    tiny.assert_as_good(ours, stock, tiny.labelled())
    hfpatch.undo(ours)
    assert tiny.classes(ours) == tiny.classes(stock)


@pytest.mark.parametrize(
    "checkpointing", ["off", hfpatch.Checkpointing(tile=512), tiny.TILED, "theirs"]
)
def test_flops_and_modules_are_counted(checkpointing):
    """FlopCounterMode and ModuleTracker hook every tensor that says it wants a gradient: none may
    say so without a graph.
    """
    ours = tiny.patched(
        tiny.llama(), checkpointing="off" if checkpointing == "theirs" else checkpointing
    )
    if checkpointing == "theirs":
        tiny.checkpoint(ours)
    batch = tiny.labelled()
    with FlopCounterMode(display=False) as counter:
        ours(**batch).loss.backward()
    tokens, kept = batch["input_ids"].numel(), int((batch["labels"][:, 1:] != -100).sum())
    D, K, F, V = 64, 32, 112, tiny.VOCAB
    matmuls = {
        "q": D * D,
        "k": D * K,
        "v": D * K,
        "o": D * D,
        "gate": D * F,
        "up": D * F,
        "down": D * F,
    }
    again = 0 if checkpointing == "off" else sum(matmuls.values()) - matmuls["down"]
    layer = tokens * 2 * (3 * sum(matmuls.values()) + again)
    counts = {name: sum(of.values()) for name, of in counter.get_flop_counts().items()}
    square = "LlamaForCausalLM.model.layers.1"
    attention = sum(
        n for op, n in counter.get_flop_counts()[square].items() if "attention" in str(op)
    )
    assert counts[square] == layer + attention
    # a matmul in older versions of transformers
    angles = counts.get("LlamaForCausalLM.model.rotary_emb", 0)
    assert counts["Global"] - angles == 2 * (layer + attention) + 6 * kept * D * V


def frozen_embedding(model):
    """LoRA's situation: all frozen but the projections."""
    for name, p in model.named_parameters():
        p.requires_grad_("_proj" in name)
    return model


def wants_gradient(model, batch) -> bool:
    """Whether the first layer is asked for the gradient of its input."""
    seen = []
    hook = model.model.layers[0].register_forward_pre_hook(
        lambda m, args: seen.append(args[0].requires_grad)
    )
    model(**batch)
    hook.remove()
    return seen == [True]


@pytest.mark.parametrize("way", tiny.WAYS)
@pytest.mark.parametrize("order", ["apply first", "hook first"])
def test_enable_input_require_grads_costs_nothing(way, order):
    """TRL and PEFT call it: the embedding's output becomes a leaf that is kept, and layer 0
    computes a gradient for nobody.
    """
    stock, ours = frozen_embedding(tiny.llama()), frozen_embedding(tiny.llama())
    for turn in ("apply first", "hook first"):
        if turn == order:
            hfpatch.apply(ours, checkpointing=tiny.WAYS[way])
        else:
            ours.enable_input_require_grads()
    stock.enable_input_require_grads()
    batch = tiny.labelled()
    assert wants_gradient(stock, batch)
    assert wants_gradient(ours, batch) == (way == "off"), (
        "transformers' own checkpointing may need it"
    )
    tiny.assert_as_good(ours, stock, batch)
    kept, exact = [], tiny.exact(stock)
    exact.enable_input_require_grads()
    for model in (ours, stock, exact):
        model.model.embed_tokens.register_forward_hook(lambda m, args, out: kept.append(out))
        tiny.step(model, batch)
    tiny.numerics.assert_close(
        *(out.grad for out in kept), "what somebody who holds the embedding's output gets"
    )
    hfpatch.undo(ours)
    assert tiny.classes(ours) == tiny.classes(stock) and wants_gradient(ours, batch)


@pytest.mark.parametrize("way", tiny.WAYS)
def test_hidden_states_have_the_gradient_that_was_asked_for(way):
    """The first of them is what was embedded; in a frozen model (saliency) nothing else has one,
    and backward raised.
    """
    stock = tiny.llama().requires_grad_(False)
    ours, exact, kept = tiny.patched(stock, checkpointing=tiny.WAYS[way]), tiny.exact(stock), []
    for model in (ours, stock, exact):
        model.enable_input_require_grads()
        out = model(**tiny.labelled(), output_hidden_states=True)
        out.loss.backward()
        kept.append(out.hidden_states[0].grad)
    tiny.numerics.assert_close(*kept, "what was embedded")


@pytest.mark.parametrize("way", tiny.WAYS)
@pytest.mark.parametrize("part", ["causal", "stack"])
def test_a_frozen_model_has_a_backward_where_input_gradients_were_asked_for(part, way):
    """Which reaches nobody, in stock too; the loss had no graph, so that backward raised."""
    ours = tiny.patched(tiny.llama().requires_grad_(False), checkpointing=tiny.WAYS[way])
    ours.enable_input_require_grads()
    batch = tiny.labelled()
    loss = (
        ours(**batch).loss
        if part == "causal"
        else ours.model(batch["input_ids"]).last_hidden_state.sum()
    )
    loss.backward()
    assert all(p.grad is None for p in ours.parameters())


@pytest.mark.parametrize("order", ["apply first", "peft first"])
def test_cpt_reads_the_logits_that_apply_was_asked_for(order):
    from peft import CPTConfig, get_peft_model

    def made(patch):
        model = tiny.llama()
        if patch and order == "apply first":
            hfpatch.apply(model, checkpointing=tiny.TILED, logits=True)
        torch.manual_seed(0)
        ids = [5, 6, 7, 8]
        settings = CPTConfig(
            cpt_token_ids=ids,
            cpt_mask=[1] * 4,
            cpt_tokens_type_mask=[1, 2, 3, 4],
            task_type="CAUSAL_LM",
        )
        wrapped = get_peft_model(model, settings)
        if patch and order == "peft first":
            hfpatch.apply(wrapped, checkpointing=tiny.TILED, logits=True)
        return wrapped

    batch = {**tiny.labelled(), "input_type_mask": torch.full((2, tiny.TOKENS), 4)}
    ours = made(True)
    tiny.assert_as_good(ours, made(False), batch)
    assert [n for n, p in ours.named_parameters() if p.grad is not None]


@pytest.mark.parametrize("when", ["before", "after"])
def test_parts_of_another_library_stay_and_the_others_are_ours(when):
    """use_kernels gives norms and MLPs a forward on the instance: those stay, the layers around
    them are tiled all the same.
    """
    stock, ours = tiny.llama(), tiny.llama()

    def kernelize(model):
        for module in model.modules():
            kind = getattr(module, "_hfpatch_base", type(module))
            if kind.__name__ in ("LlamaMLP", "LlamaRMSNorm"):
                module.forward = types.MethodType(_kernel(kind.forward), module)

    kernelize(stock)
    if when == "before":
        kernelize(ours)
    report = hfpatch.apply(ours, checkpointing=tiny.TILED)
    if when == "before":
        reasons = dict(report.skipped)
        assert reasons["rms_norm"] == reasons["mlp"] == f"its forward is {__name__}'s"
    else:
        kernelize(ours)  # transformers does at every train() and eval()
    assert (
        report.count("checkpointing") == 2
        and report.count("rope") == 2
        and report.count("loss") == 1
    )
    tiny.assert_as_good(ours, stock, tiny.labelled())
    assert ours(**tiny.labelled()).logits is None
    hfpatch.undo(ours)
    assert all("forward" in vars(m) for m in ours.modules() if type(m).__name__ == "LlamaMLP"), (
        "theirs are theirs"
    )


def _kernel(forward):
    return lambda self, x: forward(self, x)
