"""Traps that gave other numbers without a word: masks, positions, hooks, the user's own loss,
labels that are all ignored.
"""

import copy
import functools

import pytest
import tiny
import torch
from families import small_model
from transformers.loss.loss_utils import ForCausalLMLoss

import hfpatch

WAYS = {"tiled": tiny.TILED, "off": "off"}


def batch(**more) -> dict:
    return {**tiny.labelled(1), **more}


def positions(kind: str) -> torch.Tensor:
    counted = torch.arange(tiny.TOKENS)[None]
    return {
        "jump": counted + 100 * (counted >= 9),
        "repeat": counted - (counted >= 9).long(),
        "doubled": counted // 2,
        "fraction": counted / 2,
        "floats": counted.float(),
    }[kind]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["jump", "repeat", "doubled", "fraction"])
def test_positions_that_do_not_restart_start_no_document(kind, way):
    """PoSE, skip-wise and interpolated positions beside a mask: one document, as transformers has
    it.
    """
    stock = tiny.llama()
    given = batch(
        position_ids=positions(kind), attention_mask=torch.ones(1, tiny.TOKENS, dtype=torch.long)
    )
    tiny.assert_as_good(tiny.patched(stock, checkpointing=WAYS[way]), stock, given)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("kind", ["jump", "repeat", "floats"])
def test_positions_beside_the_cache_that_transformers_makes(kind, checkpointed, way):
    """A loop of one's own says nothing of a cache, so transformers makes one and looks for no
    documents, in training too; but under its own checkpointing it makes none.
    """
    stock = tiny.llama(dtype=torch.float64)
    ids, found = tiny.ids(1), []
    for model in (tiny.patched(stock, checkpointing=WAYS[way]), tiny.exact(stock)):
        if checkpointed:
            tiny.checkpoint(model)
        model.train()(input_ids=ids, labels=ids, position_ids=positions(kind)).loss.backward()
        found.append(tiny.gradients(model))
    tiny.assert_same_in_double(*found)


@pytest.mark.parametrize(
    "family, kind", [("gpt_oss", "jump"), ("afmoe", "repeat"), ("mistral", "jump")]
)
def test_positions_alone_start_documents_where_the_family_looks_for_them(family, kind):
    """Without a mask and a cache most families read documents off positions; the others see one."""
    stock = small_model(family, torch.float32)
    ids = tiny.ids(1) % stock.config.vocab_size
    given = batch(input_ids=ids, labels=ids, position_ids=positions(kind), use_cache=False)
    tiny.assert_as_good(tiny.patched(stock), stock, given)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("counted", [False, True])
def test_prompt_padding_completion(counted, way):
    """What preference trainers build: the completion still sees the prompt before the padding
    between them.
    """
    stock = tiny.llama()
    mask = torch.ones(1, tiny.TOKENS, dtype=torch.long)
    mask[:, 7:12] = 0
    given = batch(attention_mask=mask)
    given["labels"][mask == 0] = -100
    if counted:
        given["position_ids"] = (mask.cumsum(1) - 1).clamp_min(0)
    tiny.assert_as_good(tiny.patched(stock, checkpointing=WAYS[way]), stock, given)


@pytest.mark.parametrize("length", [tiny.TOKENS - 4, tiny.TOKENS + 6])
def test_a_mask_of_another_length(length):
    """Beside the cache that it makes in training too, transformers cuts it, or hides what it is
    short of.
    """
    stock = tiny.llama()
    given = batch(attention_mask=torch.ones(1, length, dtype=torch.long))
    tiny.assert_as_good(tiny.patched(stock), stock, given)


# transformers passes hidden states by keyword, of which such hooks know nothing: torch says so with
#     any model.
@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
def test_a_backward_hook_on_attention_fires():
    stock, fired = tiny.llama(), []
    ours = tiny.patched(stock)
    ours.model.layers[1].self_attn.register_full_backward_hook(lambda *_: fired.append(1))
    tiny.assert_as_good(ours, stock, batch())
    assert fired == [1]


def mean_square(logits, labels, vocab_size, **_):
    return logits.float().square().mean()


def under_its_own_name():
    """A loss that calls itself what transformers' own is called: the name decides nothing."""

    def ForCausalLMLoss(logits, labels, vocab_size, **_):
        return mean_square(logits, labels, vocab_size)

    return ForCausalLMLoss


def of_a_class(loss):
    return lambda model: setattr(
        model, "__class__", type("OfAUser", (tiny.LlamaForCausalLM,), {"loss_function": loss})
    )


