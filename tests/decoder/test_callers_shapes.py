"""Around the layers every tensor has the caller's shape, whatever padding the layers leave out:
noise, hooks, own modules, rotary scalings by the longest position, and outputs are transformers'.
"""

import pytest
import tiny
import torch
import transformers
from numerics import lifted
from test_unpadded import assert_close, padded, rows  # noqa: F401
from test_vision import small
from torch import nn
from transformers import LlamaForCausalLM, LlamaModel

BOTH_SIDES = ((7, 24), (0, 13), (3, 20))
SIDES = {
    "left": ((7, 24), (11, 24), (23, 24)),
    "right": ((0, 13), (0, 24), (0, 1)),
    "both": BOTH_SIDES,
    "one row": ((5, 21),),
}


@pytest.fixture(autouse=True)
def in_tiles_at_once(monkeypatch):
    """Whatever may read padding."""
    monkeypatch.setattr("hfpatch.decoder.batch.FEW", 0)


def pair(change=lambda model: None, cls=LlamaForCausalLM, **settings):
    """(a patched model, its float64 twin of transformers), both changed behind apply()."""
    stock = tiny.llama(cls, **settings)
    models = tiny.patched(stock).double(), tiny.exact(stock)
    for model in models:
        change(model)
    return models


def assert_steps_agree(models, batch, loss=lambda out: out.loss) -> None:
    """Loss and all gradients, each model's from the same seed."""
    found = []
    for model in models:
        torch.manual_seed(3)
        found.append(tiny.step(model, tiny.as_double(batch), loss))
    tiny.assert_same_in_double(*found)


class Watched(transformers.TrainerCallback):
    """The largest noise that NEFTune adds to an embedding."""

    noise = 0.0

    def on_step_begin(self, *args, model, **kwargs):
        def note(embedding, ids, out):
            self.noise = (out - embedding.weight[ids[0]]).abs().max().item()

        model.get_input_embeddings().register_forward_hook(note)


def test_noise_is_as_large_as_in_transformers(tmp_path, rows):  # noqa: F811
    """8 rows of 64 tokens, 339 of them real: the noise depends on the number of tokens in a row."""
    lengths, seen, models = (64, 31, 40, 47, 64, 12, 41, 40), {}, {}
    items = []
    for row, n in enumerate(lengths):
        ids = tiny.ids(1, 64, seed=row)[0]
        real = torch.arange(64) < n
        items.append(
            {"input_ids": ids, "attention_mask": real.long(), "labels": ids.where(real, -100)}
        )
    stock = tiny.llama(hidden_size=32)
    for name, model in (("ours", tiny.patched(stock)), ("stock", stock)):
        args = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=1, per_device_train_batch_size=8, report_to=[],
            neftune_noise_alpha=5, use_cpu=True, optim="sgd", learning_rate=0.1, disable_tqdm=True,
            save_strategy="no", dataloader_pin_memory=False,
        )  # fmt: skip
        seen[name], models[name] = Watched(), model
        trainer = transformers.Trainer(model, args, train_dataset=items, callbacks=[seen[name]])
        trainer.train()
    assert seen["ours"].noise == seen["stock"].noise == pytest.approx(0.110, abs=0.001)
    ours = dict(models["ours"].named_parameters())
    for name, parameter in stock.named_parameters():
        torch.testing.assert_close(ours[name], parameter, rtol=1e-4, atol=1e-6)


def of_the_shape(module, given, out):
    """A hook that depends on the shape of a batch."""
    return out * out.shape[1] ** -0.5 + len(out) / 16


def other_ids(module, given):
    (ids,) = given
    return ids.roll(1, dims=0) + (ids == ids[:, -1:]).long()


def of_an_engine(model):
    """Engines hand another tensor on to a layer, with the same values."""
    hook = tiny.OfAnEngine(lambda layer, given: (given[0].view_as(given[0]), *given[1:]))
    for layer in model.model.layers:
        layer.register_forward_pre_hook(hook)


class OwnEmbedding(nn.Module):
    """A user's own: learned positions, counted from the end of a row."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.places = nn.Parameter(torch.linspace(-1, 1, 40, dtype=torch.float64))

    def forward(self, ids):
        return self.inner(ids) + self.places[-ids.shape[1] :, None] * len(ids)


class OwnNorm(nn.Module):
    """A user's own, without a small number under its division: it scales with the shape."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) + x.shape[1] * x / x.norm(dim=-1, keepdim=True)


AROUND = {  # a change of the model, whether layers still run without padding
    "a hook on the embedding": (
        lambda m: m.model.embed_tokens.register_forward_hook(of_the_shape), True),
    "a hook before the embedding": (
        lambda m: m.model.embed_tokens.register_forward_pre_hook(other_ids), True),
    "an engine's hook on the layers": (of_an_engine, True),
    "a hook on the norm": (lambda m: m.model.norm.register_forward_hook(of_the_shape), False),
    "a hook on a layer": (
        lambda m: m.model.layers[0].register_forward_hook(of_the_shape), False),
    "a hook on the rotary embedding": (
        lambda m: m.model.rotary_emb.register_forward_hook(lambda *a: tuple(1.1 * x for x in a[2])),
        False),
    "an own embedding": (
        lambda m: setattr(m.model, "embed_tokens", OwnEmbedding(m.model.embed_tokens)), False),
    "an own norm": (lambda m: setattr(m.model, "norm", OwnNorm(m.model.norm)), False),
}  # fmt: skip


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("what", AROUND)
def test_what_stands_around_the_layers(what, side, rows):  # noqa: F811
    change, packs = AROUND[what]
    assert_steps_agree(pair(change), padded(real=SIDES[side]))
    assert len(rows) == packs


