"""What holds the memory of a step: the step followed on fake tensors, as a GPU would run it."""

import dataclasses
from functools import partial

import torch

from hfpatch.budget.first import first_policy
from hfpatch.budget.policy import Checkpointing, parse_checkpointing
from hfpatch.lab.profile.options import Options
from hfpatch.lab.profile.step import become, head_name, load_config, make_optimizer
from hfpatch.lab.profile.timeline import LASTING, NOWHERE, Run, measure
from hfpatch.lab.simulate.follow import current
from hfpatch.lab.simulate.implementations import build
from hfpatch.lab.simulate.simulator import simulate
from hfpatch.lab.watch import module_calls


def follow(run: Run, options: Options, used: Checkpointing | None = None) -> Run:
    """Fills the run's peak and the blocks alive then. used: the policy of real steps, if any ran."""
    # [Step 1] Build the model without memory, as an instance of the run's implementation.
    dtype = getattr(torch, run.setup["dtype"])
    model = build(load_config(options.model).to_dict() | {"use_cache": False}, dtype).train()
    settings = parse_checkpointing(options.checkpointing)
    if settings.offload == "auto":
        settings = dataclasses.replace(settings, offload="host")
    become(model, options.impl, options.gradient_checkpointing, settings)
    # [Step 2] Take the policy of the real steps. If none ran, take that of a first step, with as
    # much host memory as it needs.
    policy = used
    if options.impl == "hfpatch" and used is None and settings.offload != "off":
        width = model.get_input_embeddings().weight.shape[1]
        policy = first_policy(settings, tokens=options.batch * options.seq_len, width=width)
    # [Step 3] Run the step on fake tensors, and collect the inputs of its layers.
    inputs: set = set()
    layers = {id(m) for name, m in model.named_modules() if is_layer(name, m)}

    def note(module, args):
        """Collects the ids of the blocks of layers' inputs; the ledger keeps blocks alive."""
        if id(module) in layers and args and isinstance(args[0], torch.Tensor):
            inputs.add(id(current().track(args[0])))

    steps = 1
    if options.optimizer != "none" and options.warmup:
        steps = 2  # the second one has its optimizer's states from the start
    with module_calls(note):
        found = simulate(
            model, options.batch, options.seq_len, steps=steps, policy=policy,
            optimizer=partial(make_optimizer, name=options.optimizer),
        )  # fmt: skip
    # [Step 4] Put what the simulation found into the run.
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

    inputs: ids of the blocks of layers' inputs; head, root: as in _own.
    """
    starts = [start for start, _ in ledger.phases]
    ends = [*starts[1:], max(block.born for block in ledger.blocks)]
    phases = [[name, start, end] for (start, name), end in zip(ledger.phases, ends)]
    last = max(i for i, (name, *_) in enumerate(phases) if name == "forward")
    run.phases = phases[last:]
    for block in ledger.blocks:
        _own(block, inputs, ends[last], head, root)
    return measure(run, ledger)


def _own(block, inputs, forward_end, head, root) -> None:
    """Sets the block's category, module and phase to those of a report.

    head: the output projection's module name. Its blocks, and those of modules that hold it, belong
    to the loss. root: the name under which the follower lists the model itself.
    """
    block.module = "" if block.module == root else block.module or NOWHERE
    outlives = block.died is None or block.died > forward_end
    if block.phase == "setup":
        block.phase = "before the step"
    if block.category in LASTING:
        return
    if block.phase == "before the step":
        block.category = "other"
    elif block.op != "workspace" and id(block) in inputs:
        block.category = "checkpoints"
    elif block.phase != "optimizer" and block.module != NOWHERE and holds(head, block.module):
        block.category = "loss"
    elif block.phase == "forward" and outlives:
        block.category = "activations"
    else:
        block.category = "working set"


def holds(head: str, module: str) -> bool:
    """Whether the module is the head, a part of it (an adapter), or the causal LM that holds it and
    calls the loss.
    """
    return module == "" or (head + ".").startswith(module + ".") or module.startswith(head + ".")
