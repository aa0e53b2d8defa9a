"""Proves that a mixer runs in tiles through time: on the small instance, and on the device.

Runs gives the mixer whole rows and tiles. Outputs and gradients must agree. A mixer may silently
ignore a state, or drop its gradient. So the mixer also runs with one state lost between tiles, and
with one state's gradient lost.

decoder/time_probe.py proves it for transformers' plain code on a small instance. On a device the
kernels of a package replace that code (some version of flash-linear-attention, mamba_ssm,
causal_conv1d). So the mixer itself is tried once a class, device and dtype, on the first tokens of
its input. Two tiles must agree with one, in output and gradient, to a few steps of rounding.
Otherwise the difference must be much smaller than with a state between the tiles, or its gradient,
lost.
"""

import torch
from torch import Tensor, nn

from hfpatch.compat import States, autocast_dtype, is_fake, values_for_now
from hfpatch.context.ranks import refuse_shared_mixers
from hfpatch.layer.time_ranks import RankTiles
from hfpatch.layer.time_tiles import SHORTEST, TimeTiles, chunk_of

ODD = 5  # tokens beyond two chunks
CLOSE = 4  # allowed difference, in the dtype's steps of rounding, relative to a result's norm
CLOSER = 4  # a lost state must change the result by this many times the difference
OUTPUT, INPUT = "its output", "its input's gradient"


class Runs:
    """One call of a mixer by plain autograd, whole or in tiles.

    Args:
        mixer: the layer.mixers.Mixer of the call.
        argument: the mixer's argument that takes states.
        x_BtD: the mixer's input. rows: the rows of the batch that it has.
        weights: parameters by name, whose gradients are compared too.

    Attributes:
        keys: the states that the last run left.
    """

    def __init__(self, mixer, argument: str, x_BtD: Tensor, rows=slice(None), weights=None):
        self.mixer, self.rows, self.weights = mixer, rows, weights or {}
        self.x = x_BtD.detach().requires_grad_()
        self.dout: Tensor | None = None
        self.keys: tuple = ()
        mixer.time = TimeTiles(argument, 1)

    def whole(self) -> dict[str, Tensor]:
        """The output and the gradients, from whole rows without states."""
        return self._results(self.mixer.call(self.x, self.rows, 0, self.x.shape[1]))

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
            outs.append(self.mixer.call(self.x[:, a:b], self.rows, a, b, states))
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
        apart = (ours[name] - x).float().norm() / x.float().norm().clamp_min(least)
        found[name] = apart.nan_to_num(nan=float("inf")).item()
    return found


def why_not_here(module: nn.Module, argument: str, like: Tensor, runtime, call) -> str | None:
    """Why this mixer must take whole rows on this device; None if it may run in tiles.

    Args:
        module: the mixer.
        argument: the mixer's argument that takes states.
        like: hidden states with the device and dtype to try.
        runtime: the layer.runtime.LayerRuntime, which keeps the results of trials.
        call: a function that returns the Mixer and its input [B, t, D], with tokens_tried() tokens
            or all. Only the first trial calls it.
    """
    if like.device.type == "meta" or is_fake(like):
        return None
    key = type(module), like.device, like.dtype, autocast_dtype(like.device.type)
    if key not in runtime.tried:
        mixer, x_BtD = call()
        devices = [x_BtD.device] * x_BtD.is_cuda
        # Dropout would draw other numbers in tiles.
        without_dropout = [(vars(m), "training", False) for m in mixer.module.modules()]
        # Nothing that is saved here is for the hooks of a checkpoint around the model.
        own = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
        quiet = values_for_now(without_dropout)
        try:
            with torch.random.fork_rng(devices), quiet, own, torch.enable_grad():
                why = _tried(mixer, argument, x_BtD)
        except Exception as error:  # a package's own code
            why = f"tried in tiles here, it raised {type(error).__name__}"
        mixer.time = None
        runtime.tried[key] = why
        if why is not None:
            runtime.tell(f"{type(module).__name__}s take all tokens at once: {why}.")
    return runtime.tried[key]


def tokens_tried(module: nn.Module) -> int:
    return 2 * chunk_of(module) + ODD


def _tried(mixer, argument: str, x_BtD: Tensor) -> str | None:
    end = min(x_BtD.shape[1], tokens_tried(mixer.module))
    chunk = min(chunk_of(mixer.module), end - SHORTEST)
    runs = Runs(mixer, argument, x_BtD[:1, :end], rows=slice(0, 1))
    whole = runs.tiles(end)
    apart = differences(runs.tiles(chunk, end), whole)
    close, found = CLOSE * torch.finfo(x_BtD.dtype).eps, max(apart.values())
    for key in runs.keys if found > close else ():
        lost = differences(runs.tiles(chunk, end, lost=key), whole)
        unread = differences(runs.tiles(chunk, end, unread=key), whole)
        for name, without in ((OUTPUT, lost), (INPUT, unread)):
            if CLOSER * apart[name] > max(without[name], close):
                return f"with this device's kernels tiles differ from whole rows ({found:.0e})"
    return None


def go_in_time(call, again: bool, inputs: list[Tensor]) -> None:
    """Sets Mixer.time on those mixers of a layer's call that can run in tiles through time.

    Args:
        call: the layer.call.LayerCall.
        again: whether the mixers run in backward of the layer or of its segment.
        inputs: the input [B, T, D] of each mixer.
    """
    timed = dict(call.traced.traits.timed)
    saves = again or call.queue is not None and call.policy.saves_attention
    transfers = call.queue.transfers if saves and call.queue is not None else None
    for name, mixer, x in zip(call.traced.traits.mixers, call.traced.mixers, inputs):
        if name in timed and (again or mixer.time is None):
            _go_in_time(call, name, timed[name], mixer, x, transfers)


def _go_in_time(call, name: str, argument: str, mixer, x: Tensor, transfers) -> None:
    sequence = call.traced.batch.sequence
    place = argument, call.policy.tile, transfers, call.traced.rng
    time = TimeTiles(*place) if sequence is None else RankTiles(sequence, *place)
    why = None
    if time.cuts(mixer, x.shape[1]):
        why = why_not_here(mixer.module, argument, x, call.runtime, lambda: (mixer, x))
    if sequence is not None:
        key = name, type(mixer.module), x.dtype, autocast_dtype(x.device.type)
        why = sequence.agreed(("in time", *key), lambda: why)
        if why:
            refuse_shared_mixers(type(call.layer), why)
    if not why:
        mixer.time = time
