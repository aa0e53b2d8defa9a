"""The loss of a class is what its own forward asks for: classes of the kinds found on the hub, and
transformers' ASR, audio and vision decoders. Loss and gradients against stock.
"""

import copy
import dataclasses
import pickle

import pytest
import tiny
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import (
    Florence2Config,
    Florence2ForConditionalGeneration,
    LlamaForCausalLM,
    LlamaPreTrainedModel,
    MoonshineConfig,
    MoonshineForConditionalGeneration,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

import hfpatch
from hfpatch.compat import pytree

WHOLE = "the loss runs through whole logits"


class Base(LlamaForCausalLM):
    """A class whose forward is its own; `scores` is what most of them write."""

    def hidden(self, input_ids, **kwargs):
        return self.model(input_ids, **kwargs).last_hidden_state

    def loss_of(self, logits, labels=None, **kwargs):
        return self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)

    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        hidden = self.hidden(input_ids, attention_mask=attention_mask)
        logits = self.lm_head(hidden)
        loss = self.scored(hidden, logits, labels, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


class MasksThePrompt(Base):
    def scored(self, hidden, logits, labels, **kwargs):
        labels = labels.clone()
        labels[:, :9] = -100
        return self.loss_of(logits, labels, **kwargs)


class CutsPositions(Base):
    def scored(self, hidden, logits, labels, **kwargs):
        return self.loss_of(logits[:, 5:-2].contiguous(), labels[:, 5:-2], **kwargs)


class AlignedLabels(Base):
    """Shifts by itself, on logits and labels, as most older classes."""

    def scored(self, hidden, logits, labels, **kwargs):
        logits = logits[..., :-1, :].contiguous().float()
        return self.loss_of(logits, shift_labels=labels[..., 1:].contiguous(), **kwargs)


class SeveralTokensAhead(Base):
    """Multi-token prediction, forwards and backwards through the row."""

    def scored(self, hidden, logits, labels, **kwargs):
        ahead = self.loss_of(logits[:, :-1].contiguous(), labels[:, 1:], **kwargs)
        back = self.lm_head(hidden[:, :18].flip(1))
        return (
            self.loss_of(logits, labels, **kwargs)
            + 0.3 * ahead
            + 0.2 * self.loss_of(back, labels[:, :18].flip(1), **kwargs)
        )


class Scaled(Base):
    def scored(self, hidden, logits, labels, **kwargs):
        logits = torch.tanh(logits.float() / 3.0) * 3.0
        return self.loss_of(logits[:, 1:, :].contiguous(), labels[:, 1:], **kwargs)


class SoftPrompt(Base):
    """Prepends learnt embeddings; the logits of theirs are cut off."""

    cuts = True

    def __init__(self, config):
        super().__init__(config)
        self.prompt = nn.Parameter(0.3 * torch.randn(5, config.hidden_size))

    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        tokens = self.model.embed_tokens(input_ids)
        prompt = self.prompt.expand(len(tokens), -1, -1)
        seen = None
        if attention_mask is not None:
            seen = F.pad(attention_mask, (len(self.prompt), 0), value=1)
        hidden = self.model(
            inputs_embeds=torch.cat([prompt, tokens], 1), attention_mask=seen
        ).last_hidden_state
        logits = self.lm_head(hidden)
        if self.cuts:
            logits = logits[:, len(self.prompt) :].contiguous()
        else:
            labels = F.pad(labels, (len(self.prompt), 0), value=-100)
        return CausalLMOutputWithPast(loss=self.loss_of(logits, labels, **kwargs), logits=logits)


class SoftPromptPads(SoftPrompt):
    cuts = False


class ValueHead(Base):
    """Reads the hidden states after the loss."""

    def __init__(self, config):
        super().__init__(config)
        self.value = nn.Linear(config.hidden_size, 1, bias=False)

    def scored(self, hidden, logits, labels, **kwargs):
        loss = self.loss_of(logits, labels, **kwargs)
        return loss + self.value(hidden)[labels != -100].square().mean()


class WeighsByItsLoss(Base):
    """Its weight is of logits without a gradient."""

    def scored(self, hidden, logits, labels, **kwargs):
        with torch.no_grad():
            others = self.lm_head(hidden), logits[:1]
        return self.loss_of(logits, labels, **kwargs) * (
            self.loss_of(others[0] * 0.5, labels) + self.loss_of(others[1], labels[:1])
        )


class RunsTheHeadAgain(Base):
    def scored(self, hidden, logits, labels, **kwargs):
        logits = checkpoint(lambda h: self.lm_head(h * 0.5), hidden, use_reentrant=True)
        return self.loss_of(logits, labels) + checkpoint(
            lambda h: self.loss_of(self.lm_head(h), labels), hidden, use_reentrant=False
        )


FUSED = [
    MasksThePrompt, CutsPositions, AlignedLabels, SeveralTokensAhead, Scaled, SoftPrompt,
    SoftPromptPads, ValueHead,
]  # fmt: skip


class ReadsLogitsLater(Base):
    """An accuracy, and a z-loss as of Bamba's family."""

    def scored(self, hidden, logits, labels, **kwargs):
        with torch.inference_mode():
            self.right = (logits.argmax(-1) == labels).sum()
        loss = self.loss_of(logits, labels, **kwargs)
        return loss + 0.01 * logits.logsumexp(-1)[labels != -100].square().mean()


class HidesWords(Base):
    """Writes into the logits, as Chameleon does."""

    def scored(self, hidden, logits, labels, **kwargs):
        logits[:, :, :3] = torch.finfo(logits.dtype).min
        return self.loss_of(logits, labels, **kwargs)


class OwnCrossEntropy(Base):
    def scored(self, hidden, logits, labels, **kwargs):
        assert isinstance(logits, torch.Tensor) and logits.dim() == 3
        logits = logits[..., :-1, :].contiguous()
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels[..., 1:].reshape(-1))


