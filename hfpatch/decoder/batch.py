"""Reads the arguments of a stack's forward and decides how the forward runs.

`read_batch` reads this rank's arguments, `share_rows` those of whole rows where ranks share rows,
`decide` says how the forward runs. Arguments to replace are returned, as `changes`. B rows, T tokens.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from hfpatch.compat import cache_name
from hfpatch.context.current import asks_for, current, not_exchanged, standard
from hfpatch.context.documents import packs, refuse_packed, shown
from hfpatch.context.masks import Batch
from hfpatch.context.ranks import (
    SHORTEST_PART,
    refuse_shared_mixers,
    refuse_uneven_rows,
    row_ranks_now,
    whole_rows,
)
from hfpatch.layer.policies import gradient_order_matters
from hfpatch.layer.why_whole import first
from hfpatch.store.device import on_host

# Most tokens of a batch that runs untiled until a backward shows who reads padding (a 256 MiB mask).
FEW = 1 << 14


@dataclass(frozen=True)
class StackTraits:
    """The traits of a stack, from its small instance (decoder/verdict.py).

    Attributes:
        ours: the stack may use hfpatch's attention and masks.
        mixers: some layers have mixers, modules other than attention that mix tokens. In
            transformers' own layers those let documents of one row see each other.
        isolates: in the patched stack, documents of one row do not see each other.
        searches: transformers separates documents by positions that come without mask and cache.
        unpads: rows with padding may run as one packed row (decoder/unpadded.py).
        timed: every mixer of the stack runs in tiles through time.
    """

    ours: bool = True
    mixers: bool = False
    isolates: bool = True
    searches: bool = True
    unpads: bool = False
    timed: bool = False


@dataclass(frozen=True)
class Inputs:
    """The arguments of one forward.

    Attributes:
        kind: the stack's class, for messages.
        tiled: the stack's layers are hfpatch's.
        tokens: ids [B, T] or embeddings [B, T, D] of this rank.
        B, T: rows, and tokens of a whole row.
        trains: the stack is in training mode and gradients are enabled.
        reruns: transformers' own checkpointing runs the layers again in backward, when the config
            no longer names our attention.
        mask: attention_mask, of any kind.
        rows_mask: the mask if its shape is [B, T], else None.
        other_mask: the caller passed a mask of another kind.
        positions: [1 or B, T] or None.
        offsets: cu_seq_lens_q or None.
        seq_idx: the caller passed seq_idx.
        use_cache, cache: the arguments use_cache and `cache_name`.
        makes_cache: transformers makes a cache if the caller passes neither of them.
        uncached: the caller of the outer model passed neither a cache nor use_cache.
        causal: False where the caller or a module of attention says is_causal=False.
        probabilities: the caller asks for attention's probabilities.
        encoder: the caller passed an encoder's states.
        idle_BT: True where the loss does not read a token's output, or None.
        may_be_read: there is a [B, T] mask, and more than a known loss may read outputs.
        right_padded: may_be_read, and some row ends in padding.
        padding_matters: outputs at right padding must equal transformers': the layers are stock, a
            gradient reached padding before, or may (not known yet, and at most FEW tokens).
        row_ranks: the ranks that share the rows, or None.
    """

    kind: type
    tiled: bool
    config: object
    tokens: Tensor
    B: int
    T: int
    training: bool = False
    trains: bool = False
    reruns: bool = False
    mask: object = None
    rows_mask: Tensor | None = None
    other_mask: bool = False
    positions: Tensor | None = None
    offsets: Tensor | None = None
    seq_idx: bool = False
    use_cache: bool | None = None
    cache: object = None
    cache_name: str | None = None
    makes_cache: bool = False
    uncached: bool = False
    causal: bool = True
    probabilities: bool = False
    encoder: bool = False
    idle_BT: Tensor | None = None
    may_be_read: bool = False
    right_padded: bool = False
    padding_matters: bool = False
    row_ranks: object = None

    @property
    def covers_the_cache(self) -> bool:
        """Whether the mask is [B, more than T]: it describes the tokens in the cache too."""
        if self.cache is None or not isinstance(self.mask, Tensor) or self.mask.dim() != 2:
            return False
        return len(self.mask) == self.B and self.mask.shape[1] > self.T

    @cached_property
    def seen(self) -> Tensor | None:
        """[B, T]: whether each token may attend to itself; None if the mask does not say."""
        if self.rows_mask is not None or not isinstance(self.mask, Tensor | dict):
            return self.rows_mask
        if self.covers_the_cache:
            return self.mask[:, -self.T :]
        if self.T > 1:
            cached = 0 if self.cache is None else cached_tokens(self.cache)
            if cached is None:
                cached = max(0, self.mask.shape[-1] - self.T)
            return shown(self.mask, self.B, self.T, cached)
        return None

    @cached_property
    def has_documents(self) -> bool:
        """Whether rows hold several documents, by their positions. Waits for the device, once."""
        return packs(self.B, self.positions, self.seen, None)


def read_batch(stack, kwargs: dict, watched: bool) -> Inputs | None:
    """The arguments of a stack's forward; None if its input is not rows of tokens. watched: its
    layers may read padding."""
    tokens = kwargs.get("input_ids")
    if tokens is None:
        tokens = kwargs.get("inputs_embeds")
    if not isinstance(tokens, Tensor) or tokens.dim() < 2:
        return None
    B, T = tokens.shape[:2]
    config = stack.config
    training = stack.training
    runtime = stack._hfpatch.runtime
    mask = kwargs.get("attention_mask")
    visible = isinstance(mask, Tensor) and mask.shape == (B, T)
    positions = kwargs.get("position_ids")
    above = current.outer.positions
    if positions is None and isinstance(above, Tensor) and above.shape[-1] == T:
        positions = above
    if isinstance(positions, Tensor) and positions.dim() == 3:
        # Four layouts are text, time, height and width; three lack text.
        positions = positions[0] if len(positions) == 4 else None
    idle = current.labelled.idle_BT
    if isinstance(idle, Tensor) and idle.shape != (B, T):
        idle = None  # of other tokens (a soft prompt that the model's forward adds)
    may_be_read = visible and (watched or current.labelled.watched or idle is None)
    right_padded = may_be_read and bool(on_host((~mask.bool()[:, -1]).any()))
    checkpoints = training and getattr(stack, "gradient_checkpointing", False)
    return Inputs(
        kind=type(stack),
        tiled=runtime is not None,
        config=config,
        tokens=tokens,
        B=B,
        T=T,
        training=training,
        trains=training and torch.is_grad_enabled(),
        reruns=checkpoints and runtime is None,
        mask=mask,
        rows_mask=mask if visible else None,
        other_mask=mask is not None and not visible,
        positions=positions,
        offsets=kwargs.get("cu_seq_lens_q"),
        seq_idx=kwargs.get("seq_idx") is not None,
        use_cache=kwargs.get("use_cache"),
        cache=kwargs.get(cache_name(kwargs)),
        cache_name=cache_name(kwargs),
        # Under its own checkpointing transformers makes no cache.
        makes_cache=bool(getattr(config, "use_cache", False)) and not checkpoints,
        uncached=current.outer.uncached,
        probabilities=asks_for("output_attentions", stack, kwargs),
        encoder=kwargs.get("encoder_hidden_states") is not None,
        idle_BT=idle,
        may_be_read=may_be_read,
        right_padded=right_padded,
        padding_matters=right_padded and (runtime is None or runtime.padding_is_read(B * T <= FEW)),
        row_ranks=row_ranks_now(config, training),
    )


def share_rows(inputs: Inputs) -> tuple[Inputs, dict]:
    """The arguments of whole rows, where `inputs` has this rank's part of each row; and the changes.

    Raises:
        ValueError: the ranks' parts do not fit together.
    """
    if inputs.cache is not None:
        raise not_exchanged("a KV cache")
    refuse_uneven_rows(
        inputs.row_ranks,
        inputs.tokens,
        labels=current.labelled.labels,
        position_ids=inputs.positions,
        attention_mask=inputs.rows_mask,
    )
    if inputs.positions is None:
        raise ValueError(
            "hfpatch: sequences on several ranks need position_ids, got none: each rank would "
            "count its tokens from 0. Put position_ids = torch.arange(tokens) into every batch "
            "before it is sharded."
        )
    mask, positions, idle = whole_rows(
        inputs.row_ranks, inputs.B, inputs.rows_mask, inputs.positions, inputs.idle_BT
    )
    whole = replace(
        inputs,
        T=inputs.T * inputs.row_ranks.size,
        rows_mask=mask,
        positions=positions,
        idle_BT=idle,
        use_cache=False,
    )
    return whole, {"use_cache": False}


def without_unread_cache(inputs: Inputs) -> tuple[Inputs, bool, dict]:
    """Removes a cache that an outer model made and nothing reads.

    Returns:
        (the arguments without that cache, whether transformers would make a cache, the changes).
    """
    changes = {}
    made = inputs.use_cache
    if inputs.cache is not None:
        made = type(inputs.cache) is DynamicCache and cached_tokens(inputs.cache) == 0
    unread = bool(inputs.uncached and inputs.trains and made)
    if unread:  # the outer model made a cache, or set use_cache because its config does
        changes["use_cache"] = None
        if inputs.cache_name is not None:
            changes[inputs.cache_name] = None
        inputs = replace(inputs, cache=None, use_cache=None)
    unsaid = inputs.cache is None and inputs.use_cache is None and inputs.row_ranks is None
    cached = unread or unsaid and inputs.makes_cache
    mask = inputs.mask
    by_rows = isinstance(mask, Tensor) and mask.dim() == 2 and len(mask) == inputs.B
    if cached and inputs.other_mask and by_rows:
        # With a cache, transformers cuts a longer mask to T tokens, and hides the tokens beyond a
        # shorter mask.
        mask = torch.nn.functional.pad(mask, (0, inputs.T - mask.shape[1]))
        changes["attention_mask"] = mask
        inputs = replace(inputs, mask=mask, rows_mask=mask, other_mask=False)
    return inputs, cached, changes


def decide(
    inputs: Inputs, traits: StackTraits, cached: bool
) -> tuple[Batch | None, str | None, dict]:
    """How a forward runs.

    Returns:
        batch: for hfpatch's layers; None where transformers' attention runs.
        line: for the user, or None.
        changes: the arguments to replace.

    Raises:
        ValueError: documents of one row would see each other, or a layer would treat a rank's part
            of a row as the whole row.
    """
    _refuse_mixed_documents(inputs, traits)
    has_cache, changes = _settle_cache(inputs, cached)
    if has_cache:
        _refuse_documents_beside_a_cache(inputs, traits)
        return None, None, changes
    if traits.mixers and inputs.row_ranks is not None:
        _check_shared_mixers(inputs, traits)
    batch = _batch(inputs, cached or not traits.searches)
    why = first("batch", None, inputs, traits, batch)
    if why is None:
        return batch, _PADDED.format(inputs.kind.__name__) if inputs.right_padded else None, changes
    if inputs.row_ranks is not None:
        raise not_exchanged(why)
    line, more = _by_transformers(inputs, traits, why)
    return None, line, changes | more


_APART = "pass seq_idx and cu_seq_lens_q if its kernels take both, or leave checkpointing on"


def _refuse_mixed_documents(inputs: Inputs, traits: StackTraits) -> None:
    """ValueError for rows of several documents in layers that do not keep them apart."""
    # Some of transformers' mixers take documents by one of these, some by the other, some by both.
    told = inputs.seq_idx and inputs.offsets is not None
    mixed = not traits.isolates or traits.mixers and not inputs.tiled and not told
    if mixed and packs(inputs.B, inputs.positions, inputs.seen, inputs.offsets):
        refuse_packed(inputs.kind, _APART if traits.isolates else "do not pack")


def _settle_cache(inputs: Inputs, cached: bool) -> tuple[bool, dict]:
    """(whether the layers read or fill a KV cache, the changes)."""
    if inputs.cache is not None:
        return True, {}
    if inputs.use_cache is not None:
        return inputs.use_cache, {}
    if cached and not inputs.trains and not inputs.has_documents:
        return True, {}
    # Models make a cache in training too, which nothing reads. RWKV makes none there.
    return False, {"use_cache": False}


def _check_shared_mixers(inputs: Inputs, traits: StackTraits) -> None:
    """ValueError for mixers that cannot run over rows that ranks share."""
    if not (traits.timed and inputs.tiled):
        refuse_shared_mixers(inputs.kind)
    if inputs.T // inputs.row_ranks.size < SHORTEST_PART:
        raise ValueError(
            f"hfpatch: each rank must get at least {SHORTEST_PART} tokens of each sequence, got "
            f"{inputs.T // inputs.row_ranks.size}. Pad the sequences, or share them between fewer "
            "ranks."
        )


def _batch(inputs: Inputs, only_restarts: bool) -> Batch:
    """The batch of hfpatch's layers."""
    idle_BT = inputs.idle_BT
    if inputs.padding_matters and inputs.row_ranks is None and not inputs.has_documents:
        idle_BT = torch.zeros_like(inputs.rows_mask, dtype=torch.bool)
    batch = Batch(
        inputs.B,
        inputs.T,
        inputs.tokens.device,
        inputs.rows_mask,
        inputs.positions,
        # Where rows are shared, offsets count this rank's tokens; the positions give the documents.
        inputs.offsets if inputs.row_ranks is None else None,
        idle_BT,
        inputs.may_be_read,
        inputs.row_ranks,
    )
    batch.only_restarts = only_restarts
    batch.probabilities = inputs.probabilities
    if inputs.rows_mask is not None and inputs.B * inputs.T <= FEW and not gradient_order_matters():
        batch.averages = standard(inputs.config) == "eager"
    return batch


