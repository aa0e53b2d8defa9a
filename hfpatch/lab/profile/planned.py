"""The closed form's figures for a run, to compare with measured or simulated ones."""

from hfpatch.budget.shape import ModelShape
from hfpatch.lab.stock import STOCK, STOCK_CHECKPOINTING, memory_of
from hfpatch.lab.watch import policy_used

# tensors of a parameter's size and type that each optimizer keeps
STATES = {"adamw": 2, "sgd": 0, "none": 0}


def planned(model, options, *, itemsize: int, policy=None) -> dict:
    """The closed form's peaks for this model and these options, in bytes.

    policy: of hfpatch's layers, by default the last one that ran. Returns {} for a run that no
    closed form describes: an unknown family, Liger, layers that did not run in tiles.
    """
    try:
        shape = ModelShape.from_config(model.config)
    except ValueError:
        return {}
    if options.impl == "hf":
        policy = STOCK_CHECKPOINTING if options.gradient_checkpointing else STOCK
    elif options.impl == "hfpatch":
        # By default the policy of the shape that ran last.
        policy = "off" if options.checkpointing == ["off"] else policy or policy_used(model)
    if policy is None:
        return {}
    memory = memory_of(
        shape, policy, batch=options.batch, tokens=options.seq_len, itemsize=itemsize
    )
    states = STATES[options.optimizer] * memory.parameters
    # In a first step the states are born after the activations are gone.
    late = max(memory.peak, memory.parameters + memory.gradients + states)
    peak = memory.peak + states if options.warmup else late
    return {
        "gpu_peak_bytes": peak,
        "host_peak_bytes": memory.host,
        "moment": memory.peak_moment.name,
    }