class ShiftedStack(LlamaModel):
    """A user's own: it mixes neighbours of a row between the embedding and the layers, and divides
    the outputs by their number in a row."""

    def forward(self, input_ids=None, inputs_embeds=None, **kwargs):
        embeds = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        out = super().forward(inputs_embeds=embeds + embeds.roll(1, 1), **kwargs)
        out.last_hidden_state = out.last_hidden_state / out.last_hidden_state.shape[1]
        return out


class ShiftedModel(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model = ShiftedStack(config)


@pytest.mark.parametrize("side", SIDES)
def test_a_stack_of_the_users_own_sees_padding(side, rows):  # noqa: F811
    assert_steps_agree(pair(cls=ShiftedModel), padded(real=SIDES[side]))
    assert not rows


# --- rotary scalings by the longest position -------------------------------------------------------

FACTORS = [1.0 + i / 8 for i in range(8)]
ROTARY = {
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "longrope": {
        "rope_type": "longrope",
        "short_factor": FACTORS[::-1],
        "long_factor": [4 * f for f in FACTORS],
        "original_max_position_embeddings": 64,
        "factor": 2.0,
    },
}


@tiny.not_before_transformers((5, 16), "scales angles by other lengths")
@pytest.mark.parametrize("kind", ROTARY)
@pytest.mark.parametrize("side", ["left", "right"])
def test_rotary_scalings_count_padding(kind, side, rows, monkeypatch):  # noqa: F811
    """Rows of 60 and 30 tokens, padded to 104: beyond the limit of 64 tokens."""
    real = {"left": ((44, 104), (74, 104)), "right": ((0, 60), (0, 30))}[side]
    monkeypatch.setattr(tiny, "TOKENS", 104)  # of the rows that are counted
    rope = {"rope_theta": 10000.0} | ROTARY[kind]
    models = pair(max_position_embeddings=64, rope_parameters=rope)
    batch = padded(real=real, T=104)
    assert_steps_agree(models, batch)
    assert [row.real for row in rows] == [90]
    near = {n: x[:, -60:] if side == "left" else x[:, :60] for n, x in batch.items()}
    # The scaling shows: without the padding beyond the limit, the loss is another.
    assert abs(models[1](**near).loss - models[1](**batch).loss) > 1e-3


# --- what callers pass, and what they get ------------------------------------------------------------


@pytest.mark.parametrize("side", SIDES)
def test_embeddings_of_the_callers_own(side, rows):  # noqa: F811
    models, batch = pair(), padded(real=SIDES[side])
    ids = batch.pop("input_ids")
    batch["inputs_embeds"] = models[1].model.embed_tokens(ids).detach()
    assert_steps_agree(models, batch)
    assert len(rows) == 1


@pytest.mark.parametrize("side", SIDES)
def test_hidden_states_as_outputs(side, rows):  # noqa: F811
    batch = padded(real=SIDES[side]) | {"output_hidden_states": True}
    real = batch["attention_mask"].bool()

    def loss(out):
        states = torch.stack(out.hidden_states)
        assert states.shape == (3, *real.shape, 64)
        return (out.loss + states[:, real].square().mean()).float()

    assert_steps_agree(pair(), batch, loss)
    assert not rows


@pytest.mark.parametrize("family", ["qwen3_vl", "llava"])
def test_images_among_the_tokens(family, rows, monkeypatch):  # noqa: F811
    """Their features are put in before the layers, and in Qwen3-VL added behind the first ones."""
    stock, one = small(family)
    stock.set_attn_implementation("sdpa")
    monkeypatch.setattr(tiny, "TOKENS", 49)  # of the rows that are counted
    batch = {name: torch.cat([x, x]) for name, x in one.items()}
    fill = {"labels": -100, "input_ids": 1}
    for name, x in one.items():
        if x.dim() == 2 and x.shape[1] == 40:
            sides = ((9, 0), (0, 9))
            batch[name] = torch.cat(
                [nn.functional.pad(x, s, value=fill.get(name, 0)) for s in sides]
            )
    with lifted():
        got, wanted = tiny.step(tiny.patched(stock), batch), tiny.step(stock, batch)
    assert [row.real for row in rows] == [80]
    assert_close(got, wanted)


@pytest.mark.parametrize("side", SIDES)
def test_soft_prompts(side, rows, monkeypatch):  # noqa: F811
    """PEFT puts the prompt before each row, before its padding too: that is a hole."""
    peft = pytest.importorskip("peft")
    settings = peft.PromptTuningConfig(num_virtual_tokens=5, task_type="CAUSAL_LM")
    torch.manual_seed(1)
    stock = peft.get_peft_model(tiny.llama(), settings)
    monkeypatch.setattr(tiny, "TOKENS", 29)  # of the rows that are counted
    assert_steps_agree(
        (tiny.patched(stock).double(), tiny.exact(stock)), padded(real=SIDES[side], T=24)
    )
    assert len(rows) == (side == "right")
