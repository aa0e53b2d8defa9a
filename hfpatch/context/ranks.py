"""The parallelism around a forward, so that a shard is never taken for a whole sequence."""

import torch
import torch.distributed as dist
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hfpatch.compat import (
    context_parallel,
    deepspeed_config,
    parallelism_config,
    ulysses,
    ulysses_group,
)
from hfpatch.context.current import current, having, named, not_exchanged
from hfpatch.parallel.exchange import RowRanks

SHORTEST_PART = 4  # tokens: two in each of two chunks
MOST = 1 << 62  # more than any number of rows or tokens
_row_ranks: dict = {}  # one object a key: it is part of a shape's key in Policies


def row_ranks_now(config, training: bool) -> RowRanks | None:
    """The ranks that share the rows of the forward that runs, or None where every process has whole
    rows.

    Under Ulysses, training batches are sharded. Evaluation batches are too, unless accelerate turns
    Ulysses off there; `sharded()` overrides. Under torch's context_parallel, every forward inside
    the context is sharded.
    """
    if current.row_ranks is not None:
        return current.row_ranks or None
    if not (dist.is_available() and dist.is_initialized()):
        return None
    name = named(config).attention
    group_and_order = context_parallel()
    if group_and_order is None:
        group, training_only = ulysses(ALL_ATTENTION_FUNCTIONS.get(name)) or (None, False)
        if group is not None and (training or not training_only):
            group_and_order = (group, False)
            if training:
                summed_gradients(deepspeed_config(), dist.get_world_size(group))
    if group_and_order is None and training and _several(ulysses_group()):
        raise not_exchanged(f"{name} attention beside Ulysses")
    if group_and_order is None or not _several(group_and_order[0]):
        return None
    return row_ranks_of(*group_and_order)


def _several(group) -> bool:
    """Whether this process group has more than one rank. False for None."""
    return group is not None and dist.get_world_size(group) > 1


@torch.compiler.assume_constant_result
def may_share_rows() -> bool:
    """Whether ranks share rows, or may in other runs of a graph that is traced now, perhaps in an
    evaluation of whole rows.
    """
    planned = getattr(parallelism_config(), "cp_enabled", False)  # also outside its context
    return planned or _several(ulysses_group()) or context_parallel() is not None


def summed_gradients(config: dict, size: int) -> None:
    """Raises ValueError for a DeepSpeed config that sums gradients over a sequence's ranks.

    transformers' loss over the ranks has gradients `size` times too large, and ZeRO-3's
    reduce-scatter divides by it. Without that division Adam hides the factor, but clipping does
    not.
    """
    zero = config.get("zero_optimization", {})
    stage = zero.get("stage", 3)
    if stage != 3 or not zero.get("reduce_scatter", True):
        came = f"stage {stage}" if stage != 3 else "reduce_scatter: false"
        raise ValueError(
            f"hfpatch: sequence parallelism needs ZeRO-3 with reduce_scatter, got {came}: "
            f'gradients would be {size} times too large. Set "stage": 3 and "reduce_scatter": true.'
        )


def row_ranks_of(group, zigzag: bool = False) -> RowRanks:
    """The one RowRanks of a process group and its way of dealing tokens."""
    return _row_ranks.setdefault((group, zigzag), RowRanks(group, zigzag))


def sharded(row_ranks: RowRanks | None | bool):
    """A context in which forwards share their rows with these ranks; with no ranks if
    it is False.
    """
    return having(row_ranks=row_ranks)


def refuse_shared_mixers(kind: type, unknown: str | None = None) -> None:
    """Raises ValueError: mixers that do not run in tiles through time need whole rows. unknown: why the
    probe could not look for mixers.
    """
    mixes = "mixes tokens by something other than attention too"
    if unknown:
        mixes = f"may mix tokens by something other than attention ({unknown})"
    raise ValueError(
        f"hfpatch: a {kind.__name__} must get whole sequences, got a part on each rank, and it "
        f"{mixes}. Train it without sequence parallelism."
    )


def refuse_uneven_rows(row_ranks: RowRanks, tokens: Tensor, **beside: Tensor | None) -> None:
    """Raises ValueError on all ranks if their parts of the rows differ in shape, or labels and the
    like differ from the tokens. Ranks that continued would wait for the others.

    Args:
        row_ranks: the ranks that share the rows.
        tokens: [B, t] or [B, t, D].
        beside: name -> [B or 1, t], or None.
    """
    B, t = tokens.shape[:2]
    shapes = {name: tuple(x.shape[:2]) for name, x in beside.items() if x is not None}
    fits = all(shape in ((B, t), (1, t)) for shape in shapes.values())
    present = sum(1 << i for i, name in enumerate(beside) if name in shapes)
    sizes = (B, t, present)
    mine = [
        *sizes,
        *(MOST - n for n in sizes),
        int(fits),
    ]  # n and -n are least on every rank only if n is equal
    if row_ranks.least(mine) != mine or not fits:
        raise ValueError(
            "hfpatch: all ranks that share a sequence must get parts of one shape, with labels and "
            f"position_ids as long as input_ids; rank {row_ranks.rank} got input_ids {(B, t)} and "
            f"{shapes}. Cut or pad the sequences before they are dealt out."
        )


def whole_rows(row_ranks: RowRanks, B: int, *shards: Tensor | None) -> list[Tensor | None]:
    """Whole rows [B, T] from parts [1 or B, t] (attention_mask, position_ids and the like), in one
    exchange; None for None.
    """
    parts = [x.expand(B, -1) for x in shards if x is not None]
    whole = iter(row_ranks.whole(*(x.long() for x in parts)) if parts else ())
    return [None if x is None else next(whole).to(x.dtype) for x in shards]


def attends_to_all_before(config) -> bool:
    """Whether no layer has a window or chunks, by the config."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    narrow = any(getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    return not narrow and set(kinds) == {"full_attention"}
