"""Rows of files, folders and hub data sets, each with its place.

Text and JSON are read here, so that one bad row stops nothing; `datasets` reads the rest.
"""

import bz2
import gzip
import hashlib
import itertools
import json
import lzma
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import datasets
import pyarrow

from hfpatch.trainer import chat
from hfpatch.trainer.loading import loads

# A file's suffix, before that of a compression -> the reader of `datasets`, and its options.
READERS = {
    **dict.fromkeys((".txt", ".md", ".rst", ".py", ".text"), "text"),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "json"),
    ".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".arrow": "arrow",
}  # fmt: skip
READ_WHOLE = 32 << 20  # bytes of a file of which the digest reads all
OPEN = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
READ_ERRORS = (OSError, EOFError, ValueError, TypeError, KeyError, RecursionError, lzma.LZMAError,
               pyarrow.ArrowException, datasets.exceptions.DatasetsError)  # fmt: skip


@dataclass(frozen=True)
class Rows:
    """Rows that can be read again and again: (place, its columns or a BadRow) each.

    digest: of their content, wherever they are.
    """

    read: Callable[[], Iterator[tuple[str, dict | chat.BadRow]]]
    digest: str

    def good(self) -> Iterator[tuple[str, dict]]:
        return ((place, row) for place, row in self.read() if isinstance(row, dict))


def reader_of(file: Path) -> str | None:
    """The kind of a file by its name; None for an unknown name."""
    name = file.name.lower()
    for suffix in OPEN:
        name = name.removesuffix(suffix)
    return READERS.get(Path(name).suffix)


def files_of(paths, data) -> list[Path]:
    """The data files of files and folders, sorted within a folder. ValueError if there is none."""
    found = []
    for path in map(Path, paths):
        inside = [path] if path.is_file() else sorted(path.glob(data.data_glob or "**/*"))
        files = [f for f in inside if f.is_file() and f.stat().st_size and reader_of(f)]
        kept = [f for f in files if {*f.parts}.isdisjoint(data.data_exclude)]
        if not kept:
            raise ValueError(
                f"hfpatch: there are no rows ({', '.join((*READERS, *OPEN))}) at {path}. Check the "
                "path and --data_glob."
            )
        found += kept
    return found


def rows_of(paths, data, split: str) -> Rows:
    """The rows of local files and folders, or of one hub data set. Raises ValueError."""
    # [Step 1] A path that does not exist is a hub data set's name.
    name = Path(paths[0])
    if len(paths) == 1 and not name.exists():
        if reader_of(name) or name.is_absolute() or len(name.parts) > 2:  # no name of the hub's
            raise ValueError(f"hfpatch: {name} is no file or folder here. Check the path.")
        with loads("no file, folder or hub data set loads", str(name), "; check --data"):
            try:
                table = datasets.load_dataset(
                    str(name), data.data_config, split=split, streaming=data.streaming
                )
            except datasets.exceptions.DatasetGenerationError as error:
                raise error.__cause__ or error from None  # the cause says why
        return Rows(
            partial(_numbered, table, name),
            getattr(table, "_fingerprint", repr((paths, data.data_config, split))),
        )
    # [Step 2] A folder may be a data set that `datasets` saved.
    saved = (name / "dataset_info.json").is_file() or (name / "dataset_dict.json").is_file()
    if len(paths) == 1 and saved:
        table = datasets.load_from_disk(str(name))
        table = table[split] if isinstance(table, datasets.DatasetDict) else table
        return Rows(partial(_numbered, table, name), table._fingerprint)
    # [Step 3] All else are files. Their digest covers names, sizes and contents.
    files = files_of(paths, data)
    made = hashlib.blake2b(digest_size=16)
    for file in files:
        size = file.stat().st_size
        made.update(b"%b\0%d\0" % (os.fsencode(file.name), size))
        # Of a large file that is streamed, pieces alone: reading it twice would take too long.
        pieces = data.streaming and size > READ_WHOLE
        with file.open("rb") as opened:
            for at in range(0, size, size // 64 if pieces else 1 << 20):
                opened.seek(at)
                made.update(opened.read(1 << 16 if pieces else 1 << 20))
    return Rows(partial(_of_files, files, data), made.hexdigest())


def _numbered(table, name):
    """Rows of a table of `datasets`; None fills the columns that other rows have."""
    for number, row in enumerate(table, 1):
        yield f"{name}:{number}", {k: v for k, v in row.items() if v is not None}


def _of_files(files, data):
    for file in files:
        kind = reader_of(file)
        at = ""
        try:
            if kind in ("text", "json"):
                found = _texts(file, data) if kind == "text" else _objects(file)
            else:
                sep = {"sep": "\t"} if ".tsv" in file.suffixes else {}
                table = datasets.load_dataset(
                    kind, data_files=str(file), split="train", streaming=True, **sep
                )
                found = _numbered(table, file)
            for at, one in found:
                yield at, one
        except READ_ERRORS as error:
            if isinstance(error, OSError) and error.errno:
                raise ValueError(
                    f"hfpatch: {file} cannot be read ({error.strerror}). Check it."
                ) from error
            cause = " ".join(str(error.__cause__ or error).split())[:200]
            yield str(file), chat.BadRow(f"rows after {at or 'its start'} cannot be read: {cause}")


def _opened(file: Path):
    return OPEN.get(file.suffix.lower(), open)(file, "rt", encoding="utf-8-sig", errors="strict")


def _texts(file: Path, data):
    """Documents of a text file: the whole file, a line, or text between blank lines."""
    with _opened(file) as stream:
        if data.text_unit == "file":
            yield str(file), {data.text_field: stream.read()}
            return
        held: list[str] = []
        for number, line in enumerate(itertools.chain(stream, [""]), 1):
            if line.strip():
                held.append(line)
            if held and (data.text_unit == "line" or not line.strip()):
                begin = number - len(held) + (data.text_unit == "line")
                yield f"{file}:{begin}", {data.text_field: "".join(held).rstrip("\r\n")}
                held = []


def _objects(file: Path):
    """Rows of JSON lines, or of one list; a broken line is a BadRow."""
    with _opened(file) as stream:
        if stream.read(1) == "[":
            for number, row in enumerate(json.loads("[" + stream.read()), 1):
                yield f"{file}:{number}", _object(row)
            return
        stream.seek(0)
        for number, line in enumerate(stream, 1):
            try:
                if line.strip():
                    yield f"{file}:{number}", _object(json.loads(line))
            except (ValueError, RecursionError) as error:
                yield f"{file}:{number}", chat.BadRow(f"not JSON: {error}")


def _object(row):
    return row if isinstance(row, dict) else chat.BadRow(f"a JSON {type(row).__name__}, no object")
