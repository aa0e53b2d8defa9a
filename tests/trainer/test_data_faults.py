"""Data that is odd or damaged: read right, or named by file and row; never something else than the
user meant.
"""

import gzip
import json
import lzma
import multiprocessing
import os
import time
from dataclasses import replace

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from transformers import LlamaConfig

from hfpatch.trainer import chat, data_files, prepare, sources, tokens
from hfpatch.trainer.arguments import DataArguments, ModelArguments
from hfpatch.trainer.stream import StreamDataset

LINES = '{"text": "a"}\n{"text": "b"}\n'


def texts_of(path, **options):
    form = {"form": options["form"]} if "form" in options else {}
    return [
        r.value["text"] if isinstance(r, sources.Row) else r
        for r in sources.rows(data_files.find([path], **form), **options)
    ]


def saved(folder, split=None):
    made = datasets.Dataset.from_list([{"text": "a"}, {"text": "b"}])
    (datasets.DatasetDict({split: made}) if split else made).save_to_disk(folder)


@pytest.mark.parametrize(
    "name, content",
    [
        ("rows.ndjson", LINES.encode()),
        ("ROWS.JSONL", LINES.encode()),
        ("lines.json", LINES.encode()),
        ("rows.jsonl.gz", gzip.compress(LINES.encode())),
        ("rows.tsv", b'n\ttext\n1\ta\n2\t"b"\n'),
        ("Rows.CSV.xz", lzma.compress(b"text\na\nb\n")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_kinds_by_name(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert texts_of(tmp_path / name) == texts_of(tmp_path) == ["a", "b"]


def test_saved_data_sets_are_read_as_such(tmp_path):
    saved(tmp_path / "data/one")
    saved(tmp_path / "data/dict", "held")
    assert texts_of(tmp_path / "data/one") == ["a", "b"]
    [arrow] = (tmp_path / "data/one").glob("*.arrow")
    assert texts_of(arrow) == ["a", "b"]
    assert texts_of(tmp_path / "data", split="held") == ["a", "b"] * 2, "found inside a folder too"
    with pytest.raises(ValueError, match="holds the splits held, 'train' was asked for"):
        texts_of(tmp_path / "data/dict")
    before = tokens.fingerprint_of([tmp_path / "data/one"])
    arrow.write_bytes(arrow.read_bytes() + b"0")
    assert tokens.fingerprint_of([tmp_path / "data/one"]) != before


@pytest.mark.parametrize("name", ["part-00000", "rows.jsonl.zst", "rows.xlsx", "rows.parquet.gz"])
def test_what_a_name_does_not_say_is_refused(tmp_path, name):
    (tmp_path / name).write_text(LINES)
    with pytest.raises(ValueError, match=f"^hfpatch: .*{name}"):
        data_files.find([tmp_path / name])
    with pytest.raises(ValueError, match=f"^hfpatch: .*{name}"):
        data_files.find([tmp_path], pattern="*")
    if name == "part-00000":
        assert texts_of(tmp_path / name, form="jsonl") == ["a", "b"]


def test_folder_says_what_it_leaves_out_and_reads_links_once(tmp_path):
    folder, apart = tmp_path / "data", tmp_path / "apart"
    for path in (
        folder / "a.jsonl",
        folder / "b.weird",
        folder / ".ipynb_checkpoints/a-checkpoint.jsonl",
        apart / "c.jsonl",
    ):
        path.parent.mkdir(exist_ok=True)
        path.write_text(LINES)
    (folder / "link").symlink_to(apart)
    (apart / "circle").symlink_to(folder)
    told = []
    found = data_files.find([folder], say=told.append)
    assert [str(f.relative_to(folder)) for f in found] == ["a.jsonl", "link/c.jsonl"]
    assert len(told) == 1 and "left out: 1 of .weird" in told[0]


def test_folder_of_texts_beside_tables_says_so(tmp_path):
    """The README of a data set that was cloned is a document like any other."""
    for name in ("a.jsonl", "b.jsonl.gz", "README.md"):
        (tmp_path / name).write_text(LINES)
    told = []
    assert len(data_files.find([tmp_path], say=told.append)) == 3
    assert (
        len(told) == 1 and "side by side: 1 of .gz, 1 of .jsonl, 1 of .md; --data_glob" in told[0]
    )
    data_files.find([tmp_path], pattern="*", say=told.append)
    assert len(told) == 1


@pytest.mark.parametrize("name, make, words", [
    ("a.jsonl", lambda file: os.symlink("/nowhere/a.jsonl", file),
     "a.jsonl is a link that leads nowhere"),
    ("b.txt", lambda file: os.symlink("b.txt", file), "b.txt is a link that leads nowhere"),
    ("c.txt", lambda file: file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n"), "run `git lfs pull`"),
])  # fmt: skip
def test_data_that_are_not_there_are_not_passed_over(tmp_path, name, make, words):
    (tmp_path / "whole.jsonl").write_text(LINES)
    make(tmp_path / name)
    for pattern in (None, "*"):
        with pytest.raises(ValueError, match=f"^hfpatch: .*{words}"):
            data_files.find([tmp_path], pattern=pattern)
    assert data_files.find([tmp_path], pattern="whole*") == [tmp_path / "whole.jsonl"]


def test_file_name_that_is_no_utf8(tmp_path):
    file = tmp_path / os.fsdecode(b"\xff.jsonl")
    file.write_text(LINES)
    assert texts_of(tmp_path) == ["a", "b"] and tokens.fingerprint_of([file])


def test_small_file_that_cannot_be_read(tmp_path, monkeypatch):
    """It is looked into for what Git LFS leaves."""
    (tmp_path / "a.jsonl").write_text(LINES)

    def closed(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(sources.Path, "read_bytes", closed)
    with pytest.raises(ValueError, match="^hfpatch: cannot read .*a.jsonl .Permission denied"):
        data_files.find([tmp_path])


def test_folder_that_cannot_be_listed(tmp_path, monkeypatch):
    (tmp_path / "closed").mkdir()
    (tmp_path / "a.jsonl").write_text(LINES)
    scandir = os.scandir

    def closed(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", closed)
    with pytest.raises(ValueError, match="cannot list .*closed .Permission denied"):
        data_files.find([tmp_path])
    assert len(data_files.find([tmp_path], exclude=["closed"])) == 1


def test_rows_that_no_text_can_be_made_of(tmp_path, tokenizer):
    file = tmp_path / "rows.jsonl"
    bad = [
        r'{"text": "\ud800"}',
        "[" * 100_000,
        '{"text": ' + "9" * 5000 + "}",
        r'{"messages": [{"role": "user", "content": "\udfff"}]}',
    ]
    file.write_text("\n".join([*bad, '{"text": "a"}']))
    *malformed, good = tokens.encoded(sources.rows([file]), tokenizer)
    words = ["lone surrogate", "nested too deeply", "too many digits", "lone surrogate"]
    assert [(m.line, word in m.reason) for m, word in zip(malformed, words, strict=True)] == [
        (i, True) for i in (1, 2, 3, 4)
    ]
    assert tokenizer.decode(good[0]) == "a</s>"


@pytest.mark.parametrize("content", [5, [{"type": "image"}], {"text": "a"}])
def test_content_that_is_no_text(tokenizer, content):
    """A template would print it as Python does."""
    row = {
        "messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "a"}]
    }
    with pytest.raises(chat.BadRow, match="message 0 must have text as 'content'"):
        chat.encode(row, tokenizer)
    row["messages"][0]["content"] = [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]
    assert "<user>\nxy</s>" in tokenizer.decode(chat.encode(row, tokenizer)[0])


def test_template_that_raises_is_a_bad_row(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", "{{ 1 / 0 }}")
    row = sources.Row("f.jsonl", 7, {"messages": [{"role": "user", "content": "a"}]})
    [malformed] = tokens.encoded([row], tokenizer)
    assert str(malformed) == "f.jsonl:7: the chat template refuses it: division by zero"


def test_damaged_parquet_page_keeps_what_stands_before_it(tmp_path):
    file = tmp_path / "rows.parquet"
    table = pyarrow.table({"text": [f"row {i} " + "x" * 50 for i in range(900)]})
    options = {"row_group_size": 300, "write_page_checksum": True, "use_dictionary": False}
    pyarrow.parquet.write_table(table, file, **options)
    at = pyarrow.parquet.ParquetFile(file).metadata.row_group(1).column(0).data_page_offset
    content = bytearray(file.read_bytes())
    content[at + 60 : at + 90] = bytes(30)
    file.write_bytes(content)
    *good, malformed = sources.rows([file])
    assert [r.line for r in good] == list(range(1, len(good) + 1)) and len(good) > 200
    assert malformed.line == len(good) and "rows after this one are lost" in malformed.reason


def test_cut_archive_keeps_what_stands_before_the_cut(tmp_path):
    file = tmp_path / "rows.jsonl.gz"
    whole = gzip.compress(b"".join(b'{"text": "%d"}\n' % i for i in range(50_000)))
    file.write_bytes(whole[: len(whole) // 2])
    *good, malformed = sources.rows([file])
    assert [r.line for r in good] == list(range(1, len(good) + 1)) and len(good) > 1000
    assert malformed.line == len(good) and "rows after this one are lost" in malformed.reason


def test_machine_that_fails_is_no_malformed_row(tmp_path, monkeypatch):
    """It would be cached as if the file were so."""
    monkeypatch.setitem(
        sources.OPEN, ".gz", lambda *a: (_ for _ in ()).throw(OSError(5, "Input/output error"))
    )
    with pytest.raises(ValueError, match="cannot read a.jsonl.gz .Input/output error"):
        list(sources.rows(["a.jsonl.gz"]))


@pytest.mark.parametrize("header", [b"text,text\n", b"\xff,text\n"])
def test_csv_without_a_usable_header_gives_no_rows(tmp_path, header):
    (tmp_path / "a.csv").write_bytes(header + b"a,b\nc,d\n")
    [malformed] = sources.rows([tmp_path / "a.csv"])
    assert "expected a header" in malformed.reason


def stream(rows, tokenizer, **options):
    told = []
    values = {"seq_len": 8, "packed": False, "kind": "text", "text_field": "text",
              "long_rows": "truncate", "pad_id": 0,
              "shuffle": 2, "seed": 0, "strict": False} | options  # fmt: skip
    return StreamDataset(lambda: iter(rows), tokenizer, say=told.append, **values), told


@pytest.mark.parametrize("long_rows, word", [("truncate", "truncated"), ("drop", "too long")])
def test_streaming_counts_what_it_cuts(tokenizer, long_rows, word):
    rows = [sources.Row("f", i, {"text": "word " * n}) for i, n in enumerate((1, 50, 60, 1), 1)]
    rows.append(sources.Malformed("f", 9, "bad"))
    made, told = stream(rows, tokenizer, long_rows=long_rows)
    assert len(list(made)) == (4 if long_rows == "truncate" else 2)
    lengths = [len(tokenizer(row.value["text"])["input_ids"]) + 1 for row in rows[:-1]]
    lost = sum(length - 8 * (long_rows == "truncate") for length in lengths if length > 8)
    assert told[-1] == (
        f"hfpatch: train: the stream read 4 documents of {sum(lengths)} tokens; left out: {lost} "
        "tokens "
        f"({lost / sum(lengths):.1%}): {lost} of 2 {word} documents; 1 malformed row"
    )
    reading = iter(made)
    next(reading)
    told.clear()
    reading.close()  # max_steps is reached
    assert told and "left out" in told[-1]


def test_stream_without_a_row_to_learn_is_refused(tokenizer):
    """Trainer ends such a run after 0 steps, and saves."""
    made, _ = stream([sources.Malformed("f", 1, "bad")], tokenizer)
    with pytest.raises(ValueError, match="none is left: 0 documents of 0 tokens; .* 1 malformed"):
        made.check()


def test_token_beyond_the_model_is_named(tokenizer, tmp_path):
    config = LlamaConfig(vocab_size=len(tokenizer))
    added = type(tokenizer).from_pretrained(save(tokenizer, tmp_path))
    added.add_special_tokens({"additional_special_tokens": ["<image>"], "pad_token": "<image>"})
    prepare.fit_vocabulary(config, added, fresh=False)
    assert prepare.pad_id(config, added) == added.eos_token_id
    rows = [sources.Row("f", i, {"text": text}) for i, text in enumerate(("a", "b <image>"), 1)]
    good, malformed = tokens.encoded(rows, added, vocab_size=config.vocab_size)
    assert (
        str(malformed)
        == "f:2: the token '<image>' is number 300, the model's vocabulary ends at 299"
    )
    added.add_tokens("word")
    with pytest.raises(ValueError, match="'word' is number 301"):
        prepare.fit_vocabulary(config, added, fresh=False)


def save(tokenizer, folder):
    tokenizer.save_pretrained(folder)
    return folder


def test_numbers_with_gaps_count_by_the_largest(tokenizer, monkeypatch):
    vocabulary = {**tokenizer.get_vocab(), "far": 900}
    monkeypatch.setattr(type(tokenizer), "get_vocab", lambda self: vocabulary)
    with pytest.raises(
        ValueError, match="has 300 tokens, the model's vocabulary 512 .'far' is number 900"
    ):
        prepare.fit_vocabulary(LlamaConfig(vocab_size=512), tokenizer, fresh=False)
    config = LlamaConfig(vocab_size=512)
    prepare.fit_vocabulary(config, tokenizer, fresh=True)
    assert config.vocab_size == 901


def cached(folder, tokenizer):
    rows = [sources.Row("f", i, {"text": f"value {i}"}) for i in range(5)]
    made = tokens.tokenize(rows, tokenizer, fingerprint="x", cache_dir=folder)
    return made.ids.tolist(), made.learned.tolist(), made.offsets.tolist()


def test_eight_writers_of_one_cache(tmp_path, tokenizer, monkeypatch):
    """Eight processes come at the same moment to a cache that was cut: one writes, the others wait
    for it.
    """
    cache, said = tmp_path / "cache", tmp_path / "said"
    said.mkdir()
    expected = cached(cache, tokenizer)
    [folder] = cache.iterdir()
    (folder / "ids.bin").write_bytes(b"1234")
    fork = multiprocessing.get_context("fork")
    barrier, written, write = fork.Barrier(8), fork.Value("i"), tokens._write

    def noted(*args):
        with written:
            written.value += 1
        time.sleep(0.1)
        write(*args)

    def process(i):
        barrier.wait(timeout=60)
        (said / str(i)).write_text(json.dumps(cached(cache, tokenizer)))

    monkeypatch.setattr(tokens, "_write", noted)
    processes = [fork.Process(target=process, args=(i,)) for i in range(8)]
    for one in processes:
        one.start()
    for one in processes:
        one.join()
    assert [json.loads(file.read_text()) for file in said.iterdir()] == [list(expected)] * 8
    assert written.value == 1
    assert sorted(p.name for p in folder.iterdir()) == [
        "ids.bin",
        "learned.bin",
        "offsets.npy",
        "stats.json",
    ]


def test_stats_of_another_form_are_no_cache(tmp_path, tokenizer):
    expected = cached(tmp_path, tokenizer)
    [folder] = tmp_path.iterdir()
    for text in ("[]", '{"sizes": null}', '{"sizes": {"ids.bin": "x"}}'):
        (folder / "stats.json").write_text(text)
        assert cached(tmp_path, tokenizer) == expected


@pytest.mark.parametrize("name", ["ids.bin", "learned.bin", "offsets.npy", "stats.json"])
def test_cut_cache_is_rebuilt(tmp_path, tokenizer, name):
    expected = cached(tmp_path, tokenizer)
    [folder] = tmp_path.iterdir()
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: len(content) // 2])
    assert cached(tmp_path, tokenizer) == expected
    assert (folder / name).read_bytes() == content


def test_splits_and_sets_that_were_not_meant(tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_text(LINES)
    paths = {"data": [str(tmp_path / "a.jsonl")], "cache_dir": str(tmp_path / "cache")}
    with pytest.raises(ValueError, match="--data_split chooses in a hub data set, files came"):
        prepare.source(paths["data"], DataArguments(**paths, data_split="test"))
    with pytest.raises(ValueError, match="--data_glob chooses in a folder, .*a.jsonl is none"):
        prepare.source(paths["data"], DataArguments(**paths, data_glob="*.py"))
    hub = DataArguments(
        data=["someone/texts"], eval_data=paths["data"], data_split="train[:9]", data_glob=None
    )
    assert prepare.source(hub.eval_data, hub).rows(), (
        "a split of the hub's says nothing of the files beside it"
    )
    with pytest.raises(ValueError, match="--eval_split chooses in a hub data set"):
        prepare.source(hub.eval_data, hub, split="test")
    data = DataArguments(**paths, eval_data=paths["data"])
    train = prepare.source(data.data, data)
    with pytest.raises(ValueError, match="--eval_data are the training data"):
        prepare.load_datasets(
            data, train, tokenizer, LlamaConfig(vocab_size=300), seed=0, say=print
        )


def test_evaluation_takes_a_split_of_its_own(tmp_path, tokenizer):
    rows = {name: datasets.Dataset.from_list([{"text": name}]) for name in ("train", "held")}
    datasets.DatasetDict(rows).save_to_disk(tmp_path / "set")
    paths = [str(tmp_path / "set")]
    data = DataArguments(
        data=paths, eval_data=paths, eval_split="held", cache_dir=str(tmp_path / "cache")
    )
    config, train = LlamaConfig(vocab_size=300), prepare.source(data.data, data)
    made = prepare.load_datasets(data, train, tokenizer, config, seed=0, say=print)
    assert tokenizer.decode(made.train[0]["input_ids"]) == "train</s>"
    assert tokenizer.decode(made.evaluation[0]["input_ids"]) == "held</s>"


def test_tokenizer_learns_from_every_kind_of_row(tmp_path):
    said = "the same words, the same words, the same words"
    rows = [
        {"messages": [{"role": "user", "content": said}]},
        {"prompt": said, "completion": said},
        {"text": "\ud800"},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = DataArguments(data=[str(tmp_path / "a.jsonl")])
    for kind in ("chat", "prompt"):
        chosen = replace(data, kind=kind)
        made = prepare.load_tokenizer(
            ModelArguments(train_tokenizer=300), chosen, prepare.source(data.data, chosen)
        )
        assert len(made(said)["input_ids"]) < len(said) / 3
