"""What the entries of this folder share: arguments, ceilings measured in the same run, timing, and
rows with a stamp.

An entry makes one Sheet and adds a row a measurement; the CSV is written after each row, so a run
cut off keeps what it measured. Every entry takes --small: tiny shapes, on the CPU too, so that its
whole path is tested without a GPU.
"""

import argparse
import csv
import datetime
import importlib.metadata
import json
import os
import shlex
import subprocess
import sys
import time
import traceback
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # a clone that was not installed
# for all that is compared, and before the first CUDA allocation
if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

from hfpatch.lab.device import (  # noqa: E402, F401  (the entries ask for them here)
    Clock,
    clean,
    copy_rate,
    host_rates,
    is_out_of_memory,
    matmul_rate,
    one_line,
    peak_bytes,
    synchronize,
    timed,
    tree_hash,
)

GiB = 1 << 30
# seconds that what an entry started may go on after its time; then there is still time for its page
OVERTIME = 10
PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "liger-kernel",
    "cut-cross-entropy",
    "torchao",
    "accelerate",
)
# the variable that names a file to which every sheet of a run appends its rows too
JOURNAL = "HFPATCH_GPU_ROWS"


def parser(entry: str, doc: str) -> argparse.ArgumentParser:
    """The arguments every entry has. entry: its name, which its files and its default folder
    get.
    """
    made = argparse.ArgumentParser(prog=entry, description=doc.splitlines()[0])
    default = os.environ.get("OUT") or str(ROOT / "runs" / "gpu" / entry)
    made.add_argument(
        "--out",
        default=default,
        help="folder for the CSV, PNG and markdown (default: $OUT or runs/gpu)",
    )
    made.add_argument(
        "--small", action="store_true", help="tiny shapes, also on a CPU: tries the code path"
    )
    made.add_argument(
        "--seconds", type=float, default=480, help="start nothing new after this long"
    )
    made.add_argument(
        "--commit",
        default=os.environ.get("HFPATCH_COMMIT"),
        help="where the copy has no git history",
    )
    return made


def parse(made: argparse.ArgumentParser, argv, needs_gpu: bool = True) -> argparse.Namespace:
    """The arguments, with device and command line. Exits with a sentence where a GPU is needed and
    none is here.
    """
    args = made.parse_args(argv)
    args.entry, args.cuda = made.prog, torch.cuda.is_available()
    if needs_gpu and not args.cuda and not args.small:
        made.error("expected a CUDA GPU, none is here; add --small to try the code path on a CPU.")
    args.device = torch.device("cuda" if args.cuda else "cpu")
    # Where the files go and how the commit became known say nothing about the run, and may name a
    # machine's folders.
    words, said = list(sys.argv[1:] if argv is None else argv), []
    while words:
        word = words.pop(0)
        if word in ("--out", "--commit"):
            words[:1] = []
        elif not word.startswith(("--out=", "--commit=")):
            said.append(word)
    args.command = shlex.join(["python", f"scripts/gpu/{made.prog}.py", *said])
    return args


