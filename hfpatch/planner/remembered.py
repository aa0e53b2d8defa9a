"""Answers of earlier plans, one JSON file each. A key has the model's values, all arguments, and the
versions of what runs the step. Standard library only."""

import hashlib
import json
import os
from importlib.metadata import version
from pathlib import Path

LIBRARIES = ("hfpatch", "torch", "transformers", "peft", "flash-linear-attention")


def _file(asked: dict) -> Path:
    versions = []
    for name in LIBRARIES:
        try:
            versions.append(version(name))
        except Exception:  # not installed
            versions.append("")
    text = json.dumps([asked, versions], sort_keys=True, default=repr)
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root, "hfpatch", hashlib.sha256(text.encode()).hexdigest()[:32] + ".json")


def recall(asked: dict) -> dict | None:
    """The fields of the Plan of these arguments, None if there is none."""
    try:
        return json.loads(_file(asked).read_text())
    except (OSError, ValueError):
        return None


def remember(asked: dict, fields: dict) -> None:
    try:
        _file(asked).parent.mkdir(parents=True, exist_ok=True)
        _file(asked).write_text(json.dumps(fields))
    except OSError:  # a read-only home
        pass
