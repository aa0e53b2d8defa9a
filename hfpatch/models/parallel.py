"""What hfpatch asks about the parallelism around it, so that a shard is never taken for a whole sequence."""

import sys

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hfpatch.compat import attention_of, engine_hook

_ULYSSES = "deepspeed.runtime.sequence_parallel.parallel_state_sp"


def replaced_attention(config) -> bool:
    """Whether attention calls go to a function from outside transformers, as under DeepSpeed's sequence parallelism.

    That function may see tokens that this process does not have, so nothing here may take its place.
    """
    function = ALL_ATTENTION_FUNCTIONS.get(attention_of(config))
    return function is not None and not function.__module__.startswith("transformers.")


def weights_move(model: nn.Module) -> bool:
    """Whether accelerate's hooks bring weights to the device for each call, or lay the model out over several devices."""
    devices = set()
    for module in model.modules():
        hook = engine_hook(module)
        for one in getattr(hook, "hooks", (hook,)):
            if getattr(one, "offload", False):
                return True
            devices.add(getattr(one, "execution_device", None))
    return len(devices - {None}) > 1


def refuse_training_over_a_device_map(training: bool) -> None:
    """ValueError: a layer runs again in backward, when the hooks have taken its weights away."""
    if training:
        raise ValueError(
            "hfpatch: expected a model on one device, one with a device map or offloaded weights came for training; load it "
            "without device_map (FSDP or DeepSpeed ZeRO-3 spread a model that does not fit), or call hfpatch.undo(model)."
        )


def refuse_packed_shards(config, documents, position_ids: Tensor | None) -> None:
    """ValueError for packed documents under Ulysses with SDPA: it drops every mask, so they would see each other.

    A document may start exactly where this rank's shard does, which the shard alone does not show.
    """
    if attention_of(config) != "sdpa" or not replaced_attention(config):
        return
    ulysses = sys.modules.get(_ULYSSES)
    later = ulysses is not None and ulysses.get_sequence_parallel_rank() > 0
    starts_here = later and position_ids is not None and bool((position_ids[:, 0] == 0).any())
    if documents is not None or starts_here:
        raise ValueError(
            "hfpatch: expected one document a row under sequence parallelism with sdpa, restarting position_ids came; "
            'pass sp_attn_implementation="flash_attention_2", which isolates documents, or do not pack.'
        )
