"""Finds the data files of the given paths, and their formats.

A file's suffix gives its format, in letters of any case. A file without a known suffix is refused.
"""

import bz2
import glob
import gzip
import lzma
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

TABLES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow")
TEXTS = (".txt", ".md", ".rst", ".py", ".text")
OPEN = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
# Compressions that are refused.
_UNREAD = (".zst", ".zip", ".lz4", ".br", ".7z", ".lzma", ".tgz", ".tar")
FORMATS = ("auto", "text", "jsonl", "json", "csv", "tsv", "parquet", "arrow")


def format_of(file: Path) -> str | None:
    """The format by a file's name; None if the name says none that we read."""
    if file.is_dir():
        return "saved"
    suffixes = [suffix.lower() for suffix in file.suffixes]
    packed = suffixes.pop() if suffixes and suffixes[-1] in OPEN else ""
    last = suffixes[-1] if suffixes else ""
    if packed and last in (".parquet", ".arrow"):
        return None  # both compress by themselves, and their readers seek
    if last in TEXTS:
        return "text"
    return {".ndjson": "jsonl"}.get(last, last[1:]) if last in TABLES else None


def find(
    paths, *, pattern: str | None = None, exclude=(), form: str = "auto", say=print
) -> list[Path]:
    """The data files that `paths` (files and folders) name, sorted within a folder.

    Args:
        paths: files and folders. A folder that `datasets` wrote by save_to_disk counts as one file.
        pattern: the files of a folder to take, as "**/*.py"; by default those of known formats.
        exclude: names of folders to leave out.
        form: one of FORMATS; any but "auto" is the format of every file.
        say: called with a line on the files of a folder that are left out.

    Raises:
        ValueError: a path is missing, empty, cannot be listed, or holds no data that we read.
    """
    files = []
    for path in map(Path, paths):
        if path.is_dir():
            files += _inside(path, pattern, set(exclude), form, say)
        elif not path.is_file():
            raise ValueError(
                f"hfpatch: expected a data file at {path}, there is none; check --data."
            )
        elif not path.stat().st_size:
            raise ValueError(f"hfpatch: expected rows in {path}, it is empty; check --data.")
        else:
            files.append(_readable(path, form))
    return files


def _inside(folder: Path, pattern, exclude: set, form: str, say) -> list[Path]:
    wanted = pattern and {
        folder / name for name in glob.glob(pattern, root_dir=folder, recursive=True)
    }
    found, left = [], Counter()
    for path in _walk(folder, exclude, hidden=bool(pattern)):
        if path.is_dir():
            found.append(path)
        elif pattern and path not in wanted:
            continue
        elif path.exists() and not path.stat().st_size:
            continue
        elif pattern or format_of(path) or path.suffix.lower() in (*OPEN, *_UNREAD):
            found.append(_readable(path, form))
        else:
            left[path.suffix or "no suffix"] += 1
    if not found:
        wanted = pattern or ", ".join(TEXTS + TABLES)
        raise ValueError(
            f"hfpatch: expected data files ({wanted}) in {folder}, none came; name another folder."
        )
    if left:
        say(
            f"hfpatch: files of {folder} that are left out: {_counted(left)}; --data_glob and "
            "--data_format take them."
        )
    # For example a README beside the data.
    if form == "auto" and not pattern and len({format_of(path) == "text" for path in found}) > 1:
        taken = Counter(path.suffix or "a saved folder" for path in found)
        say(
            f"hfpatch: texts and tables of {folder} are read side by side: {_counted(taken)}; "
            "--data_glob takes one kind."
        )
    return sorted(found)


def _counted(kinds: Counter) -> str:
    return ", ".join(f"{number} of {kind}" for kind, number in sorted(kinds.items()))


def _walk(folder: Path, exclude: set, hidden: bool) -> Iterator[Path]:
    """Files and save_to_disk folders under the folder, through links too, each folder once."""

    def fail(error):
        raise ValueError(
            f"hfpatch: cannot list {error.filename} ({error.strerror}); let this user read it, or "
            "leave it out with --data_exclude."
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
        folders[:] = [
            name for name in folders if name not in exclude and (hidden or not name.startswith("."))
        ]
        for path in (here / name for name in names if hidden or not name.startswith(".")):
            if path.is_file() or path.is_symlink() and not path.exists():
                yield path


def _readable(file: Path, form: str) -> Path:
    """The file, if its format is known and its data are on this machine. Raises ValueError."""
    if not file.exists():
        raise ValueError(f"hfpatch: {file} is a link that leads nowhere; mend it, or remove it.")
    try:
        pointer = file.stat().st_size < 1024 and file.read_bytes().startswith(
            b"version https://git-lfs"
        )
    except OSError as error:
        raise ValueError(
            f"hfpatch: cannot read {file} ({error.strerror}); check the file."
        ) from error
    if pointer:
        raise ValueError(
            f"hfpatch: {file} is the pointer that Git LFS leaves in place of data; run `git lfs "
            "pull` there."
        )
    if file.suffix.lower() in _UNREAD:
        raise ValueError(
            f"hfpatch: {file} is compressed in a way we do not open; unpack it, or pack it as .gz "
            "or .xz."
        )
    if form == "auto" and not format_of(file):
        raise ValueError(
            f"hfpatch: expected a data file ending in {', '.join(TABLES + TEXTS)} (or those with "
            f".gz, .bz2, .xz), {file} came; rename it, or say what it is with --data_format."
        )
    return file


def is_saved(folder: Path) -> bool:
    """Whether `datasets` wrote the folder by save_to_disk: a Dataset or a DatasetDict."""
    return (folder / "dataset_dict.json").is_file() or all(
        (folder / name).is_file() for name in ("state.json", "dataset_info.json")
    )
