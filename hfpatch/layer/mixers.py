"""Modules that mix tokens by something else than an attention that can be asked: delta net, Mamba,
short convolution; attention that is written out, or whose mask is its own.

Between `pre` and `post` a mixer stands where attention does: `pre` notes its input, `post` is given
a tile of its output, and backward runs it again. It runs in tiles through time (time_tiles.py) where
decoder/time_probe.py proved that it can, over whole rows otherwise. Packed documents go through it
one by one, which isolates them on any kernel, with the memory of the longest. Mixers are found by
changing one token and looking whether others notice.
"""

from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hfpatch.compat import pytree
from hfpatch.context.classes import forwards_for_now
from hfpatch.context.current import our_attention
from hfpatch.context.masks import Batch, Mask

# said by our documents
_PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


def standing_in(layer: nn.Module, names, answer, paired=()):
    """Within, the named modules of the layer answer with answer(name, args, kwargs), those in
    `paired` with None behind it, as often as they are there.
    """

    def answering(name):
        behind = (None,) * list(paired).count(name)
        if behind:
            return lambda *args, **kwargs: (answer(name, args, kwargs), *behind)
        return lambda *args, **kwargs: answer(name, args, kwargs)

    return forwards_for_now([(layer.get_submodule(name), answering(name)) for name in names])


@dataclass
class Mixer:
    """One call of a mixer over whole rows. leaves, spec: its flattened arguments; at: which of them
    is its input [B, T, D]; axes: the token axis of each; B: rows of the batch; configs, batch: as
    context.current.our_attention has them; bounds: where documents start and end in the flattened B*T
    tokens, None where every row is one.
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
    kept: list | None = None  # each document's input and output with its graph, until backward
    time: "object | None" = None  # layer.time_tiles.TimeTiles, where it goes through time

    def documents(self, T: int) -> list[tuple[slice, int, int]]:
        """(rows, first, last) of each document."""
        if self.bounds is None:
            return [(slice(None), 0, T)]
        return [
            (slice(a // T, a // T + 1), a % T, (b - 1) % T + 1)
            for a, b in zip(self.bounds, self.bounds[1:])
        ]

    def several(self, T: int) -> bool:
        """Whether its weights get more than one gradient."""
        return self.bounds is not None or self._in_time(T)

    def _in_time(self, T: int) -> bool:
        return self.time is not None and self.time.cuts(self, T)

    def call(self, x: Tensor, rows: slice, a: int, b: int, states=None) -> Tensor:
        """x: whole, or the document's or the tile's own. states: a tile's, compat.States."""
        leaves, parted = list(self.leaves), self.bounds is not None or states is not None
        if parted:
            if states is None:
                x = x if x.shape[1] == b - a and len(x) == 1 else x[rows, a:b]
            for i, axis in enumerate(self.axes):
                if axis is not None:
                    cut = leaves[i].narrow(axis, a, b - a)
                    leaves[i] = cut[rows] if axis and cut.shape[0] == self.B > 1 else cut
        leaves[self.at] = x
        batch = self.batch
        if parted and batch is not None:
            start = a if states is None else self.time.place(a)
            place = rows, start, start + b - a
            leaves = [leaf.part(*place) if isinstance(leaf, Mask) else leaf for leaf in leaves]
            batch = batch.part(*place)
        args, kwargs = pytree().tree_unflatten(leaves, self.spec)
        if parted:
            kwargs = {name: value for name, value in kwargs.items() if name not in _PACKING}
        if states is not None and self.time.argument:
            kwargs[self.time.argument] = states
        with our_attention(self.configs, batch):  # which may run inside
            out = self._run(args, kwargs)
        return out[0] if isinstance(out, tuple) else out

    def _run(self, args: tuple, kwargs: dict):
        return self.module(*args, **kwargs)

    def forward(self, x_BTD: Tensor, keep: bool = False) -> Tensor:
        """[B, T, D]. keep: backward comes soon and walks the graph that is made here."""
        if self._in_time(x_BTD.shape[1]):
            return self.time.forward(self, x_BTD)
        outs = [
            self._graph(x_BTD, *piece) if keep else (None, self.call(x_BTD, *piece))
            for piece in self.documents(x_BTD.shape[1])
        ]
        self.kept = outs if keep else None
        outs = [out.detach() if keep else out for _, out in outs]
        if self.bounds is None:
            return outs[0]
        T, found, rows = x_BTD.shape[1], [], []
        for out in outs:
            found.append(out)
            if sum(x.shape[1] for x in found) == T:
                rows, found = [*rows, torch.cat(found, 1)], []
        return torch.cat(rows)

    def _graph(self, x_BTD: Tensor, rows: slice, a: int, b: int) -> tuple[Tensor, Tensor]:
        # other documents are written beside it
        x = x_BTD.detach() if self.bounds is None else x_BTD[rows, a:b].clone()
        with torch.enable_grad():
            return x, self.call(x.requires_grad_(), rows, a, b)

    def backward(self, x_BTD: Tensor, dout_BTD: Tensor, into: Tensor) -> None:
        """The input's gradient into `into`, which may be x; weights get theirs by autograd, a
        document at a time.
        """
        if self._in_time(x_BTD.shape[1]):
            return self.time.backward(self, x_BTD, dout_BTD, into)
        for i, (rows, a, b) in enumerate(self.documents(x_BTD.shape[1])):
            x, out = self.kept[i] if self.kept else self._graph(x_BTD, rows, a, b)
            torch.autograd.backward(out, dout_BTD[rows, a:b])
            into[rows, a:b] = x.grad
        self.kept = None


