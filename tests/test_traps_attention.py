"""Traps of masks and documents: who may see whom, and no [T, T] mask to say so."""

import inspect

import pytest
import tiny
import torch
from numerics import assert_close
from transformers.models.llama import modeling_llama as hf

import hfpatch
from hfpatch.compat import CACHE_NAMES

LENGTHS = (7, 1, 11, 5)  # documents that cross tile borders (8, 16), one of a single token
WAYS = {**tiny.WAYS, "whole": hfpatch.Checkpointing(tile=64)}


def packed() -> dict:
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    labels = tiny.ids(1).clone()
    labels[positions == 0] = -100  # as collators do: a document's first token is nobody's next
    return {"input_ids": tiny.ids(1), "position_ids": positions, "labels": labels}


def one_by_one(batch: dict):
    """The same documents, a forward each, as a loss: what packing has to equal."""

    def loss(model):
        total, count, start = 0.0, 0, 0
        for n in LENGTHS:
            ids, labels = (batch[k][:, start : start + n] for k in ("input_ids", "labels"))
            logits = model(ids, use_cache=False).logits[0, :-1]
            total = total + torch.nn.functional.cross_entropy(
                logits.to(torch.promote_types(logits.dtype, torch.float32)),
                labels[0, 1:],
                reduction="sum",
            )
            count, start = count + n - 1, start + n
        return total / count

    return loss


def gradients(model, loss) -> dict:
    model.zero_grad()
    value = loss(model)
    value.backward()
    return {"loss": value.detach()} | {n: p.grad.clone() for n, p in model.named_parameters()}