_PADDED = (
    "outputs of {} at right padding differ from transformers'. Multiply them by attention_mask."
)


def _refuse_documents_beside_a_cache(inputs: Inputs, traits: StackTraits) -> None:
    """ValueError for rows of several documents with a KV cache: transformers' layers then run, and
    do not look for documents.
    """
    # The caller's own mask limits attention alone; mixers do not read it.
    of_scores = inputs.other_mask and not inputs.covers_the_cache
    if (traits.mixers or not of_scores) and inputs.has_documents:
        raise ValueError(
            "hfpatch: a KV cache needs one document a sequence, got position_ids that restart. "
            "Pass use_cache=False, which keeps the documents apart."
        )


def _by_transformers(inputs: Inputs, traits: StackTraits, why: str) -> tuple[str | None, dict]:
    """(the line for the user of a forward with transformers' attention, the changes). ValueError
    where documents would see each other.
    """
    changes = {}
    if inputs.rows_mask is not None and inputs.has_documents:
        # With a mask, transformers does not look for documents.
        changes["attention_mask"] = None
        if not bool(inputs.rows_mask.all()):
            refuse_packed(inputs.kind, "do not pack padded sequences")
    if traits.mixers and packs(inputs.B, inputs.positions, inputs.seen, inputs.offsets):
        refuse_packed(inputs.kind, "pass no mask and attn_implementation='sdpa', or do not pack")
    if not (traits.ours and inputs.tiled and inputs.trains):
        return None, changes  # the report tells of a stack that cannot have hfpatch's attention
    line = f"the layers of {inputs.kind.__name__} run untiled, their inputs offloaded: {why}."
    return line, changes


def cached_tokens(cache) -> int | None:
    """How many tokens a cache holds; None for a cache of states alone (Mamba 2), which has no
    length."""
    try:
        return int(cache.get_seq_length())
    except ValueError:
        return None
