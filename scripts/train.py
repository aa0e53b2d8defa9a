"""`python scripts/train.py ...` is `hfpatch train ...`, also from a clone that was not installed (hfpatch/commands/train.py)."""

import sys
from pathlib import Path

# This folder has a profile.py, which cProfile must not find in place of the standard one; its parent has hfpatch.
_HERE = Path(__file__).resolve().parent
sys.path[:] = [str(_HERE.parent), *(p for p in sys.path if Path(p or ".").resolve() != _HERE)]

from hfpatch.commands.train import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
