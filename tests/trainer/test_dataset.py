"""Rows, labels, positions, the collator, the cache by content, streams, and that packed documents
stay apart.
"""

import copy
import re

import numerics
import numpy as np
import pytest
import tiny
import torch
from transformers import LlamaForCausalLM

import hfpatch
from hfpatch.trainer import dataset, sources, stream, tokens
from hfpatch.trainer.dataset import IGNORE


def rows_of(*texts):
    return [sources.Row("file.txt", i, {"text": text}) for i, text in enumerate(texts, 1)]


def make_tokens(tmp_path, tokenizer, *texts, **options):
    return tokens.tokenize(
        rows_of(*texts), tokenizer, fingerprint=repr(texts), cache_dir=tmp_path, **options
    )


def test_packed_rows_hold_whole_documents_with_restarting_positions(tmp_path, tokenizer):
    made = make_tokens(tmp_path, tokenizer, "import json", "a = 1", "def f(): return 2")
    lengths = np.diff(made.offsets)
    prepared = dataset.prepare(
        made, range(3), seq_len=int(lengths.sum()) + 3, packed=True, pad_id=2
    )
    [row] = prepared.dataset
    starts = [i for i, p in enumerate(row["position_ids"].tolist()) if p == 0]
    assert len(starts) == 4, "three documents and the padding"
    assert row["labels"][starts].tolist() == [IGNORE] * 4, (
        "nothing stands before a document's first token"
    )
    assert row["input_ids"][-3:].tolist() == [2] * 3 and row["labels"][-3:].tolist() == [IGNORE] * 3
    pieces = {
        tokenizer.decode(ids[ids != 2]) for ids in torch.tensor_split(row["input_ids"], starts[1:])
    }
    assert pieces == {"import json</s>", "a = 1</s>", "def f(): return 2</s>", ""}
    counted = row["labels"] != IGNORE
    assert counted.sum() == lengths.sum() - 3 and torch.equal(
        row["labels"][counted], row["input_ids"][counted]
    )
    assert f"packing fill {lengths.sum() / (lengths.sum() + 3):.1%}" in prepared.summary


def test_learned_tokens_alone_are_labels_and_rows_without_any_are_left_out(tmp_path, tokenizer):
    rows = [
        sources.Row("f", 1, {"prompt": "long prompt " * 9, "completion": "yes"}),
        sources.Row("f", 2, {"prompt": "2+2=", "completion": "4"}),
    ]
    made = tokens.tokenize(rows, tokenizer, fingerprint="p", cache_dir=tmp_path)
    prepared = dataset.prepare(made, range(2), seq_len=12, packed=False, long_rows="truncate")
    [row] = prepared.dataset
    assert [token for token in row["labels"].tolist() if token != IGNORE] == row["input_ids"][
        -2:
    ].tolist()
    long, short = np.diff(made.offsets)
    lost = (
        f"{long:,} tokens ({long / (long + short):.1%}): {long - 12:,} of 1 truncated document, "
        "12 of 1 part"
    )
    assert prepared.summary.endswith(f"left out: {lost} without a label; 0 malformed rows")
    whole = dataset.prepare(made, range(2), seq_len=12, packed=False)
    assert len(whole.dataset) == 2, "of the long prompt's pieces the last alone holds a label"
    with pytest.raises(ValueError, match="none of 1 documents has a label left"):
        dataset.prepare(made, [0], seq_len=12, packed=False, long_rows="truncate")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("long_rows", ["split", "truncate", "drop"])
def test_each_token_is_in_a_row_or_counted_as_left_out(tmp_path, tokenizer, long_rows, packed):
    rows = rows_of(*("word " * n for n in (1, 30, 7, 90)))
    rows += [sources.Row("f", 5 + n, {"prompt": "ask " * n, "completion": "yes"}) for n in (3, 40)]
    made = tokens.tokenize(rows, tokenizer, fingerprint="count", cache_dir=tmp_path)
    prepared = dataset.prepare(
        made, range(6), seq_len=24, packed=packed, long_rows=long_rows, pad_id=2
    )
    kept = sum(int((row["input_ids"] != 2).sum()) for row in prepared.dataset)
    found = re.search(
        r"of ([\d,]+) tokens; ([\d,]+) tokens, .* left out: (?:([\d,]+) token|no token)",
        prepared.summary,
    )
    read, said, lost = (int((number or "0").replace(",", "")) for number in found.groups())
    assert (read, said) == (len(made.ids), kept) and read == kept + lost
    assert lost > 0, "the long prompt's first piece holds no label"
    streamed = make_stream(
        tokenizer, rows, packed=packed, long_rows=long_rows, seq_len=24, say=(told := []).append
    )
    assert sum(int((row["input_ids"] != 2).sum()) for row in streamed) == kept
    assert told[-1].split("left out")[1] == prepared.summary.split("left out")[1]


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


