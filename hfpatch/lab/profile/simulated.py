"""A simulated step as a Run, so that its report is written as that of a measured one."""

import dataclasses
from functools import partial

import torch

from hfpatch.budget.first import first_policy
from hfpatch.budget.policy import parse_checkpointing
from hfpatch.lab.profile.options import Options
from hfpatch.lab.profile.owners import category_of
from hfpatch.lab.profile.record import is_layer
from hfpatch.lab.profile.step import become, head_name, load_config, make_optimizer, new_run
from hfpatch.lab.profile.timeline import LASTING, NOWHERE, Allocation, Run, measure
from hfpatch.lab.simulate.follow import current
from hfpatch.lab.simulate.implementations import build
from hfpatch.lab.simulate.simulator import simulate
from hfpatch.lab.watch import module_calls


def simulated_run(options: Options) -> Run:
    """One simulated step, by default in bfloat16."""
    dtype = getattr(torch, "bfloat16" if options.dtype == "auto" else options.dtype)
    model = build(load_config(options.model).to_dict() | {"use_cache": False}, dtype).train()
    settings = parse_checkpointing(options.checkpointing)
    if settings.offload == "auto":
        settings = dataclasses.replace(settings, offload="host")
    become(model, options.impl, options.gradient_checkpointing, settings)
    optimizer = (
        None if options.optimizer == "none" else partial(make_optimizer, name=options.optimizer)
    )
    inputs: set = set()
    policy = _policy(model, options, settings) if options.impl == "hfpatch" else None
    layers = {id(m) for name, m in model.named_modules() if is_layer(name, m)}

    def note(module, args):
        """Collects the ids of the blocks of layers' inputs; the ledger keeps blocks alive."""
        if (
            id(module) in layers
            and args
            and isinstance(args[0], torch.Tensor)
            and current() is not None
        ):
            inputs.add(id(current().track(args[0])))

    with module_calls(note):
        found = simulate(model, options.batch, options.seq_len, optimizer=optimizer, policy=policy)
    run = new_run(options, "fake tensors, as on CUDA", dtype, "simulated")
    run.memory["simulated_flops"] = found.flops["total"]
    run.memory["host_peak_bytes"] = found.host_peak_bytes
    return _measured(run, found.ledger, inputs, head_name(model), type(model).__name__)


def _measured(run: Run, ledger, inputs: set, head: str, root: str) -> Run:
    """The run with its phases and blocks.

    inputs: ids of the blocks of layers' inputs; head, root: as in _owned.
    """
    starts = [start for start, _ in ledger.phases]
    ends = [*starts[1:], max(block.born for block in ledger.blocks)]
    run.phases = [[name, start, end] for (start, name), end in zip(ledger.phases, ends)]
    return measure(run, [_owned(block, inputs, ends[0], head, root) for block in ledger.blocks])


def _policy(model, options, settings):
    """The policy of a first step, with as much host memory as it needs."""
    if settings.offload == "off":
        return None
    width = model.get_input_embeddings().weight.shape[1]
    return first_policy(settings, rows=options.batch * options.seq_len, width=width)


def _owned(block, inputs, forward_end, head, root) -> Allocation:
    """root: the name under which the follower lists the model itself."""
    module = "" if block.module == root else block.module or NOWHERE
    if block.host:
        category = "host"
    elif block.category in LASTING:
        category = block.category
    elif block.phase == "setup":
        category = "other"
    elif block.op != "workspace" and id(block) in inputs:
        category = "checkpoints"
    else:
        outlives = block.died is None or block.died > forward_end
        category = category_of(block.phase, module, head, outlives)
    phase = "before the step" if block.phase == "setup" else block.phase
    return Allocation(block.nbytes, block.born, block.died, category, module, phase, block.op)
