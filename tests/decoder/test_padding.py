"""Padding whose output is read, as where a row's first token is labelled: the masked token before
it predicts that.
"""

import pytest
import tiny
import torch
import transformers
from families import TILED, small_model
from numerics import lifted
from test_unpadded import rows  # noqa: F401
from torch import nn
from torch.nn import functional as F
from transformers import LlamaForCausalLM, LlamaModel, LlamaPreTrainedModel
from transformers.modeling_outputs import TokenClassifierOutput
from transformers.trainer_pt_utils import LabelSmoother

import hfpatch

THEIRS = "transformers' own"
WAYS = {THEIRS: "off", "tiled": tiny.TILED, "whole": hfpatch.Checkpointing(tile=64), "off": "off"}


def assert_equal(model, stock, batch, loss=lambda out: out.loss) -> None:
    got, true = tiny.step(model, batch, loss), tiny.step(stock, batch, loss)
    for name, wanted in true.items():
        assert torch.isfinite(wanted).all()
        # norms and rotation are in float32 in stock
        assert (got[name] - wanted).norm() <= 1e-5 * wanted.norm() + 1e-12, name


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss", "gemma2", "falcon", "bloom"])
@pytest.mark.parametrize("where", ["left", "hole", "row"])
@pytest.mark.parametrize("way", WAYS)
def test_what_sees_nobody_gets_zeros_or_a_mean(way, where, family):
    """A masked token predicts the token behind it where that is labelled; what it attends to is
    hidden then: with a window of 4, that of tokens in a hole as well. Eager attention without sinks
    gives the mean of all tokens; in float64 that is NaN in transformers.
    """
    if family == "llama":
        stock = tiny.llama(dtype=torch.float64)
    else:
        double = family in ("mistral", "gpt_oss")
        stock = small_model(family, torch.float64 if double else torch.float32)
        stock.set_attn_implementation("sdpa" if family == "mistral" else "eager")
        stock.config.sliding_window = 4
    at = {"left": slice(0, 9), "hole": slice(6, 15), "row": slice(None)}[where]
    ids = torch.randint(
        3,
        min(tiny.VOCAB, stock.config.vocab_size),
        (2, tiny.TOKENS),
        generator=torch.Generator().manual_seed(0),
    )
    mask = torch.ones_like(ids)
    mask[1, at] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids}
    batch["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    ours = tiny.patched(stock, checkpointing=WAYS[way])
    if way == THEIRS:  # again in backward, when our attention has gone
        ours.gradient_checkpointing_enable()
    assert_equal(ours, stock, batch)


SHORT = ("llama4_text", "phi3")
# Gemma 2 has eager attention alone, whose NaN where nothing is seen spreads to all tokens.
ALL = [f if f in SHORT else pytest.param(f, marks=pytest.mark.long) for f in TILED if f != "gemma2"]


@pytest.mark.parametrize("family", ALL)
def test_every_position_is_transformers_own_under_any_mask(family):
    """Those of masked tokens too."""
    stock, generator = small_model(family), torch.Generator().manual_seed(0)
    try:
        stock.set_attn_implementation("sdpa")
    except ValueError:
        assert family == "gpt_oss"
    ours = tiny.patched(stock)
    ids = torch.randint(3, stock.config.vocab_size, (3, tiny.TOKENS), generator=generator)
    for _ in range(3):
        mask = (torch.rand(ids.shape, generator=generator) < 0.6).long()
        with torch.no_grad(), lifted():
            got, wanted = (
                m(input_ids=ids, attention_mask=mask, use_cache=False).logits for m in (ours, stock)
            )
        assert ((got - wanted).abs() <= 1e-11 * wanted.abs().max()).all()


def own_loss(logits, labels, vocab_size, **kwargs):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class Own(LlamaForCausalLM):
    def forward(self, input_ids=None, **kwargs):
        return super().forward(input_ids=input_ids, **kwargs)


def hook(model):
    model.model.norm.register_forward_hook(lambda *_: None)


def told(model) -> str:
    return " ".join(model._hfpatch_report.notes)


MAY_READ = "or padding behind a row, until a backward shows that no loss reads it."
OTHERS = "outputs of LlamaModel at right padding differ from transformers'."

# How a forward with labels differs: (class, options of apply, change of the model, arguments).
LABELLED = {
    "fused": (LlamaForCausalLM, {}, None, {}),
    "own class": (Own, {}, None, {}),
    "logits": (LlamaForCausalLM, {"logits": True}, None, {}),
    "loss=False": (LlamaForCausalLM, {"loss": False}, None, {}),
    "own loss": (LlamaForCausalLM, {}, lambda m: setattr(m, "loss_function", own_loss), {}),
    "hook": (LlamaForCausalLM, {}, hook, {}),
    "hidden states": (LlamaForCausalLM, {}, None, {"output_hidden_states": True}),
}


@pytest.mark.filterwarnings("ignore:hfpatch. the loss runs through whole logits")
@pytest.mark.parametrize("how", LABELLED)
def test_labels_at_padding_behind_a_row_count_as_in_transformers(how):
    """labels = input_ids.clone(), as many scripts have it, in each kind of forward with labels."""
    kind, options, change, extra = LABELLED[how]
    stock = tiny.llama(kind, dtype=torch.float64)
    ids, mask = tiny.ids(), torch.ones(2, tiny.TOKENS, dtype=torch.long)
    mask[1, 15:] = 0
    ours = tiny.patched(stock, **options)
    for model in (ours, stock):
        if change is not None:
            change(model)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids, **extra}
    assert_equal(ours, stock, batch)
    assert how not in ("own class", "logits", "hook") or MAY_READ in told(ours)


