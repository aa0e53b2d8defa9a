"""`apply(model)` gives this model's modules their fused classes; `undo(model)` hands the old ones
back.

Nothing but `module.__class__` and a few `_hfpatch_*` attributes changes: parameters, hooks, names
and checkpoints stay.
"""

import weakref
from collections import Counter
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from hfpatch.anchors import with_page
from hfpatch.budget.choice import choose
from hfpatch.budget.formula import ModelShape, step_memory
from hfpatch.budget.policy import Checkpointing, names_the_nearest, parse_checkpointing
from hfpatch.compat import (
    Turn,
    balances_itself,
    drop_wrapped_forward,
    forward_before_wrapping,
    gather_as_one,
    modules_of,
    names_attention,
    not_for_ddp,
    real_tensors,
    unwatched,
)
from hfpatch.context.classes import (
    KeepsSignature,
    expect_module,
    is_mixed,
    not_a_model,
    replaced_forward,
    swap,
    unswap,
)
from hfpatch.decoder.batch import StackTraits
from hfpatch.decoder.find import Decoder, find_decoder
from hfpatch.decoder.stack import OurAttention
from hfpatch.decoder.verdict import ask_model
from hfpatch.layer.condition import look
from hfpatch.layer.freeze_base import widened
from hfpatch.layer.layer import TiledLayer, UntiledLayer
from hfpatch.layer.runtime import LayerRuntime, Waiting
from hfpatch.layer.tower import Tower, TowerBlock, find_towers
from hfpatch.layer.traits import OTHER_MIXER, LayerTraits
from hfpatch.loss.causal_model import FusedCausalLM, TellsPositions
from hfpatch.loss.head import fuse, head_name, why_whole_logits
from hfpatch.loss.log_probs import TrlHead
from hfpatch.ops._library import HAS_TRITON
from hfpatch.parts import parts
from hfpatch.parts.angles import widen
from hfpatch.parts.embedding import FreeEmbedding, FusedEmbedding, ScaledEmbedding
from hfpatch.parts.quantised import as_trained
from hfpatch.report import Report

FUSED = ("rope", "rms_norm", "mlp", "loss")
# How the names of modules end that a part may stand for, and what finds it.
_PARTS = {
    "rms_norm": ("Norm", parts.norm_part),
    "mlp": ("MLP", parts.mlp_part),
    "rope": ("Attention", parts.rope_part),
}
_TOO_LATE = {
    "DeepSpeedEngine": "deepspeed.initialize()",
    "FullyShardedDataParallel": "FSDP wraps the model",
    "DistributedDataParallel": "DistributedDataParallel wraps the model",
    "DataParallel": "DataParallel wraps the model",
    "FSDPModule": "fully_shard()",
    "OptimizedModule": "torch.compile()",
}
# Lightning's and Fabric's modules hold a model, and may show its config as theirs.
_LOOPS = ("lightning", "lightning_fabric", "pytorch_lightning")
_DYNAMIC = "torch.ao.nn.quantized.dynamic"  # Linear layers that find the range of each input


def _refuse_wrapped(model: nn.Module) -> None:
    """ValueError for a model that an engine wrapped, or whose modules Liger replaced."""
    for module in model.modules():
        for kind in type(module).__mro__:
            home = kind.__module__.split(".")[0]
            if kind.__name__ in _TOO_LATE and home in ("torch", "deepspeed", "accelerate"):
                late = _TOO_LATE[kind.__name__]
                fix = f"call apply() before {late}."
                asked = getattr(getattr(model, "config", None), "distributed_config", None)
                if (getattr(asked, "fsdp_size", None) or 1) > 1:  # sharded while it was loaded
                    fix = (
                        "load it without DistributedConfig(fsdp_size=), and have accelerate's "
                        "FSDP2 shard it after apply()."
                    )
                came = type(module).__name__
                raise ValueError(f"hfpatch: expected a model before {late}, found {came}; {fix}")
        forward = vars(module).get("forward")
        code = getattr(forward, "__func__", forward)
        homes = type(module).__module__, getattr(code, "__module__", None) or ""
        if any(home.split(".")[0] == "liger_kernel" for home in homes):
            raise ValueError(
                "hfpatch: expected transformers' own modules, found Liger's in "
                f"{type(module).__name__}; "
                "drop use_liger_kernel (apply_liger_kernel_to_...), or do not call apply()."
            )


