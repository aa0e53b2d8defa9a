"""hfpatch: long-context full fine-tuning on one GPU, by one line in a Hugging Face script:
`hfpatch.apply(model)`.

The names below are loaded on first use, so that `hfpatch plan` answers without importing torch.
"""

import importlib
import importlib.metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what completion and type checkers read; _PUBLIC says the same to Python
    from hfpatch import ops as ops
    from hfpatch.budget.policy import Checkpointing as Checkpointing
    from hfpatch.lab.profile.run import profile as profile
    from hfpatch.lab.verify import verify as verify
    from hfpatch.layer.strangers import token_wise as token_wise
    from hfpatch.patch import apply as apply
    from hfpatch.patch import undo as undo
    from hfpatch.planner.plan import plan as plan
    from hfpatch.planner.result import Plan as Plan
    from hfpatch.report import Report as Report
    from hfpatch.trainer.callback import Callback as Callback
    from hfpatch.trainer.dataset import pack as pack

__version__ = "0.1.0"

_PUBLIC = {
    "apply": "hfpatch.patch",
    "undo": "hfpatch.patch",
    "Report": "hfpatch.report",
    "plan": "hfpatch.planner.plan",
    "Plan": "hfpatch.planner.result",
    "profile": "hfpatch.lab.profile.run",
    "Callback": "hfpatch.trainer.callback",
    "pack": "hfpatch.trainer.dataset",
    "Checkpointing": "hfpatch.budget.policy",
    "token_wise": "hfpatch.layer.strangers",
    "verify": "hfpatch.lab.verify",
}
# The oldest versions that work, as in setup.cfg; pip checks them when it installs, but not what
# came later.
OLDEST = {"torch": (2, 11), "transformers": (5, 5)}

__all__ = [
    "Callback", "Checkpointing", "Plan", "Report", "__version__", "apply",
    "ops", "pack", "plan", "profile", "token_wise", "undo", "verify",
]  # fmt: skip


def _refuse_old(packages) -> None:
    for name in packages:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # its import says so, or it was built in place
        if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < OLDEST[name]:
            wanted = ".".join(map(str, OLDEST[name]))
            raise ImportError(
                f"hfpatch: {name} must be {wanted} or newer, got {version}. Run: pip install "
                f"'{name}>={wanted}'."
            )


if not TYPE_CHECKING:  # a checker that sees it takes every misspelt name for a good one

    def __getattr__(name):
        if name == "ops":
            _refuse_old(["torch"])
            return importlib.import_module("hfpatch.ops")
        if name in _PUBLIC:
            if name in ("apply", "Callback", "verify"):
                _refuse_old(OLDEST)
            return getattr(importlib.import_module(_PUBLIC[name]), name)
        raise AttributeError(f"module 'hfpatch' has no attribute {name!r}")


def __dir__():
    return sorted(__all__)
