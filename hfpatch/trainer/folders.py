"""A run's folder: which checkpoints are whole, how one is written, and which run owns the folder.

A checkpoint is written in `_saving/`, its files are synced and listed with sizes and digests, and
one rename makes it `checkpoint-N`. So a folder of that name is whole, whatever killed the run, and
a file that was cut or mixed up later does not match the list. A push to the hub leaves out names
that begin with an underscore.
"""

import contextlib
import hashlib
import json
import os
import shutil
import socket
from pathlib import Path

from hfpatch.trainer.locks import try_lock

RUN_FILE = "hfpatch_run.json"  # what a resume must match, and the list of files
STATE_FILE = "trainer_state.json"
SAVING, ASIDE, LOCK = "_saving", "_set_aside", "_lock"
WEIGHTS = (
    "model.safetensors",
    "pytorch_model.bin",
    "adapter_model.safetensors",
    "adapter_model.bin",
)
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
# The digest of a file larger than _WHOLE is of _PIECES pieces.
_WHOLE, _PIECES, _PIECE = 32 << 20, 64, 64 << 10


def step_of(path: Path) -> int | None:
    """N of a folder checkpoint-N, None for any other name."""
    name, _, number = path.name.rpartition("-")
    return int(number) if name == "checkpoint" and number.isdigit() else None


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoint folders, newest first, whole or not."""
    found = [p for p in folder.glob("checkpoint-*") if step_of(p) is not None and p.is_dir()]
    return sorted(found, key=step_of, reverse=True)


def flaw(checkpoint: Path) -> str | None:
    """Why a run cannot resume from this folder, such as "optimizer.pt is cut"; None if it can."""
    try:
        state = json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))
        step = state["global_step"]
    except FileNotFoundError:
        return f"{STATE_FILE} is missing"
    except (OSError, ValueError, KeyError, TypeError):
        return f"{STATE_FILE} is broken"
    if step_of(checkpoint) not in (None, step):
        return f"{STATE_FILE} is of step {step}"
    missing = _missing({p.name for p in checkpoint.iterdir()})
    if missing:
        return f"{missing} is missing"
    try:
        listed = json.loads((checkpoint / RUN_FILE).read_text(encoding="utf-8")).get("files")
        entries = [(name, size, digest) for name, (size, digest) in listed.items()]
    except FileNotFoundError:
        return None  # another script's checkpoint: loading it tells whether a file was cut
    except (OSError, ValueError, TypeError, AttributeError):
        return f"{RUN_FILE} is broken"
    for name, size, digest in entries:
        file = checkpoint / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} is cut ({file.stat().st_size} of {size} bytes)"
        if digest_of(file) != digest:
            return f"{name} is not the one that was saved with the rest"
    return None


def _missing(names: set[str]) -> str | None:
    """A file that a resume needs and the folder lacks.

    A run with --save_only_model saved no optimizer, and Trainer would begin a new one in silence.
    """
    if "latest" in names or any(name.startswith("pytorch_model_fsdp") for name in names):
        return None  # an engine's own layout
    if not names & {*WEIGHTS, *INDEXES}:
        return "the model"
    wanted = ("optimizer.pt", "scheduler.pt", "rng_state.pth")
    return next(
        (w for w in wanted if not any(name.startswith(w.partition(".")[0]) for name in names)), None
    )


def plain_name(name) -> bool:
    """Whether this is a file's name and no path, which could lead out of an untrusted folder."""
    return (
        isinstance(name, str) and name not in ("", ".", "..") and not set(name) & {"/", "\\", "\0"}
    )


