"""One rule for unknown modules: a layer that holds one runs whole, and the report says so.

The small instance's verdict covers the modules that it had, by name and class. Of these, one is
known if its class and the code that it runs belong to the layer's own package (transformers, or a
model's own files), or to a library in `LIBRARIES`. Any other may mix tokens, count its calls or
keep its inputs. Adapters and what replaces a Linear are known where they run their library's code
(some adapters have rows of their own in why_whole.py). A layer that runs whole calls its modules as
transformers' own checkpointing does.
"""

import copy
import re
from pathlib import PurePath

import torch
from torch import nn

from hfpatch.compat import (
    GONE,
    MADE_FROM,
    buffers_of,
    forward_in,
    modules_of,
    parameters_of,
    submodule,
)
from hfpatch.context.classes import (
    LIBRARIES,
    LINEAR,
    PROJECTIONS,
    home_of,
    other_forward,
    package_of,
    replaced_forward,
)
from hfpatch.parts.quantised import WRAPPED, class_of, is_fake_quantised, is_quantised

_DECLARED: set[type] = set()
_NUMBERS = re.compile(r"\d+")


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
            f"hfpatch: token_wise takes a class of torch.nn.Module, got {kind!r}. Pass the class, "
            "not an instance."
        )
    _DECLARED.add(kind)
    return kind


def is_token_wise(kind: type) -> bool:
    """Whether a class was declared token-wise."""
    return kind in _DECLARED


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


def _inside(layer: nn.Module, known: set[type]):
    """(name, class, forward) of the modules in a layer. A module's own submodules follow if its
    class is in `known`.

    Modules that run their library's code are left out if they replace a Linear (quantised) or are
    adapters, which why_whole.py checks. A Linear with buffers or submodules is listed: it may
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
        theirs = as_made and home_of(code) in (package, *LIBRARIES)
        if kind in _DECLARED and as_made and not _mixes(module):
            continue
        if package == "peft" or adapter:
            if not theirs or package not in LIBRARIES:
                yield name, kind, forward
            for inner, m in under.items():
                base = inner in WRAPPED
                todo.append((name if base else f"{name}.{inner}", m, not base))
        elif not (theirs and (is_quantised(module) or _projects(module, code))):
            yield name, kind, forward
            if kind in known:
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


def places_in(layer: nn.Module) -> frozenset[tuple[str, type]]:
    """(name without numbers, class) of the modules in a layer that run known code."""
    home = package_of(layer)
    found = ((_NUMBERS.sub("", name), MADE_FROM[type(m)]) for name, m in layer.named_modules())
    runs_known = lambda kind: _is_known(kind, home) and _is_known(kind.forward, home)  # noqa: E731
    return frozenset((n, k) for n, k in found if k.forward is LINEAR or runs_known(k))


def stranger_in(layer: nn.Module, known: frozenset[tuple[str, type]]) -> str | None:
    """The first of the outermost modules in a layer that are not in `known` (places_in) or run a
    replaced forward, and why; None if there is none.
    """
    found = _inside(layer, {kind for _, kind in known})
    as_made = lambda forward: forward is GONE or home_of(forward) == "transformers"  # noqa: E731
    names = [
        n for n, kind, own in found if not as_made(own) or (_NUMBERS.sub("", n), kind) not in known
    ]
    if not names:
        return None
    module = submodule(layer, name := min(names))
    kind = MADE_FROM[type(module)]
    said = replaced_forward(module)
    if said is None and kind in _DECLARED:
        said = f"a {kind.__qualname__}, which is declared token-wise and mixes tokens"
    if said is None:
        said = (
            f"a {kind.__module__}.{kind.__qualname__} that hfpatch does not know "
            "(hfpatch.token_wise declares one that computes each token alone)"
        )
    return f"{name}: {said}"


def _is_known(code, home: str) -> bool:
    """Whether a class or a function belongs to the layer's package, to a known library, or to the
    hub's kernels (files in a snapshot, under a new module name each time).
    """
    file = getattr(getattr(getattr(code, "__func__", code), "__code__", None), "co_filename", "")
    return (
        home_of(code) in LIBRARIES or home_of(code) == home or "snapshots" in PurePath(file).parts
    )
