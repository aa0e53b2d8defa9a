"""The decoder stack of any family: transformers' own forward, with our attention and masks while it
runs.

Each forward decides once whether our attention can run, and which tokens see each other
(context/documents.py).
"""

import warnings
from contextlib import suppress
from dataclasses import replace

import torch

from hfpatch.compat import (
    CACHE_NAMES,
    compiled_by_itself,
    transforming,
)
from hfpatch.context import attention  # noqa: F401 (registers ours)
from hfpatch.context.classes import KeepsSignature, package_of, replaced_forward
from hfpatch.context.current import (
    asks_for,
    current,
    having,
    not_exchanged,
    our_attention,
)
from hfpatch.context.masks import Batch
from hfpatch.context.ranks import (
    may_share_rows,
    refuse_shared_mixers,
)
from hfpatch.decoder.batch import (
    Inputs,
    StackTraits,
    decide,
    read_batch,
    share_rows,
    without_unread_cache,
)
from hfpatch.decoder.find import list_of_layers
from hfpatch.decoder.unpadded import packed_row
from hfpatch.layer.condition import look
from hfpatch.layer.layer import PatchedLayer, mixing_of
from hfpatch.layer.traits import Patched

# Arguments that this file and batch.py add to the caller's.
_ADDED = {"attention_mask", "is_causal", "return_dict", "use_cache", *CACHE_NAMES}


class PatchedStack(KeepsSignature):
    """A mixin over the class of the module that holds the decoder layers: its forward reads the
    batch, decides once how all layers run, and then calls transformers' own forward.

    _hfpatch: what is known of the stack. An instance that apply() has not seen runs as transformers'.
    """

    _hfpatch = Patched(StackTraits())

    def __setstate__(self, state):
        super().__setstate__(state)
        if self._hfpatch.runtime is not None:  # a pickle drops the runtime's owner
            self._hfpatch.runtime.owned_by(self)

    def _hfpatch_stock(self, kwargs):
        taken = self._hfpatch_takes
        if taken is not None:  # a user's own class
            kwargs = {n: x for n, x in kwargs.items() if n in taken or n not in _ADDED}
        if torch.compiler.is_compiling():
            return super().forward(**kwargs)
        outer = current.outer
        embeds = outer.embeds if outer.causal else self
        if asks_for("output_hidden_states", self, kwargs):
            embeds = None
        with having(outer=outer._replace(embeds=embeds)):
            return super().forward(**kwargs)

    def _hfpatch_forward(self, kwargs):
        # [Step 1] Refuse what cannot run.
        if torch.compiler.is_compiling():
            return _run_compiled(self, kwargs)
        if current.outer.causal:
            # The causal model reads the output's fields by name, so the config has no say.
            kwargs.setdefault("return_dict", True)
        assert not transforming(), (
            "hfpatch: torch.func and forward mode do not work on a patched model. Call "
            "hfpatch.undo(model)."
        )
        # [Step 2] Find the layers, and whether each runs as its small instance did.
        layers = list_of_layers(self) or ()
        # An engine's wrapper (FSDP1, torch's checkpoint wrapper) holds the layer.
        ours = [m for held in layers for m in held.modules() if isinstance(m, PatchedLayer)]
        # Whether each runs in tiles, or untiled for the reason that its small instance had. The layers
        # read what is found here.
        as_tried = [look(m).reason in (None, m._hfpatch.traits.reason) for m in ours]
        # [Step 3] Read the caller's arguments.
        traits = self._hfpatch.traits
        runtime = self._hfpatch.runtime
        # A layer that is not as tried, or a mixer that remembers padding, may read it.
        watched = traits.mixers and not traits.unpads or not all(as_tried)
        inputs = read_batch(self, kwargs, watched)
        if inputs is not None and _says_not_causal(layers, kwargs):
            inputs = replace(inputs, causal=False)
        if runtime is not None:
            runtime.padding_BT = None
        # [Step 4] Decide whether our attention takes this batch, and which tokens see each other.
        batch = None
        if inputs is not None:
            if runtime is not None and runtime.weights.on:
                runtime.weights_to_host(self, inputs.tokens.device)
            batch = _batch_of(self, inputs, kwargs)
            if runtime is not None and inputs.right_padded:
                runtime.padding_BT = ~inputs.rows_mask.bool()
        # [Step 5] Run transformers' own forward, with our attention or without it.
        if inputs is not None and runtime is not None:
            runtime.begin(inputs.tokens.device)
        if batch is not None:
            batch.packed_row = packed_row(inputs, traits, layers, all(as_tried), batch)
            return _run_ours(self, batch, kwargs)
        with having(declined=True):
            return self._hfpatch_stock(kwargs)