def digest_of(file: Path) -> str:
    """A digest of a file up to 32 MiB; of a larger one a digest of 64 pieces spread over it.

    Pieces are enough to tell two steps apart: each step changes all of the weights.
    """
    size = file.stat().st_size
    made = hashlib.blake2b(str(size).encode(), digest_size=16)
    with open(file, "rb") as opened:
        if size <= _WHOLE:
            made.update(opened.read())
        else:
            for i in range(_PIECES):
                opened.seek((size - _PIECE) * i // (_PIECES - 1))
                made.update(opened.read(_PIECE))
    return made.hexdigest()


def finish(saved: Path, target: Path, record: dict | None = None) -> None:
    """Turns the folder `saved` into the checkpoint `target`: lists and syncs its files, renames it.

    A folder that has the name is set aside.
    """
    files = sorted(p for p in saved.rglob("*") if p.is_file())
    if record is not None:
        listed = {p.relative_to(saved).as_posix(): [p.stat().st_size, digest_of(p)] for p in files}
        run_file = saved / RUN_FILE
        run_file.write_text(json.dumps(record | {"files": listed}, indent=1), encoding="utf-8")
        files.append(run_file)
    for path in [*files, *(p for p in saved.rglob("*") if p.is_dir()), saved]:
        sync(path)
    if target.exists():
        set_aside([target])
    os.rename(saved, target)
    sync(target.parent)


def publish(saved: Path, target: Path) -> None:
    """Moves the files of `saved` into `target`; a model loads from there all old or all new.

    The index of a sharded model is removed first and moved last: in between nothing loads.
    """
    files = sorted(saved.iterdir(), key=lambda p: p.name in INDEXES)
    for path in [*(p for p in saved.rglob("*")), saved]:
        sync(path)
    target.mkdir(parents=True, exist_ok=True)
    if any(p.name in (*WEIGHTS, *INDEXES) for p in files):
        new = {p.name for p in files}
        for name in (*INDEXES, *(w for w in WEIGHTS if w not in new)):
            (target / name).unlink(missing_ok=True)
    for path in files:
        there = target / path.name
        if path.is_dir() and there.is_dir():
            shutil.rmtree(there)
        os.replace(path, there)
    sync(target)
    saved.rmdir()


def sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def umask() -> int:
    """The process's mask of new files, which can only be read by changing it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def set_aside(paths) -> list[str]:
    """Moves checkpoints into _set_aside/ beside them, under a free name. Returns their names."""
    moved = []
    for path in paths:
        folder = path.parent / ASIDE
        folder.mkdir(exist_ok=True)
        free = (
            n
            for n in [path.name, *(f"{path.name}.{i}" for i in range(1, 10**6))]
            if not (folder / n).exists()
        )
        os.rename(path, folder / next(free))
        moved.append(path.name)
    return moved


def rotate(folder: Path, keep: int | None, best: str | None) -> None:
    """Deletes the oldest checkpoints beyond `keep`; the newest and the best are kept."""
    found = checkpoints(folder)
    kept = {
        p
        for i, p in enumerate(found)
        if i == 0 or best is not None and p.resolve() == Path(best).resolve()
    }
    for path in reversed(found) if keep else ():
        if len(found) <= max(keep, len(kept)):
            break
        if path not in kept:
            # Renamed first, so that a kill in between leaves no checkpoint with files missing.
            trash = folder / SAVING
            trash.mkdir(exist_ok=True)
            os.rename(path, trash / f"old-{path.name}")
            shutil.rmtree(trash, ignore_errors=True)
            found.remove(path)


class Lock:
    """Holds the folder for this run until close(); the kernel frees the lock of a dead process.

    Raises ValueError with the name of the process that holds it.
    """

    def __init__(self, folder: str):
        self.path = Path(folder) / LOCK
        self.path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            if try_lock(self.fd) is False:
                owner = os.read(self.fd, 256).decode(errors="replace").strip() or "another process"
                os.close(self.fd)
                raise ValueError(
                    f"hfpatch: another run writes to {folder} ({owner}); wait for it, stop it, or "
                    "name another --output_dir."
                )
            # The owner before us may have removed the file between our open and our lock.
            try:
                if os.stat(self.path).st_ino == os.fstat(self.fd).st_ino:
                    break
            except FileNotFoundError:
                pass
            os.close(self.fd)
        os.ftruncate(self.fd, 0)
        os.pwrite(self.fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def close(self) -> None:
        """Never raises: on a disk that turned read-only, the first error is the one to report."""
        if self.fd is not None:
            with contextlib.suppress(OSError):
                self.path.unlink(missing_ok=True)
                if not any(self.path.parent.iterdir()):
                    # A run that was refused later leaves no folder.
                    self.path.parent.rmdir()
            os.close(self.fd)
            self.fd = None
