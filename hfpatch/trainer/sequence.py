"""Ranks that share each row (`--sp_size`): engine settings, and parts of rows."""

from contextlib import ExitStack

import accelerate

from hfpatch.budget.limits import environment_number
from hfpatch.context.ranks import row_ranks_of, summed_gradients
from hfpatch.lab.compat import for_now
from hfpatch.layer.condition import look
from hfpatch.layer.layer import PatchedLayer, mixing_of
from hfpatch.parallel.exchange import RowRanks
from hfpatch.trainer.compat import deals_for_any_attention, skips_by_itself, unless_shared
from hfpatch.trainer.configs import EngineConfig
from hfpatch.trainer.shared_rows import of_all_ranks, part_of, shares_rows


def parallelism(config: EngineConfig | None, *, size: int, attention: str):
    """The parallelism_config: Ulysses under DeepSpeed, context parallelism under FSDP2.

    Args:
        config: the engine's.
        size: ranks that share a row.
        attention: transformers' name of the attention.

    Raises:
        ValueError: the engine or the number of processes cannot share rows.
    """
    world = environment_number("WORLD_SIZE", 1, 1)
    if config is None:
        raise ValueError(
            "hfpatch: --sp_size needs an engine that shards the model. Add --placement zero3 or fsdp2."
        )
    if world % size:
        raise ValueError(
            f"hfpatch: --sp_size must divide the {world} processes, got {size}. Change one."
        )
    if config.engine == "fsdp":
        if config.values.get("version") != 2:
            raise ValueError("hfpatch: --sp_size needs FSDP2, got FSDP1. Use --placement fsdp2.")
        return accelerate.ParallelismConfig(cp_size=size, dp_shard_size=world // size)
    summed_gradients(config.values, size)
    if not hasattr(accelerate.utils, "DeepSpeedSequenceParallelConfig"):
        raise ValueError(
            "hfpatch: --sp_size under DeepSpeed needs accelerate 1.12 or newer, got "
            f"{accelerate.__version__}. Run: pip install -U accelerate."
        )
    handler = accelerate.utils.DeepSpeedSequenceParallelConfig(
        sp_seq_length_is_variable=True, sp_attn_implementation=attention
    )
    # accelerate counts DeepSpeed's batches by dp_shard_size if several groups have rows of their
    # own.
    return accelerate.ParallelismConfig(
        sp_backend="deepspeed", sp_size=size, dp_shard_size=world // size, sp_handler=handler
    )


class SharedRows:
    """A loader that yields this rank's part of each batch, of the batches of all ranks in turn.

    accelerate's adapter does the same, but cannot resume inside an epoch, nor keep the order of a
    shuffle that differs by rank.
    """

    def __init__(self, loader, row_ranks: RowRanks, skip: int = 0):
        self.loader = loader
        self.row_ranks = row_ranks
        self.skip = skip

    def __getattr__(self, name):
        if name in ("loader", "row_ranks", "skip"):  # not set yet in a copy
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader) * self.row_ranks.size - self.skip

    def __iter__(self):
        left = self.skip
        for batch in self.loader:
            for one in of_all_ranks(self.row_ranks, batch)[left:]:
                yield part_of(self.row_ranks, one)
            left = 0

    def skipping(self, batches: int) -> "SharedRows":
        """The loader without its first batches."""
        whole, rest = divmod(batches, self.row_ranks.size)
        return SharedRows(accelerate.skip_first_batches(self.loader, whole), self.row_ranks, rest)


def in_order(loader, row_ranks: RowRanks) -> SharedRows:
    """accelerate's loader, with batches in the order of a single process. A step then has the same
    rows with any number of ranks.
    """
    sampler = getattr(loader, "batch_sampler", None)
    if hasattr(sampler, "process_index"):
        groups = sampler.num_processes // row_ranks.size
        sampler.process_index = row_ranks.rank * groups + sampler.process_index // row_ranks.size
    return SharedRows(loader, row_ranks)


def row_ranks_under(accelerator) -> RowRanks | None:
    """The ranks that share rows under Ulysses; None elsewhere (context parallelism needs none)."""
    config = accelerator.parallelism_config
    if config is None or not config.sp_enabled:
        return None
    from deepspeed.runtime.sequence_parallel.parallel_state_sp import get_sequence_parallel_group

    return row_ranks_of(get_sequence_parallel_group())


def _heads_told(config):
    """A context in which a config has the head sizes that DeepSpeed reads.

    Mixtral's config has None as head_dim, GPT-NeoX's has neither name. Our attention does not read
    them.
    """
    heads = getattr(config, "num_attention_heads", None)
    sizes = {"head_dim": config.hidden_size // heads, "num_key_value_heads": heads} if heads else {}
    missing = {n: size for n, size in sizes.items() if getattr(config, n, None) is None}
    return for_now(config, **missing)


def shares_exactly(model) -> bool:
    """Whether ranks can share rows in all of the model's layers, unchanged since the probe."""
    layers = [m for m in model.modules() if isinstance(m, PatchedLayer)]
    # For layers that mix tokens outside attention the stack decides.
    unknown = any(mixing_of(m._hfpatch.traits, look(m)).unknown for m in layers)
    return not unknown and shares_rows(model)


def share_rows(trainer) -> None:
    """Lets a Trainer's ranks share rows: SharedRows replaces DeepSpeed's adapter of the loader, and
    accelerate accepts all layers that are exact with shared rows, some of which it refuses by name.
    """
    accelerator = trainer.accelerator
    accelerator.deepspeed_ulysses_dl_adapter = lambda loader, model: in_order(
        loader, row_ranks_under(accelerator)
    )
    config = accelerator.parallelism_config
    prepare = accelerator.prepare
    if config is None or not (config.sp_enabled or config.cp_enabled):
        return
    deals_for_any_attention(trainer, shares_exactly)
    skips_by_itself(trainer, SharedRows)

    def prepare_told(*args, **kwargs):
        with ExitStack() as told:
            told.enter_context(unless_shared(shares_exactly))
            for model in args:
                if hasattr(model, "config") and hasattr(model.config, "get_text_config"):
                    told.enter_context(_heads_told(model.config.get_text_config()))
            return prepare(*args, **kwargs)

    accelerator.prepare = prepare_told
