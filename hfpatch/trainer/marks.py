"""The state that the processes of one `hfpatch run` share: its options, and a folder of marks.

The environment carries both to every process, through launchers and shells. The folder is removed
at the run's end. Standard library only.
"""

import hashlib
import json
import os
from pathlib import Path

VARIABLE = "HFPATCH_RUN"
TRAINED = "trained"


def environment(folder: str, options: dict, own: str = TRAINED) -> dict[str, str]:
    """The environment variables of a run's processes.

    Args:
        folder: an empty folder, for the marks.
        options: keyword arguments of `hfpatch.apply`, as JSON can write them.
        own: the mark that a process of this run leaves when it trains.
    """
    trained = [*settings().get("trained", ()), own]
    hook = str(Path(__file__).parent / "hook")
    came = os.environ.get("PYTHONPATH")
    places = came.split(os.pathsep) if came else []  # "" in a longer one: the current folder
    return {
        VARIABLE: json.dumps({"folder": folder, "options": options, "trained": trained}),
        "PYTHONPATH": os.pathsep.join([hook, *(place for place in places if place != hook)]),
    }


def settings() -> dict:
    """{"folder", "options", "trained"} of this process's run, {} outside of a run.

    trained: the marks of this run and of the runs around it.
    """
    return json.loads(os.environ.get(VARIABLE, "{}"))


def mark(name: str) -> bool:
    """Leaves a mark for the run. Returns whether it is the first of its name.

    Outside of a run every mark is the first.
    """
    folder = settings().get("folder")
    if folder is None:
        return True
    try:
        Path(folder, name).touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:  # the run has ended, and this process goes on
        pass
    return True


def mark_trained() -> None:
    """Tells the run, and each run around it, that this process trains a patched model."""
    for name in settings().get("trained", ()):
        mark(name)


def first_to_say(text: str) -> bool:
    """Whether no process of this run has printed this text yet."""
    return mark(hashlib.sha256(text.encode()).hexdigest())
