"""`apply(model)` gives a model's modules their fused classes; `undo(model)` restores the old ones.

Hooks, names and checkpoints stay the same. Besides classes these change, and undo takes them back:

    attributes that begin with `_hfpatch`
    marks                             DeepSpeed reads `_z3_leaf` of a layer and `ds_optim_param` of a
                                      parameter in host memory, DDP its list of ignored names
    a forward that TRL had put there  it is put aside

undo leaves two things:

    frozen weights on the host        `parameter.data` stays on the CPU: call model.to(device)
    torch's allocator                 its segments may grow, in the whole process
"""

import weakref
from contextlib import nullcontext

from torch import nn

from hfpatch import notes, swaps
from hfpatch.budget.policy import Checkpointing, names_the_nearest, parse_checkpointing
from hfpatch.compat import (
    Turn,
    as_before_fsdp2,
    drop_wrapped_forward,
    engine_hook,
    forward_before_wrapping,
    gather_as_one,
    graph_task,
    not_for_ddp,
    real_tensors,
    sharded_while_loaded,
)
from hfpatch.context.classes import (
    KeepsSignature,
    expect_module,
    is_patched,
    not_a_model,
    unswap,
)
from hfpatch.decoder.find import find_decoder
from hfpatch.decoder.small_instance import quiet_process
from hfpatch.decoder.verdict import ask_model
from hfpatch.layer.traits import layers_in, runtimes_in
from hfpatch.ops._library import HAS_TRITON
from hfpatch.report import Report

FUSED = ("rope", "rms_norm", "mlp", "loss")
_TOO_LATE = {
    "DeepSpeedEngine": "deepspeed.initialize()",
    "FullyShardedDataParallel": "FSDP wraps the model",
    "DistributedDataParallel": "DistributedDataParallel wraps the model",
    "DataParallel": "DataParallel wraps the model",
    "FSDPModule": "fully_shard()",
    "OptimizedModule": "torch.compile()",
    "ScriptModule": "torch.jit.script()",
    "ShadowLayer": "get_peft_model() with a ShadowConfig",
}
_ENGINES = ("torch", "deepspeed", "accelerate", "peft")
# Modules of Lightning and Fabric hold a model, and may expose its config as their own.
_LOOPS = ("lightning", "lightning_fabric", "pytorch_lightning")


def _refuse_wrapped(model: nn.Module) -> None:
    """Raises ValueError for a model that an engine wrapped, that a device_map offloads, or whose
    modules Liger replaced.
    """
    for module in model.modules():
        for kind in type(module).__mro__:
            late = _TOO_LATE.get(kind.__name__)
            if late is not None and kind.__module__.split(".")[0] in _ENGINES:
                raise ValueError(
                    f"hfpatch: apply() must run before {late}, got {type(module).__name__}. Call "
                    f"apply() before {late}."
                )
        _refuse_liger(module)
    hooks = filter(None, map(engine_hook, model.modules()))
    parts = [part for hook in hooks for part in getattr(hook, "hooks", [hook])]  # accelerate's
    devices = {getattr(part, "execution_device", None) for part in parts} - {None}
    if len(devices) > 1 or any(getattr(part, "offload", False) for part in parts):
        raise ValueError(
            "hfpatch: the model must be on one device, got a device_map that spreads it or "
            "keeps weights on the CPU or on disk. Load it without device_map (FSDP or "
            "DeepSpeed ZeRO-3 spread a model that does not fit)."
        )


def _refuse_liger(module: nn.Module) -> None:
    """Raises ValueError for a module of Liger, or with a forward of Liger's."""
    forward = vars(module).get("forward")
    code = getattr(forward, "__func__", forward)
    homes = (type(module).__module__, getattr(code, "__module__", None) or "")
    if any(home.split(".")[0] == "liger_kernel" for home in homes):
        raise ValueError(
            "hfpatch: the modules must be transformers' own, got Liger's in "
            f"{type(module).__name__}. Drop use_liger_kernel (apply_liger_kernel_to_...), or do "
            "not call apply()."
        )


class _WithoutLiger(Turn):
    """The model's lock. It refuses a forward after Liger replaced one of these modules' forwards,
    as `TrainingArguments(use_liger_kernel=True)` does when Trainer is made.
    """

    def __init__(self, modules, config):
        super().__init__(config)
        self.modules = weakref.WeakSet(modules)

    def __enter__(self):
        if graph_task() == -1:  # no backward, which enters once for each layer
            for module in self.modules:
                _refuse_liger(module)
        return super().__enter__()


def _unpin(module: nn.Module) -> None:
    """Removes a `forward` on the instance that is only its class's own, or a wrapper around ours.

    accelerate leaves the first when it unwraps a model; its mixed precision leaves the second.
    """
    forward = vars(module).get("forward")
    inner = forward_before_wrapping(module)
    own = type(module).forward
    if getattr(forward, "__func__", None) is own:
        del module.forward
    elif getattr(inner, "__func__", None) is own and is_patched(module):
        drop_wrapped_forward(module)


