"""Rows with padding that nobody reads run as one packed row: losses and gradients are those of
padded rows, and padding costs nothing.
"""

import pytest
import tiny
import torch
from families import small_model
from numerics import lifted

import hfpatch
from hfpatch.decoder.unpadded import PackedRow

WAYS = {
    "tiled": tiny.TILED,
    "offloaded": hfpatch.Checkpointing(tile=8, offload="host"),
    "segments": tiny.WAYS["segments"],
    "off": "off",
}
# Rows of 24 tokens: padding before, behind, on both sides, a single token, nothing, everything.
REAL = ((7, 24), (0, 13), (3, 20), (0, 1), (0, 0), (0, 24))
COUNT = sum(b - a for a, b in REAL)
FAMILIES = (
    "mistral", "gemma3_text", "gpt_oss", "qwen3_moe", "llama4_text", "qwen3_5_text", "opt",
    "gemma4_text",
)  # fmt: skip


def padded(vocab: int = tiny.VOCAB, real=REAL, T: int = tiny.TOKENS) -> dict:
    """Ids, mask and labels; a row's first token has none, so that no padding predicts it."""
    mask = torch.zeros(len(real), T, dtype=torch.long)
    labels = torch.full_like(mask, -100)
    ids = torch.randint(3, vocab, mask.shape, generator=torch.Generator().manual_seed(1))
    for row, (a, b) in enumerate(real):
        mask[row, a:b] = 1
        labels[row, a + 1 : b] = ids[row, a + 1 : b]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def assert_close(got: dict, wanted: dict) -> None:
    """The gradient of a bias that shifts all scores alike is zero but for rounding. The model's loss
    is rounded to float32."""
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.isfinite(value).all(), name
        allowed = 1e-6 if name == "loss" else 1e-11
        assert (got[name] - value).norm() <= allowed * value.norm() + 1e-12, name


@pytest.fixture
def rows(monkeypatch):
    """The packed rows on which layers ran, but for those of a small instance."""
    ran, padded = [], PackedRow._padded

    def note(row, x, y):
        if x.shape[1] == tiny.TOKENS and row not in ran:
            ran.append(row)
        return padded(row, x, y)

    monkeypatch.setattr(PackedRow, "_padded", note)
    return ran


@pytest.mark.parametrize("way", WAYS)
def test_a_step_is_that_of_padded_rows(way, rows):
    stock = tiny.llama()
    ours, batch = tiny.patched(stock, checkpointing=WAYS[way]).double(), padded()
    tiny.assert_equal_in_double(ours, stock, batch)
    assert [row.real for row in rows] == [COUNT]
    with torch.no_grad():  # a reference's pass
        both = ours.eval(), tiny.exact(stock).eval()
        got, wanted = (m(**batch, use_cache=False, skip_logits=True).loss for m in both)
    torch.testing.assert_close(got, wanted.float())
    assert len(rows) == 2


@pytest.mark.parametrize("family", tiny.longer(FAMILIES, "gpt_oss", "qwen3_5_text"))
def test_each_family(family, rows):
    """Windows, sinks, experts, two rotations, chunks, a delta net, positions counted by the mask."""
    stock = small_model(family)
    stock.config.output_router_logits = False
    if family != "gpt_oss":
        stock.set_attn_implementation("sdpa")
    real = tuple(x for x in REAL if x[0] != x[1])  # eager attention makes NaN of nothing
    batch = padded(min(tiny.VOCAB, stock.config.vocab_size), real)
    with lifted():
        got, wanted = tiny.step(tiny.patched(stock), batch), tiny.step(stock, batch)
    assert [row.real for row in rows] == [COUNT]
    assert_close(got, wanted)


def test_embeddings_positions_and_documents_inside_rows(rows):
    """Inputs that a prompt's encoder made, positions of the caller's own, two documents in a
    padded row."""
    stock, batch = tiny.llama(), padded(real=((0, 20), (0, 9)))
    batch["position_ids"] = torch.arange(24).repeat(2, 1) % 12
    batch["labels"][:, 12] = -100
    alone = {
        "input_ids": batch["input_ids"][[0, 0, 1], :12].clone(),
        "attention_mask": batch["attention_mask"][[0, 0, 1], :12].clone(),
        "labels": batch["labels"][[0, 0, 1], :12].clone(),
    }
    for name in alone:
        alone[name][1, :8] = batch[name][0, 12:20]
    alone["attention_mask"][1, 8:], alone["labels"][1, 8:] = 0, -100
    ours, stock = tiny.patched(stock).double(), tiny.exact(stock)
    tiny.assert_same_in_double(tiny.step(ours, batch), tiny.step(stock, alone))
    embedded = {n: x for n, x in batch.items() if n != "input_ids"}
    embedded["inputs_embeds"] = stock.model.embed_tokens(batch["input_ids"]).detach()
    del embedded["position_ids"]
    tiny.assert_same_in_double(tiny.step(ours, embedded), tiny.step(stock, embedded))
    assert [row.real for row in rows] == [29, 29]