def _unpin(module: nn.Module) -> None:
    """Drops a `forward` on the instance that is no more than its class's own, or a wrapper around
    ours.

    accelerate leaves the first where it unwraps a model, its mixed precision the second.
    """
    forward, inner = vars(module).get("forward"), forward_before_wrapping(module)
    # what torch.jit compiled has one on the instance alone
    own = getattr(type(module), "forward", None)
    if own is not None and getattr(forward, "__func__", None) is own:
        del module.forward
    elif own is not None and getattr(inner, "__func__", None) is own and is_mixed(module):
        drop_wrapped_forward(module)


def _base_config(model: nn.Module):
    config = getattr(model, "config", None)
    loops = any(kind.__module__.split(".")[0] in _LOOPS for kind in type(model).__mro__)
    if loops or not hasattr(config, "model_type"):
        raise not_a_model(model)
    return config


@names_the_nearest
def apply(
    model: nn.Module,
    *,
    rope: bool = True,
    rope_float64: bool = False,
    rms_norm: bool = True,
    mlp: bool = True,
    loss: bool = True,
    checkpointing: "str | Checkpointing" = "auto",
    logits: "str | bool" = "auto",
) -> Report:
    """Gives this model fused kernels and tiled, offloaded activation checkpointing, in place;
    returns a Report.

    Parameters, their names, hooks, `state_dict` and `save_pretrained` stay as they were, and so do
    other models. Gradients are exact. Documents packed in a row (positions that restart) stay
    apart, also beside an attention mask of ones, where transformers lets them see each other.
    `hfpatch.undo(model)` takes it back. Calling it again replaces the settings. One exception to
    "other models": a TRL trainer made with this model patches its reference model likewise, so that
    equal weights give equal numbers.

    Layers run again in backward, on the weights of their forward: what is written to a weight in
    between is noticed and said, but for writes in place through its `.data`, which PyTorch does not
    count: make those after backward.

    model: a transformers model, plain or wrapped by PEFT, on any device; before FSDP, DDP,
        DeepSpeed or torch.compile wrap it.
    rope: fused rotary embedding of q and k, one launch for both. rope_float64: rotary angles in
    float64, worth it above 131,072 tokens, where those of float32 are off by more than
        bfloat16 rounds.
    rms_norm: fused RMSNorm, and residual add with the norm after it. mlp: fused activation times
    up. loss: head and cross-entropy by chunks of tokens, logits never whole. checkpointing: "auto"
    is the fastest that fits the memory free at the first step; "least" takes the least device
        memory; "off" leaves transformers' own checkpointing as it is; a place ("gpu", "host", a
        folder) says where checkpoints wait; a hfpatch.Checkpointing says more.
    logits: whether a forward with labels also returns logits, in training and in evaluation.
        "auto": in evaluation up to 2 GiB with the copies that the loss makes of them; in training
        outputs.logits is None, but for PEFT's CPT, which reads them.

    Raises ValueError, a sentence that says what to do, on a model that is wrapped already, one of
    Liger's modules, one without decoder layers, and on settings out of range.

    >>> model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.1-8B", dtype="bfloat16")
    >>> print(hfpatch.apply(model))
    """
    switches = {
        "rope": rope,
        "rope_float64": rope_float64,
        "rms_norm": rms_norm,
        "mlp": mlp,
        "loss": loss,
    }
    try:
        return _apply(model, switches, checkpointing, logits)
    except ValueError as error:
        with_page(error)
        raise


