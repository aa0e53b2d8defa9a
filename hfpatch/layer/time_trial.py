"""Tries whether a mixer runs in tiles through time with the kernels of this device.

decoder/time_probe.py tried transformers' plain code on a small instance. On a device the kernels of
a package replace that code (some version of flash-linear-attention, mamba_ssm, causal_conv1d). They
may drop a state silently. So the mixer itself is tried once a class, device and dtype, on the first
tokens of its input. Two tiles must agree with one, in output and gradient, to a few steps of
rounding. Otherwise the difference must be much smaller than with a state between the tiles, or its
gradient, lost.
"""

import torch
from torch import Tensor, nn

from hfpatch.compat import States, autocast_dtype, is_fake
from hfpatch.context.ranks import refuse_shared_mixers
from hfpatch.layer.time_ranks import RankTiles
from hfpatch.layer.time_tiles import SHORTEST, TimeTiles, chunk_of

ODD = 5  # tokens beyond two chunks
CLOSE = 4  # allowed difference, in the dtype's steps of rounding, relative to a result's norm
CLOSER = 4  # a lost state must change the result by this many times the difference


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
        mixer.time, devices = TimeTiles(argument, 1), [x_BtD.device] * x_BtD.is_cuda
        modules = [(m, m.training) for m in mixer.module.modules()]
        try:
            for inside, _ in modules:  # dropout would draw other numbers in tiles
                inside.training = False
            # Nothing that is saved here is for the hooks of a checkpoint around the model.
            own = torch.autograd.graph.saved_tensors_hooks(_itself, _itself)
            with torch.random.fork_rng(devices), torch.enable_grad(), own:
                why = _tried(mixer, x_BtD)
        except Exception as error:  # a package's own code
            why = f"tried in tiles here, it raised {type(error).__name__}"
        finally:
            mixer.time = None
            for inside, training in modules:
                inside.training = training
        runtime.tried[key] = why
        if why is not None:
            runtime.tell(f"{type(module).__name__}s take all tokens at once: {why}.")
    return runtime.tried[key]


def _itself(x: Tensor) -> Tensor:
    return x


def tokens_tried(module: nn.Module) -> int:
    return 2 * chunk_of(module) + ODD


def _tried(mixer, x_BtD: Tensor) -> str | None:
    rows, end = slice(0, 1), min(x_BtD.shape[1], tokens_tried(mixer.module))
    chunk = min(chunk_of(mixer.module), end - SHORTEST)
    x = x_BtD[:1, :end].detach().requires_grad_()
    dout = None

    def run(*cuts: int, lost=None, unread=None) -> list[Tensor]:
        """The output and the input's gradient, in tiles that end at `cuts`. lost: the state that
        is zero at each tile's start. unread: the state whose gradient is dropped.
        """
        nonlocal dout
        after: dict = {}
        outs = []
        for a, b in zip((0, *cuts), cuts):
            before = {key: x.detach() if key == unread else x for key, x in after.items()}
            before |= {key: torch.zeros_like(x) for key, x in after.items() if key == lost}
            states = States(before)
            outs.append(mixer.call(x[:, a:b], rows, a, b, states))
            after = states.after
        keys[:] = after
        out = torch.cat(outs, 1)
        dout = torch.randn_like(out) if dout is None else dout
        return [out.detach(), *torch.autograd.grad(out, x, dout)]

    keys: list = []
    whole = run(end)
    out, dx = _apart(run(chunk, end), whole)
    close, found = CLOSE * torch.finfo(x.dtype).eps, max(out, dx)
    for key in tuple(keys) if found > close else ():
        without = _apart(run(chunk, end, lost=key), whole)[0]
        unread = _apart(run(chunk, end, unread=key), whole)[1]
        if CLOSER * out > max(without, close) or CLOSER * dx > max(unread, close):
            return f"with this device's kernels tiles differ from whole rows ({found:.0e})"
    return None


def _apart(ours: list[Tensor], theirs: list[Tensor]) -> list[float]:
    """The relative difference of each pair of tensors."""
    return [
        ((a - b).float().norm() / b.float().norm().clamp_min(1e-30)).item()
        for a, b in zip(ours, theirs)
    ]


def go_in_time(call, again: bool, inputs: list[Tensor]) -> None:
    """Sets Mixer.time on those mixers of a layer's call that can run in tiles through time.

    Args:
        call: the layer.call.LayerCall.
        again: whether the mixers run in backward of the layer or of its segment.
        inputs: the input [B, T, D] of each mixer.
    """
    timed = dict(call.parts.traits.timed)
    saves = again or call.queue is not None and call.policy.save_attention
    transfers = call.queue.transfers if saves and call.queue is not None else None
    for name, mixer, x in zip(call.parts.traits.mixers, call.parts.mixers, inputs):
        if name in timed and (again or mixer.time is None):
            _go_in_time(call, name, timed[name], mixer, x, transfers)


def _go_in_time(call, name: str, argument: str, mixer, x: Tensor, transfers) -> None:
    sequence = call.parts.batch.sequence
    place = argument, call.policy.time_tile or call.policy.tile, transfers, call.parts.rng
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