@pytest.fixture
def no_square(monkeypatch):
    """Fails where a boolean or float [.., T, T] mask reaches attention."""
    tiny.patched(tiny.llama())  # whose verdict, kept from here on, runs transformers' own masks
    attend = torch.nn.functional.scaled_dot_product_attention

    def watched(q, k, v, attn_mask=None, **kwargs):
        assert attn_mask is None, f"a mask of {tuple(attn_mask.shape)}"
        return attend(q, k, v, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    tiny.patched(tiny.llama())  # the verdict, whose small instance runs with such masks too
    create = hf.create_causal_mask

    def described(*args, **kwargs):
        mask = create(*args, **kwargs)
        assert not isinstance(mask, torch.Tensor), f"a mask of {tuple(mask.shape)}"
        return mask

    monkeypatch.setattr(hf, "create_causal_mask", described)


@pytest.mark.parametrize("mask", [None, "ones"])
@pytest.mark.parametrize("way", ["tiled", "segments", "whole"])
def test_packed_documents_are_isolated(way, mask, no_square, monkeypatch):
    """Packed position_ids with an all-ones mask: stock lets documents see each other, silently;
    without: a full mask.
    """
    stock = tiny.llama()
    ours = tiny.patched(stock, checkpointing=WAYS[way])
    batch = packed()
    reference = one_by_one(batch)
    if mask:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    got = gradients(ours, lambda m: m(**batch).loss)
    monkeypatch.undo()
    plain, true = gradients(stock, reference), gradients(tiny.exact(stock), reference)
    for name in got:
        assert_close(got[name], plain[name], true[name], name)


@pytest.mark.parametrize("mask", [None, "ones"])
@pytest.mark.parametrize(
    "options", [{"checkpointing": "off"}, {"logits": True}, {"logits": False}], ids=str
)
def test_packed_documents_are_isolated_everywhere_else(options, mask):
    """Also where the tiled layer is off, and in evaluation."""
    stock = tiny.llama().eval()
    ours = tiny.patched(stock, **options)
    batch = packed()
    reference = one_by_one(batch)
    if mask:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    with torch.no_grad():
        got = ours(**batch, use_cache=False).loss
        assert_close(got, reference(stock), reference(tiny.exact(stock)))
        got = ours(**batch).loss  # labels given: no cache is kept
        assert_close(got, reference(stock), reference(tiny.exact(stock)))


@pytest.mark.parametrize("own", ["or_mask_function", "and_mask_function"])
def test_a_mask_function_of_ones_own_counts_inside_documents(own, monkeypatch):
    """transformers asks it at positions inside each document where rows are packed: a prefix is one
    of every document.
    """
    function = {
        "or_mask_function": lambda b, h, q, kv: kv < 3,
        "and_mask_function": lambda b, h, q, kv: (kv < 3) | (q - kv < 2),
    }
    create = hf.create_causal_mask
    monkeypatch.setattr(
        hf, "create_causal_mask", lambda *x, **how: create(*x, **how, **{own: function[own]})
    )
    stock = tiny.llama()
    batch = packed() | {"use_cache": False}
    plain, true = tiny.step(stock, batch), tiny.step(tiny.exact(stock), batch)
    for way in ("off", "tiled"):
        got = tiny.step(tiny.patched(stock, checkpointing=tiny.WAYS[way]), batch)
        for name in true:
            assert_close(got[name], plain[name], true[name], name)


def test_cu_seq_lens_isolate_too():
    """FlashAttention's keywords, as DataCollatorWithFlattening gives them."""
    stock = tiny.llama()
    batch = packed()
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    more = {
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": 11,
        "max_length_k": 11,
    }
    got = gradients(tiny.patched(stock), lambda m: m(**batch, **more).loss)
    reference = one_by_one(batch)
    plain, true = gradients(stock, reference), gradients(tiny.exact(stock), reference)
    for name in got:
        assert_close(got[name], plain[name], true[name], name)


def test_cu_seq_lens_that_miss_tokens_raise():
    bounds = torch.tensor([0, 7, 20], dtype=torch.int32)
    with pytest.raises(ValueError, match="cu_seq_lens must rise from 0 to 24"):
        tiny.patched(tiny.llama())(**packed(), cu_seq_lens_q=bounds, cu_seq_lens_k=bounds)


def test_packed_rows_of_a_batch():
    """Documents of one row never see another row's, wherever the borders are."""
    stock = tiny.llama()
    ours = tiny.patched(stock)
    positions = torch.stack(
        [torch.cat([torch.arange(n) for n in row]) for row in ((10, 14), (24,), (8, 8, 8))]
    )
    batch = {"input_ids": tiny.ids(3), "labels": tiny.ids(3), "position_ids": positions}
    # Without a mask and without a cache transformers isolates them by a [T, T] mask: the reference.
    tiny.assert_as_good(ours, stock, batch, against={**batch, "use_cache": False})


@pytest.mark.parametrize("mask", [None, "ones"])
@pytest.mark.parametrize("given", [True, False])
def test_packed_with_a_cache_is_refused(given, mask):
    """With a cache transformers lets documents see each other; the cache cannot be right for the
    next token either.
    """
    ours = tiny.patched(tiny.llama()).eval()
    name = next(n for n in CACHE_NAMES if n in inspect.signature(ours.forward).parameters)
    batch = packed()
    del batch["labels"]
    if mask:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    if given:
        from transformers import DynamicCache

        batch[name] = DynamicCache(config=ours.config)
    with pytest.raises(
        ValueError, match="^hfpatch: a KV cache needs one document a sequence.*use_cache=False"
    ):
        ours(**batch, use_cache=True)
    batch.pop(name, None)
    assert ours(**batch, use_cache=False).logits.shape == (1, tiny.TOKENS, tiny.VOCAB)


# --- padding --------------------------------------------------------------------------------------


def padded(side: str, batch: int = 3) -> dict:
    input_ids = tiny.ids(batch)
    mask = torch.ones_like(input_ids)
    for row, n in ((0, 9), (1, 1)):
        where = slice(0, n) if side == "left" else slice(tiny.TOKENS - n, None)
        input_ids[row, where], mask[row, where] = (
            2,
            0,
        )  # not pad_token_id: its embedding is zeros, which hide what it does
    labels = input_ids.masked_fill(mask == 0, -100)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return {
        "input_ids": input_ids,
        "attention_mask": mask,
        "labels": labels,
        "position_ids": positions,
    }


@pytest.mark.parametrize("positions", [True, False])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("way", [*WAYS, "no attention row"])
def test_padded_batches(way, side, positions):
    """Stock builds a [B, 1, T, T] mask. What padded tokens compute is nobody's business, their
    gradient is zero.
    """
    stock = tiny.llama()
    options = (
        {"rope": False, "checkpointing": "off"} if way not in WAYS else {"checkpointing": WAYS[way]}
    )
    batch = padded(side)
    if not positions:
        del batch["position_ids"]
    tiny.assert_as_good(tiny.patched(stock, **options), stock, batch)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batches_without_a_square_mask(side, no_square):
    tiny.patched(tiny.llama())(**padded(side)).loss.backward()


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.int64])
def test_mask_dtypes(dtype):
    stock = tiny.llama()
    batch = padded("right")
    batch["attention_mask"] = batch["attention_mask"].to(dtype)
    tiny.assert_as_good(tiny.patched(stock), stock, batch, against=padded("right"))


def test_row_of_padding_alone():
    """A filler row: no valid label in it, no NaN from it."""
    stock = tiny.llama()
    batch = padded("right")
    batch["attention_mask"][2], batch["input_ids"][2], batch["labels"][2] = 0, 0, -100
    batch["attention_mask"][2, 0] = 1  # stock needs one
    ours = tiny.patched(stock)
    tiny.assert_as_good(ours, stock, batch)
    batch["attention_mask"][2] = 0
    assert all(p.isfinite().all() for p in tiny.step(ours, batch).values())


