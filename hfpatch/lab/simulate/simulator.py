"""Runs a training step of a real model object on fake tensors, and returns the memory it takes.

    hfpatch profile --simulate --model llama-3.1-8b --impl hfpatch --seq-len 131072

The Python that runs is the model's own, patched or stock, and follow.py records each storage's
life. Only the memory that a CUDA kernel allocates inside itself is modelled (kernels_cost.py). An
8B model at 131,072 tokens takes seconds and a few hundred MiB on a laptop. transformers is changed
process-wide while a step runs.
"""

import contextlib
import gc
import sys
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import Tensor, nn

from hfpatch.attention import heads
from hfpatch.budget.policy import Checkpointing
from hfpatch.compat import plain_scans
from hfpatch.context.ranks import sharded
from hfpatch.lab.compat import for_now, simulation_parts
from hfpatch.lab.simulate.follow import Follower
from hfpatch.lab.simulate.ledger import Ledger, alive_at, beyond, levels
from hfpatch.lab.simulate.operations import tensors_in
from hfpatch.lab.simulate.scan import few_blocks, scans_by_blocks
from hfpatch.lab.simulate.sequence import LoneRank
from hfpatch.lab.simulate.shadow import Shadows, fake_weights
from hfpatch.lab.watch import module_calls
from hfpatch.layer.condition import look
from hfpatch.layer.runtime import LayerRuntime
from hfpatch.layer.traits import layers_in, runtimes_in
from hfpatch.ops import _wide_sums
from hfpatch.store import device


@dataclass
class Simulation:
    """The memory of one simulated run. Sizes in bytes.

    Attributes:
        peak_bytes: the highest total on the device, with parameters and gradients. `categories`
            splits the blocks alive then.
        beyond_bytes: that total without the parameters and gradients alive then.
        most_beyond_bytes: the highest such difference at any moment. It counts if gradients leave
            the device as they come.
        host_peak_bytes: host memory of the runtime, without files.
        whole: reasons why layers of a patched model run untiled -> number of layers.
        whole_row_layers: layers with a mixer, other than attention, that takes whole rows.
    """

    peak_bytes: int
    beyond_bytes: int
    most_beyond_bytes: int
    host_peak_bytes: int
    peak_phase: str
    categories: dict
    flops: dict = field(default_factory=dict)
    attention_calls: dict = field(default_factory=dict)
    whole: dict = field(default_factory=dict)
    whole_row_layers: int = 0
    ledger: Ledger = field(default=None, repr=False)


def summarize(ledger: Ledger) -> Simulation:
    """Finds the highest total and the blocks alive at it."""
    top = -1
    top_at = 0
    most_beyond = 0
    for at, _, _, level in levels(ledger):
        total = sum(level.values())
        most_beyond = max(most_beyond, beyond(level))
        if total > top:
            top = total
            top_at = at
    begun = {name: at for at, name in ledger.phases if at <= top_at}
    categories: Counter = Counter()
    for block in alive_at(ledger, top_at):
        category = block.category
        if category == "activations" and block.born < begun.get("backward", 0):
            category = "checkpoints"  # made in the forward, kept for the backward
        categories[category] += block.nbytes
    blocks = ledger.blocks
    on_host = accumulate(delta for index, delta in ledger.events if blocks[index].host)
    return Simulation(
        peak_bytes=top,
        beyond_bytes=top - categories["parameters"] - categories["gradients"],
        most_beyond_bytes=most_beyond, host_peak_bytes=max(on_host, default=0),
        peak_phase=max(begun, key=begun.get, default="setup"),
        categories=dict(categories),
        flops={
            "matmul": dict(ledger.matmul_flops),
            "attention": dict(ledger.attention_flops),
            "total": sum(ledger.matmul_flops.values()) + sum(ledger.attention_flops.values()),
        },
        attention_calls=dict(ledger.attention_calls), ledger=ledger,
    )  # fmt: skip


