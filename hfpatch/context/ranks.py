"""The parallelism around a forward, so that a shard is never taken for a whole sequence."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hfpatch.compat import (
    context_parallel,
    context_parallel_group,
    deepspeed_config,
    engine_hook,
    has_values,
    ulysses,
    ulysses_group,
)
from hfpatch.context.current import current, having, named, not_exchanged
from hfpatch.parallel.exchange import Sequence

SHORTEST_PART = 4  # tokens: two in each of two chunks
_sequences: dict = {}  # one Sequence a key, so that the agreements of its ranks persist


def sequence_now(config, training: bool, name: str | None = None) -> Sequence | None:
    """The ranks that share the rows of the forward that runs, or None where every process has whole
    rows.

    Under Ulysses, training batches are sharded. Evaluation batches are too, unless accelerate turns
    Ulysses off there; `sharded()` overrides. Under torch's context_parallel, every forward inside
    the context is sharded. name: the attention that the config names, if the caller knows it.
    """
    if current.sequence is not None:
        return current.sequence or None
    if not (dist.is_available() and dist.is_initialized()):
        return None
    found, name = context_parallel(), name or named(config)
    if found is None:
        group, training_only = ulysses(ALL_ATTENTION_FUNCTIONS.get(name)) or (None, False)
        found = None if group is None or (training_only and not training) else (group, False)
        if found is not None and training:
            summed_gradients(deepspeed_config(), dist.get_world_size(group))
    if (
        found is None
        and training
        and (group := ulysses_group()) is not None
        and dist.get_world_size(group) > 1
    ):
        raise not_exchanged(f"{name} attention beside Ulysses, which exchanges another,")
    if found is None or dist.get_world_size(found[0]) == 1:
        return None
    return sequence_of(*found)


@torch.compiler.assume_constant_result
def shared_in_a_graph(name: str, training: bool) -> bool:
    """Whether ranks share rows, or may, while a graph runs that calls attention of this name. The
    graph may have been traced in an evaluation of whole rows.
    """
    groups = (ulysses_group(), context_parallel_group())
    if any(group is not None and dist.get_world_size(group) > 1 for group in groups):
        return True
    try:
        return sequence_now(None, training, name) is not None
    except ValueError:  # the forward outside the graph raises it
        return True


def summed_gradients(config: dict, size: int) -> None:
    """Raises ValueError for a DeepSpeed config that sums gradients over a sequence's ranks.

    transformers' loss over the ranks has gradients `size` times too large, and ZeRO-3's
    reduce-scatter divides by it. Without that division Adam hides the factor, but clipping does
    not.
    """
    zero = config.get("zero_optimization", {})
    stage, scatters = zero.get("stage", 3), zero.get("reduce_scatter", True)
    if stage != 3 or not scatters:
        came = f"stage {stage}" if stage != 3 else "reduce_scatter: false"
        raise ValueError(
            f"hfpatch: sequence parallelism needs ZeRO-3 with reduce_scatter, got {came}: "
            f'gradients would be {size} times too large. Set "stage": 3 and "reduce_scatter": true.'
        )


def sequence_of(group, zigzag: bool = False) -> Sequence:
    """The one Sequence of a process group and its way of dealing tokens."""
    if (group, zigzag) not in _sequences:
        _sequences[group, zigzag] = Sequence(group, zigzag)
    return _sequences[group, zigzag]


def sharded(sequence: Sequence | None | bool):
    """A context in which forwards share their rows with the ranks of `sequence`; with no ranks if
    it is False.
    """
    return having(sequence=sequence)


def weights_move(modules: list[nn.Module]) -> bool:
    """Whether accelerate's hooks on these modules bring weights to the device for each call, or
    spread the model over several devices.
    """
    devices = set()
    for hook in filter(None, map(engine_hook, modules)):
        for one in getattr(hook, "hooks", (hook,)):
            if getattr(one, "offload", False):
                return True
            devices.add(getattr(one, "execution_device", None))
    return len(devices - {None}) > 1


def refuse_training_over_a_device_map(training: bool) -> None:
    """Raises ValueError in training: hooks have removed a layer's weights when its backward runs it
    again."""
    if training:
        raise ValueError(
            "hfpatch: a model that trains must be on one device, got one with a device map or "
            "offloaded weights. Load it without device_map (FSDP or DeepSpeed ZeRO-3 spread a "
            "model that does not fit), or call hfpatch.undo(model)."
        )


def refuse_shared_mixers(kind: type, unknown: str | None = None) -> None:
    """Raises ValueError: mixers that do not run in tiles through time need whole rows. unknown: why the
    probe could not look for mixers.
    """
    mixes = "mixes tokens by something else than attention too"
    if unknown:
        mixes = f"may mix tokens by something else than attention ({unknown})"
    raise ValueError(
        f"hfpatch: a {kind.__name__} must get whole sequences, got a part on each rank, and it "
        f"{mixes}. Train it without sequence parallelism."
    )


def refuse_parts_of_pairs(trainer) -> None:
    """Raises ValueError for TRL's trainers that compare a model with a reference (DPO, KTO) where ranks
    share sequences: their losses are made of sums over whole sequences."""
    ranks = getattr(getattr(trainer, "accelerator", None), "parallelism_config", None)
    sizes = {name: getattr(ranks, name, 1) for name in ("sp_size", "cp_size")}
    if hasattr(trainer, "ref_model") and max(sizes.values()) > 1:
        raise ValueError(
            f"hfpatch: {type(trainer).__name__} must get whole sequences, got {sizes}: its loss is made "
            "of sums over each sequence. Set both to 1."
        )


def refuse_uneven_rows(sequence: Sequence, given: Tensor, **beside: Tensor | None) -> None:
    """Raises ValueError on all ranks if their parts of the rows differ in shape, or labels and the
    like differ from the tokens. Ranks that continued would wait for the others.

    Args:
        sequence: the ranks that share the rows.
        given: [B, t] or [B, t, D].
        beside: name -> [B or 1, t], or None.
    """
    B, t = given.shape[:2]
    mine = {"input_ids": (B, t)}
    for name, x in beside.items():
        # One row of positions serves all.
        mine[name] = (-1, -1) if x is None else (B if len(x) == 1 else len(x), x.shape[1])
    found = sequence.all_gather(torch.tensor([*mine.values()], device="cpu"))
    ranks = found.tolist() if has_values(found) else []
    words = lambda shapes: ", ".join(  # noqa: E731
        f"{name} {shape}" for name, shape in zip(mine, shapes) if shape[0] >= 0
    )
    for rank, shapes in enumerate(ranks):
        if shapes != ranks[0] or any(shape not in ([-1, -1], shapes[0]) for shape in shapes):
            raise ValueError(
                "hfpatch: all ranks that share a sequence must get parts of one shape, with "
                "labels and position_ids as long as input_ids, and "
                f"rank {rank} got {words(shapes)}" + (f", rank 0 {words(ranks[0])}" if rank else "")
                + ". Cut or pad the sequences before they are dealt out."
            )  # fmt: skip


def whole_rows(sequence: Sequence, B: int, *shards: Tensor | None) -> list[Tensor | None]:
    """Whole rows [B, T] from parts [1 or B, t] (attention_mask, position_ids and the like), in one
    exchange; None for None.
    """
    given = [x.expand(B, -1) for x in shards if x is not None]
    whole = iter(sequence.whole(*(x.long() for x in given)) if given else ())
    return [None if x is None else next(whole).to(x.dtype) for x in shards]


def attends_to_all_before(config) -> bool:
    """Whether no layer has a window or chunks, by the config."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    narrow = any(getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    return not narrow and set(kinds) == {"full_attention"}
