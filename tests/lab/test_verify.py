"""hfpatch.verify: a right patch passes, a wrong one is named, and the model stays as it was."""

import dataclasses

import pytest
import tiny
import torch

import hfpatch
from hfpatch.lab import verify as module
from hfpatch.lab.verify import Verified
from hfpatch.layer.layer import TiledLayer

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def long_batch(tokens=64):
    ids = tiny.ids(1, tokens)
    return {"input_ids": ids, "labels": ids}


def as_mixed_precision(forward):
    """As accelerate wraps a forward."""
    return lambda *args, **kwargs: forward(*args, **kwargs)


# Three tiles, so that sums over tiles and what is fetched are part of it.
@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_right_patch_passes(dtype, patched):
    model = tiny.llama(dtype=dtype)
    if patched:
        hfpatch.apply(model, checkpointing=tiny.TILED)
    found = hfpatch.verify(model, tiny.labelled())
    assert found.ok, found
    assert found.gradients == len(list(model.parameters()))
    assert 0 < found.noise < 0.1 and found.dtype in str(dtype) and "agrees with" in str(found)


# Both halves of the noise's claim: it is neither far above what stock loses against float64, nor
# far below.
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_noise_is_about_what_the_dtype_loses(dtype):
    model = tiny.llama(dtype=dtype)
    batch = long_batch()
    true = tiny.step(tiny.exact(model), batch)
    plain = tiny.step(model, batch)
    found = hfpatch.verify(model, batch)
    lost = module._distance(plain[found.worst], true[found.worst])
    assert lost / 3 < found.noise < 3 * lost


# One layer's scores are off by a little: what each dtype's own rounding could not do.
@pytest.mark.parametrize(
    "dtype, by",
    [(torch.float32, 1.0001), (torch.float16, 1.03), (torch.bfloat16, 1.3)],
)
def test_a_wrong_patch_is_told(dtype, by, monkeypatch):
    def wrong(model, **options):
        report = hfpatch.apply(model, **options)
        model.model.layers[1].self_attn.scaling *= by
        return report

    monkeypatch.setattr(module, "apply", wrong)
    found = hfpatch.verify(tiny.llama(dtype=dtype), tiny.labelled())
    assert not found.ok and found.distance > found.limit and "DIFFERS from" in str(found)
    assert "layers.1.self_attn" in found.worst or "layers.0" in found.worst, found


@pytest.mark.parametrize("patched", [False, True])
def test_the_model_stays_as_it_was(patched):
    model = tiny.llama(attention_dropout=0.1).eval()
    report = hfpatch.apply(model, checkpointing=tiny.TILED) if patched else None
    model.model.embed_tokens.weight.grad = torch.ones_like(model.model.embed_tokens.weight)
    stepped = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(stepped.append)
    before = {n: (id(p), p.detach().clone(), p.grad) for n, p in model.named_parameters()}
    kinds, flags = tiny.classes(model), [m.training for m in model.modules()]
    draws = torch.get_rng_state()
    batch = long_batch()
    assert hfpatch.verify(model, batch).ok
    for name, p in model.named_parameters():
        same, value, grad = before[name]
        assert id(p) == same and torch.equal(p, value) and p.grad is grad
    assert tiny.classes(model) == kinds and [m.training for m in model.modules()] == flags
    assert torch.equal(torch.get_rng_state(), draws) and not stepped
    assert getattr(model, "_hfpatch_report", None) is report
    assert set(batch) == {"input_ids", "labels"}
    assert model.model.layers[0].self_attn.attention_dropout == 0.1
    assert isinstance(model.model.layers[0], TiledLayer) == patched


def test_embeddings_in_place_of_ids_and_labels_by_default():
    model = tiny.llama()
    embeds = torch.randn(1, 24, 64)
    model.requires_grad_(False)
    found = hfpatch.verify(model, {"inputs_embeds": embeds, "labels": tiny.ids(1)})
    assert found.ok and found.worst in ("inputs_embeds", "loss") and found.gradients == 1
    assert embeds.grad is None and not embeds.requires_grad
    assert hfpatch.verify(tiny.llama(), {"input_ids": tiny.ids(1)}).ok


def test_adapters_with_dropout():
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=4, lora_dropout=0.5, target_modules="all-linear")
    model = peft.get_peft_model(tiny.llama(), settings)
    found = hfpatch.verify(model, long_batch())
    assert found.ok and found.gradients == 2 * 7 * 2
    dropouts = [m for m in model.modules() if isinstance(m, torch.nn.Dropout)]
    assert dropouts and all(m.p == 0.5 and m.training for m in dropouts)


def test_what_cannot_be_compared_is_refused_with_a_sentence():
    model = tiny.llama()
    with pytest.raises(ValueError, match="must have input_ids or inputs_embeds, got input_id"):
        hfpatch.verify(model, {"input_id": torch.zeros(1, 8, dtype=torch.long)})
    with pytest.raises(ValueError, match="hfpatch: inputs_embeds need labels"):
        hfpatch.verify(model, {"inputs_embeds": torch.randn(1, 24, 64)})
    with pytest.raises(ValueError, match="hfpatch: the model must have a list of decoder layers"):
        hfpatch.verify(torch.nn.Linear(1, 1), long_batch())
    with pytest.raises(ValueError, match="hfpatch: some parameters must train"):
        hfpatch.verify(tiny.llama().requires_grad_(False), long_batch())
    for wrapped in (model.model.layers[0], model.model, model):
        wrapped.forward = as_mixed_precision(wrapped.forward)
        with pytest.raises(ValueError, match="hfpatch: the model's copy must run its own"):
            hfpatch.verify(model, long_batch())
        del wrapped.forward


def test_a_result_that_is_nan_is_not_ok():
    fields = {f.name: 0 for f in dataclasses.fields(Verified)}
    assert not Verified(**fields | {"distance": float("nan"), "limit": 1.0}).ok
    assert Verified(**fields | {"distance": 0.1, "limit": 0.2}).ok
