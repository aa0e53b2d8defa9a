"""Rows of local files (text, jsonl, json, csv, tsv, parquet, arrow, a folder of them), each with its file and line.

A row that cannot be read is not an exception but a `Malformed`, so that the reader counts it, names it, and goes on.
`datasets` and pyarrow read tables and saved folders; their readers of text, JSON and CSV end at the first bad row.
What a file is its name says, whatever the case of its letters; a name that says nothing is refused rather than guessed.
"""

import bz2
import csv
import glob
import gzip
import json
import lzma
import os
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TABLES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow")
TEXTS = (".txt", ".md", ".rst", ".py", ".text")
_OPEN = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_UNREAD = (".zst", ".zip", ".lz4", ".br", ".7z", ".lzma", ".tgz", ".tar")  # compressed in ways we do not open
FORMATS = ("auto", "text", "jsonl", "json", "csv", "tsv", "parquet", "arrow")


@dataclass(frozen=True)
class Row:
    """One row: where it stands (line, or the row's number; 0: the whole file) and its columns."""

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


def refuse(row: "Malformed | str") -> None:
    """ValueError for a malformed row under --strict."""
    raise ValueError(f"hfpatch: --strict expects no malformed row, came {row}; mend it or drop --strict.")


def format_of(file: Path) -> str | None:
    """Which of FORMATS a file's name says it is; None where it says nothing that we read."""
    if file.is_dir():
        return "saved"
    suffixes = [suffix.lower() for suffix in file.suffixes]
    packed = suffixes.pop() if suffixes and suffixes[-1] in _OPEN else ""
    last = suffixes[-1] if suffixes else ""
    if packed and last in (".parquet", ".arrow"):
        return None  # both need to seek, and compress by themselves
    if last in TEXTS:
        return "text"
    return {".ndjson": "jsonl"}.get(last, last[1:]) if last in TABLES else None


def find(paths, *, pattern: str | None = None, exclude=(), form: str = "auto", say=print) -> list[Path]:
    """The data files that `paths` (files and folders) name, sorted within a folder.

    pattern: which files of a folder to take, such as "**/*.py"; all known kinds otherwise. exclude: names
    of folders to leave out. form: one of FORMATS; other than "auto", it is what every file taken is. say: called with a
    line on the files of a folder that were left out. A folder that `datasets` wrote by save_to_disk stands as one entry.
    Raises ValueError for a path that is missing, empty, cannot be listed, or holds no data that we read.
    """
    files = []
    for path in map(Path, paths):
        if path.is_dir():
            files += _inside(path, pattern, set(exclude), form, say)
        elif not path.is_file():
            raise ValueError(f"hfpatch: expected a data file at {path}, there is none; check --data.")
        elif not path.stat().st_size:
            raise ValueError(f"hfpatch: expected rows in {path}, it is empty; check --data.")
        else:
            files.append(_readable(path, form))
    return files


def _inside(folder: Path, pattern, exclude: set, form: str, say) -> list[Path]:
    wanted = pattern and {folder / name for name in glob.glob(pattern, root_dir=folder, recursive=True)}
    found, left = [], Counter()
    for path in _walk(folder, exclude, hidden=bool(pattern)):
        if path.is_dir():
            found.append(path)
        elif pattern and path not in wanted:
            continue
        elif path.exists() and not path.stat().st_size:
            continue
        elif pattern or format_of(path) or path.suffix.lower() in (*_OPEN, *_UNREAD):
            found.append(_readable(path, form))
        else:
            left[path.suffix or "no suffix"] += 1
    if not found:
        wanted = pattern or ", ".join(TEXTS + TABLES)
        raise ValueError(f"hfpatch: expected data files ({wanted}) in {folder}, none came; name another folder.")
    if left:
        say(f"hfpatch: files of {folder} that are left out: {_counted(left)}; --data_glob and --data_format take them.")
    # A README beside the data, say.
    if form == "auto" and not pattern and len({format_of(path) == "text" for path in found}) > 1:
        taken = Counter(path.suffix or "a saved folder" for path in found)
        say(
            f"hfpatch: texts and tables of {folder} are read side by side: {_counted(taken)}; --data_glob takes one kind."
        )
    return sorted(found)


def _counted(kinds: Counter) -> str:
    return ", ".join(f"{number} of {kind}" for kind, number in sorted(kinds.items()))


def _walk(folder: Path, exclude: set, hidden: bool) -> Iterator[Path]:
    """Files, and folders of save_to_disk, under the folder. Links to folders are followed, each folder once."""

    def fail(error):
        raise ValueError(
            f"hfpatch: cannot list {error.filename} ({error.strerror}); let this user read it, or leave it out with "
            "--data_exclude."
        )

    seen = set()
    for here, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        real, here = os.path.realpath(here), Path(here)
        if real in seen or is_saved(here):
            folders.clear()  # os.walk goes no deeper
            names = []
            if real not in seen:
                yield here
        seen.add(real)
        folders[:] = [name for name in folders if name not in exclude and (hidden or not name.startswith("."))]
        for path in (here / name for name in names if hidden or not name.startswith(".")):
            if path.is_file() or path.is_symlink() and not path.exists():
                yield path