@contextmanager
def documents_apart(layer: nn.Module, names, arguments, configs, batch, paired=()):
    """Within, the mixers of a layer that runs whole take the documents of this batch one by one."""

    own = {name: layer.get_submodule(name).forward for name in names}

    def apart(name, args, kwargs):
        module = layer.get_submodule(name)
        mixer, x = arguments.mixer(module, args, kwargs, configs, batch)
        with forwards_for_now([(module, own[name])]):
            return mixer.forward(x)

    with standing_in(layer, names, apart, paired):
        yield


# --- finding them ---------------------------------------------------------------------------------

TOKEN = 5  # the one that is changed


def _moved(ours, theirs, tokens: int) -> bool:
    """Whether outputs differ at another token than the changed one, beyond rounding."""
    for a, b in zip(pytree().tree_leaves(ours), pytree().tree_leaves(theirs)):
        if not isinstance(a, Tensor) or not a.is_floating_point():
            continue
        if a.shape != b.shape:
            return True
        axis = next((i for i, n in enumerate(a.shape) if n == tokens), None)
        if axis is not None:
            others = torch.arange(tokens, device=a.device) != TOKEN
            a, b = a.movedim(axis, 0)[others], b.movedim(axis, 0)[others]
        if not (a - b).norm() <= torch.finfo(a.dtype).eps ** 0.5 * b.norm():
            return True
    return False


def _mixes(run, args, kwargs, tokens: int, known: set) -> bool:
    """Whether run(*args, **kwargs) lets other tokens notice that one changed. known: ids of tensors
    that are not to change.
    """
    leaves, spec = pytree().tree_flatten((args, kwargs))
    changed = list(leaves)
    for i, x in enumerate(leaves):
        if (
            isinstance(x, Tensor)
            and x.is_floating_point()
            and id(x) not in known
            and tokens in x.shape
        ):
            axis = next(i for i, n in enumerate(x.shape) if n == tokens)
            x = x.clone()
            x.select(axis, TOKEN).normal_()
            changed[i] = x
    other_args, other_kwargs = pytree().tree_unflatten(changed, spec)
    return _moved(run(*other_args, **other_kwargs), run(*args, **kwargs), tokens)


def _calls_in(layer: nn.Module, run, x_BTD: Tensor) -> dict[str, list[tuple]]:
    """(args, kwargs, output) of each call of a module inside the layer while run(x) runs, by its
    name.
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


def find_mixers(
    layer: nn.Module, run, x_BTD: Tensor, known: set
) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Names of the smallest modules without which run(x), the layer with its attention answered,
    mixes no tokens, and of those among them that return more behind these (Lightning attention, its
    state), which is not read: once for each value.

    None where there are no such modules, each called once on [B, T, D] and answering alike. x_BTD:
    one row; known: ids of the layer's other arguments.
    """
    tokens = x_BTD.shape[1]
    if not _mixes(run, (x_BTD,), {}, tokens, known):
        return (), ()
    calls = _calls_in(layer, run, x_BTD)

    def constant(name, args, kwargs):
        out = calls[name][0][2]
        return out[0] if name in paired else out

    def pairs(name: str) -> int | None:
        """How many values this module returns behind hidden states; None where it does not make
        those, of any width, of such, once.
        """
        args, kwargs, out = calls[name][0]
        x = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        out, *behind = out if isinstance(out, tuple) else (out,)
        fits = isinstance(out, Tensor) and x is not None and out.dim() == 3 and out.shape == x.shape
        fits = fits and x.shape[:2] == x_BTD.shape[:2]
        return len(behind) if fits and len(calls[name]) == 1 else None

    def within(prefix: str) -> list[str]:
        found, seen = [], []
        for name in sorted(calls, key=lambda n: n.count(".")):
            if not name.startswith(prefix) or any(name.startswith(f"{outer}.") for outer in seen):
                continue
            seen.append(name)
            module, (args, kwargs, _) = layer.get_submodule(name), calls[name][0]
            if _mixes(module, args, kwargs, tokens, known):
                inner = within(f"{name}.")
                enough = inner and all(pairs(n) is not None for n in inner)
                if enough:
                    paired.extend(n for n in inner for _ in range(pairs(n)))
                    with standing_in(layer, inner, constant, paired):
                        enough = not _mixes(module, args, kwargs, tokens, known)
                found += inner if enough else [name]
        return found

    paired: list[str] = []
    found = within("")
    if any(pairs(name) is None for name in found):
        return None
    paired = [name for name in found for _ in range(pairs(name))]
    with standing_in(layer, found, constant, paired):
        if _mixes(run, (x_BTD,), {}, tokens, known):
            return None
    return tuple(found), tuple(paired)
