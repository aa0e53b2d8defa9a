"""transformers' mixers in plain torch, whatever kernels for them are installed."""

import inspect
import sys
import threading
from functools import wraps

from torch import nn

from hfpatch.compat.turns import ForNow

_CHOOSES = (
    "transformers.integrations.hub_kernels"  # whose wrappers run a package's kernel in place of the function below them
)
_here = threading.local()
_stand_ins: dict = {}  # by file and name: (what stood there, its plain form, the contexts that are within)


def run_scans_plainly(model: nn.Module) -> None:
    """Mixers of transformers 5.0 raise on a CPU where their config wants kernels, which is its default."""
    for module in model.modules():
        if hasattr(module, "use_fast_kernels"):
            module.use_fast_kernels = False


class plain_scans(ForNow):
    """Within, this thread's forwards of transformers' mixers run its own code in place of packages' kernels (causal_conv1d,
    mamba_ssm, flash-linear-attention), which take nothing on a CPU, no float64 and no fake tensors. Other threads keep theirs.
    """

    __slots__ = ("before",)

    def __init__(self):
        self.before = getattr(_here, "plainly", False)

    def enter(self):
        for file in [m for name, m in list(sys.modules.items()) if name.startswith("transformers.models.")]:
            for name, value in list(vars(file).items()):
                entry = _stand_ins.get((file, name))
                if entry is None and (plain := _plain_form(value, vars(file))) is not None:
                    entry = value, plain, set()
                if entry is not None:
                    entry[2].add(self)
                    _stand_ins[file, name] = entry
                    setattr(file, name, _either(*entry[:2]))
        _here.plainly = True

    def leave(self):
        _here.plainly = self.before
        for place, (value, _, users) in list(_stand_ins.items()):
            users.discard(self)
            if not users:
                setattr(*place, value)
                _stand_ins.pop(place, None)


def _either(kernel, plain):
    @wraps(plain)
    def run(*args, **kwargs):
        return (plain if getattr(_here, "plainly", False) else kernel)(*args, **kwargs)

    return run


def _plain_form(value, names: dict):
    """The function of a file, whose names these are, that a wrapper which may run a kernel was put around; None for anything else.
    Where `kernels` is installed the wrapper is a module with another inside."""
    if isinstance(value, nn.Module):
        cells = getattr(type(value).forward, "__closure__", None) or ()
        found = (_plain_form(cell.cell_contents, names) for cell in cells)
        return next((plain for plain in found if plain is not None), None)
    if not inspect.isfunction(value) or value.__globals__.get("__name__") != _CHOOSES:
        return None
    plain = inspect.unwrap(value)
    return plain if getattr(plain, "__globals__", None) is names else None
