"""`hfpatch.profile(...)`: each implementation in its own process, then one folder with the report.
Imports no torch.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hfpatch.budget.free import gpu_free, host_free
from hfpatch.budget.limits import gib
from hfpatch.budget.policy import parse_checkpointing
from hfpatch.lab.children import ends_with
from hfpatch.lab.models import config_of
from hfpatch.lab.profile.advice import sentences
from hfpatch.lab.profile.options import Options, check_together
from hfpatch.lab.profile.picture import PICTURE, save
from hfpatch.lab.profile.report import markdown
from hfpatch.lab.profile.timeline import Run

PACKAGE_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Profile:
    """The result of `profile`: the folder, its Runs, and notes on runs that were not possible."""

    folder: Path
    runs: list[Run]
    notes: list[str]

    @property
    def sentences(self) -> list[str]:
        return sentences(self.runs)

    def __str__(self) -> str:
        return "\n".join([*self.sentences, *self.notes, f"Report: {self.folder / 'report.md'}"])


def profile(
    model: str,
    *,
    seq_len: int | list[int] = 8192,
    impl: list[str] | str = ("hf", "hfpatch"),
    batch: int = 1,
    steps: int = 3,
    warmup: int = 1,
    dtype: str = "auto",
    optimizer: str = "adamw",
    gradient_checkpointing: bool = True,
    checkpointing="auto",
    device: str = "auto",
    simulate: bool = False,
    out: str | Path = "runs/profile",
    command: str | None = None,
) -> Profile:
    """Runs real training steps of each implementation, follows one on fake tensors to see what holds
    its memory, and writes a folder with the report.

    An implementation that cannot run here is named in the notes. One that runs out of memory is in
    the report.

    Args:
        model: a preset, a config.json, a folder or a hub id. Weights are random.
        seq_len: in tokens, one length or several.
        steps: that are timed. On a GPU one more is recorded by PyTorch's allocator.
        warmup: steps before them.
        dtype: "auto" (bfloat16 on a GPU, float32 on a CPU) or a name.
        gradient_checkpointing: of hf and liger.
        checkpointing: of hfpatch, as hfpatch.apply takes it.
        simulate: no real step, for models that this machine cannot hold.

    Raises:
        ValueError: an option is wrong, or no implementation can run.
    """
    # [Step 1] Read the options. A second run of one name would overwrite the first one's trace.
    names = list(dict.fromkeys(impl.split(",") if isinstance(impl, str) else impl))
    several = isinstance(seq_len, Iterable) and not isinstance(seq_len, str)
    lengths = list(seq_len) if several else [seq_len]
    if not isinstance(model, (str, os.PathLike)):
        raise ValueError(
            "hfpatch: the model must be a preset, a config.json, a folder or a hub id, got "
            f"{type(model).__name__}. Name one."
        )
    folder = Path(out).expanduser()
    shared = {
        "model": str(model), "batch": batch, "steps": steps, "warmup": warmup, "dtype": dtype,
        "optimizer": optimizer,
        "gradient_checkpointing": gradient_checkpointing, "checkpointing": parse_checkpointing(checkpointing).words(),
        "device": device,
        "simulate": simulate, "folder": str(folder),
    }  # fmt: skip
    # [Step 2] List all runs and check each, before the first one starts.
    asked = [shared | {"impl": name, "seq_len": length} for length in lengths for name in names]
    if not asked:
        raise ValueError("hfpatch: impl or seq_len is empty. Name at least one.")
    for options in asked:
        Options(**options)
        if not simulate:
            _expect_memory(options["model"], batch * options["seq_len"])
    check_together(names, shared["checkpointing"], gradient_checkpointing)
    # [Step 3] Run each in a process of its own.
    folder.mkdir(parents=True, exist_ok=True)
    runs = []
    notes = []  # why others could not run here
    for options in asked:
        found = _in_process(options)
        if isinstance(found, Run):
            runs.append(found)
        elif found not in notes:
            notes.append(found)
    if not runs:
        raise ValueError(notes[0])
    # [Step 4] Write the report.
    called = f"hfpatch.profile({str(model)!r}, seq_len={lengths}, impl={names})"
    return Profile(folder, runs, write(folder, runs, command=command or called, notes=notes))


def _expect_memory(model: str, tokens: int) -> None:
    """ValueError for tokens whose layer inputs alone, in 2 bytes, this machine cannot hold."""
    values = config_of(model)[1]
    values = values.get("text_config", values)
    needed = 2 * tokens * values.get("hidden_size", 0) * values.get("num_hidden_layers", 0)
    memory = host_free() or 1 << 60
    if needed > memory:  # torch loads for seconds
        memory += gpu_free() or 0
    if needed > memory:
        raise ValueError(
            f"hfpatch: the layer inputs of {tokens:,} tokens must fit this machine's {gib(memory)}, "
            f"got {gib(needed)}. Pass fewer tokens, or --simulate."
        )


def _in_process(options: dict) -> Run | str:
    """Runs the worker. Returns its Run, or the reason why it could not run here."""
    path = os.pathsep.join(filter(None, [str(PACKAGE_ROOT), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "run.json"
        done = subprocess.run(
            [sys.executable, "-m", "hfpatch.lab.profile.worker", json.dumps(options), str(result)],
            env=os.environ | {"PYTHONPATH": path}, preexec_fn=ends_with(os.getpid()), check=False,
        )  # fmt: skip
        found = json.loads(result.read_text()) if result.exists() else None
    if found is not None:
        return Run(**found) if isinstance(found, dict) else found
    name = options["impl"]
    if done.returncode == -signal.SIGKILL:
        # The kernel's out-of-memory killer leaves no message and no result.
        text = "killed by the system, as happens when the machine's memory runs out"
        return Run(name, options["seq_len"], options["batch"], error=text)
    return f"hfpatch: {name} did not run: exit code {done.returncode}"


def write(folder: Path, runs: list[Run], *, command: str = "", notes=()) -> list[str]:
    """Writes report.md, memory.png and results.json into the folder. Returns the notes."""
    told = {"command": command, "commit": _commit()}
    told["notes"] = [*notes, *save(runs, folder / PICTURE)]
    (folder / "report.md").write_text(markdown(runs, **told))
    (folder / "results.json").write_text(results(runs, **told) + "\n")
    return told["notes"]


def results(runs: list[Run], *, command="", commit="", notes=()) -> str:
    """JSON for machines: the sentences and every Run."""
    rows = [vars(r) | {"peak_split": r.peak_split, "curve": []} for r in runs]
    values = {
        "command": command,
        "commit": commit,
        "sentences": sentences(runs),
        "notes": list(notes),
        "runs": rows,
    }
    return json.dumps(values, indent=1)


def _commit() -> str:
    """The commit this package runs from, or '' outside a checkout."""
    done = subprocess.run(
        ["git", "-C", str(PACKAGE_ROOT), "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() if done.returncode == 0 else ""
