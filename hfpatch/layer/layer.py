"""Mixins over the class of any decoder layer. The layer runs in tiles where that is exact. Else
it runs untiled: as a whole, and again in backward, with its input offloaded (why_whole.py has the
reasons). A layer that keeps all runs as a whole once, and saves what autograd saves.
"""

from collections import namedtuple
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hfpatch.compat import (
    autocast_dtype,
    collected_now,
    pytree,
    under_zero3,
)
from hfpatch.context.current import (
    NotStopped,
    current,
    not_exchanged,
    our_attention,
)
from hfpatch.context.documents import refuse_packed
from hfpatch.context.masks import Batch
from hfpatch.context.ranks import refuse_shared_mixers, row_ranks_now
from hfpatch.layer.arguments import Arguments
from hfpatch.layer.condition import Condition, look
from hfpatch.layer.function import tiled_layer
from hfpatch.layer.mixers import documents_one_by_one
from hfpatch.layer.residual_streams import by_rows, joined, split, streams_of
from hfpatch.layer.shared_keys import NAME as SHARED_KEYS
from hfpatch.layer.shared_keys import of_its_own
from hfpatch.layer.traced import Traced
from hfpatch.layer.traits import LayerTraits, Patched
from hfpatch.layer.whole import offloaded_checkpoint
from hfpatch.layer.why_whole import BY_NAME, OTHER_MIXER, Why, first

_RECORDED_INSIDE = "router_logits"  # recorded per token by modules behind the attention
# outside: whether a layer is known to mix tokens outside attention. unknown: why this is not known;
# None where it is. Ranks can share rows where neither holds.
Mixing = namedtuple("Mixing", "outside unknown")


@dataclass(slots=True)
class Request:
    """One call of a layer, as the rules read it.

    Attributes:
        x: [B, T, D], residual streams joined; given: x as the caller passed it.
        batch: the description of the tokens, None if transformers' attention runs.
        row_ranks: the ranks that share the rows, or None.
    """

    x: Tensor
    given: Tensor
    args: tuple
    kwargs: dict
    batch: Batch | None
    row_ranks: object
    condition: Condition


class PatchedLayer:
    """A mixin over a decoder layer's class, where the layer runs transformers' own forward
    (checkpointing="off").

    _hfpatch: what is known of the layer.
    """

    _hfpatch: Patched

    def __call__(self, hidden_states, *args, **kwargs):
        if torch.compiler.is_compiling() or getattr(current.batch, "packed_row", None) is None:
            return super().__call__(hidden_states, *args, **kwargs)
        # Around the hooks of engines, which may hand on another tensor (FSDP2, DeepSpeed).
        return current.batch.packed_row.run(
            super().__call__, self._hfpatch.traits, hidden_states, args, kwargs
        )

    def stock_forward(self, *args, **kwargs):
        """transformers' own forward, on hidden states whose streams are joined."""
        return by_rows(super().forward, self._hfpatch.streams)(*args, **kwargs)

    def _sequence(self, batch: Batch | None):
        """The ranks that share the rows of the running forward, or None."""
        if batch is not None:
            return batch.row_ranks
        found = (row_ranks_now(config, self.training) for config in self._hfpatch.configs)
        return next(filter(None, found), None)

    def _refuse_parts(self, batch: Batch | None, condition: Condition, timed: bool = False) -> None:
        """ValueError if tokens of different ranks may have to meet outside the attention that these
        ranks exchange. timed: the mixers would pass their states from rank to rank.
        """
        if batch is None and not current.declined:  # the caller is not the stack
            raise not_exchanged("a layer that runs outside of its model's forward")
        mixing = mixing_of(self._hfpatch.traits, condition)
        if mixing.unknown or (mixing.outside and not timed):
            refuse_shared_mixers(type(self), mixing.unknown)

    def forward(self, hidden_states, *args, **kwargs):
        # accelerate binds this method and keeps it after undo()
        if not isinstance(self, PatchedLayer):
            return type(self).forward(self, hidden_states, *args, **kwargs)
        outside = not torch.compiler.is_compiling() and current.role is None
        if outside and self._sequence(current.batch) is not None:
            self._refuse_parts(current.batch, look(self))
        return super().forward(hidden_states, *args, **kwargs)


