"""Rows of local files (text, jsonl, json, csv, tsv, parquet, arrow), each with its file and line.

A row that cannot be read is no exception but a `Malformed`: the reader counts it and goes on.
`datasets` and pyarrow read tables and saved folders. Their readers of text, JSON and CSV are not
used, because they end at the first bad row.
"""

import csv
import json
import lzma
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hfpatch.trainer.data_files import OPEN, format_of

_DAMAGED = (OSError, EOFError, zlib.error, lzma.LZMAError, RecursionError, UnicodeDecodeError)


@dataclass(frozen=True)
class Row:
    """One row: its file, its line (or number; 0: the whole file) and its columns."""

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
        return (
            f"{self.file}:{self.line}: {self.reason}"
            if self.line
            else f"{self.file}: {self.reason}"
        )


def refuse(row: "Malformed | str") -> None:
    """ValueError for a malformed row under --strict."""
    raise ValueError(
        f"hfpatch: --strict expects no malformed row, came {row}; mend it or drop --strict."
    )


def rows(
    files,
    *,
    text_field: str = "text",
    text_unit: str = "file",
    form: str = "auto",
    split: str = "train",
) -> Iterator[Row | Malformed]:
    """The rows of the files, in order; a break inside a file is a Malformed with its place.

    Args:
        files: as data_files.find() gives them.
        text_field: the column that plain text gets.
        text_unit: a document of a text file: the whole "file", a "line", or a "paragraph" (text
            between blank lines).
        form: one of FORMATS; any but "auto" is the format of every file.
        split: of a saved DatasetDict.

    Raises:
        ValueError: the machine, not the file's content, is the cause.
    """
    readers = {
        "text": lambda file: _text(file, text_field, text_unit),
        "saved": lambda folder: _saved(folder, split),
        "jsonl": _jsonl,
        "json": _json,
        "csv": _csv,
        "tsv": lambda file: _csv(file, delimiter="\t"),
        "parquet": _parquet,
        "arrow": _arrow,
    }
    for file in map(Path, files):
        at = 0
        try:
            for item in readers[format_of(file) if form == "auto" or file.is_dir() else form](file):
                at = item.line
                yield item
        except (*_DAMAGED, *_arrow_errors()) as error:
            if isinstance(error, OSError) and error.errno:
                # The machine: no permission, no such file, a failing disk.
                raise ValueError(
                    f"hfpatch: cannot read {file} ({error.strerror}); check the file."
                ) from error
            reason = " ".join(str(error).split()) or type(error).__name__
            yield Malformed(
                str(file), at, f"the rows after this one are lost, the file is damaged: {reason}"
            )


def _arrow_errors() -> tuple:
    module = sys.modules.get("pyarrow")  # if it was never imported, nothing raises its errors
    return (module.ArrowException,) if module else ()


def _open(file: Path):
    return OPEN.get(file.suffix.lower(), open)(file, "rb")


def _lines(file: Path) -> Iterator[tuple[int, str] | Malformed]:
    with _open(file) as stream:
        for number, raw in enumerate(stream, 1):
            try:
                yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                yield Malformed(str(file), number, f"not UTF-8 at byte {error.start} of the line")


def _bytes(file: Path) -> bytes:
    with _open(file) as stream:
        return stream.read()


def _text(file: Path, field: str, unit: str) -> Iterator[Row | Malformed]:
    if unit == "file":
        try:
            yield Row(str(file), 0, {field: _bytes(file).decode("utf-8-sig")})
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
        except (ValueError, RecursionError) as error:
            yield Malformed(str(file), number, _json_reason(error))


def _json(file: Path) -> Iterator[Row | Malformed]:
    try:
        value = json.loads(_bytes(file).decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        yield Malformed(str(file), 0, f"not UTF-8 at byte {error.start}")
    except (ValueError, RecursionError) as error:
        if getattr(error, "msg", "") == "Extra data":  # a file of JSON lines named .json
            yield from _jsonl(file)
        else:
            yield Malformed(str(file), getattr(error, "lineno", 0), _json_reason(error))
    else:
        for number, item in enumerate(value if isinstance(value, list) else [value], 1):
            yield _row(file, number, item)


def _json_reason(error) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error.msg} at column {error.colno}"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return f"a number of too many digits: {str(error).partition(';')[0]}"


def _csv(file: Path, delimiter: str = ",") -> Iterator[Row | Malformed]:
    csv.field_size_limit(sys.maxsize)  # a document is one field; the default limit is 128 KiB
    open_text = OPEN.get(file.suffix.lower(), open)
    with open_text(
        file, "rt", newline="", encoding="utf-8-sig", errors="surrogateescape"
    ) as stream:
        reader = csv.reader(stream, strict=True, delimiter=delimiter)
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
            if header is None and (
                not values or len(set(values)) < len(values) or _escaped(values)
            ):
                yield Malformed(
                    str(file),
                    line,
                    "expected a header of different names, so the whole file is left out",
                )
                return
            if not values:
                continue
            if header is None:
                header = values
            elif _escaped(values):
                yield Malformed(str(file), line, "not UTF-8")
            elif len(values) != len(header):
                yield Malformed(
                    str(file), line, f"expected {len(header)} columns, {len(values)} came"
                )
            else:
                yield Row(str(file), line, dict(zip(header, values)))


def _escaped(values: list[str]) -> bool:
    """Whether surrogateescape stood in for bytes that are not UTF-8."""
    return any("\udc80" <= c <= "\udcff" for value in values for c in value)


def _parquet(file: Path) -> Iterator[Row | Malformed]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(file, page_checksum_verification=True)
    except pyarrow.ArrowInvalid as error:
        yield Malformed(str(file), 0, f"not parquet: {error}")
        return
    yield from table_rows(
        (row for batch in table.iter_batches(batch_size=256) for row in batch.to_pylist()),
        str(file),
    )


def _arrow(file: Path) -> Iterator[Row | Malformed]:
    import datasets

    yield from table_rows(datasets.Dataset.from_file(str(file)), str(file))


def _saved(folder: Path, split: str) -> Iterator[Row | Malformed]:
    import datasets

    try:
        made = datasets.load_from_disk(str(folder))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"hfpatch: {folder} does not load with datasets.load_from_disk ({error}); check it."
        ) from error
    if isinstance(made, dict):
        if split not in made:
            raise ValueError(
                f"hfpatch: {folder} holds the splits {', '.join(made)}, {split!r} was asked for; "
                "pass --data_split or --eval_split."
            )
        made = made[split]
    yield from table_rows(made, str(folder))


def table_rows(table, name: str) -> Iterator[Row]:
    """The rows of a table (an iterable of dicts), numbered from 1."""
    for number, value in enumerate(table, 1):
        yield Row(name, number, value)
