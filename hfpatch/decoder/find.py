"""Finds a model's decoder: the list of layers, the module that runs them, and the module with the
head and the loss."""

from dataclasses import dataclass
from inspect import signature

from torch import nn

from hfpatch.compat import modules_of


@dataclass(frozen=True)
class Decoder:
    """The parts of a decoder.

    Attributes:
        layers: the decoder layers in order.
        stack: the module whose forward runs them.
        causal: the module around it that has the head, or None.
        around: outer models of `causal` that compute a loss from its head's output. Without
            `causal`: the innermost module around the stack whose forward is given targets.
    """

    layers: tuple[nn.Module, ...]
    stack: nn.Module
    causal: nn.Module | None
    around: tuple[nn.Module, ...] = ()


def list_of_layers(stack: nn.Module) -> nn.ModuleList | None:
    """The longest nn.ModuleList among the module's own children that holds only modules which
    transformers can checkpoint; None if there is none."""
    lists = [
        module
        for module in modules_of(stack).values()
        if isinstance(module, nn.ModuleList)
        and len(module)
        and all(hasattr(layer, "gradient_checkpointing") for layer in module)
    ]
    return max(lists, key=len, default=None)


def _decoder_of(module: nn.Module) -> nn.Module | None:
    try:
        return module.get_decoder()
    except (AttributeError, NotImplementedError):  # no model, or one without a decoder
        return None


def _text_decoder(model: nn.Module) -> nn.Module:
    """The module that runs layers at the end of the first chain of get_decoder(); `model` if none
    does.

    For a multimodal model this is the text tower, which may have a head or an encoder of its own.
    """
    for module in model.modules():
        stack = module
        inner = _decoder_of(module)
        while inner is not None and inner is not stack:
            stack = inner
            inner = _decoder_of(stack)
        if (module is model or stack is not module) and list_of_layers(stack) is not None:
            return stack
        if _has_head(module):  # CSM names no decoder; that of a model inside is another's
            break
    return model


def _stacks(model: nn.Module) -> list[nn.Module]:
    """The modules that run layers. If some of them belong to models that read token ids, the others
    (images, sound) are left out."""
    models = [m for m in model.modules() if hasattr(type(m), "main_input_name")]
    # Later entries overwrite earlier ones, so each module is owned by its innermost model.
    owner = {m: of for of in models for m in of.modules()}
    stacks = [m for m in model.modules() if list_of_layers(m) is not None]
    # older transformers name the input of some image towers input_ids too
    return [
        s
        for s in stacks
        if s in owner
        and owner[s].main_input_name == "input_ids"
        and hasattr(owner[s].config, "vocab_size")
    ] or stacks


def find_decoder(model: nn.Module) -> Decoder | None:
    """The decoder of a transformers model, plain or wrapped by PEFT; None if no module has a list
    of layers.
    """
    stack = _text_decoder(model)
    if list_of_layers(stack) is None:
        stacks = _stacks(stack) or _stacks(model)
        if not stacks:
            return None
        stack = max(stacks, key=lambda m: len(list_of_layers(m)))
    layers = tuple(list_of_layers(stack))
    outer = [m for m in model.modules() if m is not stack and stack in set(m.modules())]
    causal = next((m for m in outer if _has_head(m)), None)
    targets = {"labels", "start_positions"}
    around = tuple(m for m in outer if targets & signature(type(m).forward).parameters.keys())[-1:]
    if causal is not None:
        head = causal.get_output_embeddings()
        outer = (m for m in outer if m is not causal and causal in set(m.modules()))
        around = tuple(
            m for m in outer if _computes_losses(m) and m.get_output_embeddings() is head
        )
    return Decoder(layers, stack, causal, around)


def _computes_losses(module: nn.Module) -> bool:
    return hasattr(type(module), "get_output_embeddings") and hasattr(type(module), "loss_function")


def _has_head(module: nn.Module) -> bool:
    """Whether this is a causal language model whose head is one of its own children."""
    if not _computes_losses(module):
        return False
    head = module.get_output_embeddings()
    return head is not None and any(m is head for m in modules_of(module).values())
