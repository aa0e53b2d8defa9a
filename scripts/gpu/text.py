"""Real text that every machine has: the standard library's sources, as tokens of a BPE trained on
them.
"""

import sysconfig
from pathlib import Path

LEFT_OUT = {"site-packages", "dist-packages", "idlelib", "lib2to3", "__pycache__"}


def sources(most: int | None = None) -> list[str]:
    """The texts of the standard library's .py files, tests included, in a fixed order."""
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for path in sorted(root.rglob("*.py")):
        if LEFT_OUT.intersection(path.relative_to(root).parts):
            continue
        try:
            found.append(path.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, OSError):  # files that test encodings
            continue
        if most and len(found) == most:
            break
    return found


def rows(vocab_size: int, tokens: int, count: int, files: int | None = None):
    """(count rows of `tokens` token ids each, how many different ids are in them) under a tokenizer
    of vocab_size.
    """
    from hfpatch.trainer.tokenizer import train

    texts = sources(files)
    tokenizer = train(iter(texts), vocab_size)
    ids: list[int] = []
    for text in texts:
        ids += tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        if len(ids) >= tokens * count:
            break
    while len(ids) < tokens * count:
        ids += ids
    return [ids[i * tokens : (i + 1) * tokens] for i in range(count)], len(
        set(ids[: tokens * count])
    )
