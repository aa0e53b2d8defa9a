"""A short slot on a GPU: the entries of one part, most informative first, ended by itself within
nine minutes.

bash scripts/gpu/slot.sh PART            PART 1: does it work, and how fast about; 2: the full step; 3: how far it goes;
                                         4: what a second half hour adds
bash scripts/gpu/slot.sh PART --small    the whole path at tiny size, also on a CPU

--out (or $OUT) gets three files: slotN.jsonl, every row the moment it exists; slotN.tar.gz, the
pages, tables and pictures of the entries that are done; slotN.log, all that was printed. An entry
that fails, dies or takes too long is said at once, with the end of its traceback, and the next one
runs.
"""

import argparse
import contextlib
import csv
import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER))
# common.JOURNAL; torch is imported by the worker alone, the clock must not wait for it
ROWS = "HFPATCH_GPU_ROWS"


@dataclass(frozen=True)
class Job:
    """An entry and its arguments. seconds: it starts nothing new after so long, and is stopped a
    little later. show: the columns worth reading at once. spare: it runs only where the part has so
    many seconds left.
    """

    entry: str
    arguments: str = ""
    seconds: int = 30
    show: str = ""
    spare: bool = False

    @property
    def small(self) -> bool:
        return "--small" in self.arguments.split()


STEP = "impl kept layers tokens step_s behind tokens_s mfu beyond_gib split_error error"
# Each compiles what it needs; those whose whole run comes in part 1 need no small one.
SMALL = (
    "01b_float64", "02a_elementwise", "02b_loss", "06_offload_peer", "08_longest", "09_gpu8bit",
    "12_tiles", "13_qlora", "15_streamed",
)  # fmt: skip
FULL = (
    "preset layers step_s step_whole_s ratio mfu floor_s attention_s matmul_s copy_wait_s other_s "
    "beyond_gib host_used_gib"
)
FULL += " split_error error"
LONGEST = "layers run tokens fits step_s peak_gib error"
TILES = "what tokens tier tile step_s pin_s_per_gib to_host_gb_s error"
ATTENTION = "backend tokens group fwd_tflop_s bwd_tflop_s new_length_ms chosen"
CHANGES = "check backend what tokens passed share where step_s pinned_gib apart error"
FAMILIES = "what impl kernels tokens step_s tokens_s peak_gib loss error"
EXPERTS = "model impl tokens both_ms tflop_s err_out err_grad"
TIMELINE = "tokens layers step_s clock_s step_ratio exposed_share idle_s error"
PLAN = "entry tokens gpu_off host_off seconds_off right"
PARTS = {
    1: [
        # What comes later is tried first, while it can be mended. Small ones share a process:
        # importing and starting the device cost more than they do. The first compiles every kernel,
        # and both directions of flex_attention twice.
        *(Job(name, "--small", 75 if name == SMALL[0] else 30) for name in SMALL),
        Job("05_step_128k", "--layers 8 4 --steps 1", 90, FULL),
        Job("01c_model", seconds=85,
            show="check tokens way delayed passed share host_ms device_ms"),
        # Wrong gradients and a step that cannot go on come before what is merely slow.
        Job("17_changes", "--checks layouts model memory", 50, CHANGES),
        # On a larger card as on one of 80 GB: there "auto" has to choose, and the rivals have no
        #     more.
        Job("07_short_steps",
            "--tokens 8192 32768 --warmup 1 --steps 2 --tiers auto --rivals liger trl --cap-gib 79",
            170, STEP),
        # The clock's order of copies and kernels beside the card's, before what is only longer.
        Job("18_timeline", "--tokens 8192 131072 --layers 8 2", 45, TIMELINE, spare=True),
        Job("17_changes", "--checks lengths", 60, CHANGES, spare=True),
        Job("04_attention", "--tokens 131072 32768", 55, ATTENTION, spare=True),
        *(Job(name, "--small", 30) for name in (
            "19_experts", "20_families", "11_learning", "03_models", "01a_tests",
        )),
    ],
    2: [
        Job("05_step_128k", "--layers 32 16 --steps 1", 250, FULL),
        Job("02b_loss", "", 120, "impl tokens both_ms share extra_mib"),
        Job("02a_elementwise", "", 90, "op impl tokens fwd_share bwd_share"),
        Job("18_timeline", "--tokens 8192 131072 --layers 8 2", 45, TIMELINE),
        Job("10_plan", "--results {work}", 15, PLAN),
        Job("01b_float64", "", 60, "what dtype tokens passed share", spare=True),
    ],
    3: [
        Job("08_longest", "--layers 32 --run 1 --tokens 262144 524288", 90, LONGEST),
        Job("13_qlora", "--tokens 131072 --rivals", 130,
            "impl tokens fits first_step_s peak_gib host_used_gib error"),
        Job("09_gpu8bit", "--tokens 8192 --steps 6", 100,
            "impl tokens step_s first_loss last_loss peak_gpu_gib error"),
        Job("06_offload_peer", "--tokens 131072 --layers 8 --rivals trl liger", 120, STEP),
        Job("11_learning", "", 80, "preset impl apart held_out_after"),
        Job("05_step_128k", "--model Qwen/Qwen3-8B --layers 8 4 --steps 1", 75, FULL, spare=True),
        Job("15_streamed", "--tokens 8192 32768 --bases bf16 --layers 16", 90,
            "base weights tokens step_s loss copy_wait_s peak_gib error", spare=True),
        Job("12_tiles", "--tokens 8192 --tiles 4096 8192", 55, TILES, spare=True),
        Job("10_plan", "--results {work}", 15, PLAN, spare=True),
    ],
    4: [
        Job("16_engines", "--tokens 32768", 300,
            "engine tokens step_s peak_gpu_gib host_used_gib plan_step_s error"),
        Job("07_short_steps",
            "--tokens 4096 16384 --warmup 1 --steps 2 --tiers auto --rivals liger trl", 100, STEP),
        Job("07_short_steps", "--layers 8 --tokens 8192 32768 --tiers host gpu --rivals", 60,
            "tier tokens step_s overhead"),
        # What people fine-tune most, on a card for the first time.
        Job("20_families", "--only hybrid float8 bf16", 110, FAMILIES, spare=True),
        Job("19_experts", "--tokens 8192", 45, EXPERTS, spare=True),
        Job("20_families", "--only experts", 60, FAMILIES, spare=True),
        Job("18_timeline", "--tokens 8192 16384 131072 --layers 32 32 8", 110, TIMELINE, spare=True),
        Job("10_plan", "--results {work}", 15, PLAN),
        Job("08_longest", "--layers 4 --run 1 --tokens 786432", 80, LONGEST, spare=True),
        Job("12_tiles", "--tokens 8192 --tiles 4096 8192", 55, TILES, spare=True),
        Job("01b_float64", "", 60, "what dtype tokens passed share", spare=True),
    ],
}  # fmt: skip
GRACE = 20  # seconds an entry has for its page and picture after the time in which it starts things
SHOWN = 12  # rows of an entry that are printed
FILE_BYTES = 16 << 20  # of one file that comes back; 8 of them at most


