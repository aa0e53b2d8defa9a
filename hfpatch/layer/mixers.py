"""Mixers: modules that mix tokens without an attention call that hfpatch can intercept.

Examples are delta net, Mamba, short convolution, attention written out in plain code, and attention
with its own mask. A mixer runs between `before` and `after`, like attention. `before` records its
input, `after` receives a tile of its output, and backward runs the mixer again. A mixer runs in tiles
through time (time_tiles.py) if decoder/time_probe.py proved that it can, else over whole rows.
Packed documents run one by one, which isolates them under any kernel, with the memory of the
longest. A probe finds mixers by changing one token and comparing the outputs of the others.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hfpatch.compat import pytree
from hfpatch.context.classes import forwards_for_now
from hfpatch.context.current import our_attention
from hfpatch.context.masks import Batch, Mask
from hfpatch.layer.graph_bytes import tile_graph
from hfpatch.layer.weight_gradients import walk

# Arguments that describe packed documents. A mixer gets one document at a time instead.
_PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


def standing_in(layer: nn.Module, mixers: dict[str, int], answer):
    """A context in which these modules of the layer return answer(name, args, kwargs).

    mixers: name -> the number of values that the module returns after hidden states. With any, it
    returns a tuple: the answer, then so many None.
    """

    def answering(name, behind):
        if behind:
            return lambda *args, **kwargs: (answer(name, args, kwargs), *(None,) * behind)
        return lambda *args, **kwargs: answer(name, args, kwargs)

    return forwards_for_now([(layer.get_submodule(n), answering(n, k)) for n, k in mixers.items()])


@dataclass
class Mixer:
    """One call of a mixer over whole rows.

    Attributes:
        leaves, spec: the flattened arguments.
        at: the index of the leaf that is the input [B, T, D].
        axes: the token axis of each leaf, or None.
        B: rows of the batch.
        configs, batch: as for context.current.our_attention.
        bounds: where documents start and end in the flattened B*T tokens; None if every row is one
            document.
        gradients: the layer.weight_gradients.WeightGradients that a backward adds to.
        time: the layer.time_tiles.TimeTiles if the mixer runs in tiles through time, else None.
    """

    module: nn.Module
    leaves: list
    spec: object
    at: int
    axes: list
    B: int
    configs: tuple
    batch: Batch | None
    bounds: tuple | None = None
    time: "object | None" = None
    gradients: list | tuple = ()

    def documents(self, T: int) -> list[tuple[slice, int, int]]:
        """(rows, first, last) of each document."""
        if self.bounds is None:
            return [(slice(None), 0, T)]
        return [
            (slice(a // T, a // T + 1), a % T, (b - 1) % T + 1)
            for a, b in zip(self.bounds, self.bounds[1:])
        ]

    def several(self, T: int) -> bool:
        """Whether a weight gets several gradients: one a document or tile."""
        return self.bounds is not None or self._in_time(T)

    def _in_time(self, T: int) -> bool:
        return self.time is not None and self.time.is_cut(self, T)

    def call(self, x: Tensor, rows: slice, a: int, b: int, states=None) -> Tensor:
        """The mixer's output for tokens a to b of `rows`.

        Args:
            x: hidden states of these tokens.
            rows, a, b: the document or tile.
            states: the compat.States of a tile; None where the mixer does not run in tiles.
        """
        leaves = list(self.leaves)
        batch = self.batch
        parted = self.bounds is not None or states is not None
        if parted:
            start = a if states is None else self.time.place(a)
            place = rows, start, start + b - a
            batch = batch.part(*place)
            for i, axis in enumerate(self.axes):
                if isinstance(leaves[i], Mask):
                    leaves[i] = leaves[i].part(*place)
                elif axis is not None:
                    part = leaves[i].narrow(axis, a, b - a)
                    leaves[i] = part[rows] if axis and part.shape[0] == self.B > 1 else part
        leaves[self.at] = x
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        if parted:
            kwargs = {name: value for name, value in kwargs.items() if name not in _PACKING}
        if states is not None and self.time.argument:
            kwargs[self.time.argument] = states
        with our_attention(self.configs, batch):  # the mixer may call attention
            out = self._run(args, kwargs)
        return out[0] if isinstance(out, tuple) else out

    def _run(self, args: tuple, kwargs: dict):
        return self.module(*args, **kwargs)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """The output [B, T, D]."""
        T = x_BTD.shape[1]
        if self._in_time(T):
            return self.time.forward(self, x_BTD)
        outs = [self.call(x_BTD[rows, a:b], rows, a, b) for rows, a, b in self.documents(T)]
        if self.bounds is None:
            return outs[0]
        return torch.cat(outs, 1).view(-1, T, *outs[0].shape[2:])

    def backward(self, x_BTD: Tensor, dout_BTD: Tensor, into: Tensor) -> None:
        """Writes the input's gradient to `into`, which may be x_BTD. The weights' gradients are added
        to those in `gradients`, a document at a time.
        """
        T = x_BTD.shape[1]
        if self._in_time(T):
            return self.time.backward(self, x_BTD, dout_BTD, into)
        for rows, a, b in self.documents(T):
            x = x_BTD[rows, a:b].detach()
            built = tile_graph("mixer", x)
            if self.bounds is not None:
                # `into` may be x_BTD, and other documents' gradients are written to it.
                x = x.clone()
            with torch.enable_grad():
                out = self.call(x.requires_grad_(), rows, a, b)
            built([out])
            (into[rows, a:b],) = walk(self.gradients, [out], [dout_BTD[rows, a:b]], [x])


def documents_one_by_one(layer: nn.Module, mixers: dict[str, int], arguments, configs, batch):
    """A context in which the mixers of a layer that runs untiled take the batch's documents one by
    one."""

    own = {name: layer.get_submodule(name).forward for name in mixers}

    def one_by_one(name, args, kwargs):
        module = layer.get_submodule(name)
        mixer, x = arguments.mixer(module, args, kwargs, configs, batch)
        with forwards_for_now([(module, own[name])]):
            return mixer.forward(x)

    return standing_in(layer, mixers, one_by_one)


# --- the search for mixers ------------------------------------------------------------------------

TOKEN = 5  # the token that the probe changes


def _moved(ours, theirs, tokens: int) -> bool:
    """Whether outputs differ beyond rounding at any token but the changed one."""
    for a, b in zip(pytree.tree_leaves(ours), pytree.tree_leaves(theirs)):
        if not isinstance(a, Tensor) or not a.is_floating_point():
            continue
        if a.shape != b.shape:
            return True
        if tokens in a.shape:
            axis = a.shape.index(tokens)
            others = torch.arange(tokens, device=a.device) != TOKEN
            a = a.movedim(axis, 0)[others]
            b = b.movedim(axis, 0)[others]
        if not (a - b).norm() <= torch.finfo(a.dtype).eps ** 0.5 * b.norm():
            return True
    return False


def _mixes(run, args, kwargs, tokens: int, fixed: set) -> bool:
    """Whether a change of one token in the arguments changes run()'s output at other tokens. fixed:
    ids of tensors that stay unchanged.
    """

    def changed(x):
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        if id(x) in fixed or tokens not in x.shape:
            return x
        x = x.clone()
        x.select(x.shape.index(tokens), TOKEN).normal_()
        return x

    other_args, other_kwargs = pytree.tree_map(changed, (args, kwargs))
    return _moved(run(*other_args, **other_kwargs), run(*args, **kwargs), tokens)


def calls_in(layer: nn.Module, run, x_BTD: Tensor) -> dict[str, list[tuple]]:
    """Module name -> (args, kwargs, output) of each of its calls during run(x), for modules inside
    the layer.
    """
    calls: dict[str, list[tuple]] = {}
    names = {id(m): n for n, m in layer.named_modules() if n}

    def note(module, args, kwargs, out):
        calls.setdefault(names[id(module)], []).append((args, kwargs, out))

    handles = [
        m.register_forward_hook(note, with_kwargs=True) for n, m in layer.named_modules() if n
    ]
    try:
        run(x_BTD)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def find_mixers(layer: nn.Module, run, x_BTD: Tensor, fixed: set) -> dict[str, int] | None:
    """Finds the mixers of a layer: the smallest modules that, if answered with constants, leave a
    layer that mixes no tokens.

    Args:
        layer: the layer.
        run: runs the layer on x. It answers attention calls that are not part of a mixer.
        x_BTD: one row.
        fixed: ids of the layer's other arguments.

    Returns:
        name -> the number of unread values that the mixer returns after hidden states (Lightning
        attention returns its state). None if there are no such modules. Each must be called once,
        on [B, T, D], and return the same shape.
    """
    # [Step 1] See whether the layer mixes tokens at all.
    tokens = x_BTD.shape[1]
    if not _mixes(run, (x_BTD,), {}, tokens, fixed):
        return {}
    # [Step 2] Record the calls of all modules. The search runs modules on their arguments, and
    # answers with their outputs.
    calls = calls_in(layer, run, x_BTD)

    def constant(name, args, kwargs):
        out = calls[name][0][2]
        return out[0] if isinstance(out, tuple) and len(out) > 1 else out

    def behind(name: str) -> int | None:
        """How many values this module returns after hidden states; None if it cannot be a mixer,
        which is called once and maps hidden states of any width to the same shape.
        """
        args, kwargs, out = calls[name][0]
        x = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        out, *rest = out if isinstance(out, tuple) else (out,)
        if len(calls[name]) > 1 or x is None or not isinstance(out, Tensor):
            return None
        fits = out.dim() == 3 and out.shape == x.shape and x.shape[:2] == x_BTD.shape[:2]
        return len(rest) if fits else None

    def within(prefix: str) -> dict[str, int | None]:
        """The mixers among the modules whose names begin so."""
        found: dict[str, int | None] = {}
        inside = [name for name in calls if name.startswith(prefix)]
        for name in inside:
            if any(name.startswith(f"{outer}.") for outer in inside):
                continue
            module = layer.get_submodule(name)
            args, kwargs, _ = calls[name][0]
            if not _mixes(module, args, kwargs, tokens, fixed):
                continue
            inner = within(f"{name}.")
            # The mixers inside are enough if this module mixes nothing once they are answered.
            enough = inner and None not in inner.values()
            if enough:
                with standing_in(layer, inner, constant):
                    enough = not _mixes(module, args, kwargs, tokens, fixed)
            found |= inner if enough else {name: behind(name)}
        return found

    # [Step 3] Search from the outermost modules inwards, and check that the whole layer mixes
    # nothing else.
    found = within("")
    if None in found.values():
        return None
    with standing_in(layer, found, constant):
        return None if _mixes(run, (x_BTD,), {}, tokens, fixed) else found