@contextlib.contextmanager
def _transformers_as_if_real():
    """A context in which transformers takes fake tensors for real ones.

    It takes them for a graph being traced otherwise, and builds a full T x T mask.
    """
    with contextlib.ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("transformers") and "is_fake_tensor" in vars(module):
                stack.enter_context(for_now(module, is_fake_tensor=lambda x: False))
        yield


@contextlib.contextmanager
def _young_garbage():
    """A context in which the garbage collector looks only at objects made inside, and runs at the
    end.

    A look at all imported modules takes longer than many a step.
    """
    gc.freeze()
    gc.enable()  # a cycle holds its tensors until a look finds it
    try:
        yield
    finally:
        gc.collect()
        gc.unfreeze()


@contextlib.contextmanager
def _host_buffers(follower: Follower):
    """A context in which allocations of the runtime by host_empty count as host memory."""
    real = device.host_empty

    def host_empty(*args, **kwargs):
        with follower.host():
            return real(*args, **kwargs)

    with for_now(device, host_empty=host_empty):
        yield


@contextlib.contextmanager
def _patched_as(model: nn.Module, policy, cuda: bool):
    """A context in which hfpatch follows the policy, if there is one, and its CUDA paths as far as
    these differ in memory.

    Host blocks and rings of a real run do not enter the simulation, nor the reverse.
    """
    with contextlib.ExitStack() as stack:
        if cuda:
            stack.enter_context(for_now(_wide_sums, AS_CUDA=True))
            # These serve tiled layers and whole ones.
            stack.enter_context(for_now(heads, pick=lambda *_: "flash"))
        for found in runtimes_in(model):
            found.close()
            stack.callback(found.close)
            if policy is not None:
                stack.enter_context(for_now(found.weights, on=policy.frozen_weights == "host"))
        if policy is not None:
            stack.enter_context(for_now(LayerRuntime, _resolve=lambda self, *batch: policy))
        yield


def _whole(model: nn.Module) -> dict:
    """Reasons why layers of a patched model run untiled here -> number of layers."""
    found = Counter(look(module).now for module in layers_in(model))
    found.pop(None, None)
    return dict(found)


def _weights_to_host(model: nn.Module, follower: Follower) -> None:
    """Puts streamed frozen weights on the host before the step, and their slots on the device."""
    streamed = [runtime.weights for runtime in runtimes_in(model) if runtime.weights.on]
    for weights in streamed:
        weights.pack(layers_in(model), torch.device("cpu"))
        weights.make_slots()
        for slot in weights.ring.slots:
            follower.track(slot.bytes, category="parameters")
        with follower.host():
            for packed in weights.packed.values():
                for piece in packed.pieces:
                    follower.track(piece.tensor, category="parameters")


def _modules_named(model: nn.Module, follower: Follower):
    """A context in which the follower knows the module that runs."""
    names = {id(module): name or type(module).__name__ for name, module in model.named_modules()}

    def enter(module, args):
        if id(module) in names:
            follower.enter_module(names[id(module)])

    def leave(module):
        if id(module) in names:
            follower.leave_module()

    return module_calls(enter, leave)


@contextlib.contextmanager
def following(model: nn.Module, follower: Follower):
    """A context that is followed. The model's parameters and buffers have the category
    "parameters", each .grad "gradients".
    """

    def accumulated(parameter):
        if parameter.grad is not None:
            follower.track(parameter.grad, category="gradients")

    with contextlib.ExitStack() as stack:
        stack.enter_context(_modules_named(model, follower))
        stack.enter_context(_host_buffers(follower))
        _weights_to_host(model, follower)
        for tensor in [*model.parameters(), *model.buffers()]:
            follower.track(tensor, category="parameters")
        for parameter in model.parameters():
            if parameter.requires_grad:
                accumulated(parameter)
                stack.callback(parameter.register_post_accumulate_grad_hook(accumulated).remove)
        yield stack.enter_context(follower)


