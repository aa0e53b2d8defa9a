"""With a KV cache, and for every call that keeps one, layers run as transformers has them."""

import copy
import inspect

import families
import pytest
import tiny
import torch
from transformers import MistralForCausalLM, StaticCache

import hfpatch
from hfpatch.compat import cache_name
from tests.layer.test_mixers import lengths

TILE = hfpatch.Checkpointing(offload="host", tile=16)
MASKS_OF_HYBRIDS = tiny.not_before_transformers((5, 16), "makes no such masks of a hybrid's layers")


def cache_of(out):
    """The cache in a model's output."""
    return out[cache_name(out)]


def both(name):
    stock = families.small_model(name).eval()
    stock.generation_config.eos_token_id = None
    stock.set_attn_implementation("sdpa")
    ours = copy.deepcopy(stock)
    hfpatch.apply(ours, checkpointing=TILE)
    return ours, stock


def close(ours, theirs):
    assert ours.shape == theirs.shape
    assert (ours - theirs).norm() <= 3e-6 * theirs.norm()


@pytest.mark.parametrize("name", ["mistral", pytest.param("gemma3_text", marks=pytest.mark.long)])
def test_a_prompt_fills_the_cache_as_in_transformers(name):
    """With a window shorter than the prompt; left padding; then generation goes on."""
    ours, stock = both(name)
    ids = torch.randint(1, 64, (2, 40), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    with torch.no_grad():
        for given in (
            {"input_ids": ids},
            {"input_ids": ids, "attention_mask": mask, "labels": ids},
        ):
            got, wanted = ours(**given), stock(**given)
            for a, b in zip(cache_of(got).layers, cache_of(wanted).layers, strict=True):
                close(a.keys, b.keys), close(a.values, b.values)
        more = {"max_new_tokens": 4, "do_sample": False, "attention_mask": mask}
        assert torch.equal(ours.generate(ids, **more), stock.generate(ids, **more))


@pytest.mark.parametrize("use_cache", [None, False])
def test_evaluation_without_a_cache_runs_in_tiles(use_cache):
    """Trainer says use_cache=False in the config; other loops say it in the call."""
    ours, stock = both("mistral")
    ids, found = torch.randint(1, 64, (2, 40)), []
    given = {"input_ids": ids, "labels": ids}
    if use_cache is None:
        ours.config.use_cache = False
    else:
        given["use_cache"] = use_cache
    mlp = ours.model.layers[-1].mlp
    handle = lengths(next(m for m in mlp.modules() if isinstance(m, torch.nn.Linear)), found)
    with torch.no_grad():
        close(ours(**given).loss, stock(**given).loss)
    handle.remove()
    assert max(found) <= 16


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_other_caches_are_left_to_transformers(name):
    """One of a fixed length, one that holds tokens already; a cache in training. The argument's
    name is `cache` since transformers 5.24, which takes the older one too.
    """
    if name not in inspect.signature(MistralForCausalLM.forward).parameters and name == "cache":
        pytest.skip("transformers before 5.24")
    ours, stock = both("mistral")
    ids = torch.randint(1, 64, (1, 40), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        results = []
        for model in (ours, stock):
            fixed = model(ids, **{name: StaticCache(model.config, max_cache_len=48)}).logits
            first = model(ids[:, :24])
            more = {name: cache_of(first)}
            results.append((fixed, model(ids[:, 24:], **more).logits))
    for a, b in zip(*results):
        close(a, b)
    close(ours.train()(ids, use_cache=True).logits, stock.train()(ids, use_cache=True).logits)


@pytest.mark.parametrize(
    "name, attention",
    [
        ("mistral", "sdpa"),
        ("mistral", "eager"),
        pytest.param("falcon_h1", "sdpa", marks=MASKS_OF_HYBRIDS),
        pytest.param("gemma3_text", "sdpa", marks=pytest.mark.long),
    ],
)
def test_a_padded_prompt_and_a_static_cache(name, attention):
    """transformers then makes a mask of scores, a dict of them for several kinds of layers:
    positions of padding are no restart.
    """
    ours, stock = both(name)
    ids = torch.randint(1, 64, (2, 12), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    given = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
    given |= {
        "cache_implementation": "static",
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    results = []
    for model in (ours, stock):
        model.set_attn_implementation(attention)
        results.append(model.generate(ids, **given))
    assert torch.equal(*(result.sequences for result in results))
    # of padding that sees nothing eager makes NaN
    known = slice(0, 1) if attention == "eager" else slice(None)
    for a, b in zip(*(result.logits for result in results)):
        close(a[known], b[known])


def test_packed_rows_beside_a_cache_follow_the_callers_own_mask():
    """Of documents that a mask of the caller's own keeps apart nothing is said; without it they are
    refused.
    """
    ours, stock = both("mistral")
    ids = torch.randint(1, 64, (1, 12), generator=torch.Generator().manual_seed(5))
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    apart = (torch.arange(12)[:, None] < 5) == (torch.arange(12) < 5)
    mask = (apart & torch.ones(12, 12, dtype=torch.bool).tril())[None, None]
    with torch.no_grad():
        logits = [
            m(ids, position_ids=positions, attention_mask=mask, use_cache=True).logits
            for m in (ours, stock)
        ]
        close(*logits)
        with pytest.raises(ValueError, match="^hfpatch: a KV cache needs one document a sequence"):
            ours(ids, position_ids=positions, use_cache=True)


def test_evaluation_and_generation_plan_nothing(monkeypatch):
    """Nothing is kept without a gradient: a host that is too small for checkpoints is no reason to
    refuse.
    """
    monkeypatch.setenv("HFPATCH_HOST_MEMORY", "4000")
    stock = tiny.llama().eval()
    ours = tiny.patched(stock, checkpointing=hfpatch.Checkpointing(offload="host", tile=8))
    with torch.no_grad():
        logits = (model(tiny.ids()).logits for model in (ours, stock, tiny.exact(stock)))
        tiny.numerics.assert_close(*logits, "logits")
    ours.generate(tiny.ids(1), max_new_tokens=2, do_sample=False)
    with pytest.raises(ValueError, match="^hfpatch: checkpoints need"):
        ours.train()(tiny.ids(), labels=tiny.ids())


def test_a_family_that_makes_no_cache_in_training_is_asked_for_none():
    """RWKV gives its state in evaluation alone."""
    stock = families.small_model("rwkv").train()
    ours = tiny.patched(stock)
    ids = torch.randint(3, 60, (2, 17), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        got, wanted = (m(input_ids=ids) for m in (ours, stock))
    assert got.state is None and wanted.state is None
    torch.testing.assert_close(got.logits, wanted.logits)


@tiny.not_before_transformers((5, 16), "hands mixers their states by other ways")
def test_a_cache_of_states_alone():
    """Mamba 2's does not say how many tokens it holds: patched it generates as it did."""

    stock = families.small_model("mamba2", torch.float32).eval()
    ours = copy.deepcopy(stock)
    hfpatch.apply(ours)
    ids = torch.arange(12)[None] + 3
    said = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(ours.generate(ids, **said), stock.generate(ids, **said))