def commit_of(given: str | None) -> str:
    """The short hash of this commit, '+' where the tree has changes; of a copy for which none was
    given, that of its hfpatch/.
    """
    if given:
        return given
    git = ["git", "-C", str(ROOT)]
    try:
        found = subprocess.run(
            [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        )
        if found.returncode:
            return f"hfpatch/={tree_hash(ROOT / 'hfpatch')[:12]}"
        changed = subprocess.run(
            [*git, "status", "--porcelain", "-uno"], capture_output=True, text=True
        ).stdout
    except OSError:
        return f"hfpatch/={tree_hash(ROOT / 'hfpatch')[:12]}"
    return found.stdout.strip() + ("+" if changed.strip() else "")


def versions() -> dict:
    """Of what a figure depends on."""
    found = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    found["torch"] = torch.__version__
    if torch.version.cuda:
        found |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    return found


def device_name(device: torch.device) -> str:
    """The card's name; by nvidia-smi, since an entry whose workers need all memory opens no context
    itself.
    """
    if device.type != "cuda":
        return "cpu (code path only, no measurement)"
    try:
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        asked = subprocess.run(query, capture_output=True, text=True)
    except OSError:
        return torch.cuda.get_device_name(device)
    name = asked.stdout.strip().splitlines()
    return name[0] if asked.returncode == 0 and name else torch.cuda.get_device_name(device)


def failure(error: BaseException) -> dict:
    """What a row says of an error: "out of memory", or its line and the last places it came from;
    the log has it whole.
    """
    if is_out_of_memory(error):
        return {"error": "out of memory"}
    traceback.print_exception(error)
    frames = traceback.extract_tb(error.__traceback__)[-5:]
    return {
        "error": one_line(error),
        "at": " > ".join(f"{Path(f.filename).name}:{f.lineno}" for f in frames),
    }


def why_no_fa3() -> str | None:
    """None where FlashAttention-3 can be asked for, else why not, in a line."""
    from hfpatch.compat import flash3

    try:
        flash3()
    except RuntimeError as error:  # its package is absent
        return one_line(error)
    return None


# --- timing ---------------------------------------------------------------------------------------


def rotation(bytes_each: int, small: bool) -> int:
    """Input sets to rotate among, so that a run does not find its inputs in the cache: four times a
    50 MB L2.
    """
    return 2 if small else max(1, min(8, -(-(4 * 50 << 20) // max(bytes_each, 1))))


# --- rows -----------------------------------------------------------------------------------------


class Sheet:
    """The rows of one entry, stamped with device, versions, commit and command, and the page about
    them.
    """

    def __init__(self, args: argparse.Namespace, name: str | None = None):
        self.args, self.name = args, name or args.entry
        self.out = Path(args.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.rows: list[dict] = []
        self.skipped: list[str] = []
        self.began = time.monotonic()
        self._ceilings: tuple[float, float] | None = None
        self.stamp = {
            "device": device_name(args.device),
            "commit": commit_of(args.commit),
            "date": datetime.date.today().isoformat(),
            "command": args.command,
            "versions": " ".join(f"{k}={v}" for k, v in versions().items()),
        }
        print(
            f"{self.name}: " + ", ".join(self.stamp[k] for k in ("device", "commit", "versions")),
            flush=True,
        )

    # -- time --------------------------------------------------------------------------------------
    def left(self) -> float:
        """Seconds until nothing new is to be started."""
        return self.args.seconds - (time.monotonic() - self.began)

    def late(self, what: str) -> bool:
        """True (and noted) where the time for `what` is gone."""
        if self.left() > 0:
            return False
        self.skip(what, f"the {self.args.seconds:.0f} s of this run were over")
        return True

    # -- ceilings ----------------------------------------------------------------------------------
    def ceilings(self) -> tuple[float, float]:
        """(copy bytes/s, bf16 matmul FLOP/s) of this device, measured once in this run and stamped
        on every row.
        """
        if self._ceilings is None:
            where = self.args.device, self.args.small
            self._ceilings = copy_rate(*where), matmul_rate(*where)
            clean()
            copy, matmul = self._ceilings
            self.stamp = {
                "copy_gb_s": round(copy / 1e9, 1),
                "matmul_tflop_s": round(matmul / 1e12, 2),
            } | self.stamp
            print(
                f"{self.name}: copy {copy / 1e9:.0f} GB/s, matmul {matmul / 1e12:.1f} TFLOP/s",
                flush=True,
            )
        return self._ceilings

    # -- writing -----------------------------------------------------------------------------------
    def add(self, **values) -> dict:
        """One row; floats are rounded to 5 digits. Rewrites the CSV."""
        row = {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in values.items()}
        self.rows.append(row)
        self._note(**row)
        print(
            "  " + "  ".join(f"{k}={v}" for k, v in row.items() if v not in (None, "")), flush=True
        )
        self._write_csv()
        return row

    def skip(self, what: str, why: str) -> None:
        self.skipped.append(f"{what}: {why}")
        self._note(left_out=what, why=why)
        print(f"  left out: {what}: {why}", flush=True)

    def _note(self, **values) -> None:
        """A line of JSON in the journal of a run of many entries, where there is one."""
        if os.environ.get(JOURNAL):
            try:
                with open(os.environ[JOURNAL], "a", encoding="utf-8") as file:
                    file.write(
                        json.dumps({"entry": self.name, **values, **self.stamp}, default=str) + "\n"
                    )
            except OSError as error:  # a full disk ends no measurement
                print(f"{self.name}: a row is not in the journal: {error}", flush=True)

    def columns(self) -> list[str]:
        return list(dict.fromkeys(key for row in self.rows for key in row))

    def _write_csv(self) -> None:
        columns = [*self.columns(), *(k for k in self.stamp if k not in self.columns())]
        with open(self.out / f"{self.name}.csv", "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows({**self.stamp, **row} for row in self.rows)

    def page(
        self, title: str, words: str, columns: list[str] | None = None, picture: str | None = None
    ) -> Path:
        """<name>.md: what was asked, the command, the machine, the rows and what was left out."""
        self._write_csv()  # columns that were filled in after their row was added
        columns = columns or self.columns()
        shown = [c for c in columns if any(c in row for row in self.rows)]
        lines = [f"# {title}", "", words.strip(), ""]
        if self.args.small:
            lines += [
                "**Made with --small: the code path was tried, no figure here is a measurement.**",
                "",
            ]
        lines += [f"    {self.stamp['command']}", ""]
        lines += [f"- {key}: {value}" for key, value in self.stamp.items() if key != "command"]
        if picture:
            lines += ["", f"![{title}]({picture})"]
        if self.rows:
            lines += ["", "| " + " | ".join(shown) + " |", "|" + " --- |" * len(shown)]
            lines += [
                "| " + " | ".join(_cell(row.get(c)) for c in shown) + " |" for row in self.rows
            ]
        if self.skipped:
            lines += ["", "Left out:", ""] + [f"- {line}" for line in self.skipped]
        path = self.out / f"{self.name}.md"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"{self.name}: {len(self.rows)} rows in {path.with_suffix('.csv')}", flush=True)
        return path

    def picture(self, draw, wide: int = 1) -> str | None:
        """<name>.png by draw(axes), axes a list of `wide`; None with a line where matplotlib is
        missing.
        """
        try:
            import matplotlib
        except ImportError:
            self.skip("picture", "matplotlib is not installed")
            return None
        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(1, wide, figsize=(6 * wide, 4.2), squeeze=False)
        draw(list(axes[0]))
        figure.suptitle(f"{self.stamp['device']}, {self.stamp['commit']}", fontsize=8)
        figure.text(0.01, 0.01, self.stamp["command"], fontsize=6, family="monospace")
        figure.tight_layout(rect=(0, 0.03, 1, 0.98))
        figure.savefig(self.out / f"{self.name}.png", dpi=110)
        pyplot.close(figure)
        return f"{self.name}.png"


def _cell(value) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def lines(
    axis,
    rows,
    x: str,
    y: str,
    series: str,
    *,
    title: str,
    ylabel: str | None = None,
    log: bool = True,
) -> None:
    """One line a value of `series` through the rows that have x and y."""
    for name in dict.fromkeys(row.get(series) for row in rows):
        points = sorted(
            (row[x], row[y]) for row in rows if row.get(series) == name and row.get(y) is not None
        )
        if points:
            axis.plot(*zip(*points), marker="o", markersize=3, label=str(name))
    if log:
        axis.set_xscale("log", base=2)
    axis.set(title=title, xlabel=x, ylabel=ylabel or y)
    axis.set_ylim(bottom=0)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=7)
    axis.grid(alpha=0.3)


def speed_and_peak(axes, rows, series: str) -> None:
    """Tokens a second, and the GPU's peak, by length: a line a value of `series`."""
    lines(axes[0], rows, "tokens", "tokens_s", series, title="tokens a second")
    lines(axes[1], rows, "tokens", "peak_gib", series, title="peak GPU memory, GiB")


def bars(axis, rows, label: str, y: str, *, title: str) -> None:
    """One bar a row."""
    names = [str(row.get(label)) for row in rows if row.get(y) is not None]
    axis.barh(range(len(names)), [row[y] for row in rows if row.get(y) is not None])
    axis.set_yticks(range(len(names)), names, fontsize=7)
    axis.invert_yaxis()
    axis.set(title=title, xlabel=y)
