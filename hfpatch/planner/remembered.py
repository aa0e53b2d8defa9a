"""Answers of earlier plans, one JSON file each. A key has the model's values, all arguments, and the
versions of what runs the step. Standard library only."""

import hashlib
import json
import os
from pathlib import Path

from hfpatch.lab.profile.timeline import versions

LIBRARIES = ("torch", "transformers", "peft", "flash-linear-attention")
FOLDER = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "hfpatch", "plans")


def _file(arguments: dict) -> Path:
    # Code, and the rates and configs of lab/. Sizes too: an image of a machine may have one date.
    files = (f for f in Path(__file__).parent.parent.rglob("*") if f.suffix in (".py", ".json"))
    state = sum(stat.st_mtime_ns + stat.st_size for stat in map(Path.stat, files))
    text = json.dumps([arguments, state, versions(LIBRARIES)], sort_keys=True, default=repr)
    return FOLDER / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def recall(arguments: dict) -> dict | None:
    """The fields of the Plan of these arguments, None if there is none."""
    try:
        return json.loads(_file(arguments).read_text())
    except (OSError, ValueError):
        return None


def remember(arguments: dict, fields: dict) -> None:
    file = _file(arguments)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(fields))
    except OSError:  # a read-only home
        pass
