"""What the scripts of this folder share: arguments, the stamp of a run, and its rows."""

import argparse
import importlib.metadata
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
import traceback
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # a clone that was not installed
# For all that is compared, and before the first CUDA allocation.
if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

from hfpatch.lab.device import clean, is_out_of_memory, one_line, synchronize  # noqa: E402, F401

GiB = 1 << 30
PACKAGES = "torch triton transformers accelerate peft trl torchao liger-kernel".split()
BEGAN = "HFPATCH_GPU_BEGAN"  # the variable with the time at which the first process of a run began


def parser(name: str, doc: str, seconds: float = 480) -> argparse.ArgumentParser:
    """The arguments that every script has."""
    made = argparse.ArgumentParser(prog=f"{name}.py", description=doc.splitlines()[0])
    out = os.environ.get("OUT") or str(ROOT / "runs" / "gpu" / name)
    made.add_argument("--out", default=out, help="folder of the rows (default: $OUT or runs/gpu)")
    made.add_argument("--small", action="store_true", help="tiny shapes, also on a CPU")
    made.add_argument("--seconds", type=float, default=seconds, help="start nothing new after this")
    made.add_argument("--commit", default=os.environ.get("HFPATCH_COMMIT"), help="of a bare copy")
    return made


def parse(made: argparse.ArgumentParser, argv) -> argparse.Namespace:
    """The arguments, with the device. Exits where a GPU is needed and none is here."""
    args = made.parse_args(argv)
    args.cuda = torch.cuda.is_available()
    if not args.cuda and not args.small:
        made.error("a CUDA GPU is needed, and none is here. Add --small to try the code on a CPU.")
    args.device = torch.device("cuda" if args.cuda else "cpu")
    words = list(sys.argv[1:] if argv is None else argv)
    # Where the rows go and how the commit became known say nothing about the run.
    for option in ("--out", "--commit"):
        if option in words:
            place = words.index(option)
            del words[place : place + 2]
    args.command = shlex.join(["python", f"scripts/gpu/{made.prog}", *words])
    return args


def commit_of(given: str | None) -> str:
    """This commit's short hash, "+" where the tree has changes; "unknown" of a copy."""
    if given:
        return given
    git = ["git", "-C", str(ROOT)]
    try:
        command = [*git, "rev-parse", "--short", "HEAD"]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        command = [*git, "status", "--porcelain", "-uno"]
        changed = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found + ("+" if changed else "")


def versions() -> str:
    """Of Python and of all that a figure depends on."""
    found = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    found["torch"] = torch.__version__
    if torch.version.cuda:
        found["cudnn"] = torch.backends.cudnn.version()
    return " ".join(f"{name}={version}" for name, version in found.items())


def device_name(device: torch.device) -> str:
    if device.type != "cuda":
        return "cpu (code path only, no measurement)"
    return torch.cuda.get_device_name(device)


def failure(error: BaseException) -> dict:
    """What a row says of an error: "out of memory", or its line; the log has the traceback."""
    if is_out_of_memory(error):
        return {"error": "out of memory"}
    traceback.print_exception(error)
    return {"error": one_line(error)}


class Rows:
    """NAME.jsonl in the output folder: a line a row, on disk as soon as it is known.

    The first line is the stamp of the run: device, commit, command, versions, date.
    """

    def __init__(self, args: argparse.Namespace, name: str, stamp: bool = True):
        self.args = args
        self.path = Path(args.out) / f"{name}.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.began = float(os.environ.get(BEGAN, time.time()))
        if stamp:
            self.add(
                device=device_name(args.device),
                commit=commit_of(args.commit),
                command=args.command,
                versions=versions(),
                date=time.strftime("%Y-%m-%d"),
            )

    def left(self) -> float:
        """Seconds until nothing new is to be started."""
        return self.args.seconds - (time.time() - self.began)

    def add(self, **row) -> dict:
        """Writes a row; floats are rounded to 5 digits."""
        row = {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in row.items()}
        row["at"] = round(time.time() - self.began, 1)
        line = json.dumps(row, default=str)
        print(line, flush=True)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(line + "\n")
        return row

    def read(self) -> list[dict]:
        return [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines()]


# --- timing ---------------------------------------------------------------------------------------


class Clock:
    """Marks on the device's own clock. Between the marks of a run the device must not wait for the
    host (see `timed`)."""

    def __init__(self):
        self.marks: list = []

    def mark(self) -> None:
        if torch.cuda.is_available():
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def gaps_ms(self) -> list[float]:
        """Milliseconds between neighbouring marks; waits for the device."""
        synchronize()
        pairs = zip(self.marks, self.marks[1:])
        if torch.cuda.is_available():
            return [a.elapsed_time(b) for a, b in pairs]
        return [(b - a) * 1e3 for a, b in pairs]


def timed(
    stages, *, sets: int = 1, budget_ms: float = 300.0, least: int = 5, most: int = 60
) -> list[float]:
    """Median milliseconds of each stage. stages(i, mark): one run on input set i, which calls
    mark() after each stage.

    A first pass warms up (compilation, autotuning). A second one measures host and device. Then the
    device is kept busy while the host queues all runs, so that no gap of the host is measured.
    """
    for i in range(max(2, sets)):
        stages(i % sets, lambda: None)
    synchronize()
    start = time.perf_counter()
    stages(0, lambda: None)
    host = time.perf_counter() - start
    synchronize()
    whole = (time.perf_counter() - start) * 1e3
    runs = max(least, min(most, int(budget_ms / max(whole, 1e-3))))
    if torch.cuda.is_available():
        # Cycles at about 2 GHz; half a second is the most that a short op could need.
        torch.cuda._sleep(int(min(0.5, 1.5 * host * runs) * 2e9))
    each = []
    for i in range(runs):
        clock = Clock()
        clock.mark()
        stages(i % sets, clock.mark)
        each.append(clock)
    gaps = [clock.gaps_ms() for clock in each]
    return [statistics.median(stage) for stage in zip(*gaps)]


# --- ceilings -------------------------------------------------------------------------------------


def copy_rate(device: torch.device, small: bool, nbytes: int = 4 << 30) -> float:
    """Bytes a second of a large copy on the device, read plus written."""
    n = (1 << 20) if small else nbytes
    a, b = (torch.empty(n, dtype=torch.uint8, device=device) for _ in range(2))
    a.random_()

    def run(i, mark):
        b.copy_(a)
        mark()

    return 2 * n / (timed(run, budget_ms=100, least=3)[0] / 1e3)


def matmul_rate(
    device: torch.device, small: bool, dtype=torch.bfloat16, m=8192, n=8192, k=8192
) -> float:
    """FLOP/s of a matmul of random values (zeros run faster)."""
    m, n, k = (64, 64, 64) if small else (m, n, k)
    a, b = torch.randn(m, k, device=device).to(dtype), torch.randn(k, n, device=device).to(dtype)

    def run(i, mark):
        a @ b
        mark()

    return 2 * m * n * k / (timed(run, budget_ms=200, least=5)[0] / 1e3)


def host_rates(device: torch.device, small: bool) -> tuple[float, float]:
    """Bytes a second from the device to pinned host memory and back."""
    n = (1 << 20) if small else (1 << 30)
    a = torch.empty(n, dtype=torch.uint8, device=device)
    host = torch.empty(n, dtype=torch.uint8, pin_memory=device.type == "cuda")

    def run(i, mark):
        host.copy_(a, non_blocking=True)
        mark()
        a.copy_(host, non_blocking=True)
        mark()

    out, back = timed(run, budget_ms=200, least=3)
    return n / (out / 1e3), n / (back / 1e3)