@pytest.mark.parametrize("kind, packed", [("Lora", [COUNT]), ("Lily", [])])
def test_adapters(kind, packed, rows):
    """Lily weighs its experts by the mean of all tokens, padding too."""
    peft = pytest.importorskip("peft")
    settings = {"r": 4, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    stock = peft.get_peft_model(tiny.llama(), getattr(peft, f"{kind}Config")(**settings))
    for name, parameter in stock.named_parameters():
        if "_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    tiny.assert_equal_in_double(tiny.patched(stock).double(), stock, padded())
    assert [row.real for row in rows] == packed


@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed:UserWarning")
@pytest.mark.parametrize(
    "settings, packed",
    [
        ({}, 1),
        ({"lora_bias": True}, 0),
        ({"target_modules": ["layers.0.linear_attn.out_proj"], "modules_to_save": ["layers.1"]}, 0),
    ],
    ids=["LoRA", "a bias before a mixer", "a layer of unknown kind"],
)
def test_mixers_under_adapters(settings, packed, rows):
    """Under a bias padding is not zero before a mixer; a layer of unknown kind may mix rows."""
    peft = pytest.importorskip("peft")
    base = small_model("qwen3_5_text")
    config = peft.LoraConfig(**{"r": 2, "target_modules": ["in_proj_qkv", "o_proj"]} | settings)
    stock = peft.get_peft_model(base, config).double()
    for parameter in stock.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1
    batch = padded(base.config.vocab_size, tuple(x for x in REAL if x[0] != x[1]))
    with lifted():
        got, wanted = tiny.step(tiny.patched(stock), batch), tiny.step(stock, batch)
    assert len(rows) == packed
    assert_close(got, wanted)


STAYS = {
    "padding that predicts": lambda b: b["labels"].__setitem__((0, 7), 5),
    "a hole": lambda b: b["attention_mask"].__setitem__((5, 11), 0),
    "no labels": lambda b: b.pop("labels"),
    "hidden states": lambda b: b.__setitem__("output_hidden_states", True),
    "no padding": lambda b: b["attention_mask"].fill_(1),
    "only padding": lambda b: b["attention_mask"].zero_(),
    "a tensor whose tokens have no rows": lambda b: b.__setitem__("more", torch.zeros(24, 5)),
}


@pytest.mark.parametrize("why", STAYS)
def test_what_stays_padded(why, rows):
    batch = padded()
    STAYS[why](batch)
    with torch.no_grad():
        tiny.patched(tiny.llama())(**batch, use_cache=False)
    assert not rows


@pytest.mark.filterwarnings("ignore")  # torch's, about tensors that it traces
@pytest.mark.parametrize("what", tiny.longer(["a layer", "the model"], "a layer"))
def test_under_static_shapes_rows_stay_padded(what, rows):
    """Each length would be compiled anew."""
    stock, batch = tiny.llama(), padded(real=((0, 24), (0, 13), (0, 20)))
    ours = tiny.patched(stock, checkpointing="off")
    if what == "a layer":
        ours.model.layers[1].compile(backend="eager", dynamic=False)
    else:
        ours.compile(backend="eager", dynamic=False)
    tiny.assert_as_good(ours, stock, batch)
    assert not rows


def test_a_layer_of_the_users_own_stays_padded(rows):
    """It hands a share of each token on to the next, from row to row in a packed one."""
    stock, batch = tiny.llama(), padded(real=((0, 24), (0, 13), (0, 20)))
    ours = tiny.patched(stock)
    for model in (stock, ours):
        layer = model.model.layers[1]
        layer.mlp = tiny.Shift(layer.mlp, 0.5)
    tiny.assert_equal_in_double(ours.double(), stock, batch)
    assert not rows


@pytest.mark.parametrize(
    "family",
    tiny.longer(
        ["bloom", "gemma3n_text", "qwen3_moe", "minimax_m3_vl_text"], "bloom", "minimax_m3_vl_text"
    ),
)
def test_families_that_stay_padded(family, rows):
    """Scores that depend on a key's place in its row, residual streams, recorded outputs of routers,
    whose balance counts real tokens, and blocks of keys, which padding helps to choose."""
    stock = small_model(family)
    stock.set_attn_implementation("sdpa" if family == "minimax_m3_vl_text" else "eager")
    batch = padded(min(tiny.VOCAB, stock.config.vocab_size), ((0, 24), (0, 13), (7, 24)))
    with lifted():
        got, wanted = tiny.step(tiny.patched(stock), batch), tiny.step(stock, batch)
    assert not rows
    assert_close(got, wanted)


@pytest.mark.parametrize("family", tiny.longer(["qwen3_next", "glm5_next"], "qwen3_next"))
def test_rounding_that_moves_one_token_keeps_no_padding(family):
    """In the small instance a token may go to another expert by rounding alone."""
    from hfpatch.decoder.find import find_decoder
    from hfpatch.lab.simulate.implementations import build
    from scripts.families import family_config

    model = build(family_config(family))
    hfpatch.apply(model)
    assert find_decoder(model).stack._hfpatch.traits.unpads
