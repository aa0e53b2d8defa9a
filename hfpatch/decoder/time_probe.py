"""Finds the mixers of a small instance that run in tiles through time (layer/time_tiles.py), and
the reasons why others do not.

`Runs` gives the mixer whole rows and tiles. Every output and gradient must agree. A mixer may
silently ignore a state, or drop its gradient. So the mixer also runs with one state lost between
tiles, and with one state's gradient lost: if that changed nothing, the agreement would prove nothing.

On a GPU packages' kernels replace transformers' plain code (flash-linear-attention, mamba_ssm,
causal_conv1d). They return states and the gradients of states, and are trusted to do so.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from hfpatch.compat import States, state_argument
from hfpatch.decoder import probe
from hfpatch.layer.mixers import Mixer
from hfpatch.layer.time_tiles import TimeTiles, chunk_of
from hfpatch.layer.timed import LayerAsMixer
from hfpatch.layer.traits import LayerTraits

# Allowed difference, relative to a result's norm. Aligned tiles agree to 3e-7 or better where a
# rule computes in float32 in a float64 model. A float32 model rounds in its projections too.
CLOSE = {torch.float64: 3e-6, torch.float32: 1e-4}
VISIBLE = 10  # a lost state must change the result by at least this many times CLOSE
ODD = 5  # tokens beyond two chunks
OUTPUT = "its output"
INPUT = "its input's gradient"


class Runs:
    """One call of a mixer by plain autograd, whole or in tiles.

    Args:
        mixer: the layer.mixers.Mixer of the call.
        argument: the mixer's argument that takes states.
        x_BtD: the mixer's input.
        parameters: by name, whose gradients are compared too.

    Attributes:
        keys: the states that the last run left.
    """

    def __init__(self, mixer, argument: str, x_BtD: Tensor, parameters: dict):
        self.mixer = mixer
        self.parameters = parameters
        self.x = x_BtD.detach().requires_grad_()
        self.dout = torch.randn_like(x_BtD)  # a mixer's output has its input's shape
        mixer.time = TimeTiles(argument, 1)

    def whole(self) -> dict[str, Tensor]:
        """The output and the gradients, from whole rows without states."""
        return self._results(self.mixer.call(self.x, slice(None), 0, self.x.shape[1]))

    def tiles(self, *cuts: int, key=None, change=None) -> dict[str, Tensor]:
        """The same in tiles that end at `cuts`. `change` is applied to the state `key` at each tile's
        start.
        """
        after: dict = {}
        outs = []
        for a, b in zip((0, *cuts), cuts):
            states = States({k: change(x) if k == key else x for k, x in after.items()})
            outs.append(self.mixer.call(self.x[:, a:b], slice(None), a, b, states))
            after = states.after
        self.keys = tuple(after)
        return self._results(torch.cat(outs, 1))

    def _results(self, out: Tensor) -> dict[str, Tensor]:
        inputs = {INPUT: self.x, **self.parameters}
        grads = torch.autograd.grad(out, list(inputs.values()), self.dout, materialize_grads=True)
        return {OUTPUT: out.detach()} | dict(zip(inputs, grads))


def differences(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> dict[str, float]:
    """The relative difference of each result."""
    sizes = {name: x.float().norm() for name, x in theirs.items()}
    least = 1e-6 * max(sizes.values())
    errors = {}
    for name, size in sizes.items():
        error = (ours[name] - theirs[name]).float().norm() / size.clamp_min(least)
        errors[name] = error.nan_to_num(nan=float("inf")).item()
    return errors


def ask_in_time(stack: nn.Module, layer: nn.Module, traits: LayerTraits) -> LayerTraits:
    """The traits, with `timed`, `untimed` and `carries` filled in."""
    if traits.reason is not None or traits.attends or not traits.looked:
        return traits
    if not traits.mixing:
        return replace(traits, carries="")
    timed = []
    untimed = []
    for name in traits.mixers:
        reason = _why_whole(stack, layer, traits, name)
        if reason is None:
            timed.append((name, state_argument(layer.get_submodule(name))))
        else:
            untimed.append((name, reason))
    traits = replace(traits, timed=tuple(timed), untimed=tuple(untimed))
    alone = not traits.attention and not untimed and len(timed) == 1
    if alone and _why_whole(stack, layer, traits, "") is None:
        return replace(traits, carries=state_argument(layer))
    return traits


def _why_whole(stack, layer, traits: LayerTraits, name: str) -> str | None:
    """Why a mixer of the layer, or the layer itself (name ""), does not run in tiles; None if it
    does.
    """
    module = layer.get_submodule(name)
    argument = state_argument(module)
    if argument is None:
        return "it takes no states"
    try:
        with torch.enable_grad():
            return _compared(stack, layer, traits, name, argument, chunk_of(module))
    except Exception as error:  # a family's own code
        return f"given states, it raised {probe.said(error)}"


def _compared(stack, layer, traits, name: str, argument: str, tile: int) -> str | None:
    tokens = 2 * tile + ODD
    mixer, x = _call_of(stack, layer, traits, name, tokens)
    runs = Runs(mixer, argument, x, dict(layer.named_parameters()))
    whole = runs.whole()
    cuts = (tile, 2 * tile, tokens)
    errors = differences(runs.tiles(*cuts), whole)
    if not runs.keys:
        return "it leaves no states"
    what = max(errors, key=errors.get)
    close = CLOSE[x.dtype]
    if not errors[what] <= close:
        return f"in tiles it differs from whole rows ({what}: {errors[what]:.0e})"
    if not name and any(isinstance(x, Tensor) for x in mixer.traced.beside or ()):
        return "it returns tensors beside its output"
    for key in runs.keys if name else ():  # a layer's states are its mixer's, tried before
        lost = runs.tiles(*cuts, key=key, change=torch.zeros_like)
        unread = runs.tiles(*cuts, key=key, change=Tensor.detach)
        least = min(differences(lost, whole)[OUTPUT], max(differences(unread, whole).values()))
        if not least >= VISIBLE * close:
            return f"its {key[0]} state changes too little to compare ({least:.0e})"
    return None


def _call_of(stack, layer, traits: LayerTraits, name: str, tokens: int) -> tuple[Mixer, Tensor]:
    """The mixer's call in a row of `tokens` tokens, and the mixer's input."""
    call, x_BTD = probe.captured(stack, layer, tokens)
    call = probe.with_traits(call, traits)
    if not name:
        return LayerAsMixer.of(call), x_BTD
    with torch.no_grad():
        parts = call.before(x_BTD, 0, tokens)
    at = list(traits.mixers).index(name)
    return call.mixers[at], parts[3 * len(traits.attention) + at].detach()