READS = [ReadsLogitsLater, HidesWords, OwnCrossEntropy, WeighsByItsLoss, RunsTheHeadAgain]


def batches():
    padded = tiny.labelled()
    padded["attention_mask"] = torch.ones_like(padded["input_ids"])
    padded["attention_mask"][1, -5:] = 0
    padded["labels"][1, -5:] = -100
    return {
        "plain": tiny.labelled(),
        "counted": {**tiny.labelled(), "num_items_in_batch": torch.tensor(77)},
        "padded": padded,
    }


def whole_logits_lines(model) -> list[str]:
    return [line for line in model._hfpatch_report.notes if WHOLE in line]


def compare(cls, batch, checkpointing=tiny.TILED):
    stock = tiny.llama(cls)
    ours = tiny.patched(stock, checkpointing=checkpointing)
    given = [copy.deepcopy(batch) for _ in range(4)]  # a class may write into its labels
    true = tiny.step(tiny.exact(stock), tiny.as_double(given[3]))
    plain = tiny.step(stock, given[2])
    for step in (0, 1):  # padded rows are untiled in the first step of a class of its own
        tiny.assert_within(tiny.step(ours, given[step]), plain, true)
    return ours


@pytest.mark.parametrize("kind", batches())
@pytest.mark.parametrize("cls", FUSED, ids=lambda cls: cls.__name__)
def test_a_class_of_its_own_has_its_own_loss(cls, kind):
    ours = compare(cls, batches()[kind])
    assert not whole_logits_lines(ours)
    assert ours(**batches()[kind]).logits is None


@pytest.mark.filterwarnings(f"ignore:hfpatch. {WHOLE}")
@pytest.mark.parametrize("kind", ["plain", "padded"])
@pytest.mark.parametrize("cls", READS, ids=lambda cls: cls.__name__)
def test_a_class_that_reads_its_logits_has_them_and_the_report_says_so(cls, kind):
    ours = compare(cls, batches()[kind])
    assert len(whole_logits_lines(ours)) == 1
    logits = ours(**batches()[kind]).logits
    assert logits is None or type(logits) is torch.Tensor


class OutsideAutocast(Base):
    def scored(self, hidden, logits, labels, **kwargs):
        with torch.autocast("cpu", enabled=False):
            logits = self.lm_head(hidden.float())
        return self.loss_of(logits, labels, **kwargs)


