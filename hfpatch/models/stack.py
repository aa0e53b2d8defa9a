"""The decoder stack of any family: its own forward, with attention and masks that are ours while it runs.

Decides once a step whether that can be, and who sees whom (models/documents.py).
"""

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from hfpatch.compat import attention_of, compiled_by_itself, forward_mode, modules_in, name_attention, transforming
from hfpatch.memory.sequence import FLOAT32_ANGLES
from hfpatch.models.angles import narrow
from hfpatch.models.answers import BY_PLACE, OTHER_MIXER
from hfpatch.models.asking import (
    Doubted,
    asks_for_hidden_states,
    having,
    here,
    named,
    not_exchanged,
    our_attention,
    standard,
)
from hfpatch.models.attending import CAUSAL_NAME
from hfpatch.models.balance import shares_balance
from hfpatch.models.classes import KeepsSignature, package_of, replaced_forward
from hfpatch.models.documents import packs, refuse_packed, shown
from hfpatch.models.finding import list_of_layers
from hfpatch.models.first_call import AskedLayer
from hfpatch.models.masks import Batch
from hfpatch.models.parallel import (
    attends_to_all_before,
    refuse_parts,
    refuse_shared_mixers,
    refuse_training_over_a_device_map,
    refuse_uneven_rows,
    replaced_attention,
    require_positions,
    sequence_now,
    shared_in_a_graph,
    weights_move,
    whole_rows,
    why_not_exchanged,
)

_ADVICE = (
    f"rotary angles of more than {FLOAT32_ANGLES:,} tokens are off in float32 by more than bfloat16 rounds; "
    'hfpatch.apply(model, rope="float64") computes them in float64 (hfpatch train: --rope_float64 True).'
)


