"""One rule for unknown modules: a layer that holds one runs whole, and the report says so.

A module is known if its class and the code that it runs belong to the layer's own package
(transformers, or a model's own files), or to a library in `LIBRARIES`. Any other may mix tokens,
count its calls or keep its inputs. A layer that runs whole calls it as transformers' own
checkpointing does. The user's hooks inside a layer have the same effect (condition.py).

This file checks whose code a module runs; places.py checks whether the small instance had such a
module in that place. Either one makes the layer run whole.
"""

import copy
from functools import cache
from pathlib import PurePath

import torch
from torch import nn

from hfpatch.compat import GONE, MADE_FROM, forward_in, modules_in
from hfpatch.context.classes import LIBRARIES, LINEAR, home_of, other_forward, package_of, whose
from hfpatch.parts.quantised import is_quantised

_DECLARED: set[type] = set()


def token_wise(kind: type[nn.Module]) -> type[nn.Module]:
    """Declares that a module class computes each token by itself, so that layers which hold one may
    run tile by tile. Can be used as a decorator.

    A tile is a part of each row, so the forward must not look at other tokens, at a token's place
    in its input, or at the number of tokens. It runs again in backward, once per tile, so it must
    not count its calls or keep its inputs. Declare the class before `apply`. A copy of the module
    is tried on a few tokens if the width of its weight fits; it is not tiled if its result for all
    together differs from that for each alone.

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
            f"hfpatch: expected a class of torch.nn.Module to be token-wise, {kind!r} came; pass "
            "the class, not an instance."
        )
    _DECLARED.add(kind)
    return kind


def is_token_wise(kind: type) -> bool:
    """Whether a class was declared token-wise."""
    return kind in _DECLARED


def stranger_in(layer: nn.Module) -> str | None:
    """The module in a layer that makes it run whole, and why; None if all are known."""
    home = package_of(layer)
    # Names are made only for a reason to print: a layer of many experts has thousands of modules.
    if all(_why_strange(module, home) is None for module in modules_in(layer)[1:]):
        return None
    reasons = (
        (name, _why_strange(module, home))
        for name, module in layer.named_modules()
        if module is not layer
    )
    return next(f"{name} {reason}" for name, reason in reasons if reason)


def _mixes(module: nn.Module) -> bool:
    """Whether a declared module's result for tokens together differs from that for each alone;
    False if it cannot be tried.
    """
    weight = next(
        (p for p in module.parameters() if p.dim() and p.is_floating_point() and not p.is_meta),
        None,
    )
    if weight is None:
        return False
    try:
        with (
            torch.random.fork_rng([weight.device] if weight.device.type == "cuda" else []),
            torch.no_grad(),
        ):
            run, x = copy.deepcopy(module).eval(), torch.randn(1, 4, weight.shape[-1]).to(weight)
            together, alone = run(x), torch.cat([run(x[:, i : i + 1]) for i in range(4)], 1)
    except Exception:  # of another width, sharded, on two devices
        return False
    return bool((together - alone).norm() > torch.finfo(weight.dtype).eps ** 0.5 * alone.norm())


def _why_strange(module: nn.Module, home: str) -> str | None:
    forward = forward_in(module.__dict__) if other_forward(module) else GONE
    if forward is not GONE and not _is_known(forward, home):
        return f"has a forward of {whose(forward)}'s"
    kind = MADE_FROM[type(module)]
    if kind in _DECLARED and _mixes(module):
        return f"is a {kind.__qualname__}, which is declared token-wise and mixes tokens"
    return None if is_quantised(module) else _why_strange_kind(kind, kind.forward, home)


@cache
def _why_strange_kind(kind: type, forward, home: str) -> str | None:
    if kind in _DECLARED or forward is LINEAR:
        return None
    if not _is_known(kind, home):
        return (
            f"is a {kind.__module__}.{kind.__qualname__} (hfpatch.token_wise declares one that "
            "computes each token alone)"
        )
    # A class from torch.jit has no forward.
    return (
        None
        if forward is None or _is_known(forward, home)
        else f"runs a forward of {whose(forward)}'s"
    )


def _is_known(code, home: str) -> bool:
    """Whether a class or a function belongs to the layer's package, to a known library, or to the
    hub's kernels (files in a snapshot, under a new module name each time).
    """
    file = getattr(getattr(getattr(code, "__func__", code), "__code__", None), "co_filename", "")
    return (
        home_of(code) in LIBRARIES or home_of(code) == home or "snapshots" in PurePath(file).parts
    )
