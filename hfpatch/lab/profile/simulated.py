"""What holds the memory of a step: the step followed on fake tensors, as a GPU would run it."""

import dataclasses
from functools import partial

import torch

from hfpatch.budget.first import first_policy
from hfpatch.budget.policy import Checkpointing, parse_checkpointing
from hfpatch.lab.profile.options import Options
from hfpatch.lab.profile.step import become, head_name, load_config, make_optimizer
from hfpatch.lab.profile.timeline import LASTING, NOWHERE, Allocation, Run, measure
from hfpatch.lab.simulate.follow import current
from hfpatch.lab.simulate.implementations import build
from hfpatch.lab.simulate.simulator import simulate
from hfpatch.lab.watch import module_calls


def follow(run: Run, options: Options, used: Checkpointing | None = None) -> Run:
    """Fills the run's peak and the blocks alive then. used: the policy of real steps, if any ran."""
    dtype = getattr(torch, run.setup["dtype"])
    model = build(load_config(options.model).to_dict() | {"use_cache": False}, dtype).train()
    settings = parse_checkpointing(options.checkpointing)
    if settings.offload == "auto":
        settings = dataclasses.replace(settings, offload="host")
    become(model, options.impl, options.gradient_checkpointing, settings)
    optimizer = (
        None if options.optimizer == "none" else partial(make_optimizer, name=options.optimizer)
    )
    policy = used
    if options.impl == "hfpatch" and used is None and settings.offload != "off":
        # A first step's, with as much host memory as it needs.
        width = model.get_input_embeddings().weight.shape[1]
        policy = first_policy(settings, rows=options.batch * options.seq_len, width=width)
    inputs: set = set()
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
        found = simulate(
            model, options.batch, options.seq_len, optimizer=optimizer, policy=policy,
            # The second step has its optimizer's states from the start.
            steps=1 if optimizer is None or not options.warmup else 2,
        )  # fmt: skip
    run.memory["simulated_flops"] = found.flops["total"]
    run.memory["host_peak_bytes"] = found.host_peak_bytes
    return _measured(run, found.ledger, inputs, head_name(model), type(model).__name__)


def is_layer(name: str, module) -> bool:
    """Whether this is a decoder layer, wrapped or patched: a numbered module with an attention and
    an MLP.
    """
    return (
        name.rpartition(".")[2].isdigit()
        and hasattr(module, "self_attn")
        and hasattr(module, "mlp")
    )


def _measured(run: Run, ledger, inputs: set, head: str, root: str) -> Run:
    """The run with the phases of its last step, and the blocks alive in it.

    inputs: ids of the blocks of layers' inputs; head, root: as in _owned.
    """
    starts = [start for start, _ in ledger.phases]
    ends = [*starts[1:], max(block.born for block in ledger.blocks)]
    phases = [[name, start, end] for (start, name), end in zip(ledger.phases, ends)]
    last = max(i for i, (name, *_) in enumerate(phases) if name == "forward")
    run.phases = phases[last:]
    _, began, ended = phases[last]
    blocks = [b for b in ledger.blocks if not b.host and (b.died is None or b.died > began)]
    return measure(run, [_owned(block, inputs, ended, head, root) for block in blocks])


def _owned(block, inputs, forward_end, head, root) -> Allocation:
    """head: the output projection's module name. Its blocks, and those of modules that hold it,
    belong to the loss. root: the name under which the follower lists the model itself.
    """
    module = "" if block.module == root else block.module or NOWHERE
    outlives = block.died is None or block.died > forward_end
    if block.category in LASTING:
        category = block.category
    elif block.phase == "setup":
        category = "other"
    elif block.op != "workspace" and id(block) in inputs:
        category = "checkpoints"
    elif block.phase != "optimizer" and module != NOWHERE and holds(head, module):
        category = "loss"
    elif block.phase == "forward" and outlives:
        category = "activations"
    else:
        category = "working set"
    phase = "before the step" if block.phase == "setup" else block.phase
    return Allocation(block.nbytes, block.born, block.died, category, module, phase, block.op)


def holds(head: str, module: str) -> bool:
    """Whether the module is the head, a part of it (an adapter), or the causal LM that holds it and
    calls the loss.
    """
    return module == "" or (head + ".").startswith(module + ".") or module.startswith(head + ".")
