"""Tokenizes rows once into flat files that are named by their content and read by memory map."""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hfpatch.trainer import chat, folders, sources
from hfpatch.trainer.locks import try_lock

_FORMAT = 3  # part of the name: raise it when the files' content changes
_FILES = ("ids.bin", "learned.bin", "offsets.npy")
# Pieces of a file that are compared where the whole is not read twice.
SAMPLES, SAMPLE_BYTES = 16, 4096
_NAMED = 20  # malformed rows that are printed; the rest are counted


@dataclass(frozen=True)
class Tokens:
    """Tokenized documents, one after another.

    ids: [N] int32. learned: [N] uint8, 1 if the token's prediction counts. offsets: [documents + 1]
    int64. text_bytes: UTF-8 bytes of plain text (0 for chat and prompts). malformed: rows left out.
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
    for file in _each(files):
        digest.update(b"%b\0%d\0" % (os.fsencode(file.name), os.path.getsize(file)))
        with open(file, "rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def samples_of(files) -> dict[str, str]:
    """Hex digest of each file's size and of SAMPLES pieces of it, by path: for data that are too
    large to read twice. A changed time alone is no change, since data are copied to new machines.
    """
    return {str(file): _sampled(file) for file in _each(files)}


def _sampled(file: Path) -> str:
    size = os.path.getsize(file)
    digest = hashlib.blake2b(b"%d" % size, digest_size=16)
    with open(file, "rb") as stream:
        for i in range(SAMPLES):
            stream.seek(i * max(0, size - SAMPLE_BYTES) // (SAMPLES - 1))
            digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _each(files) -> Iterator[Path]:
    """The files, and of folders all files inside."""
    for file in map(Path, files):
        yield from sorted(p for p in file.rglob("*") if p.is_file()) if file.is_dir() else [file]


def tokenizer_fingerprint(tokenizer) -> str:
    """Hex digest of a tokenizer: vocabulary, merges, special tokens, chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    body = (
        backend.to_str()
        if backend is not None
        else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    )
    parts = [
        body,
        str(tokenizer.chat_template),
        str(tokenizer.special_tokens_map),
        type(tokenizer).__name__,
    ]
    if backend is None:
        # Settings of a tokenizer in Python beside its vocabulary, such as add_bos_token.
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
    template: chat.Template = chat.OWN,
    vocab_size: int | None = None,
    say=print,
) -> Tokens:
    """Tokens of the rows, from the cache if they were made before, by any process.

    Args:
        rows: iterator of sources.Row and sources.Malformed.
        tokenizer: of transformers.
        fingerprint: of the rows' content.
        cache_dir: a folder.
        kind, text_field: what a row holds, as chat.encode() takes them.
        strict: raise at the first malformed row instead of counting it.
        template: how chat rows are rendered.
        vocab_size: of the model; a row with a token beyond it is malformed.
        say: called with each line for the user.

    Raises:
        ValueError: no row is left, or one is malformed and strict is set.
    """
    options = {
        "kind": kind,
        "text_field": text_field,
        "template": template,
        "vocab_size": vocab_size,
    }
    parts = (_FORMAT, fingerprint, tokenizer_fingerprint(tokenizer), *options.values())
    name = hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
    folder = Path(cache_dir) / name
    stats = _stats(folder) or _made(folder, rows, tokenizer, strict, **options)
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


def encoded(
    rows,
    tokenizer,
    *,
    kind: str = "auto",
    text_field: str = "text",
    template: chat.Template = chat.OWN,
    vocab_size: int | None = None,
):
    """Yields (ids, learned, bytes of plain text) for a good row, sources.Malformed for another."""
    held = []  # plain texts wait for one call of the tokenizer, which works on them in parallel

    def flush():
        texts = [item for _, item in held if isinstance(item, str)]
        made = iter(tokenizer(texts, verbose=False)["input_ids"] if texts else [])
        for row, item in held:
            if isinstance(item, str):
                ids = chat.with_end(next(made), tokenizer)
                item = ids, [True] * len(ids), len(item.encode())
            yield (
                item
                if isinstance(item, sources.Malformed)
                else _inside(row, item, tokenizer, vocab_size)
            )
        held.clear()

    for row in rows:
        item = row
        if isinstance(row, sources.Row):
            try:
                this = chat.kind_of(row.value, text_field) if kind == "auto" else kind
                if this == "text":
                    item = chat.text_of(row.value, text_field)
                else:
                    options = {"kind": this, "text_field": text_field, "template": template}
                    item = (*chat.encode(row.value, tokenizer, **options), 0)
            except chat.BadRow as error:
                item = sources.Malformed(row.file, row.line, str(error))
        held.append((row, item))
        if len(held) >= 256:
            yield from flush()
    yield from flush()


def _inside(row: sources.Row, item: tuple, tokenizer, vocab_size: int | None):
    """The item, or a Malformed if one of its tokens has no row in the model's embedding."""
    last = max(item[0], default=0)
    if vocab_size is None or last < vocab_size:
        return item
    token = tokenizer.convert_ids_to_tokens(last)
    reason = (
        f"the token {token!r} is number {last}, the model's vocabulary ends at {vocab_size - 1}"
    )
    return sources.Malformed(row.file, row.line, reason)


def _made(folder: Path, rows, tokenizer, strict: bool, **options) -> dict:
    """Tokenizes into `folder`, one process at a time; the others wait. Returns its stats."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        # Without locks on this file system every process writes, and all write the same bytes.
        try_lock(lock, wait=True)
        if _stats(folder) is None:
            try:
                _write(folder, encoded(rows, tokenizer, **options), strict)
            except BaseException:
                for file in folder.iterdir():  # a full disk gets its room back
                    file.unlink()
                raise
        return _stats(folder)
    finally:
        os.close(lock)


def _write(folder: Path, items, strict: bool) -> None:
    (folder / "stats.json").unlink(missing_ok=True)
    offsets, bytes_, malformed, first = [0], 0, 0, []
    with (
        open(folder / "ids.bin", "wb") as ids_file,
        open(folder / "learned.bin", "wb") as learned_file,
    ):
        for item in items:
            if isinstance(item, sources.Malformed):
                malformed += 1
                if strict:
                    sources.refuse(item)
                if len(first) < _NAMED:
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
    stats = {
        "documents": len(offsets) - 1,
        "bytes": bytes_,
        "malformed": malformed,
        "first": first,
        "sizes": sizes,
    }
    for file in _FILES:
        folders.sync(folder / file)
    # Last: a folder with these numbers is whole, whatever killed the process or the machine.
    (folder / "stats.json").write_text(json.dumps(stats))
    folders.sync(folder / "stats.json")


def _stats(folder: Path) -> dict | None:
    """The numbers that _write noted of the folder; None if there are none or a file was cut."""
    try:
        stats = json.loads((folder / "stats.json").read_text())
        whole = all((folder / file).stat().st_size == size for file, size in stats["sizes"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return stats if whole else None