def test_the_loss_has_the_dtype_of_the_heads_call():
    stock = tiny.llama(OutsideAutocast)
    models = stock, tiny.patched(stock, checkpointing="off", rope=False, rms_norm=False, mlp=False)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(
            *(model(**tiny.labelled()).loss for model in models), rtol=1e-6, atol=0
        )


SMALL = {"hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 128}


def of_rows(high: int, *shape) -> tuple:
    """Ids, and labels of which the first four of a row are ignored."""
    ids = torch.randint(5, high, (2, 20, *shape))
    labels = ids.clone()
    labels[0, :4] = -100
    return ids, labels


def moonshine():
    config = MoonshineConfig(
        vocab_size=97, encoder_num_hidden_layers=1, decoder_num_hidden_layers=2,
        encoder_num_attention_heads=4, decoder_num_attention_heads=4, pad_token_id=2,
        decoder_start_token_id=1, **SMALL,
    )  # fmt: skip
    batch = {"input_values": torch.randn(2, 4000), "labels": of_rows(97)[1]}
    return MoonshineForConditionalGeneration(config), batch


def florence2():
    text = {
        "model_type": "bart", "vocab_size": 97, "d_model": 32, "encoder_layers": 1,
        "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
        "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 128,
        "dropout": 0.0,
    }  # fmt: skip
    vision = {
        "embed_dim": [8] * 4, "num_heads": [1] * 4, "num_groups": [1] * 4, "depths": [1] * 4,
        "projection_dim": 32, "window_size": 4,
    }  # fmt: skip
    config = Florence2Config(text_config=text, vision_config=vision, image_token_id=96)
    ids, labels = of_rows(90)
    return Florence2ForConditionalGeneration(config), {"input_ids": ids, "labels": labels}


# transformers says how old names of settings are called now.
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("family", [moonshine, florence2])
def test_decoders_of_sound_and_images_have_their_own_loss(family):
    """Their forwards hand labels on that are aligned already, or a part of them."""
    torch.manual_seed(0)
    stock, batch = family()
    stock.train()
    ours = tiny.patched(stock)
    got, plain = tiny.step(ours, batch), tiny.step(stock, batch)
    torch.testing.assert_close(got, plain, rtol=1e-4, atol=1e-6)
    assert not whole_logits_lines(ours)


class PlainArguments(LlamaForCausalLM):
    """A forward that takes its own arguments and no others."""

    gives = "output"

    def forward(self, input_ids, labels=None):
        logits = self.lm_head(self.model(input_ids)[0])
        loss = self.loss_function(logits, labels, self.config.vocab_size)
        made = {"loss": loss, "logits": logits}
        if self.gives == "output":
            return CausalLMOutputWithPast(**made)
        return {"dict": made, "tuple": (loss, logits), "loss": loss}[self.gives]


@pytest.mark.parametrize("gives", ["output", "dict", "tuple", "loss"])
def test_a_forward_without_kwargs_gets_what_it_accepts(gives, monkeypatch):
    monkeypatch.setattr(PlainArguments, "gives", gives)
    loss = {
        "output": lambda out: out.loss,
        "dict": lambda out: out["loss"],
        "tuple": lambda out: out[0],
        "loss": lambda out: out,
    }[gives]
    stock = tiny.llama(PlainArguments)
    ours = tiny.patched(stock)
    tiny.assert_as_good(ours, stock, tiny.labelled(), loss)
    out = ours(**tiny.labelled())
    if gives == "dict":
        assert out["logits"] is None
    if gives == "tuple":
        assert len(out) == 2 and out[1] is None


class OneClass(LlamaPreTrainedModel):
    """Embedding, layers, norm and head in one module."""

    def __init__(self, config):
        super().__init__(config)
        inner = LlamaForCausalLM(config)
        for name, module in (*inner.model.named_children(), ("lm_head", inner.lm_head)):
            self.add_module(name, module)

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids=None, attention_mask=None, labels=None):
        x = self.embed_tokens(input_ids)
        positions = torch.arange(x.shape[1])[None]
        angles = self.rotary_emb(x, positions)
        for layer in self.layers:
            x = layer(x, position_embeddings=angles, position_ids=positions)
        logits = self.lm_head(self.norm(x))
        loss = self.loss_function(logits, labels, self.config.vocab_size)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