def test_caller_made_mask_is_honoured():
    """A 4D mask (prefix attention here) is the caller's: whole layers then, never ignored."""
    stock = tiny.llama()
    allowed = torch.ones(tiny.TOKENS, tiny.TOKENS, dtype=torch.bool).tril()
    allowed[:, :5] = True
    batch = {**tiny.labelled(), "attention_mask": allowed.expand(2, 1, -1, -1)}
    ours = tiny.patched(stock)
    tiny.assert_as_good(ours, stock, batch)
    causal = tiny.step(ours, tiny.labelled())["loss"]
    assert (tiny.step(ours, batch)["loss"] - causal).abs() > 1e-3


@pytest.mark.parametrize("name", ["eager", "sdpa"])
@pytest.mark.parametrize("way", ["off", "tiled"])
def test_attention_implementations(name, way):
    stock = tiny.llama(attn_implementation=name)
    tiny.assert_as_good(tiny.patched(stock, checkpointing=WAYS[way]), stock, tiny.labelled())


@pytest.mark.parametrize("way", ["off", "tiled"])
def test_plain_batch_builds_no_mask(way, no_square):
    ours = tiny.patched(tiny.llama(), checkpointing=WAYS[way])
    for batch in (
        tiny.labelled(),
        {**tiny.labelled(), "attention_mask": torch.ones(2, tiny.TOKENS, dtype=torch.long)},
    ):
        ours(**batch).loss.backward()
        with torch.no_grad():
            ours.eval()(**batch)
        ours.train()


def test_packed_with_padding_after():
    """Documents and then padding, both said: the mask marks the padding, the positions the
    documents.
    """
    stock = tiny.llama()
    batch = packed()
    reference = one_by_one(batch)
    more = {
        "input_ids": torch.nn.functional.pad(batch["input_ids"], (0, 6)),
        "labels": torch.nn.functional.pad(batch["labels"], (0, 6), value=-100),
        "position_ids": torch.nn.functional.pad(batch["position_ids"], (0, 6), value=1),
        "attention_mask": torch.nn.functional.pad(torch.ones_like(batch["input_ids"]), (0, 6)),
    }
    for options in ({}, {"checkpointing": "off"}):
        got = gradients(tiny.patched(stock, **options), lambda m: m(**more).loss)
        plain, true = gradients(stock, reference), gradients(tiny.exact(stock), reference)
        for key in got:
            assert_close(got[key], plain[key], true[key], key)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("options", [{"checkpointing": "off"}, {}], ids=["off", "tiled"])
def test_packed_base_model_without_a_word_on_the_cache(options, training):
    """use_cache defaults to True, and with a cache transformers isolates nothing: packed rows keep
    none.
    """
    stock = tiny.llama(hf.LlamaModel).train(training)
    ours = tiny.patched(stock, **options)
    batch = packed()
    del batch["labels"]
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).tolist()
    got = ours(**batch).last_hidden_state
    for model, outs in ((stock, plain := []), (tiny.exact(stock), true := [])):
        outs += [
            model(batch["input_ids"][:, a:b], use_cache=False)[0]
            for a, b in zip(starts, starts[1:])
        ]
    assert_close(got, torch.cat(plain, 1), torch.cat(true, 1))


def test_packed_with_attentions():
    """Attentions asked for through the config: transformers' own layers, still one document at a
    time.
    """
    ours = tiny.patched(tiny.llama(attn_implementation="eager")).eval()
    ours.config.output_attentions = True
    batch = packed()
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    attentions = ours(**batch, use_cache=False).attentions
    assert len(attentions) == 2
    document = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    apart = document[:, None] != document[None]
    for weights in attentions:
        assert (weights[0, :, apart] == 0).all() and torch.allclose(weights.sum(-1), torch.ones(()))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("way", tiny.longer(["off", "tiled"], "tiled"))
@pytest.mark.parametrize("kind", tiny.longer(["ones", "left", "packed"], "packed"))
def test_compiled_with_a_mask(kind, way):
    """A graph break, never an error, never the wrong mask."""
    stock = tiny.llama()
    ours = tiny.patched(stock, checkpointing=WAYS[way])
    torch._dynamo.reset()
    ours.compile(backend="eager")
    if kind == "packed":
        batch = packed()
        reference = one_by_one(batch)
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        got = gradients(ours, lambda m: m(**batch).loss)
        plain, true = gradients(stock, reference), gradients(tiny.exact(stock), reference)
        for key in got:
            assert_close(got[key], plain[key], true[key], key)
        return
    batch = (
        padded("left")
        if kind == "left"
        else {**tiny.labelled(), "attention_mask": torch.ones(2, tiny.TOKENS)}
    )
    tiny.assert_as_good(ours, stock, batch)
