"""Private names of accelerate, of transformers' Trainer and of verl that the trainer alone needs
(hfpatch/compat/ has the core's). What refuses or deals rows by name stays as it is in a version
without the name; verl's is required.
"""

import sys

from hfpatch.compat import attention_of, attention_row, names_attention, values_for_now
from hfpatch.lab.compat import for_now

# The method by which verl's FSDP2 engine shards its model. The plugin refuses an engine without it.
VERL_SHARDS = "_build_fsdp_module"


def unless_shared(shares):
    """A context in which accelerate, for a model with shares(model), neither refuses layer types
    nor removes masks from attention."""
    module = sys.modules["accelerate.accelerator"]

    def unless(look):
        return lambda model: None if shares(model) else look(model)

    names = "_attach_context_parallel_hooks", "_refuse_recurrent_layers_under_sequence_parallelism"
    theirs = {name: unless(getattr(module, name)) for name in names if hasattr(module, name)}
    return for_now(module, **theirs)


def deals_for_any_attention(trainer, shares) -> None:
    """Makes transformers' Trainer deal out rows by context parallelism to a model with
    shares(model), whatever attention its config names. Trainer itself does so for sdpa only."""
    deal = getattr(trainer, "_prepare_context_parallel_inputs", None)
    if deal is None:
        return

    def dealing(model, inputs):
        config = getattr(model, "config", None)
        named = names_attention(config) and attention_of(config)  # DeepSpeed's engine has a dict
        if named in (False, "sdpa") or not shares(model):
            return deal(model, inputs)
        with values_for_now([attention_row(config, "sdpa")]):
            return deal(model, inputs)

    trainer._prepare_context_parallel_inputs = dealing


def skips_by_itself(trainer, kind: type) -> None:
    """Makes a Trainer call `skipping(n)` on a loader of this kind when it resumes in the middle of
    an epoch. Its module's name for accelerate's function differs only while this Trainer trains."""
    from accelerate import skip_first_batches

    def skip(loader, num_batches=0):
        if type(loader) is kind:
            return loader.skipping(num_batches)
        return skip_first_batches(loader, num_batches)

    while_it_trains = for_now(sys.modules["transformers.trainer"], skip_first_batches=skip)
    trainer._inner_training_loop = while_it_trains(trainer._inner_training_loop)


def is_sharded_by_zero3(parameter) -> bool:
    """Whether DeepSpeed holds shards of this parameter."""
    return "ds_id" in parameter.__dict__
