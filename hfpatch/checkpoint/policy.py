"""`Checkpointing`'s old place, kept for one release: `hfpatch.Checkpointing`."""

from hfpatch.memory.policy import Checkpointing

__all__ = ["Checkpointing"]
