"""The fused rotation inside an attention's own forward, for any family whose rotation a probe finds
equal.
"""

import inspect
import types
from functools import cache, partial

import torch
from torch import Tensor, nn

from hfpatch import ops
from hfpatch.context.class_code import as_probed, reached, wrote
from hfpatch.parts.parts import close, with_gradients
from hfpatch.parts.unread import UnreadRotation, is_unread


class FusedRotation:
    """Mixed over an attention's class: its own forward, which rotates q and k in one launch. The
    attention itself stays as it is."""

    def forward(self, *args, **kwargs):
        if torch.compiler.is_compiling() or not as_probed(self._hfpatch_base):
            return super().forward(*args, **kwargs)
        forward = self._hfpatch_base.forward
        # Read in each call: some libraries replace it process-wide.
        theirs = inspect.unwrap(forward).__globals__["apply_rotary_pos_emb"]
        return rotating(forward, theirs)(self, *args, **kwargs)


class _Names(dict):
    """A file's globals with some names replaced. Other names are read from the file each time."""

    def __init__(self, file_globals: dict, own: dict):
        super().__init__(own)
        self.file_globals = file_globals

    def __missing__(self, name):
        return self.file_globals[name]


# of q and k, and of the angles; the last under autocast
_DTYPES = (
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
)


def _rotation_probe(dtype: torch.dtype, of_angles: torch.dtype) -> tuple[Tensor, ...]:
    """(q, k, cos, sin)."""
    make = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    q = make(2, 4, 5, 16).to(dtype)
    k = make(2, 2, 5, 16).to(dtype)
    cos = make(1, 5, 8).repeat(1, 1, 2).to(of_angles)
    return q, k, cos, make(1, 5, 8).repeat(1, 1, 2).to(of_angles)


@cache
def rotation(theirs):
    """Replaces the rotation `theirs`: the fused op where whole heads are rotated, else `theirs`
    itself."""

    def rotate(q, k, cos, sin, *args, **kwargs):
        standard = not args and not kwargs and q.ndim == 4 and cos.ndim == 3
        if not standard or cos.shape[-1] != q.shape[-1]:
            return theirs(q, k, cos, sin, *args, **kwargs)
        if is_unread(q) and is_unread(k):
            return UnreadRotation.apply(q, k, cos, sin)
        return ops.rope(q, k, cos, sin)

    return rotate


@cache
def rotating(forward, theirs):
    """A copy of an attention's forward in which `theirs` is replaced by the fused rotation, under
    the same decorators.

    The forward finds its rotation among the globals of the family's file. Replacing it there would
    change every other model of the family in the process, so the forward's code gets globals of its
    own (_Names).
    """
    inner = getattr(forward, "__wrapped__", None)
    if inner is not None:
        # A decorator's wrapper holds the function that it calls in a cell of its closure, which
        # other models share, so the copy gets a cell of its own.
        cell = types.CellType(rotating(inner, theirs))
        cells = [cell if c.cell_contents is inner else c for c in forward.__closure__]
        return with_globals(forward, forward.__globals__, tuple(cells))
    own = {
        "apply_rotary_pos_emb": rotation(theirs),
        "__builtins__": forward.__globals__["__builtins__"],
    }
    return with_globals(forward, _Names(forward.__globals__, own), forward.__closure__)


def with_globals(function, names: dict, closure):
    """A copy of a function with these globals and this closure."""
    made = types.FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, closure
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def rope_part(attention: nn.Module) -> tuple[type, dict] | str:
    """(fused class, {}) for this attention, or the reason why it keeps its class."""
    forward = inspect.unwrap(type(attention).forward)
    theirs = getattr(forward, "__globals__", {}).get("apply_rotary_pos_emb")
    return _rope_reason(forward, theirs) or (FusedRotation, {})


@cache
def _rope_reason(forward, theirs) -> str | None:
    code = getattr(forward, "__code__", None)
    if code is None or theirs is None or "apply_rotary_pos_emb" not in code.co_names:
        return "no plain apply_rotary_pos_emb in its forward"
    before = reached(theirs)
    for dtype, of_angles in _DTYPES:
        args = _rotation_probe(dtype, of_angles)
        try:
            leaves = [x.requires_grad_() for x in args[:2]]
            wanted = with_gradients(theirs(*args), leaves)
            ours = with_gradients(ops.rope(*args), leaves)
            # Stock rounds two products and their sum; fused rounds once.
            if not all(map(close, ours, wanted, [8] * 4)):
                return "its rotation differs from the fused one"
        except Exception as error:  # a family's own code on a probe may raise anything
            return f"its rotation takes other arguments ({type(error).__name__})"
    return "its rotation writes to more than its output" if wrote(before, theirs) else None