@pytest.mark.parametrize("where", [slice(15, None), slice(0, 9)])
def test_a_loss_of_ones_own_that_the_mask_weighs(where):
    """A KL divergence to another model's logits, without labels, and a mean of hidden states."""
    stock, teacher = (
        tiny.llama(dtype=torch.float64),
        tiny.llama(dtype=torch.float64, rope_theta=50.0),
    )
    ids, mask = tiny.ids(), torch.ones(2, tiny.TOKENS, dtype=torch.long)
    mask[1, where] = 0
    batch = {"input_ids": ids, "attention_mask": mask}
    ours = tiny.patched(stock)
    with torch.no_grad():
        wanted = teacher(**batch).logits.log_softmax(-1)
    for model in (ours, stock):
        out = model(**batch, output_hidden_states=True)
        apart = F.kl_div(out.logits.log_softmax(-1), wanted, log_target=True, reduction="none")
        loss = (apart.sum(-1) * mask).sum() / mask.sum()
        means = [(h * mask[..., None]).sum(1) / mask.sum(1)[:, None] for h in out.hidden_states]
        (loss + torch.stack(means).square().sum()).backward()
    for (name, p), q in zip(stock.named_parameters(), ours.parameters()):
        assert (q.grad - p.grad).norm() <= 1e-5 * p.grad.norm(), name


# --- what else reads padding behind a row ----------------------------------------------------------


class OwnHead(LlamaPreTrainedModel):
    """A user's own: a loss over all positions, and one over their mean."""

    def __init__(self, config):
        super().__init__(config)
        self.model = LlamaModel(config)
        self.score = nn.Linear(config.hidden_size, 3)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, labels=None):
        h = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        scores = self.score(h)
        return TokenClassifierOutput(loss=F.cross_entropy(scores.flatten(0, 1), labels.flatten()))


class Spread(nn.Module):
    """Divides by the spread of all tokens, padding too."""

    def forward(self, x):
        return x / (x.std((0, 1), keepdim=True) + 1)


