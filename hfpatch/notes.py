"""Lines of the report: the swapped modules, how the layers run, the memory of one long sequence,
the allocator's setting.
"""

import os
from collections import Counter

import torch
from torch import nn

from hfpatch import compat
from hfpatch.budget.free import ALLOCATOR, GROWS, expand_segments
from hfpatch.decoder.find import Decoder
from hfpatch.layer.condition import look
from hfpatch.parts.quantised import dense_of
from hfpatch.report import Report


def grow_segments() -> None:
    """Lets torch's allocator grow its segments from now on, unless the user set it: fixed ones
    fragment at long rows.
    """
    if torch.backends.cuda.is_built() and not any(name in os.environ for name in ALLOCATOR):
        compat.set_allocator(GROWS)
        expand_segments()


def count(report: Report, option: str, done: list[nn.Module], left: Counter) -> None:
    """Adds the swapped modules to the report, by class, and the reasons of the others."""
    names = Counter(type(m).__name__ for m in done)
    report.swaps += [(option, name, n) for name, n in names.items()]
    for (name, reason), n in left.items():
        report.details.append(f"{option}: {n} x {name} stay stock: {reason}.")
    if left:
        (name, reason), _ = left.most_common(1)[0]
        report.skipped.append((option, f"{name}: {reason}" if done else reason))
    elif not done:
        report.skipped.append((option, "none in this model"))


def note_layers(decoder: Decoder, settings, found, report: Report) -> None:
    """Adds the layers' notes to the report."""
    stack = decoder.stack
    layers = decoder.layers
    notes = report.notes
    for reason, n in Counter(reason for layer in layers if (reason := look(layer).reason)).items():
        notes.append(f"{n} of {len(layers)} layers run {reason.how}: {reason}.")
    notes += _mixer_notes(layers, found.answers)
    how = (
        ", ".join(settings.words()) or "chosen from what steps measure (`hfpatch plan` predicts it)"
    )
    notes.append(f"checkpoints: {how}. They replace transformers' gradient checkpointing.")
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
            "(prepare_model_for_kbit_training): leave that call out, get_peft_model freezes the base."
        )
    notes += [
        f"{name} is {p}: in training, layers run untiled."
        for name, p in stack.config.to_dict().items()
        if "att" in name and "drop" in name and p  # attention_dropout, attn_pdrop, ...
    ]
    rotary = getattr(stack.config, "rope_parameters", None)
    if rotary and (positions := getattr(stack.config, "max_position_embeddings", None)):
        notes.append(
            f"positions end at {positions:,} tokens: longer sequences need rope_parameters (guide: A "
            "longer context)."
        )


def widened(model: nn.Module) -> list[str]:
    """Names of frozen float32 parameters in a 16-bit model whose Linear layers are quantised."""
    named = getattr(getattr(model, "config", None), "dtype", None)
    narrow = str(named).rpartition(".")[2] in ("bfloat16", "float16")
    if not narrow or not any(dense_of(m) for m in model.modules()):
        return []
    return [
        n for n, p in model.named_parameters() if p.dtype == torch.float32 and not p.requires_grad
    ]


def _mixer_notes(layers, answers) -> list[str]:
    """How the modules run that mix tokens beyond attention: a line for each class and way."""
    found = Counter()
    for layer, traits in zip(layers, answers):
        for name in traits.mixers if traits.reason is None else ():
            kind = type(layer.get_submodule(name)).__name__
            found[kind, traits.in_time(name)] += 1
    return [f"{n} {kind} mixers {in_time}." for (kind, in_time), n in found.items()]
