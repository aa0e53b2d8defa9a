"""What the policy keeps beside x, out and lse, and layers that keep everything: the same gradients
with less computed.
"""

import pytest
import torch
from tiny import gradients, largest_difference

import hfpatch
from hfpatch.layer import function
from tests.families import small_model
from tests.layer.deep import tiny_llama, tokens
from tests.layer.test_layer import BUDGET, check

pytestmark = pytest.mark.usefixtures("exact_loss")


@pytest.mark.parametrize("where", ["gpu", "host", "disk"])
@pytest.mark.parametrize("tile", [14, 4096])
def test_gradients_equal_stock(where, tile, tmp_path):
    where = str(tmp_path) if where == "disk" else where
    check(hfpatch.Checkpointing(offload=where, tile=tile, keep="gate_up", plain=0))


# None, the last, all but the first, and more than there are; behind layers that keep their input
# alone, and segments.
@pytest.mark.parametrize("plain, every", [(0, 1), (1, 1), (2, 1), (9, 1), (1, 2)])
def test_plain_layers(plain, every, monkeypatch):
    calls = []
    monkeypatch.setattr(
        "hfpatch.layer.layer.tiled_layer", _counted("hfpatch.layer.layer.tiled_layer", calls)
    )
    check(hfpatch.Checkpointing(offload="host", tile=14, plain=plain, every=every))
    assert len(calls) == max(0, 3 - plain)


def _counted(path, calls):
    module, name = path.rsplit(".", 1)
    function = getattr(__import__(module, fromlist=[name]), name)

    def counted(*args, **kwargs):
        calls.append(args)
        return function(*args, **kwargs)

    return counted


def same(one, other) -> bool:
    """Bit for bit; frozen parameters have none."""
    return all(a is b is None or torch.equal(a, b) for a, b in ((one[n], other[n]) for n in one))


def three(prepare, **inputs):
    """Gradients with nothing kept, all that layers can, and the last layer plain."""
    found = []
    for keep, plain in (("attention", 0), ("gate_up", 0), ("gate_up", 1)):
        model = tiny_llama()
        prepare(model)
        hfpatch.apply(
            model,
            checkpointing=hfpatch.Checkpointing(offload="gpu", tile=14, keep=keep, plain=plain),
        )
        torch.manual_seed(3)
        model(**inputs).loss.backward()
        found.append(gradients(model))
    return found


# Packed documents, frozen parts, a first layer whose input wants no gradient.
@pytest.mark.parametrize("prepare", [
    lambda m: None, lambda m: m.model.embed_tokens.requires_grad_(False),
    lambda m: m.model.layers[1].requires_grad_(False),
    lambda m: m.model.layers[0].mlp.gate_proj.requires_grad_(False),
])  # fmt: skip
def test_what_is_kept_changes_no_bit(prepare):
    ids = tokens(2, 37)
    positions = torch.cat([torch.arange(20), torch.arange(17)])[None].expand(2, -1)
    nothing, everything, last = three(prepare, input_ids=ids, labels=ids, position_ids=positions)
    assert same(nothing, everything)
    trained = [{n: g for n, g in found.items() if g is not None} for found in (nothing, last)]
    assert largest_difference(*trained) < BUDGET


def test_what_cannot_be_kept_is_computed_again():
    """Asked for by hand, but another MLP's forward may read what would be left out."""
    plain, model = tiny_llama(), tiny_llama()
    for m, keep in ((plain, "attention"), (model, "gate_up")):
        hfpatch.apply(
            m, checkpointing=hfpatch.Checkpointing(offload="gpu", tile=14, keep=keep, plain=0)
        )
        for layer in m.model.layers:
            layer.mlp.forward = type(layer.mlp).forward.__get__(layer.mlp)
    for _ in range(2):
        for m in (plain, model):
            m(tokens(), labels=tokens()).loss.backward()
    assert same(gradients(plain), gradients(model))


FAMILIES = ("phi3", "gemma2", "cohere", "starcoder2", "gpt_oss")
MORE = (
    "mistral",
    "qwen2",
    "qwen3",
    "mixtral",
    "gemma",
    "gemma3_text",
    "olmo2",
    "granite",
    "smollm3",
    "seed_oss",
    "glm4",
)


@pytest.mark.parametrize(
    "family", ["qwen3_moe", *FAMILIES, *(pytest.param(n, marks=pytest.mark.long) for n in MORE)]
)
def test_each_family_keeps_what_it_can(family, monkeypatch):
    found, kept = [], set()
    model = small_model(family)
    columns = function.gate_up_columns

    def noted(*given):
        kept.add(columns(*given) > 0)
        return columns(*given)

    monkeypatch.setattr(function, "gate_up_columns", noted)
    ids = torch.randint(1, 60, (2, 37), generator=torch.Generator().manual_seed(0))
    for keep in ("attention", "gate_up"):
        hfpatch.apply(
            model, checkpointing=hfpatch.Checkpointing(offload="host", tile=14, keep=keep, plain=0)
        )
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        found.append(gradients(model))
    assert len(kept) == 1  # where nothing is kept, nobody asks
    assert same(*found)
