"""What a stack's forward was given, and what its layers make of it: `read_batch`, then `decide`,
then the stack applies it.

`read_batch` looks at the arguments, `share_rows` at the other ranks' where they share rows, and
`decide` says what is to be: neither of them changes anything. B rows, T tokens of a row.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from hfpatch.context.current import current, named, not_exchanged, standard
from hfpatch.context.documents import packs, refuse_packed, shown
from hfpatch.context.masks import Batch
from hfpatch.context.ranks import (
    refuse_parts,
    refuse_shared_mixers,
    refuse_uneven_rows,
    replaced_attention,
    require_positions,
    sequence_now,
    whole_rows,
    why_not_exchanged,
)


@dataclass(frozen=True)
class StackTraits:
    """What is known of a stack, by its small instance (decoder/verdict.py).

    Attributes: kind: its class, for messages. ours: whether it may have our attention and masks.
        mixers: whether some layers mix tokens by something else than attention. across: whether
        those mixers let documents of one row see each other where layers run as transformers has
        them. apart: whether its layers, as they run here, keep documents of one row apart. prefill:
        whether its layers may fill an empty KV cache in tiles. tiled: whether its layers are
        hfpatch's.
    """

    kind: type
    ours: bool = True
    mixers: bool = False
    across: bool = False
    apart: bool = True
    prefill: bool = False
    tiled: bool = True


@dataclass(frozen=True)
class Given:
    """The arguments of one forward, as its caller gave them.

    Attributes: tokens: ids [B, T] or embeddings [B, T, D] of this rank. T: tokens of a whole row.
        mask: attention_mask, of any kind; rows_mask: the same where it is [B, T], else None. own:
        whether a mask of another kind came. positions: [1 or B, T] or None. offsets: cu_seq_lens_q
        or None. seq_idx: whether that came. use_cache, cache: use_cache and past_key_values.
        caches_unasked: whether transformers makes a cache where nobody says anything. uncached:
        whether the caller of the model around asked for no cache, nor against one. trains: in
        training mode, with gradients. weights: whether attention is to give its probabilities.
        encoder: whether an encoder's states came. sequence: the ranks that share the rows, or None.
    """

    tokens: Tensor
    T: int
    config: object
    trains: bool = False
    training: bool = False
    mask: object = None
    rows_mask: Tensor | None = None
    own: bool = False
    positions: Tensor | None = None
    offsets: Tensor | None = None
    seq_idx: bool = False
    use_cache: bool | None = None
    cache: object = None
    caches_unasked: bool = False
    uncached: bool = False
    weights: bool = False
    encoder: bool = False
    idle_BT: Tensor | None = None
    sequence: object = None

    @property
    def B(self) -> int:
        return self.tokens.shape[0]

    @cached_property
    def seen(self) -> Tensor | None:
        """[B, T]: which tokens the mask lets see themselves, None where it does not say."""
        if self.rows_mask is not None or not isinstance(self.mask, Tensor | dict):
            return self.rows_mask
        two = isinstance(self.mask, Tensor) and self.mask.dim() == 2 and len(self.mask) == self.B
        if two and self.cache is not None and self.mask.shape[1] > self.T:
            return self.mask[:, -self.T :]  # it tells of what is in the cache too
        if self.own and self.T > 1:
            return shown(
                self.mask,
                self.B,
                self.T,
                0 if self.cache is None else int(self.cache.get_seq_length()),
            )
        return None

    @property
    def of_scores(self) -> bool:
        """Whether the mask is one of scores, which mixers know nothing of."""
        two = isinstance(self.mask, Tensor) and self.mask.dim() == 2 and len(self.mask) == self.B
        return self.own and not (two and self.cache is not None and self.mask.shape[1] > self.T)

    @cached_property
    def packed(self) -> bool:
        """Whether rows hold several documents, as positions say. Waits for the device, once."""
        return packs(self.B, self.positions, self.seen, None)


@dataclass(frozen=True)
class Decision:
    """What becomes of one forward.

    Attributes:
        batch: what the layers are told; None where they run as transformers has them.
        changes: keyword arguments of the forward that are replaced.
        warning: a line for the user, or None.
    """

    batch: Batch | None
    changes: dict = field(default_factory=dict)
    warning: str | None = None


def tokens_of(kwargs: dict):
    """The ids, or what is embedded already."""
    return kwargs.get("inputs_embeds") if kwargs.get("input_ids") is None else kwargs["input_ids"]


def read_batch(kwargs: dict, config, training: bool, checkpoints: bool) -> Given | None:
    """The arguments of a stack's forward; None where they are no rows of tokens.

    checkpoints: whether transformers' own checkpointing is on, under which it makes no cache.
    """
    tokens = tokens_of(kwargs)
    if not isinstance(tokens, Tensor) or tokens.dim() < 2:
        return None
    B, T = tokens.shape[:2]
    mask, positions, asked = (
        kwargs.get("attention_mask"),
        kwargs.get("position_ids"),
        kwargs.get("output_attentions"),
    )
    if (
        positions is None
        and isinstance(current.positions, Tensor)
        and current.positions.shape[-1] == T
    ):
        positions = current.positions
    if isinstance(positions, Tensor) and positions.dim() == 3:
        # text, then time, height and width
        positions = positions[0] if len(positions) == 4 else None
    visible = isinstance(mask, Tensor) and mask.shape == (B, T)
    return Given(
        tokens, T, config, training and torch.is_grad_enabled(), training, mask,
        mask if visible else None,
        mask is not None and not visible, positions, kwargs.get("cu_seq_lens_q"),
        kwargs.get("seq_idx") is not None,
        kwargs.get("use_cache"), kwargs.get("past_key_values"),
        bool(getattr(config, "use_cache", False)) and not (training and checkpoints),
        current.uncached,
        bool(getattr(config, "output_attentions", False) if asked is None else asked),
        kwargs.get("encoder_hidden_states") is not None, current.idle_BT,
        sequence_now(config, training),
    )  # fmt: skip


def share_rows(
    given: Given, whole_layers: int, refuse_unasked: Callable[[], None], changes: dict
) -> Given:
    """The same of whole rows, of which this rank has a part. ValueError where the ranks' parts do
    not fit together.

    whole_layers: a number that stands for the layers which run whole here; refuse_unasked: raises
        for layers that nobody tried.
    """
    if given.cache is not None:
        raise not_exchanged("a KV cache")
    refuse_unasked()
    beside = {
        "labels": current.labels,
        "position_ids": given.positions,
        "attention_mask": given.rows_mask,
    }
    refuse_uneven_rows(given.sequence, given.tokens, whole_layers, **beside)
    require_positions(given.positions)
    mask, positions, idle = whole_rows(
        given.sequence, given.B, given.rows_mask, given.positions, given.idle_BT
    )
    changes["use_cache"] = False
    T = given.T * given.sequence.size
    return replace(given, T=T, rows_mask=mask, positions=positions, idle_BT=idle, use_cache=False)


def without_unread_cache(given: Given, changes: dict) -> tuple[Given, bool]:
    """(The same without a cache that a model around this one made and nobody reads, whether
    transformers would make one).
    """
    made = given.use_cache if given.cache is None else is_empty(given.cache)
    unread = bool(given.uncached and given.trains and made)
    if unread:  # or the model around asks for one because its config does
        changes["past_key_values"] = changes["use_cache"] = None
        given = replace(given, cache=None, use_cache=None)
    cached = (
        unread
        or given.cache is None
        and given.use_cache is None
        and given.sequence is None
        and given.caches_unasked
    )
    mask = given.mask
    if (
        cached
        and isinstance(mask, Tensor)
        and mask.dim() == 2
        and len(mask) == given.B
        and mask.shape[1] != given.T
    ):
        # Beside its cache transformers cuts a mask to the tokens, and hides what it is short of.
        mask = changes["attention_mask"] = torch.nn.functional.pad(
            mask, (0, given.T - mask.shape[1])
        )
        given = replace(given, mask=mask, rows_mask=mask, own=False)
    return given, cached


def decide(given: Given, traits: StackTraits, cached: bool, changes: dict) -> Decision:
    """What becomes of a forward. ValueError where documents of one row would see each other, or
    ranks' parts be taken for rows.
    """
    _refuse_mixed_documents(given, traits)
    use_cache, positions = given.use_cache, given.positions
    if given.cache is None and use_cache is None:
        use_cache = cached and not given.trains and not given.packed
        # models make a cache in training too, where nobody reads it; RWKV makes none
        if not use_cache:
            changes["use_cache"] = False
    caches = given.cache is not None or bool(use_cache)
    if caches:
        if not _fills_a_cache(given, traits):
            return Decision(None, changes)
        # beside a cache transformers looks for no documents, and what restarts was refused
        positions = None
    if traits.mixers and given.sequence is not None:
        refuse_shared_mixers(traits.kind)
    # Offsets beside shards would count this rank's tokens; the positions say the same of whole
    # rows.
    offsets = given.offsets if given.sequence is None else None
    batch = Batch(
        given.B,
        given.T,
        given.tokens.device,
        given.rows_mask,
        positions,
        offsets,
        given.idle_BT,
        given.sequence,
    )
    if given.sequence is not None and (came := _not_exchanged(given, traits)):
        raise not_exchanged(came)
    if not traits.ours:
        return _without_our_attention(given, traits, changes)
    batch.cached, batch.prefill, batch.weights = cached, caches, given.weights
    return _with_our_attention(given, traits, batch, changes)


def _refuse_mixed_documents(given: Given, traits: StackTraits) -> None:
    if not traits.apart and packs(given.B, given.positions, given.seen, given.offsets):
        refuse_packed(traits.kind)
    stock_mixers = traits.across and not traits.tiled
    if stock_mixers and given.offsets is None and not given.seq_idx and given.packed:
        refuse_packed(
            traits.kind,
            "pass seq_idx where its kernels take that, leave checkpointing on, or do not pack",
        )


def _fills_a_cache(given: Given, traits: StackTraits) -> bool:
    """Whether this forward is a prompt that our layers may put into an empty cache."""
    # A mask of the caller's own says who sees whom in attention; mixers know nothing of it.
    if (traits.across or not given.of_scores) and given.packed:
        raise ValueError(
            "hfpatch: expected one document a row where a KV cache is kept, position_ids that "
            "restart came; "
            "pass use_cache=False, which isolates the documents."
        )
    empty = given.cache is None or is_empty(given.cache)
    return empty and given.T > 1 and not torch.is_grad_enabled() and traits.tiled and traits.prefill


def _with_our_attention(given: Given, traits: StackTraits, batch: Batch, changes: dict) -> Decision:
    config = given.config
    name = None if replaced_attention(config) else standard(config)
    ours = name == "eager" if given.weights else name is not None  # others have no weights to give
    if given.sequence is not None and (not ours or why_not_exchanged(config, given.training)):
        return Decision(None, changes | shared_without(config, batch))
    why = "a mask that is made outside of it" if given.own else None
    # whose masks and lengths are others
    why = why or ("they attend to an encoder's states" if given.encoder else None)
    if name is None and why is None:
        why = f"its attention is another library's ({named(config)})"
    if why or not ours or not getattr(config, "is_causal", True):
        told = (
            why
            and f"the layers of {traits.kind.__name__} run whole, their inputs offloaded: {why}."
        )
        _refuse_documents_across(given, traits)
        return Decision(None, changes, told if traits.tiled and given.trains else None)
    return Decision(batch, changes)


def _without_our_attention(given: Given, traits: StackTraits, changes: dict) -> Decision:
    if given.rows_mask is not None and given.packed:
        # Beside a mask transformers looks for no documents.
        changes["attention_mask"] = None
        if not bool(given.rows_mask.all()):
            refuse_packed(traits.kind, "do not pack rows that are padded too")
    _refuse_documents_across(given, traits)
    return Decision(None, changes)


def _refuse_documents_across(given: Given, traits: StackTraits) -> None:
    """ValueError where layers run as transformers has them, and their mixers would let documents
    see each other.
    """
    if traits.across and given.packed:
        refuse_packed(traits.kind, "do not pack, or load the model with attn_implementation='sdpa'")


def _not_exchanged(given: Given, traits: StackTraits) -> str | None:
    """What came where ranks share rows and neither our attention nor an engine's can exchange it;
    None where one can.
    """
    if not traits.ours:
        return f"a {traits.kind.__name__}, whose attention cannot be hfpatch's,"
    if replaced_attention(given.config):
        return f"attention from elsewhere ({named(given.config)})"
    if not getattr(given.config, "is_causal", True):
        return "attention that is not causal"
    if given.encoder:
        return "attention to an encoder's states"
    return (
        "an attention mask of the caller's own"
        if given.own
        else "output_attentions"
        if given.weights
        else None
    )


def shared_without(config, batch: Batch) -> dict:
    """Changes for rows that ranks share and transformers' attention, as an engine replaced it,
    takes: ValueError where that is not exact.
    """
    refuse_parts(config, batch)
    # Of this rank's positions, or of what is hidden, transformers would make a [t, t] mask that
    # says nothing of whole rows.
    return {"attention_mask": torch.ones(batch.B, batch.t, dtype=torch.bool, device=batch.device)}


def is_empty(cache) -> bool:
    """Whether this is a plain KV cache that holds nothing yet."""
    return type(cache) is DynamicCache and not cache.get_seq_length()