def load(path: str):
    spec = importlib.util.spec_from_file_location("gpu_" + Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- the process that runs entries ----------------------------------------------------------------


def work(path: Path) -> int:
    """Runs the jobs of a JSON file one after another; a line of JSON as each begins and ends."""
    order = json.loads(path.read_text())
    for number, entry, arguments in order["jobs"]:
        _say(order["said"], number=number, began=time.time())
        found = {"code": 1, "trace": []}
        try:
            found["code"] = load(entry).main(arguments)
        except SystemExit as stop:  # argparse
            found["code"] = stop.code
        except BaseException:  # whatever it was: said, and the next one runs
            traceback.print_exc()
            # Without the lines that only underline the one before.
            found["trace"] = [
                line for line in traceback.format_exc().splitlines() if line.strip(" ^~")
            ][-7:]
        _say(order["said"], number=number, rows=len(_lines(Path(os.environ[ROWS]))), **found)
        if not _device_answers():
            # a context that met an illegal access answers nothing any more: the rest needs a new
            # process
            return 1
    return 0


def _device_answers() -> bool:
    """Asked after each entry: one that makes a row of every error ends as if all were well."""
    torch = sys.modules.get("torch")
    try:
        return (
            torch is None
            or not torch.cuda.is_available()
            or bool((torch.zeros(1, device="cuda") == 0).item())
        )
    except RuntimeError:
        return False


def _say(path: str, **values) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(values) + "\n")


# --- the process that watches the clock -----------------------------------------------------------


