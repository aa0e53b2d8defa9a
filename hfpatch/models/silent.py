"""A layer whose output nobody differentiates: its own forward runs once and is stopped nowhere; what holds weights beside
attention takes the tokens tile by tile.
"""

from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hfpatch.compat import collected_now, collecting, pytree
from hfpatch.models.mixers import standing_in


def nobody_differentiates(layer: nn.Module, *given) -> bool:
    """Whether no gradient comes back to this call of the layer with what is given to it."""
    if not torch.is_grad_enabled():
        return True
    tensors = (x for x in (*pytree().tree_leaves(given), *layer.parameters()) if isinstance(x, Tensor))
    return not any(x.requires_grad for x in tensors)


@contextmanager
def by_tiles(layer: nn.Module, mixing: tuple[str, ...], bounds: list[tuple[int, int]], records: tuple[str, ...] = ()):
    """Within, the layer's children that hold matrices, and none of the modules named in `mixing`, take their input [B, T, D] by
    tiles; those that take or give anything else run as they are. records: what transformers records inside them, by key."""
    inside = {name.partition(".")[0] for name in mixing}
    names = [
        name
        for name, child in layer.named_children()
        if name not in inside and "forward" not in vars(child) and any(p.dim() > 1 for p in child.parameters())
    ]

    def tiled(name, args, kwargs):
        module = layer.get_submodule(name)
        forward = type(module).forward
        leaves, spec = pytree().tree_flatten((args, kwargs))
        given = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        x = leaves[given[0]] if len(given) == 1 else None
        if x is None or x.dim() != 3 or x.shape[1] != bounds[-1][1]:
            return forward(module, *args, **kwargs)
        tiles = []
        for a, b in bounds:
            leaves[given[0]] = x[:, a:b].contiguous()  # experts take a view of it
            cut_args, cut_kwargs = pytree().tree_unflatten(leaves, spec)
            recorded = {key: [] for key in records}
            with collecting(recorded):
                out = forward(module, *cut_args, **cut_kwargs)
            found, made = pytree().tree_flatten((out, recorded))
            if not all(_counts_tokens(part, len(x), b - a) for part in found):
                return forward(module, *args, **kwargs)
            tiles.append(found)
        out, recorded = pytree().tree_unflatten([_joined(parts, len(x), bounds) for parts in zip(*tiles)], made)
        for key, found in recorded.items():
            collected_now()[key] += found
        return out

    with standing_in(layer, names if len(bounds) > 1 else (), tiled):
        yield


def _counts_tokens(x, B: int, t: int) -> bool:
    """Whether this is [B, t, ...] or, over flattened tokens, [B*t, ...]."""
    return isinstance(x, Tensor) and x.dim() > 1 and (x.shape[:2] == (B, t) or x.shape[0] == B * t)


def _joined(parts: tuple, B: int, bounds: list[tuple[int, int]]) -> Tensor:
    """Tiles of either kind over all tokens."""
    # Of one token a row both kinds have B rows: the widest tile tells more.
    x, t = max(((x, b - a) for x, (a, b) in zip(parts, bounds)), key=lambda tile: tile[1])
    flat = x.shape[0] == B * t and (x.dim() == 2 or x.shape[:2] != (B, t))
    return torch.cat([x.unflatten(0, (B, -1)) for x in parts] if flat else parts, 1).flatten(0, int(flat))
