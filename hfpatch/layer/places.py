"""Compares a layer's modules, by name and class, with those of the small instance: its verdict
covers no other modules. (strangers.py checks whose code they run.)
"""

import re

import torch
from torch import nn

from hfpatch.compat import GONE, MADE_FROM, buffers_of, forward_in, modules_of, parameters_of
from hfpatch.context.classes import (
    LIBRARIES,
    LINEAR,
    PROJECTIONS,
    home_of,
    other_forward,
    package_of,
)
from hfpatch.layer.strangers import is_token_wise
from hfpatch.parts.quantised import class_of, is_fake_quantised, is_quantised


def _inside(layer: nn.Module, known=None):
    """(name, class, forward) of the modules in a layer. A module's own submodules follow if its
    class is in `known` (None: any).

    Modules that run their library's code are left out if they replace a Linear (quantised) or are
    adapters, which layer.adapters checks. A Linear with buffers or submodules is listed: it may
    write to them. forward: the one on the instance, GONE without one.
    """
    todo = [(*child, False) for child in modules_of(layer).items()]
    while todo:
        name, module, adapter = todo.pop()
        if module is None:
            continue
        plain = class_of(module)
        kind, package = MADE_FROM[plain], home_of(MADE_FROM[plain])
        forward = forward_in(vars(module)) if other_forward(module) else GONE
        code, under = kind.forward, modules_of(module) if plain is type(module) else {}
        # transformers' tensor parallelism puts a forward on each module whose weights ranks share.
        as_made = forward is GONE or home_of(forward) == "transformers"
        theirs = as_made and code is not None and home_of(code) in (package, *LIBRARIES)
        if is_token_wise(kind):
            continue
        if package == "peft" or adapter:
            if not theirs or package not in LIBRARIES:
                yield name, kind, forward
            for inner, m in under.items():
                base = inner in ("base_layer", "original_module")
                todo.append((name if base else f"{name}.{inner}", m, not base))
        elif not (theirs and (is_quantised(module) or _projects(module, code))):
            yield name, kind, forward
            if known is None or kind in known:
                todo += [(f"{name}.{inner}", m, False) for inner, m in under.items()]


def _projects(module: nn.Module, code) -> bool:
    """Whether a module only replaces a Linear, judged by the code that it runs."""
    if isinstance(module, nn.Linear) and (buffers_of(module) or modules_of(module)):
        return is_fake_quantised(module)
    weight = parameters_of(module).get("weight")
    if (
        isinstance(module, nn.Linear)
        and isinstance(weight, torch.Tensor)
        and not weight.is_floating_point()
    ):
        return True
    known_home = hasattr(module, "in_features") and package_of(module) in PROJECTIONS
    return code is LINEAR or known_home and code is not nn.Linear.forward


_NUMBERS = re.compile(r"\d+")


def places_in(layer: nn.Module) -> frozenset[tuple[str, type]]:
    """(name without numbers, class) of all modules in a layer."""
    return frozenset(
        (_NUMBERS.sub("", name), MADE_FROM[type(m)]) for name, m in layer.named_modules()
    )


def strange(layer: nn.Module, known: frozenset[tuple[str, type]]) -> list[str]:
    """Names of the outermost modules in a layer that are not in `known` (places_in) or run a
    replaced forward.
    """
    found = _inside(layer, {kind for _, kind in known})
    as_made = lambda forward: forward is GONE or home_of(forward) == "transformers"  # noqa: E731
    return sorted(
        n for n, kind, own in found if not as_made(own) or (_NUMBERS.sub("", n), kind) not in known
    )
