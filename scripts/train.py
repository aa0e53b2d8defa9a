"""Runs `hfpatch train` (hfpatch/cli/train.py), also from a clone that was not installed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hfpatch.cli.train import main

if __name__ == "__main__":
    sys.exit(main())
