"""Rows, labels, positions, the collator, and that packed documents stay apart."""

import copy

import numerics
import pytest
import tiny
import torch
from transformers import LlamaForCausalLM

import hfpatch
from hfpatch.trainer import dataset


def test_padding_in_a_batch_changes_nothing():
    """Right padding: each row's gradient is the one it has alone."""
    model = tiny.llama(dtype=torch.float64)
    long, short = (
        dataset.make_row([(range(3, 3 + n), [1] * n)], pad_to=None, pad_id=0) for n in (20, 7)
    )
    both = dataset.Collator()([long, short])
    together = gradients(model, [both], 25)
    apart = gradients(model, [dataset.Collator()([row]) for row in (long, short)], 25)
    plain = gradients(model.float(), [both], 25)
    for name in together:
        numerics.assert_close(together[name], plain[name], apart[name], name)


def gradients(model, batches, items):
    model = copy.deepcopy(model)
    for batch in batches:
        model(**batch, use_cache=False, num_items_in_batch=torch.tensor(items)).loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("patched", [False, True])
def test_packed_documents_are_isolated_exactly(attention, patched):
    """Gradients of a packed batch are those of its documents one by one, stock and patched."""
    torch.manual_seed(3)
    documents = [(torch.randint(3, tiny.VOCAB, (n,)).tolist(), [1] * n) for n in (9, 1, 30, 17)]
    packed = [
        dataset.make_row(documents[:2], pad_to=40, pad_id=0),
        dataset.make_row(documents[2:], pad_to=64, pad_id=0),
    ]
    batch = dataset.Collator()(packed)
    items = sum(len(ids) - 1 for ids, _ in documents)
    alone = [
        dataset.Collator()([dataset.make_row([d], pad_to=None, pad_id=0)])
        for d in documents
        if len(d[0]) > 1
    ]
    stock = tiny.llama(LlamaForCausalLM, attn_implementation=attention)
    exact = gradients(copy.deepcopy(stock).double(), alone, items)
    plain = gradients(stock, alone, items)
    if patched:
        hfpatch.apply(stock, checkpointing=hfpatch.Checkpointing(tile=16))
    got = gradients(stock, [batch], items)
    for name in exact:
        numerics.assert_close(got[name], plain[name], exact[name], name)
