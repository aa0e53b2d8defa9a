"""Rows of local files (text, jsonl, json, csv, parquet, a folder of them), each with its file and line.

A row that cannot be read is not an exception but a `Malformed`, so that the reader counts it, names it, and goes on.
"""

import csv
import glob
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TABLES = (".jsonl", ".json", ".csv", ".parquet")
TEXTS = (".txt", ".md", ".rst", ".py", ".text")


@dataclass(frozen=True)
class Row:
    """One row: where it stands (line 0: the whole file) and its columns."""

    file: str
    line: int
    value: dict


@dataclass(frozen=True)
class Malformed:
    """A row that cannot be used, and why."""

    file: str
    line: int
    reason: str

    def __str__(self):
        return f"{self.file}:{self.line}: {self.reason}" if self.line else f"{self.file}: {self.reason}"


def find(paths, *, pattern: str | None = None, exclude=()) -> list[Path]:
    """The data files that `paths` (files and folders) name, sorted within a folder.

    pattern: which files of a folder to take, such as "**/*.py"; all known kinds otherwise. exclude: names
    of folders to leave out. Raises ValueError for a path that is missing, empty, or holds no data.
    """
    files = []
    for path in map(Path, paths):
        if path.is_dir():
            if pattern:
                inside = [path / name for name in glob.glob(pattern, root_dir=path, recursive=True)]
            else:
                inside = [p for p in path.rglob("*") if p.suffix in TABLES + TEXTS]
            left_out = set(exclude)
            inside = [p for p in inside if not left_out.intersection(p.relative_to(path).parts[:-1])]
            inside = sorted(p for p in inside if p.is_file() and p.stat().st_size)
            if not inside:
                wanted = pattern or ", ".join(TEXTS + TABLES)
                raise ValueError(f"hfpatch: expected data files ({wanted}) in {path}, none came; name another folder.")
            files += inside
        elif not path.is_file():
            raise ValueError(f"hfpatch: expected a data file at {path}, there is none; check --data.")
        elif not path.stat().st_size:
            raise ValueError(f"hfpatch: expected rows in {path}, it is empty; check --data.")
        else:
            files.append(path)
    return files


def rows(files, *, text_field: str = "text", text_unit: str = "file") -> Iterator[Row | Malformed]:
    """The rows of the files in order.

    text_field: the column that plain text goes by. text_unit: what a document of a text file is: the whole
    "file", a "line", or a "paragraph" (text between blank lines).
    """
    readers = {".jsonl": _jsonl, ".json": _json, ".csv": _csv, ".parquet": _parquet}
    for file in map(Path, files):
        reader = readers.get(file.suffix)
        yield from reader(file) if reader else _text(file, text_field, text_unit)


def _lines(file: Path) -> Iterator[tuple[int, str] | Malformed]:
    with open(file, "rb") as stream:
        for number, raw in enumerate(stream, 1):
            try:
                yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                yield Malformed(str(file), number, f"not UTF-8 at byte {error.start} of the line")


def _text(file: Path, field: str, unit: str) -> Iterator[Row | Malformed]:
    if unit == "file":
        try:
            yield Row(str(file), 0, {field: file.read_bytes().decode("utf-8-sig")})
        except UnicodeDecodeError as error:
            yield Malformed(str(file), 0, f"not UTF-8 at byte {error.start}")
        return
    begin, held = 0, []
    for item in _lines(file):
        if isinstance(item, Malformed):
            yield item
            continue
        number, line = item
        if line.strip():
            begin = begin or number
            held.append(line)
        if held and (unit == "line" or not line.strip()):
            yield Row(str(file), begin, {field: "".join(held).rstrip("\r\n")})
            begin, held = 0, []
    if held:
        yield Row(str(file), begin, {field: "".join(held).rstrip("\r\n")})


def _row(file: Path, line: int, value) -> Row | Malformed:
    if isinstance(value, dict):
        return Row(str(file), line, value)
    return Malformed(str(file), line, f"expected a JSON object, {type(value).__name__} came")


def _jsonl(file: Path) -> Iterator[Row | Malformed]:
    for item in _lines(file):
        if isinstance(item, Malformed):
            yield item
            continue
        number, line = item
        if not line.strip():
            continue
        try:
            yield _row(file, number, json.loads(line.rstrip("\r\n")))
        except json.JSONDecodeError as error:
            yield Malformed(str(file), number, f"not JSON: {error.msg} at column {error.colno}")


def _json(file: Path) -> Iterator[Row | Malformed]:
    try:
        value = json.loads(file.read_bytes().decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        yield Malformed(str(file), 0, f"not UTF-8 at byte {error.start}")
    except json.JSONDecodeError as error:
        yield Malformed(str(file), error.lineno, f"not JSON: {error.msg} at column {error.colno}")
    else:
        for item in value if isinstance(value, list) else [value]:
            yield _row(file, 0, item)


def _csv(file: Path) -> Iterator[Row | Malformed]:
    csv.field_size_limit(sys.maxsize)  # a document is one field; the default limit is 128 KiB
    with open(file, newline="", encoding="utf-8-sig", errors="surrogateescape") as stream:
        reader = csv.reader(stream, strict=True)
        header, begin = None, 1
        while True:
            try:
                values = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield Malformed(str(file), begin, f"not CSV: {error}")
                values = None
            line, begin = begin, reader.line_num + 1
            if not values:
                continue
            if any("\udc80" <= c <= "\udcff" for value in values for c in value):
                yield Malformed(str(file), line, "not UTF-8")
            elif header is None:
                header = values
            elif len(values) != len(header):
                yield Malformed(str(file), line, f"expected {len(header)} columns, {len(values)} came")
            else:
                yield Row(str(file), line, dict(zip(header, values)))


def _parquet(file: Path) -> Iterator[Row | Malformed]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(file)
    except pyarrow.ArrowInvalid as error:
        yield Malformed(str(file), 0, f"not parquet: {error}")
        return
    number = 0
    for batch in table.iter_batches(batch_size=256):
        for value in batch.to_pylist():
            number += 1
            yield Row(str(file), number, value)
