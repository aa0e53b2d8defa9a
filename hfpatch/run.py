"""The old place of `hfpatch run`, kept for one release: `python -m hfpatch.run script.py`."""

import sys

from hfpatch.commands.run import main

if __name__ == "__main__":
    sys.exit(main())