def _apply(model: nn.Module, switches: dict, checkpointing, logits) -> Report:
    settings = parse_checkpointing(checkpointing)
    if logits not in ("auto", True, False):
        raise ValueError(
            f'hfpatch: logits must be "auto", True or False, {logits!r} came; leave it "auto".'
        )
    for name, value in switches.items():
        if value not in (True, False):
            raise ValueError(
                f"hfpatch: {name} must be True or False, {value!r} came; leave it out."
            )
    expect_module(model)
    _refuse_wrapped(model)
    config = _base_config(model)
    undo(model)
    decoder = find_decoder(model)
    if decoder is None:
        raise ValueError(
            "hfpatch: expected a decoder with a list of layers, found none in "
            f"{type(model).__name__} "
            f"({config.model_type}); call apply() on a causal language model as transformers made "
            "it."
        )
    report = Report(type(model).__name__)
    # The small instance needs values, also where the caller's tensors have none.
    with real_tensors(), torch.device("cpu"), unwatched([]):
        found = ask_model(decoder)  # of transformers' own classes, before any is swapped
        for option in _PARTS:
            if switches[option]:
                _fuse_parts(decoder, option, report)
    if switches["rope_float64"]:
        _count(report, "float64 RoPE", widen(decoder.stack), Counter())
    if switches["loss"]:
        _fuse_loss(decoder, logits, report)
        if decoder.causal is not None:
            vars(decoder.causal)["_hfpatch_beside"] = partial(
                apply, **switches, checkpointing=checkpointing, logits=logits
            )
    report.skipped += [(name, "not asked for") for name in FUSED if not switches[name]]
    if any(option in FUSED for option, _, _ in report.swaps):
        runs = (
            "Triton kernels on a GPU, as plain PyTorch on a CPU"
            if HAS_TRITON
            else "plain PyTorch: Triton is not installed"
        )
        report.notes.append(f"fused ops run as {runs}.")
    turn = Turn()
    _checkpoint(decoder, settings, found, turn, report)
    _checkpoint_towers(model, decoder, settings, turn, report)
    for module in model.modules():
        if isinstance(module, KeepsSignature):
            module._hfpatch_turn = turn
    model._hfpatch_report = report
    return report


def _count(report: Report, option: str, done: list[nn.Module], left: Counter) -> None:
    """Adds to the report what was swapped, by class, and the reasons of what was not."""
    names = Counter(type(m).__name__ for m in done)
    report.swaps += [(option, name, n) for name, n in names.items()]
    for (name, reason), n in left.items():
        report.details.append(f"{option}: {n} x {name} left as they are: {reason}.")
    if left and not done:
        report.skipped.append((option, left.most_common(1)[0][0][1]))
    elif left:
        (name, reason), _ = left.most_common(1)[0]
        report.skipped.append((option, f"{name}: {reason}"))
    elif not done:
        report.skipped.append((option, "none in this model"))


def _fuse_parts(decoder: Decoder, option: str, report: Report) -> None:
    ending, part_of = _PARTS[option]
    done, left = [], Counter()
    for module in decoder.stack.modules():
        if not type(module).__name__.endswith(ending) or is_mixed(module):
            continue
        found = part_of(module)
        if isinstance(found, str):
            left[type(module).__name__, found] += 1
            continue
        part, attributes = found
        swap(module, part)
        vars(module).update(attributes)
        done.append(module)
    _count(report, option, done, left)


def _fuse_loss(decoder: Decoder, logits, report: Report) -> None:
    model = decoder.causal
    name = None if model is None else head_name(model)
    trl = None if model is None else TrlHead.of(vars(model).get("forward"))
    if model is None or trl is None and "forward" in vars(model):
        why = "no head with labels in this model" if model is None else replaced_forward(model)
        report.skipped.append(("loss", why))
        return
    if trl is not None:
        del model.forward
        report.notes.append(
            "TRL's fused head is hfpatch's, as its loss is: log-probabilities and entropies "
            "without logits."
        )
    for outer in (model, *(m for m in decoder.around if "forward" not in vars(m))):
        holder = next(path for path, m in outer.named_modules() if m is model)
        swap(outer, FusedCausalLM)
        outer._hfpatch_holder, outer._hfpatch_head_name = holder, name
        outer._hfpatch_norm_path = decoder.norm_path and f"{holder}.{decoder.norm_path}".lstrip(".")
        outer._hfpatch_logits = logits
    model._hfpatch_trl = trl
    reason = why_whole_logits(model, model._hfpatch_head())
    if reason:  # asked again in each call: an adapter may come off the head
        report.skipped.append(("loss", f"{reason}: the loss runs through whole logits"))
    else:
        report.swaps.append(("loss", type(outer).__name__, 1))


