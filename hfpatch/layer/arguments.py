"""The arguments of a layer besides its hidden states, cut along tokens."""

from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from hfpatch.compat import pytree
from hfpatch.layer.mixers import Mixer


def token_axis(x, B: int, T: int) -> int | None:
    """The axis of an argument that counts tokens: [B, T, ...] first, then [..., T, E], then [...,
    T].
    """
    axes = [i for i, n in enumerate(x.shape) if n == T] if isinstance(x, Tensor) else []
    if 1 in axes and x.shape[0] in (1, B):
        return 1
    return next((i for i in axes if i >= x.dim() - 2), next(iter(axes), None))


# What transformers hands to the layers of every stack, or lets through to them.
_USUAL = frozenset(
    "attention_mask position_ids past_key_values past_key_value use_cache cache_position "
    "position_embeddings output_attentions output_hidden_states output_router_logits return_dict "
    "is_causal seq_idx cu_seq_lens_q cu_seq_lens_k max_length_q max_length_k num_items_in_batch "
    "shift_labels ignore_index shared_kv_states".split()
)


def axes_of(args, kwargs, B: int, T: int) -> dict[str, tuple]:
    """Unusual argument -> the token axes of its tensors. Those that are None or False are left out;
    those without a name have their position's."""
    both = {str(name): x for name, x in {**dict(enumerate(args)), **kwargs}.items()}
    given = (n for n in both.keys() - _USUAL if both[n] is not None and both[n] is not False)
    return {n: tuple(token_axis(x, B, T) for x in pytree.tree_leaves(both[n])) for n in given}


def other_argument(traits, args, kwargs, B: int, T: int) -> str | None:
    """The name of an argument that a user's own layer did not get in its small instance, or not
    along the same axes: one of them may be as long as a row by chance."""
    if traits.arguments is None:
        return None
    given = axes_of(args, kwargs, B, T)
    return min((n for n in given if given[n] != traits.arguments.get(n)), default=None)


@dataclass(eq=False)
class Arguments:
    """Positional and keyword arguments besides the hidden states [B, T, D]; `tile` cuts those with
    a token axis.
    """

    args: tuple
    kwargs: dict
    B: int
    T: int
    _gradients: list | None = None  # sums of the wanted gradients, during a backward
    # of the last tile in a backward: (a part of these sums, the leaf in place of the argument)
    stand_ins: list = field(default_factory=list)

    def __post_init__(self):
        self.leaves, self.spec = pytree.tree_flatten((self.args, self.kwargs))
        self.cut = self.leaves  # of the last tile

    @cached_property
    def axes(self) -> list[int | None]:
        return [token_axis(x, self.B, self.T) for x in self.leaves]

    def tile(self, a: int, b: int):
        """(args, kwargs) of tokens a to b."""

        def part(x, axis):
            return x if axis is None else x.narrow(axis, a, b - a)

        self.cut = list(self.leaves)
        if (a, b) != (0, self.T):
            self.cut = list(map(part, self.leaves, self.axes))
        if self._gradients:
            self.stand_ins = []
            for i, whole in zip(self.wanted, self._gradients):
                self.cut[i] = self.cut[i].detach().requires_grad_()
                self.stand_ins.append((part(whole, self.axes[i]), self.cut[i]))
        return pytree.tree_unflatten(self.cut, self.spec)

    @cached_property
    def wanted(self) -> dict[int, Tensor]:
        """Index -> leaf, of the leaves that require a gradient."""
        return {
            i: x for i, x in enumerate(self.leaves) if isinstance(x, Tensor) and x.requires_grad
        }

    @contextmanager
    def gradients(self):
        """Context that yields tensors in which backward through tiles sums the gradients of
        `wanted`.
        """
        found = self._gradients = []
        for i, x in self.wanted.items():
            dtype = x.dtype  # a token's gradient comes from one tile
            if self.axes[i] is None:  # a sum over tiles
                dtype = torch.promote_types(dtype, torch.float32)
            found.append(torch.zeros_like(x, dtype=dtype))
        try:
            yield found
        finally:
            self._gradients = None
            self.stand_ins = []
        found[:] = [sums.to(x.dtype) for sums, x in zip(found, self.wanted.values())]

    def mixer(self, module: nn.Module, args, kwargs, configs, batch) -> tuple[Mixer, Tensor]:
        """A mixer's call for whole rows, and its input, from its arguments in the last tile.

        ValueError if an argument is neither the mixer's input nor an unchanged argument of the
        layer that requires no gradient.
        """
        leaves, spec = pytree.tree_flatten((args, kwargs))
        places = {id(x): i for i, x in enumerate(self.cut) if isinstance(x, Tensor)}
        new = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and id(x) not in places]
        wanted = {id(self.cut[i]) for i in self.wanted}
        if len(new) != 1 or any(id(x) in wanted for x in leaves):
            raise ValueError(
                f"hfpatch: a {type(module).__name__} must take one tensor made in its layer and "
                f"arguments that want no gradient, got {len(new)} such tensors: backward would miss "
                "the others. Call hfpatch.apply(model, checkpointing='off')."
            )
        given = [places.get(id(x)) if isinstance(x, Tensor) else None for x in leaves]
        whole = [x if i is None else self.leaves[i] for x, i in zip(leaves, given)]
        axes = [None if i is None else self.axes[i] for i in given]
        # a tile's input, which would live until backward; the caller passes whole rows
        whole[new[0]] = None
        given = (spec, new[0], axes, self.B, configs, batch, batch.document_bounds)
        return Mixer(module, whole, *given), leaves[new[0]]
