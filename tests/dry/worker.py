"""Runs cases on the dry device, one after the other, in one process.

    worker.py                      a line of JSON with a Case's fields on stdin, lines of JSON out
    worker.py '{"model": "llama-3.1-8b", "rows": [[1, 131072], [1, 131072]]}'     a person reads

The process must have the dry device preloaded (conftest.py, scripts/test.sh).
"""

import dataclasses
import json
import os
import sys
import traceback
import warnings
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import garbage  # noqa: E402
import steps  # noqa: E402
import torch  # noqa: E402

GiB = 2**30
SHORT = 600  # characters of an error that are kept


def rows_of(case: dict):
    """The rows of a case, and at last one that says how it ended."""
    fields = {field.name for field in dataclasses.fields(steps.Case)}
    assert case.keys() <= fields, f"a case has {sorted(fields)}, got {sorted(case)}"
    try:
        yield from steps.run(steps.Case(**case))
        yield {"end": "ok"}
    except Exception as error:
        traceback.print_exc()
        yield {"end": f"{type(error).__name__}: {error}"[:SHORT]}
    finally:
        steps.cleared()


def serve() -> None:
    # Libraries print to stdout: answers go to a copy of it, everything else to stderr.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        for row in rows_of(json.loads(line)):
            print(json.dumps(row), file=answers, flush=True)


def show(case: dict) -> None:
    print(
        f"{torch.cuda.get_device_name()} (dry: kernels compute nothing), torch {torch.__version__}"
    )
    for row in rows_of(case):
        if "report" in row:
            print(row["report"], flush=True)
        elif "end" in row:
            print(row["end"])
        else:
            peak, reserved = row["allocated_peak"] / GiB, row["reserved_peak"] / GiB
            launches = row.get("launches_forward", 0) + row.get("launches_backward", 0)
            link = sum(row["bytes"][kind] for kind in ("h2d", "d2h")) / GiB
            print(
                f"step {row['step']} of {row['shape']}: peak {peak:.2f} GiB ({reserved:.2f} reserved), "
                f"{launches:,} launches, {link:.1f} GiB over the link, host waits {row['waits']}",
                flush=True,
            )


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    garbage.answer_truly()
    if len(sys.argv) > 1:
        show(json.loads(sys.argv[1]))
    else:
        serve()