def _run_ours(stack: "PatchedStack", batch: Batch, kwargs):
    if kwargs.get("attention_mask") is None:
        # Without a mask, transformers looks for documents itself, which waits for the device.
        # `batch` has the documents already.
        kwargs["attention_mask"] = torch.ones(
            batch.B, batch.t, dtype=torch.bool, device=batch.device
        )
    with our_attention(stack._hfpatch.configs, batch):
        return stack._hfpatch_stock(kwargs)


def _run_compiled(stack: "PatchedStack", kwargs):
    """The forward under torch.compile: transformers' own, which builds a [T, T] mask.

    Tiled layers are autograd functions that run nested graphs, so a stack with them trains
    outside the compiled graph.
    """
    runtime = stack._hfpatch.runtime
    tiled = runtime is not None
    # Beside a mask transformers does not look for packed documents.
    masked = kwargs.get("attention_mask") is not None
    outside = tiled and runtime.weights.on
    if stack.training and torch.is_grad_enabled():
        outside = outside or tiled or masked and kwargs.get("position_ids") is not None
    if outside or may_share_rows():
        return _outside(stack, kwargs)
    return stack._hfpatch_stock(kwargs)


def _batch_of(stack: "PatchedStack", inputs: Inputs, kwargs) -> Batch | None:
    """The batch for hfpatch's layers; None where transformers' attention runs. Updates `kwargs`
    with the changes that these functions return.
    """
    inputs, cached, changes = without_unread_cache(inputs)
    if inputs.row_ranks is not None:
        if asks_for("output_router_logits", stack, kwargs):
            raise not_exchanged("a balancing loss of experts (output_router_logits)")
        _refuse_unasked(stack)
        inputs, shared = share_rows(inputs)
        changes |= shared
    batch, warning, decided = decide(inputs, stack._hfpatch.traits, cached)
    kwargs.update(changes | decided)
    if warning is not None and inputs.tiled:
        stack._hfpatch.runtime.tell(warning)
    elif warning is not None:
        warnings.warn(f"hfpatch: {warning}", stacklevel=2)
    return batch


def _refuse_unasked(stack: "PatchedStack") -> None:
    """ValueError for layers that do not run as their traits say (replaced since apply(), or with
    another forward): they may mix tokens outside attention."""
    for layer in list_of_layers(stack) or [stack]:
        if isinstance(layer, PatchedLayer):
            # A layer that is not compiled refuses itself as it runs (PatchedLayer.forward).
            mixing = mixing_of(layer._hfpatch.traits, look(layer))
            unchanged = not any(mixing) or not compiled_by_itself(layer)
        else:
            unchanged = package_of(layer) == "torch"  # torch's own wrappers
        if replaced_forward(layer) or not unchanged:
            refuse_shared_mixers(type(stack), "its layers changed after apply()")


def _says_not_causal(layers, kwargs: dict) -> bool:
    """Whether the caller, or a module that calls attention, says is_causal=False.

    If all modules say so, the caller is made to say it too, for one answer also beside padding and
    documents: transformers makes its masks by the config and the call.
    """
    causal = []
    for layer in layers:
        names = layer._hfpatch.traits.attention if isinstance(layer, PatchedLayer) else ()
        with suppress(AttributeError):  # a layer that was rebuilt runs untiled
            modules = [layer.get_submodule(name) for name in names]
            causal += [vars(module).get("is_causal") in (None, True) for module in modules]
    if causal and not any(causal):
        kwargs["is_causal"] = False
    return not all(causal) or kwargs.get("is_causal") not in (None, True)


_outside = torch.compiler.disable(lambda stack, kwargs: stack._hfpatch_forward(kwargs))
