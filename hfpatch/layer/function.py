"""A tiled layer in autograd's graph: one node, with the forward and backward of layer/call.py."""

import weakref

import torch
from torch import Tensor

from hfpatch.attention.heads import Attention
from hfpatch.budget.policy import Checkpointing
from hfpatch.compat import is_fake, keeps_graph, version
from hfpatch.context.current import having
from hfpatch.layer.call import LayerCall
from hfpatch.layer.forward_state import ForwardState
from hfpatch.layer.gate_up import gate_up_columns
from hfpatch.layer.graph_bytes import measured
from hfpatch.layer.random_state import Generators
from hfpatch.layer.timed import TimedCall, in_time
from hfpatch.layer.traced import Traced
from hfpatch.parallel.exchange import ExchangedAttention


class LayerFunction(torch.autograd.Function):
    """A layer's call as one node. Inputs: the hidden states and all tensors that require a
    gradient.
    """

    @staticmethod
    def forward(ctx, call, x, *tensors):
        ctx.call = call
        return tuple(call.forward(x))

    @staticmethod
    def backward(ctx, dy, *dextras):
        if torch.is_grad_enabled():
            raise RuntimeError(
                "hfpatch: a patched layer has no second derivative, got create_graph=True. Call "
                "hfpatch.undo(model), and model.set_attn_implementation('eager')."
            )
        call = ctx.call
        if call.traced is None:
            raise RuntimeError(
                "hfpatch: this graph was freed by its first backward. Pass retain_graph=True to "
                "the first of two."
            )
        # having() resets what an interrupt leaves behind.
        with call.runtime.turn, having(), measured(call.step, call.layer):
            dx, grads = call.backward(dy, dextras, ctx.needs_input_grad[1], keeps_graph())
        return None, dx, *grads


def tiled_layer(runtime, policy: Checkpointing, traced: Traced, x: Tensor) -> list[Tensor]:
    """Runs a layer tile by tile on x [B, T, D]. Returns its output, then the recorded tensors;
    nothing if it turned out to draw random numbers, or to call attention with dropout, which
    traced.condition then says.

    runtime: layer.runtime.LayerRuntime, which gave the policy. Nothing is kept if no gradient is
    needed.
    """
    layer = traced.layer
    device = x.device
    # [Step 1] The call, and the tensors that its backward runs on.
    state = ForwardState(layer, traced.condition.snapshot)
    tensors = [*traced.arguments.wanted.values(), *state.wanted]
    timed = {}
    # A layer without attention may run in time as one mixer. Not where an engine gathers weights
    # around each call, which no test covers: there its mixers run in time, the rest in tiles.
    if traced.traits.carries is not None and not state.gathered:
        timed = in_time(traced, policy, runtime, x)
    attention = Attention(all_heads=policy.aim == "fastest")
    if traced.batch.row_ranks is not None:
        attention = ExchangedAttention(traced.batch.row_ranks)
    call = (TimedCall if timed else LayerCall)(
        layer=layer, runtime=runtime, policy=policy, traced=traced, device=device, state=state,
        shards=runtime.shards if policy.every == 1 else None, attention=attention, **timed,
    )  # fmt: skip
    keeps = torch.is_grad_enabled() and (x.requires_grad or tensors)
    real = device.type != "meta" and (x.__class__ is Tensor or not is_fake(x))
    watched = Generators(device) if real and (keeps or layer.training) else None
    dropped = traced.condition.drops  # as far as known
    # [Step 2] Without a gradient nothing is kept.
    if not keeps:
        # There is no queue before a training step with this tier.
        call.queue = runtime.queues.get((device, policy.offload))
        with torch.no_grad():
            outputs = call.forward(x, keeping=None)
    else:
        # [Step 3] Whether gate and up are kept (the policy says it by layer), the meter's step that
        # measures this call, and its links: the queue of its copies, the call of the layer below,
        # whose backward is next, and with every > 1 the calls of its segment.
        if policy.keeps_gates(layer._hfpatch.index):
            call.keeps_gates = gate_up_columns(layer, traced.traits, device.type) > 0
        call.step = getattr(runtime.meters.get(device), "step", None)
        runtime.link(call, x)
        outputs = LayerFunction.apply(call, x, *tensors)
        state.ran()
    # [Step 4] If the generators' states changed, the layer draws random numbers (dropout, noise
    # before a router): it has to run once more, from the saved states. With dropout in its attention
    # it then runs untiled.
    drew = watched is not None and watched.drew()
    if traced.condition.drops != dropped or (drew and traced.rng is None):
        traced.condition.draws |= drew
        if drew:
            watched.put_back()
        return []
    if keeps:
        runtime.last_call = weakref.ref(call), weakref.ref(outputs[0]), version(outputs[0])
    return list(outputs)
