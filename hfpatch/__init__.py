"""hfpatch: long-context full fine-tuning of Llama on one GPU, by one line in a Hugging Face script.

The names below are loaded on first use, so that `hfpatch plan` answers without importing torch.
"""

import importlib

__version__ = "0.1.0"

_PUBLIC = {
    "apply": "hfpatch.patch",
    "undo": "hfpatch.patch",
    "Report": "hfpatch.patch",
    "plan": "hfpatch.planner.plan",
    "Plan": "hfpatch.planner.plan",
    "profile": "hfpatch.profiling.run",
    "Callback": "hfpatch.training.callback",
    "Checkpointing": "hfpatch.memory.policy",
}

__all__ = [*_PUBLIC, "ops", "__version__"]


def __getattr__(name):
    if name == "ops":
        return importlib.import_module("hfpatch.ops")
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'hfpatch' has no attribute {name!r}")


def __dir__():
    return sorted(__all__)