class OurAttention(KeepsSignature):
    """Mixed over the class of the module that holds the decoder layers.

    `_hfpatch_asks`: what says four of these, where nobody looked yet (models.verdict.isolation), else None;
    `_hfpatch_configs`: the configs that its modules read; `_hfpatch_ours`: whether it may have our attention and masks;
    `_hfpatch_mixers`: whether some layers mix tokens by something else, `_hfpatch_across`: whether that lets documents see each
    other where they run as transformers has them; `_hfpatch_prefill`: whether an empty cache may be filled
    by our layers; `_hfpatch_apart`: whether its layers, as they run here, keep documents apart where positions restart.
    """

    _hfpatch_configs, _hfpatch_session, _hfpatch_mixers, _hfpatch_ours, _hfpatch_prefill = (), None, False, True, False
    _hfpatch_apart, _hfpatch_across, _hfpatch_asks = True, False, None

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
        with having(embeds=None if asks_for_hidden_states(self, kwargs) else here.embeds if here.causal else self):
            out = super().forward(**kwargs)
        if getattr(out, "router_logits", None):
            shares_balance(type(self), sequence_now(self.config, self.training))
        return out

    def _hfpatch_forward(self, args, kwargs):
        kwargs |= zip(self._hfpatch_positional, args)
        if torch.compiler.is_compiling():
            # Tiled layers are autograd functions that run nested graphs: the stack runs outside the compiled graph.
            packed = kwargs.get("attention_mask") is not None and kwargs.get("position_ids") is not None
            session = self._hfpatch_session
            eager = self.training and torch.is_grad_enabled() and (packed or session is not None)
            eager = eager or session is not None and session.weights.on
            eager = eager or shared_in_a_graph(attention_of(self.config), self.training)
            return _outside(self, kwargs) if eager else self._hfpatch_compiled(kwargs)
        if here.causal:
            kwargs.setdefault("return_dict", True)  # whatever the config says: the model around it reads names
        return self._hfpatch_run(kwargs)

    def _hfpatch_compiled(self, kwargs):
        """In a graph transformers always builds a [T, T] mask: not where every row is one causal sequence."""
        plain = all(
            kwargs.get(n) is None for n in ("attention_mask", "position_ids", "past_key_values", "cu_seq_lens_q")
        )
        config = self.config
        if kwargs.get("use_cache") is None:
            kwargs["use_cache"] = bool(getattr(config, "use_cache", False)) and not self.training
        if not plain or kwargs["use_cache"] or not _full_attention(config) or attention_of(config) != "sdpa":
            return self._hfpatch_stock(kwargs)
        name_attention(config, CAUSAL_NAME)
        try:
            return self._hfpatch_stock(kwargs)
        finally:
            name_attention(config, "sdpa")

    def _hfpatch_run(self, kwargs):
        forward = forward_mode()  # which operators of ours would lose without a word
        reverse = transforming() and torch.is_grad_enabled() and self._differentiated(kwargs.get("inputs_embeds"))
        if forward or reverse:
            came = "forward-mode differentiation (jvp, dual numbers)" if forward else "a gradient by torch.func"
            raise RuntimeError(
                f"hfpatch: expected torch.autograd's own backward, {came} came; "
                "call hfpatch.undo(model) before it, or torch.autograd.grad in its place."
            )
        given, session = _given(kwargs), self._hfpatch_session
        if session is not None and session.weights.on and isinstance(given, Tensor):
            session.weights_to_host(self, given.device)
        if weights_move(self):
            refuse_training_over_a_device_map(self.training and torch.is_grad_enabled())
            if sequence_now(self.config, self.training) is not None:
                raise not_exchanged("a model with a device map or offloaded weights")
            return self._hfpatch_declined(kwargs)
        as_given = dict(kwargs)
        batch = self._hfpatch_batch(kwargs)
        if batch is None:
            return self._hfpatch_declined(kwargs)
        if session is not None and batch.T > FLOAT32_ANGLES and _ADVICE not in session.told and narrow(self):
            session.tell(_ADVICE)
        checkpointed = (
            self._hfpatch_session is None and self.training and getattr(self, "gradient_checkpointing", False)
        )
        if checkpointed and batch.sequence is not None:
            self._hfpatch_shared_without(kwargs, batch)
            return self._hfpatch_declined(kwargs)
        if checkpointed:
            # transformers' own checkpointing runs layers again when this forward, and our attention with it, has gone.
            rows, positions = batch.rows(), kwargs.get("position_ids")
            if rows.documents is not None and rows.hidden_BT is None and positions is not None:
                # Beside a mask it would not look for documents; without one padding before a row attends to itself.
                if rows.blind_BT is None or packs(batch.B, positions, kwargs["attention_mask"], None):
                    kwargs["attention_mask"] = None
            return self._hfpatch_stock(kwargs)
        if kwargs.get("attention_mask") is None:
            # transformers then looks for documents itself, waiting for the device; ours are found already.
            kwargs["attention_mask"] = torch.ones(batch.B, batch.t, dtype=torch.bool, device=batch.device)
        try:
            with our_attention(self._hfpatch_configs, batch):
                return self._hfpatch_stock(kwargs)
        except Exception as error:  # a family's own code may add a mask to its scores
            if not batch.doubted:
                raise
            self._hfpatch_look()
            if self._hfpatch_ours and not isinstance(error, Doubted):
                raise
        return self._hfpatch_run(as_given)

    def _hfpatch_look(self) -> None:
        """What the verdict that apply() left out would have said of documents, mixers and masks."""
        asks, self._hfpatch_asks = self._hfpatch_asks, None
        self._hfpatch_apart, self._hfpatch_mixers, across, self._hfpatch_ours = asks(self.config)
        self._hfpatch_across = self._hfpatch_mixers and across

    def _hfpatch_watched(self) -> int:
        """A number that stands for the layers with hooks inside, which run whole in training."""
        if self._hfpatch_session is None or not (self.training and torch.is_grad_enabled()):
            return 0
        layers = (m for m in self.modules() if "_hfpatch_index" in vars(m))
        return hash(tuple(layer._hfpatch_index for layer in layers if layer._hooked(modules_in(layer))))

    def _differentiated(self, embeds) -> bool:
        return any(isinstance(x, Tensor) and x.requires_grad for x in (embeds, *self.parameters()))

    def _hfpatch_declined(self, kwargs):
        with having(declined=True):
            return self._hfpatch_stock(kwargs)

    def _hfpatch_batch(self, kwargs) -> Batch | None:
        """What the layers are to know of this batch; None where they run as transformers has them."""
        given = _given(kwargs)
        if not isinstance(given, Tensor) or given.dim() < 2:
            return None
        B, T = given.shape[:2]
        mask, cache, config = kwargs.get("attention_mask"), kwargs.get("past_key_values"), self.config
        positions, use_cache = kwargs.get("position_ids"), kwargs.get("use_cache")
        if positions is None and isinstance(here.positions, Tensor) and here.positions.shape[-1] == T:
            positions = here.positions
        if isinstance(positions, Tensor) and positions.dim() == 3:
            positions = positions[0] if len(positions) == 4 else None  # text, then time, height and width
        sequence = sequence_now(config, self.training)
        for_nobody = here.uncached and self.training and torch.is_grad_enabled()
        for_nobody = bool(for_nobody and (use_cache if cache is None else _empty(cache)))
        if for_nobody:  # a model around this one made it, or asks for one because its config does
            cache = use_cache = kwargs["past_key_values"] = kwargs["use_cache"] = None
        cached = (
            for_nobody
            or cache is None
            and use_cache is None
            and sequence is None
            and bool(getattr(config, "use_cache", False))
            and not (self.training and getattr(self, "gradient_checkpointing", False))
        )
        of_rows = cached and isinstance(mask, Tensor) and mask.dim() == 2 and len(mask) == B
        if of_rows and mask.shape[1] != T:
            # Beside its cache transformers cuts a mask to the tokens, and hides what it is short of.
            mask = kwargs["attention_mask"] = torch.nn.functional.pad(mask, (0, T - mask.shape[1]))
        visible = isinstance(mask, Tensor) and mask.shape == (B, T)
        rows_mask, idle = mask if visible else None, here.idle_BT
        if sequence is not None:
            if cache is not None:
                raise not_exchanged("a KV cache")
            self._hfpatch_refuse_unasked()
            refuse_uneven_rows(
                sequence,
                given,
                self._hfpatch_watched(),
                labels=here.labels,
                position_ids=positions,
                attention_mask=rows_mask,
            )
            require_positions(kwargs.get("position_ids"))
            rows_mask, positions, idle = whole_rows(sequence, B, rows_mask, positions, idle)
            T, use_cache = T * sequence.size, False
            kwargs["use_cache"] = False
        offsets = kwargs.get("cu_seq_lens_q")
        seen = rows_mask
        if cache is not None and isinstance(mask, Tensor) and mask.dim() == 2 and len(mask) == B and mask.shape[1] > T:
            seen = mask[:, -T:]  # it tells of what is in the cache too
        own = mask is not None and not visible
        of_scores = own and seen is None
        if of_scores and T > 1:
            seen = shown(mask, B, T, 0 if cache is None else int(cache.get_seq_length()))
        packed = lambda: packs(B, positions, seen, None)  # noqa: E731
        if self._hfpatch_apart is None and (positions is not None or offsets is not None):
            self._hfpatch_look()
        if not self._hfpatch_apart and packs(B, positions, seen, offsets):
            refuse_packed(type(self))
        stock_mixers = self._hfpatch_across and self._hfpatch_session is None
        if stock_mixers and offsets is None and kwargs.get("seq_idx") is None and packed():
            refuse_packed(
                type(self), "pass seq_idx where its kernels take that, leave checkpointing on, or do not pack"
            )
        if cache is None and use_cache is None:
            use_cache = cached and not (self.training and torch.is_grad_enabled())
            use_cache = use_cache and not packed()
            if not use_cache:  # models make a cache in training too, where nobody reads it; RWKV makes none
                kwargs["use_cache"] = False
        if cache is not None or use_cache:
            # A mask of the caller's own says who sees whom in attention; mixers know nothing of it.
            if (self._hfpatch_across or not of_scores) and packed():
                raise ValueError(
                    "hfpatch: expected one document a row where a KV cache is kept, position_ids that restart came; "
                    "pass use_cache=False, which isolates the documents."
                )
            fills = cache is None or _empty(cache)
            prefill = fills and T > 1 and not torch.is_grad_enabled() and self._hfpatch_session is not None
            if not (prefill and self._hfpatch_prefill):
                return None
            positions = None  # beside a cache transformers looks for no documents, and what restarts was refused
        if self._hfpatch_mixers and sequence is not None:
            refuse_shared_mixers(type(self))
        asked = kwargs.get("output_attentions")
        weights = bool(getattr(config, "output_attentions", False) if asked is None else asked)
        # Offsets beside shards would count this rank's tokens; the positions say the same of whole rows.
        batch = Batch(B, T, given.device, rows_mask, positions, offsets if sequence is None else None, idle, sequence)
        encoder = kwargs.get("encoder_hidden_states") is not None  # whose masks and lengths are others
        if sequence is not None and (came := self._hfpatch_not_exchanged(own, encoder, weights)):
            raise not_exchanged(came)
        if not self._hfpatch_ours:
            if rows_mask is not None and packed():
                # Beside a mask transformers looks for no documents.
                kwargs["attention_mask"] = None
                if not bool(rows_mask.all()):
                    refuse_packed(type(self), "do not pack rows that are padded too")
            return self._hfpatch_without(packed)
        batch.cached, batch.doubted = cached, self._hfpatch_asks is not None
        batch.prefill, batch.weights = cache is not None or bool(use_cache), weights
        name = None if replaced_attention(config) else standard(config)
        ours = name == "eager" if weights else name is not None  # others have no weights to give
        if sequence is not None and (not ours or why_not_exchanged(config, self.training)):
            return self._hfpatch_shared_without(kwargs, batch)
        why = "a mask that is made outside of it" if own else "they attend to an encoder's states" if encoder else None
        if name is None and why is None:
            why = f"its attention is another library's ({named(config)})"
        if why and self._hfpatch_session is not None and self.training and torch.is_grad_enabled():
            self._hfpatch_session.tell(f"the layers of {type(self).__name__} run whole, their inputs offloaded: {why}.")
        if why or not ours:
            return self._hfpatch_without(packed)
        return batch if getattr(config, "is_causal", True) else self._hfpatch_without(packed)

    def _hfpatch_refuse_unasked(self) -> None:
        """ValueError for layers that nobody asks whether they mix tokens: another forward runs than the one that would."""
        layers = list_of_layers(self)
        if layers is None:
            refuse_shared_mixers(type(self), "its layers are others than at apply()")
        for layer in layers:
            why = replaced_forward(layer)
            if not isinstance(layer, AskedLayer):  # but for one that torch wrapped
                why = why or (package_of(layer) != "torch" and "put in after apply()")
            elif compiled_by_itself(layer):
                layer._look(modules_in(layer))
                answers = layer._hfpatch_answers
                known = answers and answers.looked and answers.reason not in (OTHER_MIXER, BY_PLACE)
                why = why or (not known and "it is compiled by itself")
            if why:
                refuse_shared_mixers(type(layer), why)

    def _hfpatch_not_exchanged(self, own: bool, encoder: bool, weights: bool) -> str | None:
        """What came where ranks share rows and neither our attention nor an engine's can exchange it; None where one can.

        own: whether a mask of the caller's own came; encoder: an encoder's states; weights: whether attention is to give its
        weights."""
        config = self.config
        if not self._hfpatch_ours:
            return f"a {type(self).__name__}, whose attention cannot be hfpatch's,"
        if replaced_attention(config):
            return f"attention from elsewhere ({named(config)})"
        if not getattr(config, "is_causal", True):
            return "attention that is not causal"
        if encoder:
            return "attention to an encoder's states"
        return "an attention mask of the caller's own" if own else "output_attentions" if weights else None

    def _hfpatch_shared_without(self, kwargs, batch: Batch) -> None:
        """Rows that ranks share go to transformers' attention, as an engine replaced it: ValueError where that is not exact."""
        refuse_parts(self.config, batch)
        # Of this rank's positions, or of what is hidden, transformers would make a [t, t] mask that says nothing of whole rows.
        kwargs["attention_mask"] = torch.ones(batch.B, batch.t, dtype=torch.bool, device=batch.device)

    def _hfpatch_without(self, packed) -> None:
        """The layers run as transformers has them, whose mixers know nothing of documents: ValueError where that matters."""
        if self._hfpatch_across and packed():
            refuse_packed(type(self), "do not pack, or load the model with attn_implementation='sdpa'")


def _given(kwargs):
    """The ids, or what is embedded already."""
    return kwargs.get("inputs_embeds") if kwargs.get("input_ids") is None else kwargs["input_ids"]


def _empty(cache) -> bool:
    return type(cache) is DynamicCache and not cache.get_seq_length()


def _full_attention(config) -> bool:
    """Whether no layer has a window, chunks or weights to give, as far as the config says."""
    names = ("output_attentions", "attention_dropout")
    plain = not any(getattr(config, name, None) for name in names) and getattr(config, "is_causal", True)
    return plain and attends_to_all_before(config)


_outside = torch.compiler.disable(lambda stack, kwargs: stack._hfpatch_run(kwargs))
