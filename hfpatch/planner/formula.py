"""The closed forms' old place, kept for one release: `hfpatch.memory.formula`."""

from hfpatch.memory.formula import *  # noqa: F403