def test_tokens_are_kept_by_content(tmp_path, tokenizer, texts):
    class Counting:
        def __init__(self, rows):
            self.rows, self.read = rows, 0

        def __iter__(self):
            for row in self.rows:
                self.read += 1
                yield row

    file = tmp_path / "a.txt"

    def run(text, **options):
        file.write_text(text)
        rows = Counting(rows_of(text))
        made = tokens.tokenize(
            rows,
            tokenizer,
            fingerprint=tokens.fingerprint_of([file]),
            cache_dir=tmp_path,
            **options,
        )
        return rows.read, made

    first, made = run(texts[0])
    again, kept = run(texts[0])
    assert (first, again) == (1, 0) and np.array_equal(made.ids, kept.ids)
    assert tokenizer.decode(kept.ids) == texts[0] + "</s>" and kept.text_bytes == len(
        texts[0].encode()
    )
    assert run(texts[0] + " ")[0] == 1, "another byte"
    stock = tokenizer.chat_template
    try:
        tokenizer.chat_template = stock + " "
        assert run(texts[0])[0] == 1, "another template"
    finally:
        tokenizer.chat_template = stock


def test_broken_off_tokenization_leaves_nothing(tmp_path, tokenizer):
    def rows():
        yield from rows_of("a")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tokens.tokenize(rows(), tokenizer, fingerprint="x", cache_dir=tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_malformed_rows_are_named_counted_and_strict_stops(tmp_path, tokenizer):
    rows = [
        *rows_of("a"),
        sources.Malformed("f", 7, "not JSON"),
        sources.Row("f", 9, {"body": "x"}),
    ]
    told = []
    made = tokens.tokenize(rows, tokenizer, fingerprint="m", cache_dir=tmp_path, say=told.append)
    assert (len(made), made.malformed) == (1, 2)
    assert "f:7: not JSON" in told[0] and "f:9: expected a column 'text'" in told[1]
    for cache in (tmp_path, tmp_path / "fresh"):  # from the cache and anew
        with pytest.raises(
            ValueError, match="--strict expects no malformed row, came f:7: not JSON"
        ):
            tokens.tokenize(rows, tokenizer, fingerprint="m", cache_dir=cache, strict=True)
    with pytest.raises(ValueError, match="all 2 are malformed"):
        tokens.tokenize(rows[1:], tokenizer, fingerprint="n", cache_dir=tmp_path)


def test_split_is_disjoint_complete_and_seeded():
    train, held = dataset.split(100, 0.1, seed=1)
    assert len(held) == 10 and sorted([*train, *held]) == list(range(100))
    assert np.array_equal(held, dataset.split(100, 0.1, seed=1)[1])
    assert not np.array_equal(held, dataset.split(100, 0.1, seed=2)[1])
    assert [len(part) for part in dataset.split(2, 0.001, seed=0)] == [1, 1]


def make_stream(tokenizer, rows, **changes):
    settings = {
        "seq_len": 48, "packed": True, "kind": "auto", "text_field": "text", "long_rows": "split",
        "pad_id": 2,
        "shuffle": 8, "seed": 0, "strict": False, "say": lambda line: None,
    } | changes  # fmt: skip
    return stream.StreamDataset(lambda: iter(rows), tokenizer, **settings)


def test_stream_is_the_same_every_time_and_shuffled_by_epoch(tokenizer):
    rows = rows_of(*(f"value_{i} = {i}" for i in range(60)))
    made = make_stream(tokenizer, rows)
    first, again = ([row["input_ids"].tolist() for row in made] for _ in range(2))
    made.set_epoch(1)
    later = [row["input_ids"].tolist() for row in made]
    assert first == again != later

    def documents(packed):
        found = [tokenizer.decode([t for t in row if t != 2]).split("</s>") for row in packed]
        return sorted(text for row in found for text in row if text)

    assert documents(first) == documents(later) == sorted(row.value["text"] for row in rows)
    in_order = [
        t
        for row in make_stream(tokenizer, rows, shuffle=1)
        for t in row["input_ids"].tolist()
        if t != 2
    ]
    assert tokenizer.decode(in_order) == "".join(row.value["text"] + "</s>" for row in rows)


def test_stream_workers_share_the_rows(tokenizer):
    rows = rows_of(*(f"v{i}" for i in range(20)))
    made = make_stream(tokenizer, rows, packed=False)
    loader = torch.utils.data.DataLoader(made, batch_size=None, num_workers=2)
    found = sorted(tokenizer.decode(row["input_ids"], skip_special_tokens=True) for row in loader)
    assert found == sorted(row.value["text"] for row in rows)


def test_stream_counts_malformed_rows_and_strict_stops(tokenizer):
    told, rows = [], [*rows_of("a = 1"), sources.Malformed("f", 3, "not JSON")]
    assert len(list(make_stream(tokenizer, rows, say=told.append))) == 1
    assert (
        told[0] == "hfpatch: malformed row left out (1 so far): f:3: not JSON"
        and "1 malformed" in told[1]
    )
    with pytest.raises(ValueError, match="--strict"):
        list(make_stream(tokenizer, rows, strict=True))


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
