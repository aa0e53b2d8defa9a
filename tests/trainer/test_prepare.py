"""Data sets of the hub, streamed or not, and validation data of their own."""

import datasets
import pytest
from transformers import LlamaConfig, MistralConfig

from hfpatch.trainer import data_files, prepare, sources
from hfpatch.trainer.arguments import DataArguments

ROWS = [{"text": f"value_{i} = {i}"} for i in range(30)] + [{"text": None}]


@pytest.fixture
def hub(monkeypatch):
    """A hub with one data set, someone/texts; anything else is not there."""
    asked = []

    def load_dataset(name, config, *, split, streaming):
        asked.append((name, config, split, streaming))
        if name != "someone/texts":
            raise datasets.exceptions.DatasetNotFoundError(
                f"Dataset '{name}' doesn't exist on the Hub\nand more"
            )
        made = datasets.Dataset.from_list(ROWS)
        return made.to_iterable_dataset() if streaming else made

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked


def load(tokenizer, tmp_path, config=LlamaConfig, **flags):
    data = DataArguments(seq_len=32, packing=True, cache_dir=str(tmp_path / "cache"), **flags)
    told = []
    train = prepare.source(data.data, data, digest=not data.streaming)
    return prepare.load_datasets(
        data, train, tokenizer, config(vocab_size=300), seed=0, say=told.append
    ), told


def documents(made, tokenizer):
    texts = [tokenizer.decode(row["input_ids"]) for row in made]
    return sorted(
        part for text in texts for part in text.replace("<pad>", "").split("</s>") if part
    )


@pytest.mark.parametrize("streaming", [False, True])
def test_hub_data_set(hub, tokenizer, tmp_path, streaming):
    made, told = load(
        tokenizer, tmp_path, data=["someone/texts"], data_split="train[:31]", streaming=streaming
    )
    assert hub == [("someone/texts", None, "train[:31]", streaming)]
    assert documents(made.train, tokenizer) == sorted(row["text"] for row in ROWS[:30])
    [line] = [line for line in told if "malformed row left out" in line]
    assert "someone/texts:31: 'text' must be a string, NoneType came" in line


@pytest.mark.parametrize("streaming", [False, True])
def test_packed_rows_know_the_models_windows(tokenizer, tmp_path, streaming):
    """For MFU: what a window of 4 tokens sees of a row is hardly less over short documents."""
    (tmp_path / "a.txt").write_text("a = 1\nb = 2\n" * 20)
    flags = {"data": [str(tmp_path / "a.txt")], "text_unit": "line", "streaming": streaming}
    whole, _ = load(tokenizer, tmp_path, **flags)
    narrow, _ = load(
        tokenizer, tmp_path, lambda **sizes: MistralConfig(**sizes, sliding_window=4), **flags
    )
    assert whole.attention_share < 0.2 < 0.5 < narrow.attention_share < 1.0


def test_hub_data_set_that_is_not_there(hub):
    data = DataArguments(data=["nobody/nothing"])
    with pytest.raises(
        ValueError,
        match="^hfpatch: 'nobody/nothing' is no file or folder here, and .* doesn't exist",
    ):
        prepare.source(data.data, data)


@pytest.mark.parametrize("streaming", [False, True])
def test_evaluation_data_of_its_own(tokenizer, tmp_path, streaming):
    for name, text in (("train", "a = 1\nb = 2\n"), ("held", "c = 3\n")):
        (tmp_path / f"{name}.txt").write_text(text)
    flags = {
        "data": [str(tmp_path / "train.txt")],
        "eval_data": [str(tmp_path / "held.txt")],
        "text_unit": "line",
    }
    made, _ = load(tokenizer, tmp_path, streaming=streaming, **flags)
    assert documents(made.train, tokenizer) == ["a = 1", "b = 2"]
    assert documents(made.evaluation, tokenizer) == ["c = 3"]
    held = tokenizer("c = 3")["input_ids"]
    assert made.bytes_per_token == 5 / (len(held) + 1)


def test_folder_of_several_kinds(tokenizer, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    (tmp_path / "data/b.csv").write_text("prompt,completion\nask,answer\n")
    (tmp_path / "data/c.txt").write_text("three")
    made, told = load(tokenizer, tmp_path, data=[str(tmp_path / "data")])
    assert documents(made.train, tokenizer) == ["askanswer", "one", "three", "two"] and not told
    assert isinstance(next(sources.rows(data_files.find([tmp_path / "data"]))), sources.Row)
