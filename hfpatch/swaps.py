"""The swap of a model's classes: fused parts, the loss, the stack and its layers, towers.

`apply` (patch.py) calls these functions in order. Each reports the modules that it swapped, and
why others keep their class.
"""

import weakref
from collections import Counter
from dataclasses import replace

from torch import nn

from hfpatch import notes
from hfpatch.compat import (
    Turn,
    exchanges_tokens,
    gather_as_one,
    modules_of,
    names_attention,
    not_for_ddp,
)
from hfpatch.context.classes import is_patched, replaced_forward, swap
from hfpatch.decoder.batch import StackTraits
from hfpatch.decoder.find import Decoder
from hfpatch.decoder.stack import PatchedStack
from hfpatch.layer.layer import PatchedLayer, TiledLayer
from hfpatch.layer.runtime import LayerRuntime, Waiting
from hfpatch.layer.tower import Tower, TowerBlock, find_towers
from hfpatch.layer.traits import Patched
from hfpatch.loss.causal_model import FusedCausalLM, TellsPositions
from hfpatch.loss.head import fuse, head_name, why_whole_logits
from hfpatch.loss.log_probs import TrlHead
from hfpatch.parts import parts, rotation
from hfpatch.report import Report

# option -> (ending of the class names that a part may replace, the function that finds the part)
PARTS = {
    "rms_norm": ("Norm", parts.norm_part),
    "mlp": ("MLP", parts.mlp_part),
    "rope": ("Attention", rotation.rope_part),
}


def fuse_parts(decoder: Decoder, option: str, report: Report) -> None:
    ending, part_of = PARTS[option]
    done = []
    left = Counter()
    for module in decoder.stack.modules():
        if not type(module).__name__.endswith(ending) or is_patched(module):
            continue
        found = replaced_forward(module) or part_of(module)
        if isinstance(found, str):
            left[type(module).__name__, found] += 1
            continue
        part, attributes = found
        swap(module, part)
        vars(module).update(attributes)
        done.append(module)
    notes.count(report, option, done, left)


def fuse_loss(decoder: Decoder, logits, report: Report) -> None:
    model = decoder.causal
    name = None if model is None else head_name(model)
    trl = None if model is None else TrlHead.of(vars(model).get("forward"))
    if model is None or trl is None and "forward" in vars(model):
        why = "no head with labels around its layers" if model is None else replaced_forward(model)
        report.skipped.append(("loss", why))
        return
    if trl is not None:
        del model.forward
        report.notes.append(
            "TRL's loss uses hfpatch's fused head: log-probabilities and entropies without logits."
        )
    models = (model, *(m for m in decoder.around if "forward" not in vars(m)))
    for outer in models:
        holder = next(path for path, m in outer.named_modules() if m is model)
        swap(outer, FusedCausalLM)
        outer._hfpatch_holder = holder
        outer._hfpatch_head_name = name
        outer._hfpatch_logits = logits
        outer._hfpatch_report = report
    model._hfpatch_trl = trl
    reason = why_whole_logits(model, model._hfpatch_head())
    if reason:  # each call checks again: an adapter may come off the head
        report.skipped.append(("loss", f"{reason}: the loss runs through whole logits"))
    else:
        report.swaps.append(("loss", type(models[-1]).__name__, 1))


