"""Tokenizes rows once and keeps the result under a name made from their content: flat files, read by memory map."""

import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hfpatch.training import chat, sources

_FORMAT = 1  # part of the name: raise it when what is written changes
_TOLD = 20  # malformed rows named one by one; the rest are counted


@dataclass(frozen=True)
class Tokens:
    """Tokenized documents, one after another.

    ids: [N] int32. learned: [N] uint8, 1 where the token's prediction counts. offsets: [documents + 1] int64.
    text_bytes: UTF-8 bytes of plain text (0 for chat and prompts). malformed: rows left out; first: their sentences.
    """

    ids: np.ndarray
    learned: np.ndarray
    offsets: np.ndarray
    text_bytes: int
    malformed: int
    first: tuple[str, ...]
    fingerprint: str

    def __len__(self):
        return len(self.offsets) - 1


def fingerprint_of(files) -> str:
    """Hex digest of the names and the bytes of the files."""
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
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
    say=print,
) -> Tokens:
    """Tokens of the rows (an iterator of sources.Row and sources.Malformed), from the cache where they were made once.

    fingerprint: of the rows' content. strict: raise ValueError at the first malformed row instead of counting it.
    say: called with each line for the user. Raises ValueError where no row is left.
    """
    parts = (_FORMAT, fingerprint, tokenizer_fingerprint(tokenizer), kind, text_field)
    name = hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
    folder = Path(cache_dir) / name
    if not (folder / "stats.json").is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".writing-", dir=folder.parent))
        try:
            _write(scratch, rows, tokenizer, kind, text_field, strict)
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(scratch, folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    stats = json.loads((folder / "stats.json").read_text())
    for reason in stats["first"]:
        say(f"hfpatch: malformed row left out: {reason}")
    if stats["malformed"] > len(stats["first"]):
        say(f"hfpatch: {stats['malformed'] - len(stats['first'])} more malformed rows left out")
    if stats["malformed"] and strict:
        raise ValueError(
            f"hfpatch: --strict expects no malformed row, came {stats['first'][0]}; mend it or drop --strict."
        )
    if stats["documents"] == 0:
        raise ValueError(
            f"hfpatch: expected rows to train on, all {stats['malformed']} are malformed "
            f"({(stats['first'] or ['no row'])[0]}); mend the data or name its columns."
        )
    ids = np.memmap(folder / "ids.bin", dtype=np.int32, mode="r")
    learned = np.memmap(folder / "learned.bin", dtype=np.uint8, mode="r")
    offsets = np.load(folder / "offsets.npy")
    return Tokens(ids, learned, offsets, stats["bytes"], stats["malformed"], tuple(stats["first"]), name)


def encoded(rows, tokenizer, *, kind: str = "auto", text_field: str = "text"):
    """Yields (ids, learned, bytes of plain text) for each good row, sources.Malformed for each other, in order."""
    held = []  # plain texts wait for one call of the tokenizer, which works on them in parallel

    def flush():
        texts = [text for text in held if isinstance(text, str)]
        made = iter(tokenizer(texts, verbose=False)["input_ids"] if texts else [])
        for item in held:
            if isinstance(item, str):
                ids = chat.with_end(next(made), tokenizer)
                yield ids, [True] * len(ids), len(item.encode())
            else:
                yield item
        held.clear()

    for row in rows:
        if isinstance(row, sources.Malformed):
            held.append(row)
        else:
            try:
                this = chat.kind_of(row.value, text_field) if kind == "auto" else kind
                if this == "text":
                    held.append(chat.text_of(row.value, text_field))
                else:
                    held.append((*chat.encode(row.value, tokenizer, kind=this, text_field=text_field), 0))
            except chat.BadRow as error:
                held.append(sources.Malformed(row.file, row.line, str(error)))
        if len(held) >= 256:
            yield from flush()
    yield from flush()


def _write(folder: Path, rows, tokenizer, kind, text_field, strict) -> None:
    offsets, bytes_, malformed, first = [0], 0, 0, []
    with open(folder / "ids.bin", "wb") as ids_file, open(folder / "learned.bin", "wb") as learned_file:
        for item in encoded(rows, tokenizer, kind=kind, text_field=text_field):
            if isinstance(item, sources.Malformed):
                malformed += 1
                if strict:
                    raise ValueError(
                        f"hfpatch: --strict expects no malformed row, came {item}; mend it or drop --strict."
                    )
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
    stats = {"documents": len(offsets) - 1, "bytes": bytes_, "malformed": malformed, "first": first}
    (folder / "stats.json").write_text(json.dumps(stats))
