"""Tokenizes rows once and keeps the result under a name made from their content: flat files, read by memory map."""

import hashlib
import itertools
import json
import os
import shutil
import tempfile
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hfpatch.memory.locks import try_lock
from hfpatch.training import chat, folders, sources

_FORMAT = 2  # part of the name: raise it when what is written changes
_FILES = ("ids.bin", "learned.bin", "offsets.npy")
_SCRATCH = ".writing-"
_TOLD = 20  # malformed rows named one by one; the rest are counted


@dataclass(frozen=True)
class Tokens:
    """Tokenized documents, one after another.

    ids: [N] int32. learned: [N] uint8, 1 where the token's prediction counts. offsets: [documents + 1] int64.
    text_bytes: UTF-8 bytes of plain text (0 for chat and prompts). malformed: rows left out.
    """

    ids: np.ndarray
    learned: np.ndarray
    offsets: np.ndarray
    text_bytes: int
    malformed: int
    fingerprint: str

    def __len__(self):
        return len(self.offsets) - 1


def fingerprint_of(files) -> str:
    """Hex digest of the names and the bytes of the files; of folders, those of all files inside."""
    digest = hashlib.blake2b(digest_size=16)
    inside = (sorted(p for p in Path(f).rglob("*") if p.is_file()) if Path(f).is_dir() else [f] for f in files)
    for file in itertools.chain(*inside):
        digest.update(f"{Path(file).name}\0{os.path.getsize(file)}\0".encode())
        with open(file, "rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def tokenizer_fingerprint(tokenizer) -> str:
    """Hex digest of all that decides the tokens: vocabulary and merges, special tokens, chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    body = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    parts = [body, str(tokenizer.chat_template), str(tokenizer.special_tokens_map), type(tokenizer).__name__]
    if backend is None:  # what a tokenizer in Python does beside its vocabulary (add_bos_token, ...)
        parts.append(repr(sorted(tokenizer.init_kwargs.items(), key=repr)))
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()


def tokenize(
    rows,
    tokenizer,
    *,
    fingerprint: str,
    cache_dir,
    kind: str = "auto",
    text_field: str = "text",
    strict: bool = False,
    vocab_size: int | None = None,
    say=print,
) -> Tokens:
    """Tokens of the rows (an iterator of sources.Row and sources.Malformed), from the cache where they were made once.

    fingerprint: of the rows' content. strict: raise ValueError at the first malformed row instead of counting it.
    vocab_size: of the model; a row with a token beyond it is malformed. say: called with each line for the user.
    Any number of processes may ask at once. Raises ValueError where no row is left.
    """
    parts = (_FORMAT, fingerprint, tokenizer_fingerprint(tokenizer), kind, text_field, vocab_size)
    name = hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
    folder = Path(cache_dir) / name
    stats = _stats(folder)
    if stats is None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _scratch(folder.parent) as scratch:
            _write(scratch, encoded(rows, tokenizer, kind=kind, text_field=text_field, vocab_size=vocab_size), strict)
            _move(scratch, folder)
        stats = _stats(folder)
    for reason in stats["first"]:
        say(f"hfpatch: malformed row left out: {reason}")
    if stats["malformed"] > len(stats["first"]):
        say(f"hfpatch: {stats['malformed'] - len(stats['first'])} more malformed rows left out")
    if stats["malformed"] and strict:
        sources.refuse(stats["first"][0])
    if stats["documents"] == 0:
        raise ValueError(
            f"hfpatch: expected rows to train on, all {stats['malformed']} are malformed "
            f"({(stats['first'] or ['no row'])[0]}); mend the data or name its columns."
        )
    ids = np.memmap(folder / "ids.bin", dtype=np.int32, mode="r")
    learned = np.memmap(folder / "learned.bin", dtype=np.uint8, mode="r")
    offsets = np.load(folder / "offsets.npy")
    return Tokens(ids, learned, offsets, stats["bytes"], stats["malformed"], name)


def encoded(rows, tokenizer, *, kind: str = "auto", text_field: str = "text", vocab_size: int | None = None):
    """Yields (ids, learned, bytes of plain text) for each good row, sources.Malformed for each other, in order."""
    held = []  # plain texts wait for one call of the tokenizer, which works on them in parallel

    def flush():
        texts = [item for _, item in held if isinstance(item, str)]
        made = iter(tokenizer(texts, verbose=False)["input_ids"] if texts else [])
        for row, item in held:
            if isinstance(item, str):
                ids = chat.with_end(next(made), tokenizer)
                item = ids, [True] * len(ids), len(item.encode())
            yield item if isinstance(item, sources.Malformed) else _inside(row, item, tokenizer, vocab_size)
        held.clear()

    for row in rows:
        item = row
        if isinstance(row, sources.Row):
            try:
                this = chat.kind_of(row.value, text_field) if kind == "auto" else kind
                if this == "text":
                    item = chat.text_of(row.value, text_field)
                else:
                    item = (*chat.encode(row.value, tokenizer, kind=this, text_field=text_field), 0)
            except chat.BadRow as error:
                item = sources.Malformed(row.file, row.line, str(error))
        held.append((row, item))
        if len(held) >= 256:
            yield from flush()
    yield from flush()


def _inside(row: sources.Row, item: tuple, tokenizer, vocab_size: int | None):
    """The item, or a Malformed where one of its tokens has no row in the model's embedding."""
    last = max(item[0], default=0)
    if vocab_size is None or last < vocab_size:
        return item
    token = tokenizer.convert_ids_to_tokens(last)
    reason = f"the token {token!r} is number {last}, the model's vocabulary ends at {vocab_size - 1}"
    return sources.Malformed(row.file, row.line, reason)


def _write(folder: Path, items, strict: bool) -> None:
    offsets, bytes_, malformed, first = [0], 0, 0, []
    with open(folder / "ids.bin", "wb") as ids_file, open(folder / "learned.bin", "wb") as learned_file:
        for item in items:
            if isinstance(item, sources.Malformed):
                malformed += 1
                if strict:
                    sources.refuse(item)
                if len(first) < _TOLD:
                    first.append(str(item))
                continue
            ids, learned, size = item
            ids_file.write(np.asarray(ids, dtype=np.int32).tobytes())
            learned_file.write(np.asarray(learned, dtype=np.uint8).tobytes())
            offsets.append(offsets[-1] + len(ids))
            bytes_ += size
        if offsets[-1] == 0:
            ids_file.write(bytes(4))  # an empty file cannot be mapped
            learned_file.write(bytes(1))
    np.save(folder / "offsets.npy", np.asarray(offsets, dtype=np.int64))
    sizes = {file: (folder / file).stat().st_size for file in _FILES}
    stats = {"documents": len(offsets) - 1, "bytes": bytes_, "malformed": malformed, "first": first, "sizes": sizes}
    (folder / "stats.json").write_text(json.dumps(stats))
    for file in (*_FILES, "stats.json"):  # before the folder gets its name: a machine that dies leaves no cut file
        folders.sync(folder / file)


def _stats(folder: Path) -> dict | None:
    """What _write noted of the folder; None where there is none or a file of it was cut."""
    try:
        stats = json.loads((folder / "stats.json").read_text())
        whole = all((folder / file).stat().st_size == size for file, size in stats["sizes"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return stats if whole else None


def _move(scratch: Path, folder: Path) -> None:
    """Gives the finished folder its name, unless another process was first; a cut one goes away.

    One at a time, so that nobody takes a whole folder away for the cut one that it has just replaced.
    """
    with _alone_in(folder.parent):
        if _stats(folder) is not None:
            return
        if folder.exists():
            aside = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=folder.parent))
            os.rename(folder, aside / folder.name)  # may be a file
            shutil.rmtree(aside, ignore_errors=True)
        os.rename(scratch, folder)


@contextmanager
def _scratch(parent: Path):
    """A folder to write in that does not outlive us; those of killed writers, whose locks the kernel freed, go first."""
    with _alone_in(parent):
        for left in parent.glob(f"{_SCRATCH}*"):
            with suppress(OSError):  # it has just gone, or is another user's
                handle = os.open(left, os.O_RDONLY)
                if try_lock(handle):
                    shutil.rmtree(left, ignore_errors=True)
                os.close(handle)
        scratch = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=parent))
        handle = os.open(scratch, os.O_RDONLY)
        try_lock(handle)
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        os.close(handle)


@contextmanager
def _alone_in(folder: Path):
    """Waits for whoever holds this folder's lock; where a file system has none, goes on without."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        try_lock(handle, wait=True)
        yield
    finally:
        os.close(handle)
