"""From files and data sets to rows: each kind of file, chat and prompts, what is left out and said,
streams, splits, and that a second run reads the cache.
"""

import gzip
import json

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from transformers import LlamaConfig

from hfpatch.trainer import data as module
from hfpatch.trainer.arguments import DataArguments
from hfpatch.trainer.dataset import IGNORE

pytestmark = pytest.mark.filterwarnings("ignore")  # files that `datasets` leaves open


@pytest.fixture
def load(tokenizer, tmp_path):
    """load(**flags) -> (Datasets, lines said), of a model of 300 tokens."""

    def made(config=LlamaConfig, **flags):
        asked = {"seq_len": 32, "packing": True, "cache_dir": str(tmp_path / "cache")} | flags
        data, told = DataArguments(**asked), []
        rows = module.rows_of(data.data, data, data.data_split)
        found = module.load_datasets(
            data, rows, tokenizer, config(vocab_size=300), seed=0, say=told.append
        )
        return found, told

    return made


def documents(rows, tokenizer) -> list[str]:
    texts = [tokenizer.decode(row["input_ids"]).replace("<pad>", "") for row in rows]
    return sorted(part for text in texts for part in text.split("</s>") if part)


@pytest.mark.parametrize("name, content", [
    ("a.jsonl", b'{"text": "one"}\n{"text": "two"}\n'), ("a.json", b'[{"text": "one"}, {"text": "two"}]'),
    ("a.csv", b'n,text\n1,one\n2,"two"\n'), ("a.tsv", b"n\ttext\n1\tone\n2\ttwo\n"),
    ("a.txt", b"one\ntwo\n"), ("A.MD", b"one\ntwo\n"),
])  # fmt: skip
@pytest.mark.parametrize("streaming", [False, True])
def test_each_kind_of_file(load, tokenizer, tmp_path, name, content, streaming):
    (tmp_path / name).write_bytes(content)
    made, _ = load(data=[str(tmp_path / name)], text_unit="line", streaming=streaming)
    assert documents(made.train, tokenizer) == ["one", "two"]


def test_parquet_and_a_saved_data_set(load, tokenizer, tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"text": ["one", "two"]}), tmp_path / "a.parquet")
    rows = {n: datasets.Dataset.from_list([{"text": n}]) for n in ("train", "held")}
    datasets.DatasetDict(rows).save_to_disk(tmp_path / "saved")
    assert documents(load(data=[str(tmp_path / "a.parquet")])[0].train, tokenizer) == ["one", "two"]
    saved = [str(tmp_path / "saved")]
    made, _ = load(data=saved, eval_data=saved, eval_split="held")
    assert documents(made.train, tokenizer) == ["train"]
    assert documents(made.evaluation, tokenizer) == ["held"]


