"""Runs a program on the dry device, with true answers (garbage.py).

program.py -m MODULE ARGS...
program.py SCRIPT ARGS...
"""

import runpy
import sys
import warnings
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import garbage  # noqa: E402

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    garbage.answer_truly()
    sys.argv = sys.argv[1:]
    if sys.argv[0] == "-m":
        sys.argv = sys.argv[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
        runpy.run_path(sys.argv[0], run_name="__main__")
