"""Rows of each kind of file, and how a bad one is named: file, line, what is wrong."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from hfpatch.trainer import data_files, sources


def read(file, **options):
    return list(sources.rows(data_files.find([file]), **options))


def test_jsonl_names_each_bad_line_and_goes_on(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"text": "a"}\n\n{"text": "b"\n[1]\n\xff\n{"text": "c"}\n')
    good = [(r.line, r.value["text"]) for r in read(file) if isinstance(r, sources.Row)]
    bad = [str(r) for r in read(file) if isinstance(r, sources.Malformed)]
    assert good == [(1, "a"), (6, "c")]
    assert bad == [
        f"{file}:3: not JSON: Expecting ',' delimiter at column 13",
        f"{file}:4: expected a JSON object, list came",
        f"{file}:5: not UTF-8 at byte 0 of the line",
    ]


def test_json_holds_a_list_or_one_object(tmp_path):
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([{"text": "a"}, {"text": "b"}]))
    assert [r.value["text"] for r in read(file)] == ["a", "b"]
    file.write_text('[{"text": "a"},\n{"text": }]')
    assert [str(r) for r in read(file)] == [f"{file}:2: not JSON: Expecting value at column 10"]


def test_csv_counts_lines_through_quoted_newlines(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_bytes(b'prompt,completion\n"two\nlines",yes\nshort\n"x",\xff\nlast,"of ""all"""\n')
    rows = read(file)
    assert [(r.line, r.value) for r in rows if isinstance(r, sources.Row)] == [
        (2, {"prompt": "two\nlines", "completion": "yes"}),
        (6, {"prompt": "last", "completion": 'of "all"'}),
    ]
    assert [str(r) for r in rows if isinstance(r, sources.Malformed)] == [
        f"{file}:4: expected 2 columns, 1 came",
        f"{file}:5: not UTF-8",
    ]


def test_csv_takes_a_document_larger_than_the_default_field(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text("text\n" + "x" * 200_000 + "\n")
    assert len(read(file)[0].value["text"]) == 200_000


def test_parquet(tmp_path):
    file = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", "b"]}), file)
    assert [(r.line, r.value) for r in read(file)] == [(1, {"text": "a"}), (2, {"text": "b"})]
    file.write_bytes(b"no parquet at all")
    assert str(read(file)[0]).startswith(f"{file}: not parquet")


@pytest.mark.parametrize(
    "unit, expected",
    [
        ("file", [(0, "a\nb\n\n\nc\n")]),
        ("line", [(1, "a"), (2, "b"), (5, "c")]),
        ("paragraph", [(1, "a\nb"), (5, "c")]),
    ],
)
def test_text_units(tmp_path, unit, expected):
    file = tmp_path / "a.txt"
    file.write_text("a\nb\n\n\nc\n")
    assert [(r.line, r.value["text"]) for r in read(file, text_unit=unit)] == expected


def test_folder_is_sorted_filtered_and_without_what_is_excluded(tmp_path):
    for name in ("b.txt", "a.jsonl", "sub/c.csv", "sub/skip/d.txt", "picture.png", "empty.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("" if name == "empty.txt" else "x")
    found = data_files.find([tmp_path], exclude=["skip"])
    assert [str(p.relative_to(tmp_path)) for p in found] == ["a.jsonl", "b.txt", "sub/c.csv"]
    assert data_files.find([tmp_path], pattern="**/*.csv") == [tmp_path / "sub/c.csv"]


@pytest.mark.parametrize(
    "name, words", [("none.jsonl", "there is no"), ("empty.jsonl", "empty"), ("bare", "none came")]
)
def test_missing_and_empty_data(tmp_path, name, words):
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "bare").mkdir()
    with pytest.raises(ValueError, match=f"^hfpatch: .*{words}"):
        data_files.find([tmp_path / name])