def mixing_of(traits: LayerTraits, condition: Condition) -> Mixing:
    """What is known of a layer's mixing of tokens outside attention."""
    reason = condition.reason
    if not traits.looked or (reason is not None and reason.name == "unknown module"):
        return Mixing(outside=False, unknown=reason)
    return Mixing(outside=traits.mixes_outside and not traits.attends, unknown=None)


def _run_directly(function, *args, **kwargs):
    return function(*args, **kwargs)


class TiledLayer(PatchedLayer):
    """A mixin over a decoder layer's class. The layer runs tile by tile where that is exact, else
    untiled, with its input offloaded.
    """

    @property
    def _gradient_checkpointing_func(self):
        # transformers sets a function when checkpointing is turned on. The runtime replaces it.
        return _run_directly

    @_gradient_checkpointing_func.setter
    def _gradient_checkpointing_func(self, function):
        vars(self)["_gradient_checkpointing_func"] = function  # takes effect after undo()

    def __call__(self, hidden_states, *args, **kwargs):
        if torch.is_grad_enabled() and not hidden_states.requires_grad and under_zero3(self):
            # DeepSpeed reduces a leaf module's gradients in its backward hook. If no input wants a
            # gradient (the first layer under LoRA), PyTorch runs that hook before the module's
            # backward. So the input gets one.
            hidden_states = hidden_states.detach().requires_grad_(True)
        return super().__call__(hidden_states, *args, **kwargs)

    def _apply(self, fn, recurse=True):
        with self._hfpatch.runtime.weights_staying(self, fn):
            return super()._apply(fn, recurse)

    def forward(self, hidden_states, *args, **kwargs):
        # accelerate binds this method and keeps it after undo()
        if not isinstance(self, TiledLayer):
            return type(self).forward(self, hidden_states, *args, **kwargs)
        runtime = self._hfpatch.runtime
        batch = current.batch
        if torch.compiler.is_compiling() or current.role is not None:
            return super().forward(hidden_states, *args, **kwargs)
        # The stack's forward holds the lock already. Calls without gradients take it too: they must
        # not clear the state of another thread's running backward as if it were left over.
        with runtime.turn if batch is None and not current.declined else nullcontext():
            runtime.watch_padding(hidden_states)
            request = self._request(hidden_states, batch, args, kwargs)
            traits = self._hfpatch.traits
            if request.row_ranks is not None:
                # If such a layer then runs untiled after all, its own forward raises.
                timed = batch is not None and bool(traits.mixers) and traits.all_timed
                self._refuse_parts(batch, request.condition, timed)
            if (
                traits.reason == OTHER_MIXER
                and batch is not None
                and batch.document_bounds is not None
            ):
                refuse_packed(type(self))
            y = self._run(request)
            runtime.layer_ended(self, request.x.device)
            return y

    def _run(self, r: Request):
        runtime = self._hfpatch.runtime
        why = first("call", r.condition.now, r)
        if why is not None:
            return self._untiled(r, why)
        policy = runtime.policy(self, r.x, r.batch.row_ranks)
        if runtime.layer_begins(self, r.x, policy):
            return self._keeping_all(r)
        return self._in_tiles(r, policy)

    def _untiled(self, r: Request, why: Why):
        """Runs a call untiled, for the reason `why`: checkpointed, unless it must or may keep all."""
        reason = BY_NAME[why.name]
        runtime = self._hfpatch.runtime
        whole = self._whole(r)
        # [Step 1] No backward will follow (or it is eval mode), or the caller wants probabilities: not
        # checkpointed.
        nothing_to_keep = not (self.training and torch.is_grad_enabled()) or not r.given.numel()
        if nothing_to_keep or r.kwargs.get("output_attentions"):
            return whole(r.given)
        # [Step 2] A layer that cannot run again in backward keeps all.
        if reason.told:
            runtime.tell(f"{type(self).__name__}s run {why.how}: {why}.")
        if reason.keeps:
            return whole(r.given)
        # [Step 3] Of the others some may keep all, where there is room. The policy takes one row of
        # tokens, if they have other dimensions than [B, T, D].
        x = r.given if r.given.dim() == 3 else r.given.flatten(0, -2)[None]
        policy = runtime.policy(self, x, r.row_ranks, whole=True)
        if runtime.layer_begins(self, x, policy):
            return self._keeping_all(r)
        # [Step 4] The rest are checkpointed, their inputs offloaded.
        return self._checkpointed(r, policy, whole)

    def _keeping_all(self, r: Request):
        y = self._whole(r)(r.given)
        self._hfpatch.runtime.kept_all(self, r.given, y)
        return y

    def _request(self, given: Tensor, batch: Batch | None, args, kwargs) -> Request:
        """The Request of this call. The stack has looked at the layer's condition already. A layer
        that something else calls looks itself, and has no batch: it runs untiled.
        """
        known = self._hfpatch
        condition = known.condition
        if condition is None or (batch is None and not current.declined):
            condition = look(self)
        if batch is not None:
            known.streams = streams_of(given, batch.B, batch.t)
        x = given if batch is None else joined(given, known.streams)
        return Request(x, given, args, kwargs, batch, self._sequence(batch), condition)

    def _in_tiles(self, r: Request, policy) -> object:
        known = self._hfpatch
        runtime = known.runtime
        lists = collected_now()
        records = None
        if lists:
            records = (_RECORDED_INSIDE,) if _RECORDED_INSIDE in lists else ()
        arguments = Arguments(r.args, of_its_own(r.kwargs), *r.x.shape[:2])
        traced = Traced(
            self, arguments, known.traits, known.configs, r.batch,
            r.condition, self.stock_forward, records=records, rng={} if r.condition.draws else None,
            autocast=autocast_dtype(r.x.device.type),
        )  # fmt: skip
        try:
            with runtime.weights.forward(self, r.x.device):
                outputs = tiled_layer(runtime, policy, traced, r.x)
        except NotStopped as error:
            raise RuntimeError(
                f"hfpatch: a {type(self).__name__} does not mix tokens as its small instance did: "
                f"{error}. Call hfpatch.apply(model, checkpointing='off')."
            ) from None
        # Once more: untiled if its attention drops scores or tokens may share its draws, else noting
        # each tile's random state, as its later calls do.
        if not outputs:
            why = first("forward", None, self, r.condition)
            return self._in_tiles(r, policy) if why is None else self._untiled(r, why)
        y, *extras = outputs
        return traced.hand_on(split(y, known.streams), extras, lists, r.kwargs.get(SHARED_KEYS))

    def _whole(self, r: Request):
        """A function that runs the layer whole on given hidden states. Mixers take packed documents
        one by one.
        """
        runtime = self._hfpatch.runtime
        traits = self._hfpatch.traits
        batch = r.batch
        # The function lives until backward. Holding the request would keep the hidden states on the
        # device, which are offloaded meanwhile.
        args = r.args
        kwargs = r.kwargs
        B, T = r.x.shape[:2]

        def whole(h):
            if runtime.weights.on and not needs_no_gradient(self, h, args, kwargs):
                # autograd would save views of a slot, which the next layer overwrites
                raise ValueError(
                    'hfpatch: Checkpointing(frozen_weights="host") needs layers that run tiled, got a '
                    f"{type(self).__name__} that runs untiled: its backward would find other weights. "
                    "Leave frozen_weights out, or call it under torch.no_grad()."
                )
            isolated = nullcontext()
            if traits.mixers and batch is not None and batch.document_bounds is not None:
                given = Arguments(args, kwargs, B, T)
                configs = self._hfpatch.configs
                isolated = documents_one_by_one(self, traits.mixers, given, configs, batch)
            with runtime.weights.forward(self, h.device), isolated:
                return super(TiledLayer, self).forward(h, *args, **kwargs)

        return whole

    def _checkpointed(self, r: Request, policy, whole):
        runtime = self._hfpatch.runtime
        batch = r.batch
        configs = self._hfpatch.configs if batch is not None else ()

        def run(h):
            # Backward runs this again, long after the model's forward has ended.
            with runtime.turn, our_attention(configs, batch):
                return whole(h)

        return offloaded_checkpoint(runtime, policy, self, run, r.given)


def needs_no_gradient(layer: nn.Module, *given) -> bool:
    """Whether no gradient flows through this call of the layer with the arguments `given`."""
    if not torch.is_grad_enabled():
        return True
    leaves = (*pytree.tree_leaves(given), *layer.parameters())
    return not any(x.requires_grad for x in leaves if isinstance(x, Tensor))
