"""The simulator's old place, kept for one release: `python -m hfpatch.simulate`."""

from hfpatch.simulate.simulator import simulate

__all__ = ["simulate"]

if __name__ == "__main__":
    import sys

    from hfpatch.commands.main import main

    raise SystemExit(main(["simulate", *sys.argv[1:]]))