def _checkpoint(decoder: Decoder, settings, found, turn: Turn, report: Report) -> None:
    """The stack gets our attention, and its layers run tile by tile where that is exact."""
    stack, layers, skipped = decoder.stack, decoder.layers, report.skipped
    if "forward" in vars(stack):
        skipped.append(("checkpointing", f"{type(stack).__name__}: {replaced_forward(stack)}"))
        return
    if not found.ours and found.alone and found.apart:
        skipped.append(("checkpointing", found.alone))
        return
    configs = _configs(decoder)
    _patch_stack(decoder, found, configs, report)
    if settings == "off" or found.alone:
        skipped.append(("checkpointing", "not asked for" if settings == "off" else found.alone))
        for layer, answer in zip(layers, found.answers):
            _swap_layer(layer, UntiledLayer, answer, found.places, configs)
        return
    for layer in layers:
        if "forward" in vars(layer):
            skipped.append(("checkpointing", f"{type(layer).__name__}: {replaced_forward(layer)}"))
            return
    shape = as_trained(_shape(stack.config), layers[0])
    session = LayerRuntime(settings, shape, len(layers), turn)
    session.owner = weakref.ref(decoder.causal or stack)
    stack._hfpatch_session = session
    not_for_ddp(session.owner(), Waiting(session))
    names = Counter(type(layer).__name__ for layer in layers)
    for index, (layer, answer) in enumerate(zip(layers, found.answers)):
        if isinstance(layer, TiledLayer):  # one that runs again later in the same forward
            continue
        layer._hfpatch_index, layer._hfpatch_session = index, session
        _swap_layer(layer, TiledLayer, answer, found.places, configs)
        gather_as_one(layer, True)
    if hasattr(stack, "embed_tokens"):
        fuse(stack.embed_tokens, nn.Embedding, FusedEmbedding)
        # A family's own scales its output; a plain one is left here where another library replaced
        # its forward (accelerate's hooks, tensor parallelism). A parametrized one keeps its class.
        rest = stack.embed_tokens
        if isinstance(rest, nn.Embedding) and not modules_of(rest) and not is_mixed(rest):
            swap(rest, FreeEmbedding if type(rest) is nn.Embedding else ScaledEmbedding)
    report.swaps += [("checkpointing", name, n) for name, n in names.items()]
    _note_layers(decoder, settings, found, shape, report)


def _checkpoint_towers(model: nn.Module, decoder: Decoder, settings, turn: Turn, report) -> None:
    """Blocks of images and sound: checkpointed whole. Only beside layers that are ours."""
    if not isinstance(decoder.layers[0], TiledLayer):
        return
    for name, lists in find_towers(model, decoder.stack).items():
        swap(model.get_submodule(name), Tower)
        for blocks in lists:
            runtime = LayerRuntime(replace(settings, frozen_weights="gpu"), None, len(blocks), turn)
            for block in blocks:
                swap(block, TowerBlock)
                block._hfpatch_tower, block._hfpatch_first = runtime, block is blocks[0]
        report.notes.append(
            f"{sum(map(len, lists))} blocks of {name} are checkpointed, their inputs offloaded; "
            "without a graph where nothing in it is trained."
        )


def _patch_stack(decoder: Decoder, found, configs: tuple, report: Report) -> None:
    """Our class for the stack, and for a model around it that must hand positions on."""
    stack, causal = decoder.stack, decoder.causal
    swap(stack, OurAttention)
    mixers = any(a.mixers or a.reason == OTHER_MIXER for a in found.answers)
    stack._hfpatch_configs = configs
    # Ranks that send tokens to each other's experts run equally many tiles.
    asked = getattr((causal or stack).config, "distributed_config", None)
    unpads = found.unpads and (getattr(asked, "ep_size", None) or 1) == 1
    stack._hfpatch_traits = StackTraits(
        found.ours, mixers, mixers and found.across, found.apart, unpads
    )
    if causal is not None and not is_mixed(causal) and "forward" not in vars(causal):
        # A model between the two may make a cache.
        if mixers or not found.apart or stack not in causal.children():
            swap(causal, TellsPositions)
    if not found.apart:
        report.notes.append(
            "rows that hold several documents are refused: its layers were not seen to keep them "
            "apart."
        )