LOSSES = {
    # how the model's loss is set -> whether the fused one may run in its place
    "stock": (lambda model: None, True),
    "stock, set": (lambda model: setattr(model, "loss_function", ForCausalLMLoss), True),
    "stock, wrapped": (lambda model: setattr(model, "loss_function",
                                             functools.wraps(ForCausalLMLoss)(mean_square)), False),
    "theirs": (lambda model: setattr(model, "loss_function", under_its_own_name()), False),
    "loss_type": (lambda model: setattr(model, "loss_type", "ForMaskedLM"), False),
    "a method": (of_a_class(lambda self, *args, **more: mean_square(*args, **more)), False),
    "a property": (of_a_class(property(lambda self: mean_square)), False),
    # transformers: the causal one
    "a loss_type nobody knows": (lambda model: setattr(model, "loss_type", "Mine"), True),
}  # fmt: skip


# transformers says it of every loss_type that it does not know.
@pytest.mark.filterwarnings(
    "ignore:.*loss_type:UserWarning", "ignore:hfpatch. the loss runs through:UserWarning"
)
@pytest.mark.parametrize("when", ["before apply", "after apply"])
@pytest.mark.parametrize("how", LOSSES)
def test_whose_loss_runs(how, when, monkeypatch):
    """The fused loss only in place of transformers' causal one, and what the report says is what
    runs.
    """
    put, fused = LOSSES[how]
    whole = tiny.llama()
    ours, true = copy.deepcopy(whole), tiny.with_exact_norms(whole).double()
    put(whole)
    put(true)
    if when == "before apply":
        put(ours)
    report = hfpatch.apply(ours, checkpointing=tiny.TILED)
    if when == "after apply":
        put(ours)
        report = hfpatch.apply(copy.deepcopy(ours), checkpointing=tiny.TILED)
    assert (ours(**batch()).logits is None) is fused and report.count("loss") == fused
    assert fused or [o for o, _ in report.skipped] == ["loss"]
    tiny.assert_within(*(tiny.step(model, batch()) for model in (ours, whole, true)))


def test_evaluation_with_labels_keeps_the_cache():
    stock = tiny.llama().eval()
    ours = tiny.patched(stock, logits=False)
    with torch.no_grad():
        got, wanted = (m(**batch()).past_key_values for m in (ours, stock))
    assert got.get_seq_length() == wanted.get_seq_length() == tiny.TOKENS


def test_nothing_says_our_attention_outside_of_a_forward(tmp_path):
    """What TRL and transformers read of the config is the user's choice, also after an exception,
    and config.json says neither.
    """
    ours = tiny.patched(tiny.llama())
    ours.model.layers[1].mlp.register_forward_hook(
        lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        ours(**batch())
    assert ours.config._attn_implementation == "sdpa"
    ours.save_pretrained(tmp_path)
    assert "hfpatch" not in (tmp_path / "config.json").read_text()
    assert hfpatch.undo(ours) is None


def test_a_forward_that_a_trainer_kept_runs_after_undo():
    """TRL sets model.forward to a closure over the bound method that it found."""
    stock = tiny.llama()
    ours = tiny.patched(stock)
    kept = ours.forward
    ours.forward = lambda *args, **kwargs: kept(*args, **kwargs)
    hfpatch.undo(ours)
    tiny.assert_as_good(ours, stock, batch())
    report = hfpatch.apply(ours, checkpointing=tiny.TILED)
    assert ("loss", "its forward is test_traps_silent's") in report.skipped
    tiny.assert_as_good(ours, stock, batch())


def test_an_attention_wrapped_later_runs_whole():
    from peft import AdaptionPromptConfig, get_peft_model

    stock = tiny.llama(dtype=torch.float64)
    ours = tiny.patched(stock)
    settings = AdaptionPromptConfig(adapter_len=4, adapter_layers=2, task_type="CAUSAL_LM")
    ours, stock = get_peft_model(ours, settings), get_peft_model(stock, settings)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in stock.parameters():
            if parameter.requires_grad:  # a gate of zero would hide the prompt's gradient
                parameter.normal_()
    ours.load_state_dict(stock.state_dict())
    tiny.assert_equal_in_double(ours, stock, batch())


def test_a_batch_of_another_shape_leaves_nothing_behind():
    ours = tiny.patched(tiny.llama())
    with pytest.raises(RuntimeError):
        ours(input_ids=tiny.ids()[None])
    ours(**tiny.labelled())
