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

from hfpatch.compat import Snapshot, States, state_argument
from hfpatch.context.current import our_attention
from hfpatch.decoder import probe
from hfpatch.layer.arguments import Arguments
from hfpatch.layer.condition import Condition
from hfpatch.layer.mixers import Mixer
from hfpatch.layer.time_tiles import TimeTiles, chunk_of
from hfpatch.layer.timed import LayerAsMixer
from hfpatch.layer.traced import Traced
from hfpatch.layer.traits import LayerTraits

# Allowed difference, relative to a result's norm. Aligned tiles agree to 3e-7 or better where a
# rule computes in float32 in a float64 model. A float32 model rounds in its projections too.
CLOSE = {torch.float64: 3e-6, torch.float32: 1e-4}
VISIBLE = 10  # a lost state must change the result by at least this many times CLOSE
ODD = 5  # tokens beyond two chunks
OUTPUT, INPUT = "its output", "its input's gradient"


class Runs:
    """One call of a mixer by plain autograd, whole or in tiles.

    Args:
        mixer: the layer.mixers.Mixer of the call.
        argument: the mixer's argument that takes states.
        x_BtD: the mixer's input.
        weights: parameters by name, whose gradients are compared too.

    Attributes:
        keys: the states that the last run left.
    """

    def __init__(self, mixer, argument: str, x_BtD: Tensor, weights: dict):
        self.mixer = mixer
        self.weights = weights
        self.x = x_BtD.detach().requires_grad_()
        self.dout: Tensor | None = None
        self.keys: tuple = ()
        mixer.time = TimeTiles(argument, 1)

    def whole(self) -> dict[str, Tensor]:
        """The output and the gradients, from whole rows without states."""
        return self._results(self.mixer.call(self.x, slice(None), 0, self.x.shape[1]))

    def tiles(self, *cuts: int, lost=None, unread=None) -> dict[str, Tensor]:
        """The same in tiles that end at `cuts`. lost: the state that is zero at each tile's start.
        unread: the state whose gradient is dropped.
        """
        after: dict = {}
        outs = []
        for a, b in zip((0, *cuts), cuts):
            before = {key: x.detach() if key == unread else x for key, x in after.items()}
            before |= {key: torch.zeros_like(x) for key, x in after.items() if key == lost}
            states = States(before)
            outs.append(self.mixer.call(self.x[:, a:b], slice(None), a, b, states))
            after = states.after
        self.keys = tuple(after)
        return self._results(torch.cat(outs, 1))

    def _results(self, out: Tensor) -> dict[str, Tensor]:
        if self.dout is None:
            self.dout = torch.randn_like(out)
        inputs = {INPUT: self.x, **self.weights}
        grads = torch.autograd.grad(out, list(inputs.values()), self.dout, allow_unused=True)
        found = {name: grad for name, grad in zip(inputs, grads) if grad is not None}
        return {OUTPUT: out.detach()} | found


def differences(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> dict[str, float]:
    """The relative difference of each result; infinite where one of two runs has none."""
    if ours.keys() != theirs.keys():
        return {"other gradients": float("inf")}
    least = 1e-6 * max(x.float().norm().item() for x in theirs.values())
    found = {}
    for name, x in theirs.items():
        error = (ours[name] - x).float().norm() / x.float().norm().clamp_min(least)
        found[name] = error.nan_to_num(nan=float("inf")).item()
    return found


def ask_in_time(stack: nn.Module, layer: nn.Module, traits: LayerTraits) -> LayerTraits:
    """The traits, with `timed`, `untimed` and `carries` filled in."""
    if traits.reason is not None or traits.attends or not traits.looked:
        return traits
    if not traits.mixing:
        return replace(traits, carries="")
    found = {name: _why_whole(stack, layer, traits, name) for name in traits.mixers}
    named = {name: state_argument(layer.get_submodule(name)) for name in traits.mixers}
    traits = replace(
        traits,
        timed=tuple((name, named[name]) for name, reason in found.items() if reason is None),
        untimed=tuple((name, reason) for name, reason in found.items() if reason is not None),
    )
    alone = not traits.attention and len(traits.timed) == 1 and not traits.untimed
    argument = state_argument(layer)
    if not alone or argument is None or _why_whole(stack, layer, traits, "") is not None:
        return traits
    return replace(traits, carries=argument)


def _why_whole(stack, layer, traits: LayerTraits, name: str) -> str | None:
    """Why a mixer of the layer, or the layer itself (name ""), does not run in tiles; None if it
    does.
    """
    module = layer.get_submodule(name)
    argument = state_argument(module)
    if argument is None:
        return "it takes no states"
    try:
        with probe.buffers_copied(layer), torch.enable_grad():
            return _compared(stack, layer, traits, name, argument, chunk_of(module))
    except Exception as error:  # a family's own code
        said = " ".join(str(error).split())[:80]
        return f"given states, it raised {type(error).__name__} ({said})"


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
        lost = differences(runs.tiles(*cuts, lost=key), whole)[OUTPUT]
        unread = differences(runs.tiles(*cuts, unread=key), whole)
        least = min(lost, max(unread.values()))
        if not least >= VISIBLE * close:
            return f"its {key[0]} state changes too little to compare ({least:.0e})"
    return None


def _call_of(stack, layer, traits: LayerTraits, name: str, tokens: int) -> tuple[Mixer, Tensor]:
    """The mixer's call in a row of `tokens` tokens, and the mixer's input."""
    forward, x, args, kwargs, batch = probe.captured(stack, layer, tokens)
    arguments = Arguments(args, kwargs, 1, tokens)
    condition = Condition(Snapshot(layer), traits)
    ask = Traced(layer, arguments, traits, (stack.config,), batch, condition, forward)
    with torch.no_grad(), our_attention((stack.config,), batch):
        parts = ask.before(x, 0, tokens)
    if not name:
        return LayerAsMixer.of(ask), x
    at = list(traits.mixers).index(name)
    return ask.mixers[at], parts[3 * len(traits.attention) + at].detach()
