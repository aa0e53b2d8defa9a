"""Rows, labels, positions, the collator, and that packed documents stay apart."""

import copy

import numerics
import pytest
import tiny
import torch
from transformers import LlamaForCausalLM

import hfpatch
from hfpatch.trainer import dataset
from hfpatch.trainer.dataset import IGNORE


def test_collator_pads_on_the_right_without_a_mask():
    rows = [
        dataset.make_row([([5, 6, 7], [1, 1, 1])], pad_to=None, pad_id=9),
        dataset.make_row([([5], [1])], pad_to=None, pad_id=9),
    ]
    batch = dataset.Collator(pad_id=9, multiple=4)(rows)
    assert set(batch) == {"input_ids", "labels", "attention_mask"}
    assert batch["input_ids"].tolist() == [[5, 6, 7, 9], [5, 9, 9, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]
    assert batch["labels"].tolist() == [[IGNORE, 6, 7, IGNORE], [IGNORE] * 4]
    assert "attention_mask" not in dataset.Collator()(rows[:1]), "nothing is padded"


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


def test_show_colours_by_label_and_marks_documents(tokenizer):
    row = dataset.make_row([([40, 41], [0, 1]), ([42, 43], [1, 1])], pad_to=5, pad_id=2)
    text = dataset.show([row], tokenizer)
    green, grey = (lambda t, c=c: f"\x1b[{c}m{tokenizer.decode([t])}\x1b[0m" for c in (32, 90))
    assert "2 learned (green), 3 ignored (grey)" in text
    assert text.splitlines()[1:] == [
        f"|{grey(40)}{green(41)}",
        f"|{grey(42)}{green(43)}",
        f"|{grey(2)}",
    ]
