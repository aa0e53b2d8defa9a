"""Runs `hfpatch train` (hfpatch/cli/train.py), also from a clone that was not installed."""

import sys
from pathlib import Path

# The parent folder has hfpatch. This folder goes: it has a profile.py that cProfile would import
# in place of the standard one.
_HERE = Path(__file__).resolve().parent
sys.path[:] = [str(_HERE.parent), *(p for p in sys.path if Path(p or ".").resolve() != _HERE)]

from hfpatch.cli.train import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