def checkpoint(decoder: Decoder, settings, found, turn: Turn, report: Report) -> None:
    """Gives the stack our attention, and its layers tile-by-tile execution where that is exact."""
    # [Step 1] Leave the stack stock if its forward was replaced, or if its layers cannot run twice.
    stack = decoder.stack
    layers = decoder.layers
    skipped = report.skipped
    if "forward" in vars(stack):
        skipped.append(("checkpointing", f"{type(stack).__name__}: {replaced_forward(stack)}"))
        return
    # If documents could mix, the stack is patched all the same, to refuse them.
    if not found.ours and found.why_unpatched and found.isolates:
        skipped.append(("checkpointing", found.why_unpatched))
        return
    # [Step 2] Patch the stack. Its layers stay untiled where the settings or the verdict say so.
    configs = _configs(decoder)
    _patch_stack(decoder, found, configs, report)
    if settings.offload == "off" or found.why_unpatched:
        off = settings.offload == "off"
        skipped.append(("checkpointing", "not asked for" if off else found.why_unpatched))
        for layer, answer in zip(layers, found.answers):
            _swap_layer(layer, PatchedLayer, Patched(answer, configs))
        return
    # [Step 3] If a layer's forward was replaced, all layers stay stock. The stack stays patched.
    for layer in layers:
        if "forward" in vars(layer):
            skipped.append(("checkpointing", f"{type(layer).__name__}: {replaced_forward(layer)}"))
            return
    # [Step 4] Make the runtime, and let the layers run tile by tile.
    runtime = LayerRuntime(settings, len(layers), turn)
    owner = decoder.causal or stack
    owner._hfpatch_report = report
    runtime.owner = weakref.ref(owner)
    runtime.exchanges_tokens = exchanges_tokens(owner)
    stack._hfpatch.runtime = runtime
    not_for_ddp(owner, Waiting(runtime))
    names = Counter(type(layer).__name__ for layer in layers)
    for index, (layer, answer) in enumerate(zip(layers, found.answers)):
        if isinstance(layer, TiledLayer):  # a layer that runs again later in the same forward
            continue
        _swap_layer(layer, TiledLayer, Patched(answer, configs, runtime, index))
        gather_as_one(layer, True)
    # [Step 5] Swap the embedding, and report the layers.
    if hasattr(stack, "embed_tokens"):
        fuse(stack.embed_tokens, nn.Embedding, parts.FreeEmbedding)
        # A family's own embedding scales its output. A plain one remains here if another library
        # replaced its forward (accelerate's hooks, tensor parallelism). A parametrized one keeps
        # its class.
        rest = stack.embed_tokens
        if isinstance(rest, nn.Embedding) and not modules_of(rest) and not is_patched(rest):
            swap(rest, parts.FreeEmbedding)
    report.swaps += [("checkpointing", name, n) for name, n in names.items()]
    notes.note_layers(decoder, settings, found, report)


def checkpoint_towers(model: nn.Module, decoder: Decoder, settings, turn: Turn, report) -> None:
    """Checkpoints the blocks of image and sound towers whole, if the decoder's layers are ours."""
    if not isinstance(decoder.layers[0], TiledLayer):
        return
    for name, lists in find_towers(model, decoder.stack).items():
        swap(model.get_submodule(name), Tower)
        for blocks in lists:
            runtime = LayerRuntime(replace(settings, frozen_weights="gpu"), len(blocks), turn)
            for index, block in enumerate(blocks):
                swap(block, TowerBlock)
                block._hfpatch = Patched(None, runtime=runtime, index=index)
        report.notes.append(
            f"{sum(map(len, lists))} blocks of {name} are checkpointed, with offloaded inputs; "
            "frozen blocks keep nothing."
        )


def _patch_stack(decoder: Decoder, found, configs: tuple, report: Report) -> None:
    """Swaps the stack's class, and the class of a model around it that must hand positions on."""
    stack = decoder.stack
    causal = decoder.causal
    swap(stack, PatchedStack)
    mixing = [a for a in found.answers if a.mixes_outside]
    timed = bool(mixing) and all(a.all_timed for a in mixing)
    traits = StackTraits(
        found.ours, bool(mixing), found.isolates, found.searches, found.unpads, timed
    )
    stack._hfpatch = Patched(traits, configs)
    for model in decoder.around if causal is None else (causal,):
        if not is_patched(model) and "forward" not in vars(model):
            swap(model, TellsPositions)
    if not found.isolates:
        report.notes.append(
            "sequences that hold several documents are refused: its layers may not keep them apart."
        )


def _swap_layer(layer: nn.Module, part: type, known: Patched) -> None:
    if not is_patched(layer):
        swap(layer, part)
        layer._hfpatch = known


def _configs(decoder: Decoder) -> tuple:
    """The configs that the stack and its layers read, each once. Not those of an encoder inside."""
    configs = (
        getattr(m, "config", None)
        for m in (decoder.stack, *nn.ModuleList(decoder.layers).modules())
    )
    return tuple({id(c): c for c in configs if names_attention(c)}.values())