@names_the_nearest
def apply(
    model: nn.Module,
    *,
    rope: bool = True,
    rms_norm: bool = True,
    mlp: bool = True,
    loss: bool = True,
    checkpointing: "str | dict | Checkpointing" = "auto",
    logits: "str | bool" = "auto",
) -> Report:
    """Gives this model fused kernels and tiled, offloaded activation checkpointing, in place.

    Parameters, their names, hooks, `state_dict`, `save_pretrained` and other models stay the same.
    Gradients are exact. Documents packed in a row (positions that restart) stay isolated, also with
    an attention mask of ones, where transformers lets them see each other. `hfpatch.undo(model)`
    reverts it; a second call replaces the settings. A trainer's reference model needs a call of its
    own.

    Layers run again in backward, on the weights of their forward. A write to a weight in between
    raises an error, except through its `.data`, which PyTorch does not count: write after backward.

    Args:
        model: a transformers model, plain or wrapped by PEFT, on any device; before FSDP, DDP,
            DeepSpeed or torch.compile wrap it.
        rope: fused rotary embedding of q and k, one launch for both.
        rms_norm: fused RMSNorm.
        mlp: fused activation times up.
        loss: head and cross-entropy by chunks of tokens, without whole logits.
        checkpointing: "auto" is the fastest that fits the memory free at the first step; "least"
            needs the least device memory; "off" keeps transformers' own; a place ("gpu", "host", a
            folder) sets where checkpoints wait; a hfpatch.Checkpointing sets more.
        logits: whether a forward with labels also returns logits, in training and in evaluation.
            "auto": in training outputs.logits is None; in evaluation they are returned if they fit
            2 GiB with the copies that the loss makes. Code that reads them in training (PEFT's CPT)
            needs True.

    Returns:
        A Report of the swapped modules.

    Raises:
        ValueError: the model is wrapped already, is spread over devices or offloaded by a
            device_map, has Liger's modules or no decoder layers, or a setting is out of range. The
            message says what to do.

    Examples:
        >>> model = LlamaForCausalLM.from_pretrained("meta-llama/Llama-3.1-8B", dtype="bfloat16")
        >>> print(hfpatch.apply(model))
    """
    switches = {
        "rope": rope,
        "rms_norm": rms_norm,
        "mlp": mlp,
        "loss": loss,
    }
    settings = parse_checkpointing(checkpointing)
    if logits not in ("auto", True, False):
        raise ValueError(
            f'hfpatch: logits must be "auto", True or False, got {logits!r}. Leave it "auto".'
        )
    for name, value in switches.items():
        if value not in (True, False):
            raise ValueError(f"hfpatch: {name} must be True or False, got {value!r}. Leave it out.")
    expect_module(model)
    with as_before_fsdp2(model) if sharded_while_loaded(model) else nullcontext():
        return _applied(model, settings, switches, checkpointing, logits)


def _applied(model: nn.Module, settings, switches: dict, checkpointing, logits) -> Report:
    # [Step 1] The model is transformers' own, and plain.
    _refuse_wrapped(model)
    packages = {kind.__module__.split(".")[0] for kind in type(model).__mro__}
    in_a_loop = not packages.isdisjoint(_LOOPS)
    config = getattr(model, "config", None)
    if in_a_loop or not hasattr(config, "model_type"):
        raise not_a_model(model)
    undo(model)
    # [Step 2] Its decoder layers.
    decoder = find_decoder(model)
    if decoder is None:
        raise ValueError(
            "hfpatch: the model must have a list of decoder layers, and none was found in "
            f"{type(model).__name__} ({model.config.model_type}). Call apply() on a causal "
            "language model of transformers."
        )
    report = Report(type(model).__name__)
    notes.grow_segments()
    # [Step 3] The small instance's verdict on each layer, then the fused parts and the loss.
    # The probe's small instance needs values, also where the caller's tensors have none.
    with real_tensors(), quiet_process():
        found = ask_model(decoder)  # probes transformers' own classes, before any is swapped
        for option in swaps.PARTS:
            if switches[option]:
                swaps.fuse_parts(decoder, option, report)
    if switches["loss"]:
        swaps.fuse_loss(decoder, logits, report)
        if decoder.causal is not None:
            options = {**switches, "checkpointing": checkpointing, "logits": logits}
            vars(decoder.causal)["_hfpatch_options"] = options
    # [Step 4] What the report says of them.
    report.skipped += [(name, "not asked for") for name in FUSED if not switches[name]]
    if any(option in FUSED for option, _, _ in report.swaps):
        runs = "plain PyTorch: Triton is not installed"
        if HAS_TRITON:
            runs = "Triton kernels on a GPU, as plain PyTorch on a CPU"
        report.notes.append(f"fused ops run as {runs}.")
    # [Step 5] The layers' runtime, those of other towers, and the lock of all.
    watched = [model, decoder.causal or model, *decoder.layers[0].modules()]
    turn = _WithoutLiger(watched, getattr(decoder.stack, "config", None))
    swaps.checkpoint(decoder, settings, found, turn, report)
    swaps.checkpoint_towers(model, decoder, settings, turn, report)
    if report.count("loss") and logits is not True:
        report.notes.append(
            "outputs.logits is None in training, and in evaluation where logits and their copies "
            "take over 2 GiB, as the loss needs none; "
            "hfpatch.apply(model, logits=True) returns them."
        )
    # [Step 6] The lock and the report, where forwards and callers find them.
    for module in model.modules():
        if isinstance(module, KeepsSignature):
            module._hfpatch_turn = turn
    model._hfpatch_report = report
    return report


def undo(model: nn.Module) -> None:
    """Restores every module's own class and frees the runtime's host memory. A model that was never
    patched stays the same.

    Frozen weights that waited on the host are then on the CPU: call model.to(device). The setting of
    torch's allocator stays.

    Raises:
        ValueError: the argument is no model.
    """
    expect_module(model)
    runtimes = runtimes_in(model)
    for layer in layers_in(model):
        gather_as_one(layer, False)
    for module in model.modules():
        _unpin(module)
        if is_patched(module):
            unswap(module)
        trl = vars(module).get("_hfpatch_trl")
        if trl is not None:
            vars(module)["forward"] = trl.theirs
        not_for_ddp(module)
        for mark in [name for name in vars(module) if name.startswith("_hfpatch")]:
            del vars(module)[mark]
    for runtime in runtimes:
        runtime.close()


__all__ = ["Report", "apply", "undo"]
