"""transformers' mixers in plain torch, whatever kernels for them are installed."""

import inspect
import sys

from torch import nn

from hfpatch.compat.modules import values_for_now


def plain_scans():
    """A context in which transformers' mixers run its own code in place of packages' kernels
    (causal_conv1d, mamba_ssm, flash-linear-attention), which support no CPU, float64 or fake
    tensors.
    """
    rows = []
    for file, module in list(sys.modules.items()):
        if file.startswith("transformers.models."):
            names = vars(module)
            for name, value in names.items():
                function = _unwrapped(value, names)
                if function is not None:
                    rows.append((names, name, function))
    return values_for_now(rows)


def _unwrapped(value, names: dict):
    """The function of a file that a wrapper, which may run a kernel, was put around; None for
    another value.

    names: the file's globals. The wrappers of hub_kernels run a package's kernel in place of the
    function that they wrap. If `kernels` is installed, the wrapper is a module that holds another
    one.
    """
    if isinstance(value, nn.Module):
        cells = getattr(type(value).forward, "__closure__", None) or ()
        functions = (_unwrapped(cell.cell_contents, names) for cell in cells)
        return next((function for function in functions if function is not None), None)
    wrappers = "transformers.integrations.hub_kernels"
    if not inspect.isfunction(value) or value.__globals__.get("__name__") != wrappers:
        return None
    function = inspect.unwrap(value)
    return function if getattr(function, "__globals__", None) is names else None
