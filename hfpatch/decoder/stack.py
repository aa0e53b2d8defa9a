"""The decoder stack of any family: its own forward, with attention and masks that are ours while it
runs.

Decides once a step whether that can be, and who sees whom (context/documents.py).
"""

import torch
from torch import Tensor

from hfpatch.budget.sequence import FLOAT32_ANGLES
from hfpatch.compat import (
    attention_of,
    compiled_by_itself,
    forward_mode,
    hooks_on_all,
    name_attention,
    transforming,
)
from hfpatch.context.attention import CAUSAL_NAME
from hfpatch.context.classes import KeepsSignature, package_of, replaced_forward
from hfpatch.context.current import (
    asks_for_hidden_states,
    current,
    having,
    not_exchanged,
    our_attention,
    standard,
)
from hfpatch.context.documents import packs
from hfpatch.context.masks import Batch
from hfpatch.context.ranks import (
    attends_to_all_before,
    refuse_shared_mixers,
    refuse_training_over_a_device_map,
    sequence_now,
    shared_in_a_graph,
    weights_move,
)
from hfpatch.context.router_balance import shares_balance
from hfpatch.decoder.batch import (
    StackTraits,
    decide,
    read_batch,
    share_rows,
    shared_without,
    tokens_of,
    without_unread_cache,
)
from hfpatch.decoder.find import list_of_layers
from hfpatch.layer.condition import look
from hfpatch.layer.layer import UntiledLayer, why_not_shared
from hfpatch.parts.angles import narrow

_ADVICE = (
    f"rotary angles of more than {FLOAT32_ANGLES:,} tokens are off in float32 by more than "
    "bfloat16 rounds; "
    "hfpatch.apply(model, rope_float64=True) computes them in float64 (hfpatch train: "
    "--rope_float64 True)."
)


