"""A tiled layer in autograd's graph: one function with one node, whose forward and backward are
layer.py's.
"""

import torch
from torch import Tensor, nn

from hfpatch.budget.policy import Policy
from hfpatch.compat import applying, is_fake, keeps_graph
from hfpatch.layer.call import LayerCall
from hfpatch.layer.privacy import holders, is_private
from hfpatch.layer.random_state import Generators
from hfpatch.layer.weight_gradients import AsThen
from hfpatch.ops._library import refuse_a_batch
from hfpatch.parallel.exchange import attention_for

DROPOUTS = (nn.Dropout, nn.AlphaDropout, nn.Dropout1d)


class _TiledLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, x, *tensors):
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tuple(call.forward(x))

    @staticmethod
    def backward(ctx, dy, *dextras):
        if torch.is_grad_enabled():
            raise RuntimeError(
                "hfpatch: expected a first-order backward, create_graph=True came; "
                "for second derivatives call hfpatch.undo(model), and "
                "model.set_attn_implementation('eager')."
            )
        call = ctx.call
        if dy is None:
            if all(d is None for d in dextras):
                return (None,) * len(ctx.needs_input_grad)
            dy = torch.zeros(call.shape, dtype=call.dtype, device=call.device)
        n = len(dextras) - len(call.ask.places_left())
        call.dextras, call.dleft = dextras[:n], dextras[n:]
        try:
            # on a line of its own, as in _Probe: an argument list holds a reference too
            held = holders(dy)
            private = is_private(dy, held, call.private)
            with call.session.turn:
                dx, grads = call.backward(dy, private, ctx.needs_input_grad[1], keeps_graph())
        except RuntimeError as error:
            refuse_a_batch(error)
            raise
        # the graph, and the call with it, may live as long as the loss
        call.dextras = call.dleft = ()
        return None, dx, *grads


_apply = applying(_TiledLayer)


def tiled_layer(session, policy: Policy, ask, x: Tensor, again: bool = False) -> list[Tensor]:
    """Runs a layer tile by tile on x [B, T, D]: its output, and behind it what was recorded on the
    way.

    session: layer.runtime.LayerRuntime, which gave the policy; ask: layer.parts.LayerParts of this
    call. Without a gradient to come nothing is kept. again: what the first run found out about the
    layer is known.
    """
    layer = ask.layer
    policy = policy.of_layer(layer._hfpatch_index, session.n_layers)
    modules = ask.modules
    direct = ask.goes_direct(x)
    then = AsThen(layer, modules, session.weights.on, called=not direct, looked=ask.looked)
    tensors = ask.arguments.wanted() + then.wanted()
    kind = layer._hfpatch_index, layer.training
    known = ask.random = (
        ask.random
        or kind in session.draws
        or any(
            [
                m.training and m.p > 0
                for m in modules
                if "p" in m.__dict__ and isinstance(m, DROPOUTS)
            ]
        )
    )
    call = LayerCall(
        layer=layer, session=session, policy=policy, ask=ask, device=x.device, then=then,
        random=known,
        shards=session.shards if policy.every == 1 else None,
        mixes=bool(ask.n_calls), attention=attention_for(ask.batch.sequence, policy),
    )  # fmt: skip
    if not torch.is_grad_enabled() or not (x.requires_grad or tensors):
        # there where this length was trained before
        call.queue = session.queues.get((x.device, policy.offload))
        with torch.no_grad():
            return call.forward(x, where=None)
    call.keep = ask.keepable(policy.keep, x.device.type) if policy.every == 1 else ()
    call.keep_inside = tuple([name for name in call.keep if name != "qkv"]) if call.keep else ()
    if call.keep != policy.keep and session.checkpointing.keep != "auto":
        lost = ", ".join(name for name in policy.keep if name not in call.keep)
        session.tell(
            f"{type(layer).__name__}s compute {lost} again: keeping that spares them nothing "
            "(adapters, autocast, or "
            "another block)."
        )
    call.shape, call.dtype = x.shape, x.dtype
    call.private = session.private(x)
    session.link(call, x)
    # What draws and no module tells of it (F.dropout, noise before a router) is found out by what
    # it leaves behind.
    real = (
        not (known or direct)
        and x.device.type != "meta"
        and (x.__class__ is Tensor or not is_fake(x))
    )
    watched = Generators(x.device) if real else None
    outputs = _apply(call, x, *tensors)
    drew = watched and watched.drew()
    cast = not direct and then.ran()
    if drew:
        session.draws.add(kind)
        watched.put_back()
    if drew or (cast and not again):
        # Autograd has noted the types that the layer's own weights had before it cast them.
        ask.start_anew()
        del call, outputs  # what the first run holds goes before the second one
        return tiled_layer(session, policy, ask, x, again=True)
    session.linked(call, outputs[0])
    return list(outputs)