def test_layers_in_the_model_that_has_the_head():
    assert compare(OneClass, batches()["plain"])._hfpatch.runtime is not None


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits):
        ctx.save_for_backward(logits * 1.0)
        return logits.square().mean()

    @staticmethod
    def backward(ctx, grad):
        (logits,) = ctx.saved_tensors
        return grad * 2 * logits / logits.numel()


class OwnFunction(Base):
    def scored(self, hidden, logits, labels, **kwargs):
        return Squared.apply(logits)


@pytest.mark.filterwarnings(f"ignore:hfpatch. {WHOLE}")
def test_an_autograd_function_of_the_users_own_is_refused_not_left_without_a_gradient():
    """torch does not let a tensor see that it is handed to one."""
    stock = tiny.llama(OwnFunction)
    with pytest.raises(RuntimeError, match=r"hfpatch: .*hfpatch.apply\(model, logits=True\)"):
        tiny.patched(stock)(**tiny.labelled()).loss.backward()
    tiny.assert_as_good(tiny.patched(stock, logits=True), stock, tiny.labelled())


@pytest.mark.parametrize("which", ["fixed_cross_entropy", "cross_entropy", "ForCausalLM"])
def test_a_replaced_cross_entropy_runs(which, monkeypatch):
    """Liger's replaces torch's; people replace transformers' for weights or a temperature."""
    from transformers.loss import loss_utils

    stock = tiny.llama()
    ours = tiny.patched(stock)

    def doubled(real):
        return lambda *args, **kwargs: 2 * real(*args, **kwargs)

    if which == "fixed_cross_entropy":
        monkeypatch.setattr(loss_utils, which, doubled(loss_utils.fixed_cross_entropy))
    elif which == "cross_entropy":
        monkeypatch.setattr(F, which, doubled(F.cross_entropy))
    else:
        monkeypatch.setitem(loss_utils.LOSS_MAPPING, which, doubled(loss_utils.LOSS_MAPPING[which]))
    with pytest.warns(UserWarning, match=WHOLE):
        got = tiny.step(ours, tiny.labelled())
    torch.testing.assert_close(got, tiny.step(stock, tiny.labelled()))
    assert len(whole_logits_lines(ours)) == 1
    report = hfpatch.apply(copy.deepcopy(stock))
    assert any(WHOLE in reason for option, reason in report.skipped if option == "loss")


def test_unread_logits_say_so_and_the_report_has_a_line(capsys):
    """They stay None, without a field: Liger's users ask `outputs.logits is None`, and engines
    copy every field."""
    from hfpatch.loss import causal_model

    causal_model._say_once.cache_clear()
    ours = tiny.llama()
    report = hfpatch.apply(ours)
    assert any("outputs.logits is None in training" in line for line in report.notes)
    out = ours(**tiny.labelled(), output_hidden_states=True)
    for again in (out, type(out)(dict(out)), dataclasses.replace(out), type(out)(**out)):
        assert len(again) == 2 and copy.copy(again).loss is out.loss
        assert list(again) == list(out) == ["loss", "hidden_states"] == list(again.keys())
        assert again[1] is out.hidden_states and again.get("logits") is None
        assert isinstance(again, CausalLMOutputWithPast)
        leaves, how = pytree.tree_flatten(again)
        again = pytree.tree_unflatten(leaves, how)
        assert not capsys.readouterr().err, "nothing read them yet"
        with pytest.raises(AttributeError):
            again.logits.view(-1)
        assert "apply(model, logits=True)" in capsys.readouterr().err
        assert again.logits is None and not capsys.readouterr().err, "once"
        causal_model._say_once.cache_clear()
    out.logits = torch.ones(1)
    assert out.logits == 1 and not capsys.readouterr().err
    with torch.no_grad():
        out = ours(**tiny.labelled(), skip_logits=True)
    assert copy.deepcopy(out).loss == out.loss == pickle.loads(pickle.dumps(out)).loss
    assert not capsys.readouterr().err
