"""Finds the mixers of a small instance that run in tiles through time (layer/time_tiles.py), and
the reasons why others do not.

Each mixer runs on whole rows and in tiles: outputs and every gradient must agree. A mixer may
silently ignore a state, or drop its gradient. So the mixer also runs with one state lost between
tiles, and with one state's gradient lost. If the results did not change then, their agreement would
prove nothing.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from hfpatch.compat import modules_in, state_argument
from hfpatch.context.current import our_attention
from hfpatch.decoder import probe
from hfpatch.layer.arguments import Arguments
from hfpatch.layer.forward_state import ForwardState
from hfpatch.layer.mixers import Mixer
from hfpatch.layer.time_tiles import TimeTiles, chunk_of
from hfpatch.layer.timed import LayerAsMixer
from hfpatch.layer.traced import Traced
from hfpatch.layer.traits import LayerTraits
from hfpatch.layer.weight_gradients import WeightGradients
from hfpatch.store.transfers import Transfers

# Allowed difference, relative to a result's norm. Aligned tiles agree to 3e-7 or better where a
# rule computes in float32 in a float64 model. A float32 model rounds in its projections too.
CLOSE = {torch.float64: 3e-6, torch.float32: 1e-4}
VISIBLE = 10  # a lost state must change the result by at least this many times CLOSE
ODD = 5  # tokens beyond two tiles


class _Losing(TimeTiles):
    """TimeTiles that hand on zeros in place of one state, or drop one state's gradient."""

    def __init__(self, *args, state: tuple | None = None, gradient: tuple | None = None):
        super().__init__(*args)
        self.state, self.gradient = state, gradient

    def _handed_on(self, states: dict, index: int, begins: bool) -> dict:
        states = super()._handed_on(states, index, begins)
        return {k: torch.zeros_like(s) if k == self.state else s for k, s in states.items()}

    def _handed_back(self, dstates: dict, index: int) -> dict:
        return {key: d for key, d in dstates.items() if key != self.gradient}


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
        with probe.buffers_apart(layer), torch.enable_grad():
            return _compared(stack, layer, traits, name, argument, chunk_of(module))
    except Exception as error:  # a family's own code
        said = " ".join(str(error).split())[:80]
        return f"given states, it raised {type(error).__name__} ({said})"


def _compared(stack, layer, traits, name: str, argument: str, tile: int) -> str | None:
    mixer, x = _call_of(stack, layer, traits, name, 2 * tile + ODD)
    dout = torch.randn_like(x)

    def run(time: TimeTiles | None) -> tuple[dict, dict]:
        """The output, and every gradient."""
        mixer.time, dx = time, torch.empty_like(x)
        then = ForwardState(layer, modules_in(layer))
        with torch.no_grad(), WeightGradients(then, True) as sums:
            mixer.weights = [sums]
            out = mixer.forward(x)
            mixer.backward(x, dout, dx)
        grads = {str(i): g for i, g in enumerate(sums.sums) if g is not None}
        return {"its output": out}, {"its input's gradient": dx, **grads}

    place = (argument, tile, Transfers(x.device, "gpu"))
    out, grads = run(None)
    time = TimeTiles(*place)
    out_in_time, grads_in_time = run(time)
    keys = list(time.entries[1])
    if not keys:
        return "it leaves no states"
    apart, what = _apart(out_in_time | grads_in_time, out | grads)
    close = CLOSE[x.dtype]
    if not apart <= close:
        return f"in tiles it differs from whole rows ({what}: {apart:.0e})"
    if not name and any(isinstance(x, Tensor) for x in mixer.parts.beside or ()):
        return "it returns tensors beside its output"
    for key in keys if name else ():  # a layer's states are its mixer's, which was tried before
        lost = _apart(run(_Losing(*place, state=key))[0], out)[0]
        unread = _apart(run(_Losing(*place, gradient=key))[1], grads)[0]
        if not min(lost, unread) >= VISIBLE * close:
            return f"its {key[0]} state changes too little to compare ({min(lost, unread):.0e})"
    return None


def _call_of(stack, layer, traits: LayerTraits, name: str, tokens: int) -> tuple[Mixer, Tensor]:
    """The mixer's call in a row of `tokens` tokens, and the mixer's input."""
    forward, x, args, kwargs, batch = probe.captured(stack, layer, tokens)
    arguments = Arguments(args, kwargs, 1, tokens)
    ask = Traced(layer, arguments, traits, (stack.config,), batch, forward=forward)
    with torch.no_grad(), our_attention((stack.config,), batch):
        parts = ask.pre(x, 0, tokens)
    if not name:
        return LayerAsMixer.of(ask), x
    at = list(traits.mixers).index(name)
    return ask.mixers[at], parts[3 * len(traits.attention) + at].detach()


def _apart(ours: dict, theirs: dict) -> tuple[float, str]:
    """The largest relative difference, and the name of the tensor that has it."""
    least = 1e-6 * max(x.norm().item() for x in theirs.values())
    found = [(float("inf"), "other gradients")] * (ours.keys() != theirs.keys())
    for what in ours.keys() & theirs.keys():
        a, b = ours[what], theirs[what]
        apart = ((a - b).norm() / b.norm().clamp_min(least)).item()
        found.append((float("inf") if apart != apart else apart, what))
    return max(found)