def train_step(
    model: nn.Module, follower: Follower, input_ids: Tensor, labels: Tensor, **inputs
) -> None:
    """One forward and backward as a training loop runs it: the output object does not outlive the
    forward.
    """
    follower.set_phase("forward")
    loss = model(input_ids=input_ids, labels=labels, **inputs).loss
    follower.set_phase("backward")
    loss.backward()


def _steps(
    model: nn.Module, follower: Follower, steps: int, optimizer, both: tuple, more: dict
) -> None:
    """both: tokens and labels; more: of the model's forward."""
    stepper = optimizer(model.parameters()) if optimizer else None
    for _ in range(steps):
        train_step(model, follower, *both, **more)
        if stepper:
            follower.set_phase("optimizer")
            stepper.step()
            states = [value for state in stepper.state.values() for value in state.values()]
            for tensor in tensors_in(states, []):
                follower.track(tensor, category="optimizer")
            stepper.zero_grad()


def simulate(
    model: nn.Module,
    batch: int,
    seq_len: int,
    *,
    steps: int = 1,
    optimizer=None,
    ids: Tensor | None = None,
    labels: Tensor | None = None,
    inputs: dict | None = None,
    cuda: bool = True,
    policy=None,
    ranks: int = 1,
    most_operations: int | None = None,
    accumulates: bool = False,
    follower=Follower,
) -> Simulation:
    """Runs `steps` training steps of `model` at [batch, seq_len] tokens on fake tensors.

    Args:
        model: patched or not, on any device ("meta" needs no memory). Its parameters are replaced
            while the steps run, and put back afterwards.
        optimizer: a function from parameters to a torch optimizer, which each step steps.
        ids, labels: [batch, seq_len] int64, real values. By default random tokens, each a label.
        inputs: more real tensors for the model's forward.
        cuda, most_operations: as of Follower.
        policy: of a patched model's tiled layers; by default they choose by this machine. No file
            is written: host blocks stand in.
        ranks: that share each row of a patched model. seq_len is this rank's part.
        accumulates: gradients of earlier batches exist as the first step begins.
        follower: makes the Follower from its settings.
    """
    # [Step 1] What the step is given.
    if ids is None:
        vocabulary = getattr(getattr(model, "config", None), "vocab_size", 32)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, vocabulary, (batch, seq_len), generator=generator)
    if labels is None:
        labels = ids
    inputs = inputs or {}
    # [Step 2] The contexts in which it runs as on a GPU.
    mode = simulation_parts()[0](allow_non_fake_inputs=True)
    shadows = Shadows(mode)
    follower = follower(cuda=cuda, shadows=shadows, most_operations=most_operations)
    further = []
    if ranks > 1:
        further.append(sharded(LoneRank(ranks)))
        inputs = {"position_ids": torch.arange(seq_len).repeat(batch, 1), **inputs}
    files = policy is not None and policy.tier == "disk"
    if files:
        policy = replace(policy, offload="host")
        # Beside files no gradient waits on the host, as it may beside the blocks that stand in.
        further.append(for_now(Checkpointing, parks_dx=False))
    around = (
        mode, _transformers_as_if_real(), _patched_as(model, policy, cuda), *further,
        plain_scans(), scans_by_blocks(),
        few_blocks(follower), fake_weights(model, shadows),
    )  # fmt: skip
    # [Step 3] The steps.
    was_training = model.training
    model.train()
    try:
        with _young_garbage(), contextlib.ExitStack() as stack:
            for context in around:
                stack.enter_context(context)
            for parameter in model.parameters():
                if accumulates and parameter.requires_grad:
                    parameter.grad = torch.empty_like(parameter)
            with following(model, follower):
                both = (shadows.fake(ids), shadows.fake(labels))
                more = {name: shadows.fake(value) for name, value in inputs.items()}
                _steps(model, follower, steps, optimizer, both, more)
            whole = _whole(model)
    finally:
        model.train(was_training)
    result = summarize(follower.ledger)
    result.whole = whole
    result.whole_row_layers = sum(not m._hfpatch.traits.all_timed for m in layers_in(model))
    if files:
        result.host_peak_bytes = 0
    return result
