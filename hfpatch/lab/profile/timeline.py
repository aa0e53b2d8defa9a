"""The data of a profile: the Run that a report shows, and how it follows from a step's ledger.

Standard library only.
"""

import importlib.metadata
import platform
import statistics
from dataclasses import dataclass, field

from hfpatch import __version__
from hfpatch.lab.simulate.ledger import Block, Ledger, alive_at, levels

IMPLEMENTATIONS = ("hf", "liger", "hfpatch")
# The longest-lived category first.
CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer",
    "checkpoints",
    "activations",
    "loss",
    "working set",
    "other",
)
LASTING = ("parameters", "gradients", "optimizer")  # needed at any length
MEANING = {
    "parameters": "weights and buffers",
    "gradients": "the .grad of every parameter",
    "optimizer": "optimizer states",
    "checkpoints": "decoder-layer inputs kept for the backward",
    "activations": "what else the forward keeps for the backward",
    "loss": "head and loss: logits, their gradients, chunks of them",
    "working set": "born and freed within a phase, recomputation included",
    "other": "batch, and tensors that were there before the step",
}
NOWHERE = "(outside of modules)"  # as a block's module; "" is the model itself
SLICES = 300  # of a picture's time


@dataclass
class Run:
    """One implementation at one length. Sizes in bytes, moments in allocations and frees of the step
    as it was followed on fake tensors.
    """

    impl: str
    seq_len: int
    batch: int = 1
    source: str = "measured"  # or "simulated"
    device: str = "cpu"
    phases: list = field(default_factory=list)  # [name, start, end]
    peak_bytes: int = 0
    peak_at: int = 0
    peak_phase: str = ""
    # alive at the peak: {bytes, count, category, module, phase, op}
    rows: list = field(default_factory=list)
    # [time, [bytes of each of CATEGORIES]], for the picture
    curve: list = field(default_factory=list)
    step_seconds: list = field(default_factory=list)  # of real steps
    memory: dict = field(default_factory=dict)  # allocator, host and copy figures, by name
    setup: dict = field(default_factory=dict)  # model, dtype, optimizer, engine, ...
    versions: dict = field(default_factory=dict)
    applied: list = field(default_factory=list)  # what hfpatch.apply printed, line by line
    error: str | None = None  # one line, where the run did not finish

    @property
    def peak_split(self) -> dict:
        """category -> bytes at the peak."""
        split = dict.fromkeys(CATEGORIES, 0)
        for row in self.rows:
            split[row["category"]] += row["bytes"]
        return split

    @property
    def seconds(self) -> float | None:
        """The median of the steps that were timed."""
        return statistics.median(self.step_seconds) if self.step_seconds else None


def held(run: Run) -> dict:
    """(module, phase) -> bytes at the peak, beyond LASTING categories and what was there before."""
    found: dict = {}
    for row in run.rows:
        if row["category"] not in LASTING and row["phase"] != "before the step":
            key = (generic(row["module"]) or "(the model's own forward)", row["phase"])
            found[key] = found.get(key, 0) + row["bytes"]
    return found


def generic(module: str) -> str:
    """model.layers.17.mlp -> model.layers.*.mlp, as layers are alike."""
    return ".".join("*" if part.isdigit() else part for part in module.split("."))


def measure(run: Run, ledger: Ledger) -> Run:
    """Fills the run's peak with the blocks alive then. The ledger's categories are CATEGORIES."""
    began = run.phases[0][1]
    points = [
        [at, [level[name] for name in CATEGORIES]]
        for at, _, _, level in levels(ledger)
        if at >= began
    ]
    run.curve = _thinned(points)
    run.peak_at, peak = max(points, key=lambda point: sum(point[1]))
    run.peak_bytes = sum(peak)
    run.peak_phase = next(n for n, start, stop in run.phases if start <= run.peak_at <= stop)
    run.rows = grouped(alive_at(ledger, run.peak_at))
    return run


def _thinned(points: list) -> list:
    """The highest and the last point of each slice of time, so that a short peak is drawn."""
    width = (points[-1][0] - points[0][0]) / SLICES or 1
    slices: dict = {}
    for point in points:
        kept = slices.setdefault(point[0] // width, [])
        highest = not kept or sum(point[1]) >= sum(kept[0][1])
        kept[0 if highest else 1 :] = [point]
    return [point for kept in slices.values() for point in kept]


def grouped(alive: list[Block]) -> list:
    """Rows of the blocks alive, the largest first. Blocks of all layers with equal owners are one
    row.
    """
    rows: dict = {}
    for block in alive:
        owner = {"category": block.category, "module": generic(block.module)}
        owner |= {"phase": block.phase, "op": block.op}
        row = rows.setdefault(tuple(owner.values()), owner | {"bytes": 0, "count": 0})
        row["bytes"] += block.nbytes
        row["count"] += 1
    return sorted(rows.values(), key=lambda row: -row["bytes"])


def versions(packages) -> dict[str, str | None]:
    """Versions of Python, hfpatch and the packages; None for a package that is not installed."""
    found = {"python": platform.python_version(), "hfpatch": __version__}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found
