"""The simulator's old place, kept for one release: `python -m hfpatch.simulate`."""

from hfpatch.simulate.simulator import simulate

__all__ = ["simulate"]

if __name__ == "__main__":
    from hfpatch.commands.simulate import main

    raise SystemExit(main())