class OurAttention(KeepsSignature):
    """Mixed over the class of the module that holds the decoder layers.

    `_hfpatch_configs`: the configs that its modules read; `_hfpatch_ours`: whether it may have our
    attention and masks; `_hfpatch_mixers`: whether some layers mix tokens by something else,
    `_hfpatch_across`: whether that lets documents see each other where they run as transformers has
    them; `_hfpatch_prefill`: whether an empty cache may be filled by our layers; `_hfpatch_apart`:
    whether its layers, as they run here, keep documents apart where positions restart.
    """

    _hfpatch_configs, _hfpatch_session, _hfpatch_mixers, _hfpatch_ours, _hfpatch_prefill = (
        (),
        None,
        False,
        True,
        False,
    )
    _hfpatch_apart, _hfpatch_across = True, False

    def __setstate__(self, state):
        super().__setstate__(state)
        if self._hfpatch_session is not None:  # which a pickle leaves without its owner
            self._hfpatch_session.owned_by(self)

    @property
    def _hfpatch_shares_rows(self) -> bool:
        """Whether its layers, outside training, take a part of each row."""
        known = standard(self.config) and getattr(self.config, "is_causal", True)
        return bool(self._hfpatch_ours and not self._hfpatch_mixers and known)

    def _hfpatch_stock(self, kwargs):
        if torch.compiler.is_compiling():
            return super().forward(**kwargs)
        with having(
            embeds=None
            if asks_for_hidden_states(self, kwargs)
            else current.embeds
            if current.causal
            else self
        ):
            out = super().forward(**kwargs)
        if getattr(out, "router_logits", None):
            shares_balance(type(self), sequence_now(self.config, self.training))
        return out

    def _hfpatch_forward(self, args, kwargs):
        kwargs |= zip(self._hfpatch_positional, args)
        if torch.compiler.is_compiling():
            # Tiled layers are autograd functions that run nested graphs: the stack runs outside the
            #     compiled graph.
            packed = (
                kwargs.get("attention_mask") is not None and kwargs.get("position_ids") is not None
            )
            session = self._hfpatch_session
            eager = self.training and torch.is_grad_enabled() and (packed or session is not None)
            eager = eager or session is not None and session.weights.on
            eager = eager or shared_in_a_graph(attention_of(self.config), self.training)
            return _outside(self, kwargs) if eager else self._hfpatch_compiled(kwargs)
        if current.causal:
            # whatever the config says: the model around it reads names
            kwargs.setdefault("return_dict", True)
        return self._hfpatch_run(kwargs)

    def _hfpatch_compiled(self, kwargs):
        """In a graph transformers always builds a [T, T] mask: not where every row is one causal
        sequence.
        """
        plain = all(
            kwargs.get(n) is None
            for n in ("attention_mask", "position_ids", "past_key_values", "cu_seq_lens_q")
        )
        config = self.config
        if kwargs.get("use_cache") is None:
            kwargs["use_cache"] = bool(getattr(config, "use_cache", False)) and not self.training
        if (
            not plain
            or kwargs["use_cache"]
            or not _full_attention(config)
            or attention_of(config) != "sdpa"
        ):
            return self._hfpatch_stock(kwargs)
        name_attention(config, CAUSAL_NAME)
        try:
            return self._hfpatch_stock(kwargs)
        finally:
            name_attention(config, "sdpa")

    def _hfpatch_run(self, kwargs):
        forward = forward_mode()  # which operators of ours would lose without a word
        reverse = (
            transforming()
            and torch.is_grad_enabled()
            and self._differentiated(kwargs.get("inputs_embeds"))
        )
        if forward or reverse:
            came = (
                "forward-mode differentiation (jvp, dual numbers)"
                if forward
                else "a gradient by torch.func"
            )
            raise RuntimeError(
                f"hfpatch: expected torch.autograd's own backward, {came} came; "
                "call hfpatch.undo(model) before it, or torch.autograd.grad in its place."
            )
        given, session = tokens_of(kwargs), self._hfpatch_session
        for layer in self._hfpatch_layers():
            look(layer)
        if session is not None and session.weights.on and isinstance(given, Tensor):
            session.weights_to_host(self, given.device)
        if weights_move(self):
            refuse_training_over_a_device_map(self.training and torch.is_grad_enabled())
            if sequence_now(self.config, self.training) is not None:
                raise not_exchanged("a model with a device map or offloaded weights")
            return self._hfpatch_declined(kwargs)
        batch = self._hfpatch_batch(kwargs)
        if batch is None:
            return self._hfpatch_declined(kwargs)
        if (
            session is not None
            and batch.T > FLOAT32_ANGLES
            and _ADVICE not in session.told
            and narrow(self)
        ):
            session.tell(_ADVICE)
        checkpointed = (
            self._hfpatch_session is None
            and self.training
            and getattr(self, "gradient_checkpointing", False)
        )
        if checkpointed and batch.sequence is not None:
            kwargs.update(shared_without(self.config, batch))
            return self._hfpatch_declined(kwargs)
        if checkpointed:
            # transformers' own checkpointing runs layers again when this forward, and our attention
            # with it, has gone.
            rows, positions = batch.rows(), kwargs.get("position_ids")
            if rows.documents is not None and rows.hidden_BT is None and positions is not None:
                # Beside a mask it would not look for documents; without one padding before a row
                # attends to itself.
                if rows.blind_BT is None or packs(
                    batch.B, positions, kwargs["attention_mask"], None
                ):
                    kwargs["attention_mask"] = None
            return self._hfpatch_stock(kwargs)
        if kwargs.get("attention_mask") is None:
            # transformers then looks for documents itself, waiting for the device; ours are found
            # already.
            kwargs["attention_mask"] = torch.ones(
                batch.B, batch.t, dtype=torch.bool, device=batch.device
            )
        with our_attention(self._hfpatch_configs, batch):
            return self._hfpatch_stock(kwargs)

    def _hfpatch_layers(self) -> list[UntiledLayer]:
        """Its layers that are hfpatch's."""
        return [m for m in list_of_layers(self) or () if isinstance(m, UntiledLayer)]

    def _hfpatch_whole_layers(self) -> int:
        """A number that stands for the layers which run whole in training."""
        if self._hfpatch_session is None or not (self.training and torch.is_grad_enabled()):
            return 0
        layers = self._hfpatch_layers()
        return hash(
            (bool(hooks_on_all()), *(i for i, layer in enumerate(layers) if look(layer).reason))
        )

    def _differentiated(self, embeds) -> bool:
        return any(isinstance(x, Tensor) and x.requires_grad for x in (embeds, *self.parameters()))

    def _hfpatch_declined(self, kwargs):
        with having(declined=True):
            return self._hfpatch_stock(kwargs)

    def _hfpatch_batch(self, kwargs) -> Batch | None:
        """What the layers are to know of this batch; None where they run as transformers has them.
        Changes the arguments so.
        """
        checkpoints = bool(getattr(self, "gradient_checkpointing", False))
        given, changes = read_batch(kwargs, self.config, self.training, checkpoints), {}
        if given is None:
            return None
        given, cached = without_unread_cache(given, changes)
        if given.sequence is not None:
            given = share_rows(
                given, self._hfpatch_whole_layers(), self._hfpatch_refuse_unasked, changes
            )
        decision = decide(given, self._hfpatch_stack_traits, cached, changes)
        kwargs.update(decision.changes)
        if decision.warning is not None:
            self._hfpatch_session.tell(decision.warning)
        return decision.batch

    @property
    def _hfpatch_stack_traits(self) -> StackTraits:
        return StackTraits(
            type(self), self._hfpatch_ours, self._hfpatch_mixers, self._hfpatch_across,
            self._hfpatch_apart,
            self._hfpatch_prefill, self._hfpatch_session is not None,
        )  # fmt: skip

    def _hfpatch_refuse_unasked(self) -> None:
        """ValueError for layers that nobody asks whether they mix tokens: another forward runs than
        the one that would.
        """
        layers = list_of_layers(self)
        if layers is None:
            refuse_shared_mixers(type(self), "its layers are others than at apply()")
        for layer in layers:
            why = replaced_forward(layer)
            if not isinstance(layer, UntiledLayer):  # but for one that torch wrapped
                why = why or (package_of(layer) != "torch" and "put in after apply()")
            elif compiled_by_itself(layer):
                known = why_not_shared(layer._hfpatch_traits, look(layer)) is None
                why = why or (not known and "it is compiled by itself")
            if why:
                refuse_shared_mixers(type(layer), why)


def _full_attention(config) -> bool:
    """Whether no layer has a window, chunks or weights to give, as far as the config says."""
    names = ("output_attentions", "attention_dropout")
    plain = not any(getattr(config, name, None) for name in names) and getattr(
        config, "is_causal", True
    )
    return plain and attends_to_all_before(config)


_outside = torch.compiler.disable(lambda stack, kwargs: stack._hfpatch_run(kwargs))