def _readable(file: Path, form: str) -> Path:
    """The file, if its name or `form` says what it is, and the data are there. Raises ValueError."""
    if not file.exists():
        raise ValueError(f"hfpatch: {file} is a link that leads nowhere; mend it, or remove it.")
    try:
        pointer = file.stat().st_size < 1024 and file.read_bytes().startswith(b"version https://git-lfs")
    except OSError as error:
        raise ValueError(f"hfpatch: cannot read {file} ({error.strerror}); check the file.") from error
    if pointer:
        raise ValueError(
            f"hfpatch: {file} is the pointer that Git LFS leaves in place of data; run `git lfs pull` there."
        )
    try:
        str(file).encode()
    except UnicodeEncodeError:
        raise ValueError(f"hfpatch: expected file names in UTF-8, {os.fsencode(file)} came; rename it.") from None
    if file.suffix.lower() in _UNREAD:
        raise ValueError(f"hfpatch: {file} is compressed in a way we do not open; unpack it, or pack it as .gz or .xz.")
    if form == "auto" and not format_of(file):
        raise ValueError(
            f"hfpatch: expected a data file ending in {', '.join(TABLES + TEXTS)} (or those with .gz, .bz2, .xz), "
            f"{file} came; rename it, or say what it is with --data_format."
        )
    return file


def is_saved(folder: Path) -> bool:
    """Whether `datasets` wrote the folder by save_to_disk: a Dataset, or a DatasetDict of several splits."""
    return (folder / "dataset_dict.json").is_file() or all(
        (folder / name).is_file() for name in ("state.json", "dataset_info.json")
    )


def rows(
    files, *, text_field: str = "text", text_unit: str = "file", form: str = "auto", split: str = "train"
) -> Iterator[Row | Malformed]:
    """The rows of the files in order; what broke off inside a file is a Malformed that names where.

    text_field: the column that plain text goes by. text_unit: what a document of a text file is: the whole
    "file", a "line", or a "paragraph" (text between blank lines). form: as in find(). split: of a saved DatasetDict.
    Raises ValueError where the machine, not the file's content, stands in the way.
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
        except (OSError, EOFError, zlib.error, lzma.LZMAError, RecursionError, *_arrow_errors()) as error:
            if isinstance(error, OSError) and error.errno:  # no permission, no such file, a disk that fails
                raise ValueError(f"hfpatch: cannot read {file} ({error.strerror}); check the file.") from error
            reason = " ".join(str(error).split()) or type(error).__name__
            yield Malformed(str(file), at, f"the rows after this one are lost, the file is damaged: {reason}")


def _arrow_errors() -> tuple:
    module = sys.modules.get("pyarrow")  # where nobody imported it, nothing raises its errors
    return (module.ArrowException,) if module else ()


def _open(file: Path):
    return _OPEN.get(file.suffix.lower(), open)(file, "rb")


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
        if getattr(error, "msg", "") == "Extra data":  # lines of JSON under the shorter name
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
    open_text = _OPEN.get(file.suffix.lower(), open)
    with open_text(file, "rt", newline="", encoding="utf-8-sig", errors="surrogateescape") as stream:
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
            if header is None and (not values or len(set(values)) < len(values) or _escaped(values)):
                yield Malformed(str(file), line, "expected a header of different names, so the whole file is left out")
                return
            if not values:
                continue
            if header is None:
                header = values
            elif _escaped(values):
                yield Malformed(str(file), line, "not UTF-8")
            elif len(values) != len(header):
                yield Malformed(str(file), line, f"expected {len(header)} columns, {len(values)} came")
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
    first = 1
    for group in range(table.num_row_groups):
        number, after = first, first + table.metadata.row_group(group).num_rows
        try:
            for batch in table.iter_batches(batch_size=256, row_groups=[group]):
                yield from _batch(file, number, batch)
                number += len(batch)
        except (OSError, pyarrow.ArrowException) as error:  # a damaged page; the next group is read all the same
            if isinstance(error, OSError) and error.errno:
                raise
            reason = " ".join(str(error).split())
            yield Malformed(str(file), number, f"rows {number} to {after - 1} are lost, the file is damaged: {reason}")
        first = after


def _batch(file: Path, first: int, batch) -> Iterator[Row | Malformed]:
    """The rows of an Arrow record batch, one by one where a value in it is not UTF-8."""
    try:
        values = batch.to_pylist()
    except UnicodeDecodeError:
        values = []
        for i in range(len(batch)):
            try:
                values += batch.slice(i, 1).to_pylist()
            except UnicodeDecodeError:
                values.append(None)
    for number, value in enumerate(values, first):
        yield Malformed(str(file), number, "not UTF-8") if value is None else Row(str(file), number, value)


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
                f"hfpatch: {folder} holds the splits {', '.join(made)}, {split!r} was asked for; pass --data_split or --eval_split."
            )
        made = made[split]
    yield from table_rows(made, str(folder))


def table_rows(table, name: str) -> Iterator[Row]:
    """The rows of a data set of `datasets`, numbered from 1."""
    for number, value in enumerate(table, 1):
        yield Row(name, number, value)