def _note_layers(decoder: Decoder, settings, found, shape, report: Report) -> None:
    """What the report says of the layers."""
    stack, layers, notes = decoder.stack, decoder.layers, report.notes
    whole = Counter(reason for layer in layers if (reason := look(layer).reason))
    for reason, n in whole.items():
        notes.append(
            f"{n} of {len(layers)} layers are checkpointed whole, their inputs offloaded: {reason}."
        )
    notes += _mixer_notes(layers, found.answers)
    where = "chosen at the first step" if settings.offload == "auto" else settings.offload
    notes.append(
        f"checkpoints of {len(layers)} layers: {where}; transformers' own gradient checkpointing "
        "of them is replaced."
    )
    if settings.frozen_weights == "host":
        notes.append(
            "frozen weights of the layers stay in host memory and come to the device a layer "
            "ahead of their use."
        )
    wide = widened(decoder.stack if decoder.causal is None else decoder.causal)
    if wide:
        notes.append(
            f"{len(wide)} frozen parameters ({wide[0]}, ...) are float32 over a quantised base, "
            "so residual stream and host memory are twice as large "
            "(prepare_model_for_kbit_training): call hfpatch.freeze_base(model) in its place."
        )
    ranged = [n for n, m in stack.named_modules() if type(m).__module__.startswith(_DYNAMIC)]
    if ranged:
        notes.append(
            f"{len(ranged)} modules ({ranged[0]}, ...) quantise what they are given by its range, "
            "which is each tile's own: values differ from those of whole sequences by a step of "
            "that quantisation; tile as long as the sequence for the same."
        )
    if shape is not None and not whole and not shape.whole_because:
        itemsize = next(stack.parameters()).element_size()
        notes.append(_memory_note(stack.config, shape, settings, itemsize))
    dropout = getattr(stack.config, "attention_dropout", 0.0)
    if dropout:
        notes.append(
            f"attention_dropout is {dropout}: in training, layers are checkpointed whole instead "
            "of tile by tile."
        )


def _swap_layer(
    layer: nn.Module, part: type, answers: LayerTraits, places: frozenset, configs: tuple
) -> None:
    if not is_mixed(layer):
        swap(layer, part)
        layer._hfpatch_configs, layer._hfpatch_traits, layer._hfpatch_places = (
            configs,
            answers,
            places,
        )


def _configs(decoder: Decoder) -> tuple:
    """The configs that the stack and what is in it read, each once."""
    configs = (getattr(m, "config", None) for m in decoder.stack.modules())
    return tuple({id(c): c for c in configs if names_attention(c)}.values())


def _shape(config) -> ModelShape | None:
    try:
        return ModelShape.from_config(config)
    except Exception:  # a config whose sizes differ from layer to layer raises one of its own
        return None


def _mixer_notes(layers, answers) -> list[str]:
    """How the modules run that mix tokens beside attention, a line for each way."""
    found = Counter()
    for layer, traits in zip(layers, answers):
        for name in traits.mixers if traits.reason is None else ():
            kind = type(layer.get_submodule(name)).__name__
            found[kind, traits.in_time(name)] += 1
    return [f"{n} {kind}s, which mix tokens, {in_time}." for (kind, in_time), n in found.items()]


def _memory_note(config, shape: ModelShape, settings: Checkpointing, itemsize: int) -> str:
    """What the closed form expects of one long sequence on a GPU with the host memory it asks
    for.
    """
    tokens = min(config.max_position_embeddings, 131072)
    policy = choose(settings, shape, batch=1, tokens=tokens, itemsize=itemsize)
    memory = step_memory(shape, policy, batch=1, tokens=tokens, itemsize=itemsize)
    return (
        f"expected for one sequence of {tokens:,} tokens on a GPU: {memory.beyond / 2**30:.2f} "
        "GiB beyond parameters and "
        f"gradients, {memory.host / 2**30:.2f} GiB of host memory (see `hfpatch plan`)."
    )


def undo(model: nn.Module) -> None:
    """Hands every module its own class back and frees the session's host memory. A model never
    patched stays as it is.

    A reference model that a TRL trainer had patched with its policy is a model of its own:
    undo(trainer.ref_model). Raises ValueError on what is no model.
    """
    expect_module(model)
    sessions = set()
    for module in model.modules():
        _unpin(module)
        if isinstance(module, OurAttention):
            balances_itself(type(module))
        if is_mixed(module):
            unswap(module)
        trl = vars(module).get("_hfpatch_trl")
        if trl is not None:
            vars(module)["forward"] = trl.theirs
        session = vars(module).get("_hfpatch_session")
        not_for_ddp(module)
        if session is not None:
            sessions.add(session)
            gather_as_one(module, False)
        sessions |= {vars(module).get("_hfpatch_tower")} - {None}
        for mark in [name for name in vars(module) if name.startswith("_hfpatch_")]:
            del vars(module)[mark]
    for session in sessions:
        session.close()


__all__ = ["Report", "apply", "undo"]
