"""The decisive rows of one GPU in nine minutes, most informative first.

python scripts/gpu/nine.py --out $OUT            the first nine minutes: FIRST
python scripts/gpu/nine.py --parts second        what they leave out: SECOND
python scripts/gpu/nine.py --parts loss step_8k  some parts
python scripts/gpu/nine.py --small               the same code at tiny size, also on a CPU
python scripts/gpu/nine.py --tables nine.jsonl --out profiles/gpu    a CSV a part

Every row is in nine.jsonl as soon as it is known. The parts run in one worker process. If it dies,
a new one goes on with the next part.
"""

import csv
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import common
import correct
import more
import speed

# Name: (seconds that must be left, what runs). Liger comes last: it writes into transformers'
# module, where it stays for the whole process.
FIRST = {
    "machine": (10, correct.machine),
    "on_cpu": (15, correct.on_cpu),
    "gradients": (40, correct.gradients),
    "step_8k": (25, partial(speed.steps, layers=32, tokens=8192, count=5, trace=True)),
    "step_32k": (30, partial(speed.steps, layers=32, tokens=32768, count=4, trace=True)),
    "step_131k_8": (60, partial(speed.steps, layers=8, tokens=131072, count=3, trace=True)),
    "attention": (20, speed.attention),
    "loss": (15, speed.loss),
    "elementwise": (15, speed.elementwise),
    "step_131k_32": (120, partial(speed.steps, layers=32, tokens=131072, count=2, adam=True)),
    "lengths": (40, speed.lengths),
    "least_131k_8": (60, partial(speed.steps, layers=8, tokens=131072, count=2, keep="least")),
    "stock_8k": (20, partial(speed.steps, layers=32, tokens=8192, count=2, impl="stock ckpt")),
    "liger_8k": (15, partial(speed.steps, layers=32, tokens=8192, count=3, impl="liger")),
    "liger_8k_ckpt": (15, partial(speed.steps, layers=32, tokens=8192, count=3, impl="liger ckpt")),
    "liger_32k_ckpt": (25, partial(speed.steps, layers=32, tokens=32768, count=3, impl="liger ckpt")),
}  # fmt: skip
SECOND = {
    "experts": (30, more.experts),
    "qlora": (120, more.qlora),
    "hybrid": (60, more.hybrid),
    "moe": (60, more.moe),
    "lora": (60, more.lora),
    "longest": (150, more.longest),
}
PARTS = FIRST | SECOND
NO_CPU = ("liger", "attention")  # parts that have nothing to run on a CPU


def work(rows: common.Rows, names: list[str]) -> None:
    """Runs parts in this process; raises where the device answers nothing any more."""
    for name in names:
        least, part = PARTS[name]
        rows.add(part=name, begins=True)
        if not rows.args.cuda and name.startswith(NO_CPU):
            continue
        if rows.left() < least and not rows.args.small:
            rows.add(part=name, left_out=f"{rows.left():.0f} s left, {least} needed")
            continue
        try:
            part(rows, name)
        except Exception as error:  # the next part may still work
            rows.add(part=name, failed=True, **common.failure(error))
            if "CUDA error" in str(error):
                raise
        common.clean()
        rows.add(part=name, ends=True)


def tables(path: str, out: str) -> None:
    """Writes OUT/PART.csv for each part of a nine.jsonl, each row with the run's stamp."""
    stamp, *rows = (json.loads(line) for line in open(path, encoding="utf-8"))
    stamp.pop("at")
    Path(out).mkdir(parents=True, exist_ok=True)
    for part in dict.fromkeys(row["part"] for row in rows if "part" in row):
        own = [r for r in rows if r.get("part") == part and not r.keys() & {"begins", "ends"}]
        own = [{k: v for k, v in row.items() if k not in ("part", "at")} for row in own]
        columns = dict.fromkeys(key for row in own for key in row)
        with open(Path(out) / f"{part}.csv", "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [*columns, *stamp])
            writer.writeheader()
            writer.writerows(row | stamp for row in own)


def main(argv=None) -> int:
    parser = common.parser("nine", __doc__, seconds=530)
    parser.add_argument(
        "--parts", nargs="+", default=["first"], choices=["first", "second", *PARTS]
    )
    parser.add_argument("--worker", action="store_true", help="run the parts in this process")
    parser.add_argument("--tables", metavar="FILE", help="write this file's rows as tables")
    if "--tables" in (argv or sys.argv):
        args = parser.parse_args(argv)
        tables(args.tables, args.out)
        return 0
    args = common.parse(parser, argv)
    groups = {"first": list(FIRST), "second": list(SECOND)}
    names = [name for word in args.parts for name in groups.get(word, [word])]
    names.sort(key=lambda name: name.startswith("liger"))  # a stable sort: the others keep theirs
    if args.worker:
        work(common.Rows(args, "nine", stamp=False), names)
        return 0
    rows = common.Rows(args, "nine")
    environment = os.environ | {common.BEGAN: str(rows.began)}
    options = ["--small"] * args.small + ["--seconds", str(args.seconds), "--out", args.out]
    while names:
        command = [sys.executable, __file__, "--worker", *options, "--parts", *names]
        try:
            patience = max(5, rows.left() + 25)
            done = subprocess.run(command, env=environment, timeout=patience).returncode
        except subprocess.TimeoutExpired:
            rows.add(left_out="the rest", why="the time was over")
            break
        if done == 0:
            break
        begun = [row["part"] for row in rows.read() if row.get("begins")]
        rows.add(died=begun[-1] if begun else names[0], code=done)
        names = names[names.index(begun[-1]) + 1 :] if begun else names[1:]
    rows.add(what="end")
    return 0


if __name__ == "__main__":
    sys.exit(main())