def test_a_folder(load, tokenizer, tmp_path):
    for name in ("a.jsonl", "b/c.jsonl", "left/d.jsonl", "README"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(json.dumps({"text": name}))
    made, _ = load(data=[str(tmp_path / "in")], data_exclude=["left"])
    assert documents(made.train, tokenizer) == ["a.jsonl", "b/c.jsonl"]
    (tmp_path / "in/e.csv").write_text("text\nx\n")
    made, _ = load(data=[str(tmp_path / "in")], data_exclude=["left"])
    assert documents(made.train, tokenizer) == ["a.jsonl", "b/c.jsonl", "x"]
    assert len(load(data=[str(tmp_path / "in")], data_glob="*.csv")[0].train) == 1
    with pytest.raises(ValueError, match="^hfpatch: there are no rows .* at .*README"):
        load(data=[str(tmp_path / "in/README")])


@pytest.mark.parametrize("content, words", [
    ("", "there are no rows"), ('{"text": "a"\n', "all 1 rows are malformed .*a.jsonl:1: not JSON"),
    ('{"body": "a"}\n', "all 1 rows are malformed .*a.jsonl:1: a row needs a column 'text'"),
    ('{"prompt": "%s", "completion": "a"}\n' % ("long " * 40), "has a label left"),
])  # fmt: skip
def test_data_without_a_row_to_learn(load, tmp_path, content, words):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(ValueError, match=f"^hfpatch: .*{words}"):
        load(data=[str(tmp_path / "a.jsonl")], long_rows="truncate")


@pytest.mark.parametrize("streaming", [False, True])
def test_malformed_rows_are_named_and_strict_stops(load, tokenizer, tmp_path, streaming):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n\n{"text": ""}\n{"text"\n{"text": "b"}\n')
    flags = {"data": [str(tmp_path / "a.jsonl")], "streaming": streaming}
    made, told = load(**flags, allow_malformed=True)
    assert documents(made.train, tokenizer) == ["a", "b"]
    for line, why in ((3, "'text' is empty"), (4, "not JSON: Expecting ':' delimiter")):
        at = f"(the first at {tmp_path}/a.jsonl:{line})"
        assert any(f"left out: {why}" in one and one.endswith(at) for one in told), told
    with pytest.raises(ValueError, match="--strict allows no malformed row, .*a.jsonl:[34]: "):
        list(load(**flags, strict=True)[0].train)


def test_labels_positions_and_what_is_left_out(load, tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_text(
        '{"prompt": "2+2=", "completion": "4"}\n{"prompt": "ask", "completion": "yes"}\n'
    )
    made, told = load(data=[str(tmp_path / "a.jsonl")])
    [row] = made.train
    starts = np.flatnonzero(row["position_ids"] == 0)
    assert len(starts) == 3, "two documents and the padding"
    learned = [t for t, label in zip(row["input_ids"], row["labels"]) if label != IGNORE]
    assert sorted(tokenizer.decode(learned).split("</s>")) == ["", "4", "yes"]
    assert told[-1].startswith("hfpatch: train: 2 documents of") and "packing fill" in told[-1]


@pytest.mark.parametrize("long_rows", ["split", "truncate", "drop"])
@pytest.mark.parametrize("packing", [False, True])
def test_each_token_is_in_a_row_or_left_out(load, tokenizer, tmp_path, long_rows, packing):
    texts = ["word " * n for n in (1, 30, 7, 90)]
    (tmp_path / "a.txt").write_text("\n".join(texts))
    flags = {"data": [str(tmp_path / "a.txt")], "text_unit": "line", "long_rows": long_rows}
    kept = {}
    for streaming in (False, True):
        made, _ = load(**flags, packing=packing, streaming=streaming)
        rows = [row["input_ids"] for row in made.train]
        assert all(len(row) <= 32 for row in rows)
        kept[streaming] = sum(int((row != 2).sum()) for row in rows)
    lengths = [len(tokenizer(text)["input_ids"]) + 1 for text in texts]
    most = {"split": sum(lengths), "truncate": sum(min(n, 32) for n in lengths),
            "drop": sum(n for n in lengths if n <= 32)}  # fmt: skip
    assert kept == dict.fromkeys((False, True), most[long_rows])


def test_a_stream_shuffles_each_epoch_in_its_own_order(load, tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("\n".join(f"value_{i} = {i}" for i in range(60)))
    flags = {"data": [str(tmp_path / "a.txt")], "text_unit": "line", "streaming": True}
    made = load(**flags, shuffle_buffer=8)[0].train
    first, again = ([row["input_ids"].tolist() for row in made] for _ in range(2))
    made.set_epoch(1)
    later = [row["input_ids"].tolist() for row in made]
    assert first == again != later and documents(made, tokenizer) == sorted(
        f"value_{i} = {i}" for i in range(60)
    )


def test_tokens_are_kept_by_content(load, tmp_path):
    (tmp_path / "a.txt").write_text("one")
    first, again = (load(data=[str(tmp_path / "a.txt")])[0].train.table for _ in range(2))
    assert first.cache_files and first.cache_files == again.cache_files
    (tmp_path / "a.txt").write_text("two")
    assert load(data=[str(tmp_path / "a.txt")])[0].train.table.cache_files != first.cache_files


def test_the_hub(load, tokenizer, monkeypatch):
    def load_dataset(name, config, *, split, streaming):
        if name != "someone/texts":
            raise datasets.exceptions.DatasetNotFoundError(f"'{name}' doesn't exist on the Hub")
        made = datasets.Dataset.from_list([{"text": "a = 1"}, {"text": None}])
        return made.to_iterable_dataset() if streaming else made

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for streaming in (False, True):
        made, told = load(data=["someone/texts"], streaming=streaming, allow_malformed=True)
        assert documents(made.train, tokenizer) == ["a = 1"]
        assert any("left out: a row needs a column 'text'" in line for line in told), told
    with pytest.raises(
        ValueError, match="^hfpatch: no file, .* from 'nobody/nothing': .*doesn't exist"
    ):
        load(data=["nobody/nothing"])


@pytest.mark.parametrize("streaming", [False, True])
def test_many_malformed_rows_stop_the_run(load, tokenizer, tmp_path, streaming):
    """11 of 100 rows, with two reasons: each is said once, with its count."""
    rows = ['{"text": "a"}'] * 89 + ['{"text": ""}'] * 5 + ['{"body": "b"}'] * 6
    (tmp_path / "a.jsonl").write_text("\n".join(rows) + "\n")
    flags = {"data": [str(tmp_path / "a.jsonl")], "streaming": streaming}
    with pytest.raises(ValueError, match="^hfpatch: 11 of 100 rows .* pass --allow_malformed True"):
        list(load(**flags)[0].train)
    made, told = load(**flags, allow_malformed=True)
    assert sum("left out: 'text' is empty" in line for line in told) == 1
    assert documents(made.train, tokenizer).count("a") == 89
    assert any(line.startswith("hfpatch: 6 malformed rows left out: a row needs") for line in told)
    (tmp_path / "a.jsonl").write_text("\n".join([*rows[:99], rows[0]]) + "\n")
    list(load(**flags)[0].train)


@pytest.mark.parametrize("streaming", [False, True])
def test_chats_beside_texts_need_a_template(load, tokenizer, tmp_path, streaming, monkeypatch):
    """They were left out row by row, and the run went on without them."""
    chats = (
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'
    )
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' * 30)
    (tmp_path / "b.jsonl").write_text(chats)
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(
        ValueError,
        match="chat messages need a chat template, and the tokenizer has none. .*b.jsonl:1",
    ):
        list(load(data=[str(tmp_path)], streaming=streaming)[0].train)


def test_a_split_is_seeded_and_disjoint(load, tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("\n".join(f"v{i}" for i in range(40)))
    flags = {"data": [str(tmp_path / "a.txt")], "text_unit": "line", "validation_split": 0.1}
    made, again = load(**flags)[0], load(**flags)[0]
    held = documents(made.evaluation, tokenizer)
    assert len(held) == 4 and held == documents(again.evaluation, tokenizer)
    assert sorted(held + documents(made.train, tokenizer)) == sorted(f"v{i}" for i in range(40))


def test_tokens_that_the_model_lacks(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    added = type(tokenizer).from_pretrained(tmp_path)
    added.add_special_tokens({"additional_special_tokens": ["<image>"], "pad_token": "<image>"})
    config = LlamaConfig(vocab_size=len(tokenizer))
    module.fit_vocabulary(config, added, fresh=False)
    assert module.pad_id(config, added) == added.eos_token_id
    rows = module.Rows(lambda: [("f:1", {"text": "b <image>"})], "")
    [made] = module.encoded(rows, added, DataArguments(), module.chat.OWN, 300)
    assert made["bad"] == "f:1: the token '<image>' is beyond the model's 300"
    added.add_tokens("word")
    with pytest.raises(ValueError, match="'word' is number 301"):
        module.fit_vocabulary(config, added, fresh=False)


def test_what_stands_before_a_cut_archive_is_kept(load, tokenizer, tmp_path):
    whole = gzip.compress(b"".join(b'{"text": "%d"}\n' % i for i in range(9000)))
    (tmp_path / "a.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    made, told = load(data=[str(tmp_path / "a.jsonl.gz")])
    assert len(documents(made.train, tokenizer)) > 100
    assert any("a.jsonl.gz" in line and "cannot be read" in line for line in told)


def test_rows_are_read_as_they_are_written(tokenizer, tmp_path):
    """No column is filled in, however late it comes, and no tool gets another one's parameters."""
    tools = [{"function": {"name": n, "parameters": {n: {"type": "string"}}}} for n in "xy"]
    rows = [{"messages": [], "tools": [tool]} for tool in tools] + [{"text": "a", "late": 1}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = DataArguments(data=[str(tmp_path / "a.jsonl")])
    assert [row for _, row in module.rows_of(data.data, data, "train").good()] == rows
