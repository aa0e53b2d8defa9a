"""One rule for unknown modules: a layer that holds one runs untiled, and the report says so.

The small instance's verdict covers the classes of modules that it had. Of these, one is known if its
class and the code that it runs belong to the layer's own package (transformers, or a model's own
files), or to a library in `LIBRARIES`. Any other may mix tokens, count its calls or keep its inputs.
Adapters and what replaces a Linear are known where they run their library's code (some adapters have
rows of their own in why_whole.py). A layer that runs untiled calls its modules as transformers' own
checkpointing does.
"""

from pathlib import PurePath

import torch
from torch import nn

from hfpatch.compat import MADE_FROM, buffers_of, modules_of, parameters_of
from hfpatch.context.classes import (
    LIBRARIES,
    LINEAR,
    PROJECTIONS,
    home_of,
    other_forward,
    package_of,
    replaced_forward,
)
from hfpatch.parts.quantised import WRAPPED, class_of, dense_of, is_fake_quantised

TOKEN_WISE: set[type] = set()  # the declared classes


def token_wise(kind: type[nn.Module]) -> type[nn.Module]:
    """Declares that a module class computes each token by itself, so that layers which hold one may
    run tile by tile. Can be used as a decorator.

    A tile is a part of each row, so the forward must not look at other tokens, at a token's place
    in its input, or at the number of tokens. It runs again in backward, once per tile, so it must
    not count its calls or keep its inputs. Nothing checks that. Declare the class before `apply`.

    Args:
        kind: the class itself; derived classes need their own declaration.

    Returns:
        The same class.

    Raises:
        ValueError: for anything but a class of modules.

    Example:
        @hfpatch.token_wise
        class MyNorm(torch.nn.Module):
            def forward(self, x):
                return x / x.norm(dim=-1, keepdim=True)
    """
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise ValueError(
            f"hfpatch: token_wise takes a class of torch.nn.Module, got {kind!r}. Pass the class, "
            "not an instance."
        )
    TOKEN_WISE.add(kind)
    return kind


def stranger_in(layer: nn.Module, kinds: frozenset[type]) -> str | None:
    """The name of an unknown module in a layer, and why it is unknown; None if there is none.

    kinds: the classes in the small instance (kinds_in). What is in an unknown module, or in one that
    replaces a Linear, is not looked at.
    """
    todo = [(name, module, False) for name, module in modules_of(layer).items()]
    while todo:
        name, module, in_adapter = todo.pop()
        if module is None:
            continue
        kind = MADE_FROM[class_of(module)]
        package = home_of(kind)
        # Whether the class still has a forward of its own package or of a library.
        as_made = home_of(kind.forward) in (package, *LIBRARIES)
        in_adapter = in_adapter or package == "peft"
        # transformers' tensor parallelism puts a forward on each module whose weights ranks share.
        if other_forward(module) and home_of(vars(module)["forward"]) != "transformers":
            return f"{name}: {replaced_forward(module)}"
        if kind in TOKEN_WISE:
            continue
        # A Linear, or what replaces one.
        if as_made and not in_adapter and (dense_of(module) or _projects(module, kind)):
            continue
        is_known = kind in kinds
        if in_adapter:
            is_known = as_made and package in LIBRARIES
        if not is_known:
            return (
                f"{name}: a {kind.__module__}.{kind.__qualname__} that hfpatch does not know "
                "(hfpatch.token_wise declares one that computes each token alone)"
            )
        # Experts in 4 bits: bitsandbytes' parametrizations are all that is new inside.
        if kind is not MADE_FROM[type(module)]:
            continue
        for inner, m in modules_of(module).items():
            base = in_adapter and inner in WRAPPED  # what PEFT wraps has its wrapper's name
            todo.append((name if base else f"{name}.{inner}", m, in_adapter and not base))
    return None


def _projects(module: nn.Module, kind: type) -> bool:
    """Whether a module only replaces a Linear, judged by the code that it runs."""
    weight = parameters_of(module).get("weight")
    if isinstance(module, nn.Linear):
        if buffers_of(module) or modules_of(module):  # it may write to them
            return is_fake_quantised(module)
        if isinstance(weight, torch.Tensor) and not weight.is_floating_point():
            return True
    if kind.forward is LINEAR:
        return True
    replaces = hasattr(module, "in_features") and home_of(kind) in PROJECTIONS
    return replaces and kind.forward is not nn.Linear.forward


def kinds_in(layer: nn.Module) -> frozenset[type]:
    """The classes of the modules in a layer that run known code."""
    home = package_of(layer)
    found = set()
    for kind in {MADE_FROM[type(m)] for m in layer.modules()}:
        if kind.forward is LINEAR or _is_known(kind, home) and _is_known(kind.forward, home):
            found.add(kind)
    return frozenset(found)


def _is_known(code, home: str) -> bool:
    """Whether a class or a function belongs to the layer's package, to a known library, or to the
    hub's kernels (files in a snapshot, under a new module name each time).
    """
    file = getattr(getattr(getattr(code, "__func__", code), "__code__", None), "co_filename", "")
    return home_of(code) in (home, *LIBRARIES) or "snapshots" in PurePath(file).parts
