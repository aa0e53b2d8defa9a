"""Closed forms: the bytes, FLOPs and seconds of a training step. Standard library only, so a plan needs no torch."""

from hfpatch.planner.shape import LLAMA_LIKE, GiB, ModelShape, Policy

__all__ = ["LLAMA_LIKE", "GiB", "ModelShape", "Policy"]