class Slot:
    """The part's jobs, its three files, and how many seconds are left."""

    def __init__(self, part: int, jobs: list[Job], out: Path, seconds: float):
        self.name, self.jobs, self.end = f"slot{part}", jobs, time.monotonic() + seconds
        out.mkdir(parents=True, exist_ok=True)
        self.rows, self.log, self.pack = (
            out / f"{self.name}.{kind}" for kind in ("jsonl", "log", "tar.gz")
        )
        for path in (self.rows, self.log, self.pack):
            path.unlink(missing_ok=True)
        self.rows.touch()
        self.seen, self.failed, self.began = 0, [], time.monotonic()

    def left(self) -> float:
        return self.end - time.monotonic()

    def print(self, *words) -> None:
        line = f"[{time.monotonic() - self.began:4.0f} s] " + " ".join(map(str, words))
        print(line, flush=True)
        with (
            contextlib.suppress(OSError),
            self.log.open("a", encoding="utf-8") as file,
        ):  # a full disk ends no measurement
            file.write(line + "\n")

    def run(self) -> int:
        with tempfile.TemporaryDirectory() as scratch:
            work = Path(scratch) / "work"
            work.mkdir()
            numbers = list(range(len(self.jobs)))
            while numbers:
                # Neighbours at tiny size share a process; every other entry has one of its own.
                count = 1
                while (
                    self.jobs[numbers[0]].small
                    and count < len(numbers)
                    and self.jobs[numbers[count]].small
                ):
                    count += 1
                done = self._together(numbers[:count], Path(scratch), work)
                numbers = numbers[max(1, done) :]
        self.print(
            f"{self.name}: {len(self.jobs) - len(self.failed)} of {len(self.jobs)} entries went "
            "well;",
            *self.failed,
        )
        return 1 if self.failed else 0

    def _together(self, numbers: list[int], scratch: Path, work: Path) -> int:
        """Runs these jobs in one process until it ends, or one takes too long; returns how many are
        settled.
        """
        job = self.jobs[numbers[0]]
        if self.left() < (job.seconds + GRACE if job.spare else 15):
            for number in numbers:
                self._settle(
                    number, {"trace": ["not started: the time of the slot was over"]}, 0, None
                )
            return len(numbers)
        orders, said = scratch / "orders.json", scratch / "said.jsonl"
        said.unlink(missing_ok=True)
        jobs = []
        for number in numbers:
            job, folder = self.jobs[number], work / f"{number:02d}_{self.jobs[number].entry}"
            words = [word.format(work=work) for word in job.arguments.split()]
            words += [
                "--out",
                str(folder),
                "--seconds",
                str(min(job.seconds, max(1, int(self.left() - GRACE)))),
            ]
            jobs.append((number, str(FOLDER / f"{job.entry}.py"), words))
        orders.write_text(json.dumps({"jobs": jobs, "said": str(said)}))
        environment = {**os.environ, ROWS: str(self.rows), "PYTHONUNBUFFERED": "1"}
        # A group to be killed by, and no session of its own: who ends this process may spare those.
        with self.log.open("a", encoding="utf-8") as log:
            worker = subprocess.Popen(
                [sys.executable, __file__, "--worker", str(orders)], stdout=log, stderr=log,
                env=environment,
                preexec_fn=os.setpgrp,
            )  # fmt: skip
        settled, started, now = 0, time.monotonic(), None
        try:
            while settled < len(numbers):
                code = worker.poll()
                for line in _lines(said):
                    number = line["number"]
                    if "began" in line and (now is None or number > now):
                        started, now = time.monotonic(), number
                    if "code" in line and number == numbers[settled]:
                        self._settle(number, line, time.monotonic() - started, work)
                        settled, started = settled + 1, time.monotonic()
                        if settled == len(numbers):
                            break
                else:
                    over = time.monotonic() - started - self.jobs[numbers[settled]].seconds - GRACE
                    if code is not None and settled and now != numbers[settled]:
                        # it stopped after the last entry it settled: the next one has not begun
                        return settled
                    if code is not None:
                        why = f"the process ended with code {code}"
                    elif over > 0 or self.left() < 3:
                        why = (
                            "stopped: its time was over"
                            if over > 0
                            else "stopped: the time of the slot was over"
                        )
                    else:
                        time.sleep(0.1)
                        continue
                    self._settle(
                        numbers[settled], {"trace": [why]}, time.monotonic() - started, work
                    )
                    return settled + 1
        finally:
            _end(worker)
        return settled

    def _settle(self, number: int, result: dict, seconds: float, work: Path | None) -> None:
        """Says what an entry found, and packs its files."""
        job = self.jobs[number]
        lines = _lines(self.rows)[: result.get("rows")]
        fresh, self.seen = lines[self.seen :], len(lines)
        bad = [r for r in fresh if r.get("error") or r.get("passed") is False]
        missing = [f"{r['left_out']}: {r['why']}" for r in fresh if "left_out" in r]
        # A rival that cannot run, and a length that does not fit, are results; anything else that
        # fails is ours.
        ours = [
            r
            for r in bad
            if r.get("impl", "hfpatch") == "hfpatch" and r.get("error") != "out of memory"
        ]
        wrong = result.get("trace") or result.get("code") or ours
        words = f"{job.entry} {job.arguments}".strip()
        counted = f"{len(fresh) - len(missing)} rows in {seconds:.0f} s"
        verdict = "FAILED" if wrong else "ok    " if len(fresh) > len(missing) else "EMPTY "
        self.print(verdict, f"{words}: {counted}" + (f", {len(bad)} bad" if bad else ""))
        if wrong:
            self.failed.append(f"FAILED {words};")
        for line in result.get("trace") or []:
            self.print("    ", line[:300])
        for row in bad[:3]:
            self.print("     bad:", " ".join(f"{k}={row[k]}" for k in _telling(row))[:400])
        if not job.small:
            for line in missing[:4]:
                self.print("     left out:", line[:200])
        if work is None:
            return
        folder = work / f"{number:02d}_{job.entry}"
        for row in _table(folder)[:SHOWN] if job.show else []:
            shown = {k: row[k] for k in job.show.split() if row.get(k)}
            self.print("     ", " ".join(f"{k}={v}" for k, v in shown.items()))
        self._pack(work)

    def _pack(self, work: Path) -> None:
        """All entries' files so far, in place of the last pack at once: a run cut off leaves a
        whole one. Files come back up to FILE_BYTES each: what is too much for the pack stays out,
        and the end of a log that is too long.
        """
        made, room = io.BytesIO(), FILE_BYTES - (1 << 20)  # a MiB for the archive's own blocks

        def plain_file(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
            nonlocal room
            if not info.isdir() and info.size >= min(room, 4 << 20):
                return None
            room -= info.size
            return info

        with tarfile.open(fileobj=made, mode="w:gz") as tar:
            tar.add(work, arcname=self.name, filter=plain_file)
        with contextlib.suppress(OSError):
            if self.log.stat().st_size > FILE_BYTES - (1 << 20):
                os.truncate(self.log, FILE_BYTES - (1 << 20))
        fresh = self.pack.with_suffix(".new")
        try:
            fresh.write_bytes(made.getvalue())
            fresh.replace(self.pack)
        except OSError as error:
            self.print("     not packed:", error)


def _end(worker: subprocess.Popen) -> None:
    """Ends an entry and the processes it started, and waits until they are gone: the next one wants
    the memory that they pinned.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()
    until = time.monotonic() + 15
    while time.monotonic() < until:
        try:
            os.killpg(worker.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)


def _telling(row: dict) -> list[str]:
    stamps = (
        "device",
        "commit",
        "date",
        "command",
        "versions",
        "copy_gb_s",
        "matmul_tflop_s",
        "entry",
    )
    told = [key for key, value in row.items() if key not in stamps and value not in (None, "")]
    return sorted(told, key=lambda key: key not in ("error", "at"))  # first: a line is cut


def _lines(path: Path) -> list[dict]:
    """The whole lines of a file that another process appends to."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _table(folder: Path) -> list[dict]:
    return [
        row
        for path in sorted(folder.glob("*.csv"))
        for row in csv.DictReader(path.open(encoding="utf-8"))
    ]


def main(argv=None) -> int:
    if (argv or sys.argv[1:])[:1] == ["--worker"]:
        return work(Path((argv or sys.argv[1:])[1]))
    made = argparse.ArgumentParser(prog="slot", description=__doc__.splitlines()[0])
    made.add_argument("part", type=int, choices=sorted(PARTS))
    made.add_argument("--out", help="folder for the three files (default: $OUT or runs/gpu/slotN)")
    made.add_argument(
        "--small", action="store_true", help="every entry at tiny size, also on a CPU"
    )
    made.add_argument(
        "--host-gib",
        type=float,
        help="host memory to plan with, where the machine's figure grows with use",
    )
    made.add_argument(
        "--seconds", type=float, default=525, help="the whole slot ends by itself after this long"
    )
    args = made.parse_args(argv)
    out = (
        args.out
        or os.environ.get("OUT")
        or str(FOLDER.parents[1] / "runs" / "gpu" / f"slot{args.part}")
    )
    jobs = PARTS[args.part]
    if args.small:
        # Without sizes an entry is one job; the plan still reads what this slot measured.
        shown = {(job.entry, _without_sizes(job.arguments)): job.show for job in jobs}
        jobs = [Job(entry, words, 60, show) for (entry, words), show in shown.items()]
    if args.host_gib:
        os.environ["HFPATCH_HOST_MEMORY"] = str(int(args.host_gib * (1 << 30)))
    # who ends this process ends its entry too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    return Slot(args.part, jobs, Path(out), args.seconds).run()


def _without_sizes(arguments: str) -> str:
    """Results and presets stay: another family is another path."""
    if "{work}" in arguments:
        return arguments
    words = arguments.split()
    return " ".join(
        ["--small", *(words[words.index("--model") :][:2] if "--model" in words else [])]
    )


if __name__ == "__main__":
    sys.exit(main())