class OwnNorm(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model.norm = Spread()


class OwnNormInside(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model.layers[1].input_layernorm = Spread()


def behind() -> tuple[torch.Tensor, torch.Tensor]:
    """Ids whose padding is the config's, and their mask."""
    ids, mask = tiny.ids(), torch.ones(2, tiny.TOKENS, dtype=torch.long)
    mask[1, 15:] = 0
    return ids.masked_fill(mask == 0, 0), mask


def of_ones_own(divergence):
    """A loss over all tokens, padding's too, of a model's outputs."""
    return lambda out: divergence(out.logits if "logits" in out else out.last_hidden_state)


SMOOTHING = LabelSmoother(0.1, ignore_index=3)
# The class, its inputs beside ids and mask, and a loss of its outputs.
READERS = {
    "labels of tokens": (
        transformers.LlamaForTokenClassification, lambda ids: {"labels": ids % 2}, None),
    "answers in a text": (
        transformers.LlamaForQuestionAnswering,
        lambda ids: {"start_positions": ids[:, 0] % 9, "end_positions": ids[:, 1] % 9}, None),
    "an own norm": (OwnNorm, lambda ids: {"labels": ids.masked_fill(ids == 0, -100)}, None),
    "an own norm inside": (
        OwnNormInside, lambda ids: {"labels": ids.masked_fill(ids == 0, -100)}, None),
    "an own class": (OwnHead, lambda ids: {"labels": ids % 3}, None),
    "a divergence": (LlamaForCausalLM, lambda ids: {}, of_ones_own(lambda z: z.square().mean())),
    "smoothed labels": (
        LlamaForCausalLM, lambda ids: {},
        lambda out: SMOOTHING(out, tiny.ids() % 9, shift_labels=True)),
    "a mean of states": (
        LlamaModel, lambda ids: {}, of_ones_own(lambda h: h.mean(1).square().sum())),
}  # fmt: skip


@pytest.mark.parametrize("checkpointing", [tiny.TILED, "off"], ids=["tiled", "off"])
@pytest.mark.parametrize("what", READERS)
def test_what_reads_padding_behind_a_row_gets_transformers_values(what, checkpointing):
    """From the first step. A loss outside the model shows by its gradient, for all later steps."""
    kind, beside, loss = READERS[what]
    stock = tiny.llama(kind, dtype=torch.float64, classifier_dropout=0.0)
    ids, mask = behind()
    batch = {"input_ids": ids, "attention_mask": mask, **beside(ids)}
    ours = tiny.patched(stock, checkpointing=checkpointing)
    for _ in range(2):
        assert_equal(ours, stock, batch, loss or (lambda out: out.loss))
    assert checkpointing == "off" or MAY_READ in told(ours)


UNREAD = of_ones_own(lambda z: z[0].square().mean() + z[1, :15].square().mean())
EVERYTHING = of_ones_own(lambda z: z.square().mean())


@pytest.mark.parametrize("most, first", [(1 << 14, MAY_READ), (0, OTHERS)])
def test_padding_is_tiled_once_a_backward_shows_it_unread(most, first, monkeypatch):
    """Long rows are so at once. The line is there before a loss reads padding, and
    the step after that is exact."""
    monkeypatch.setattr("hfpatch.decoder.batch.FEW", most)
    stock, (ids, mask) = tiny.llama(dtype=torch.float64), behind()
    ours, batch = tiny.patched(stock), {"input_ids": ids, "attention_mask": mask}
    for line in (first, OTHERS):
        assert_equal(ours, stock, batch, UNREAD)
        assert line in told(ours)
    tiny.step(ours, batch, EVERYTHING)
    assert_equal(ours, stock, batch, EVERYTHING)


@pytest.mark.parametrize("most", [1 << 14, 0])
def test_a_teachers_padding_is_transformers_or_has_a_line(most, monkeypatch):
    """Its logits go to a loss that no gradient of its own can show."""
    monkeypatch.setattr("hfpatch.decoder.batch.FEW", most)
    stock, (ids, mask) = tiny.llama(dtype=torch.float64).eval(), behind()
    ours, batch = tiny.patched(stock), {"input_ids": ids, "attention_mask": mask}
    with torch.no_grad():
        got, wanted = (model(**batch, use_cache=False).logits for model in (ours, stock))
    exact = (got - wanted).norm() <= 1e-5 * wanted.norm()
    line = OTHERS + " Multiply them by attention_mask."
    assert exact if most else line in ours._hfpatch_report.notes


@pytest.mark.parametrize("way", ["tiled", "off"])
def test_packed_rows_with_padding_have_the_line(way, recwarn):
    """Beside a mask transformers does not look for documents: packed rows keep hfpatch's mask."""
    ours = tiny.patched(tiny.llama(LlamaModel, dtype=torch.float64), checkpointing=WAYS[way])
    ids, mask = behind()
    positions = torch.arange(tiny.TOKENS).expand(2, -1) % 9
    batch = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    for _ in range(2):
        tiny.step(ours, batch, lambda out: out.last_hidden_state.mean(1).square().sum())
    lines = [str(warning.message) for warning in recwarn] + ours._hfpatch_report.notes
    assert [line for line in lines if OTHERS in line] and MAY_READ not in " ".join(lines)


@pytest.mark.parametrize("gap", [False, True], ids=["padding's id", "another id"])
def test_a_classifier_of_rows_reads_one_token_of_each(gap, rows, capfd):  # noqa: F811
    """Its padding costs nothing. With another id there it pools padding, as in transformers."""
    stock = tiny.llama(
        transformers.LlamaForSequenceClassification, dtype=torch.float64, num_labels=1
    )
    ids, mask = behind()
    ids = ids.masked_fill(mask == 0, 7) if gap else ids
    batch = {"input_ids": ids, "attention_mask": mask}
    prefers = lambda out: F.logsigmoid(out.logits[0] - out.logits[1]).sum()  # noqa: E731
    assert_equal(tiny.patched(stock), stock, batch, prefers)
    assert len(rows) == (not gap)
    assert ("or padding behind a row" in capfd.readouterr().err) == gap
