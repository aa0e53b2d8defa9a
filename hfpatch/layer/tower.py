"""Image and sound towers in front of the text model: blocks checkpointed whole, inputs offloaded.

A block is small compared with a text layer and may mix tokens in any way (windows, frames, both
directions). So it runs as transformers has it, and again in backward. Towers have transfer queues
of their own: a batch's number of patches is independent of its text, and differs between ranks.
"""

from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from hfpatch.budget.policy import LEAST, Checkpointing
from hfpatch.layer.layer import TiledLayer, needs_no_gradient
from hfpatch.layer.runtime import LayerRuntime
from hfpatch.layer.whole import offloaded_checkpoint


def _place(tower: LayerRuntime, x: Tensor) -> Checkpointing:
    """The policy for a block's input x."""
    place = tower.checkpointing.offload
    if place == "auto":
        place = "host" if x.is_cuda else "gpu"
    policy = replace(LEAST, offload=place)
    tower.open_queue(x.device, policy)
    return policy


class Tower:
    """Mixed over the class of a tower's outermost module. A frozen tower runs without a graph, even
    if its embeddings require a gradient (enable_input_require_grads).
    """

    def __call__(self, *args, **kwargs):
        frozen = needs_no_gradient(self, args, kwargs)
        with torch.no_grad() if frozen else nullcontext():
            return super().__call__(*args, **kwargs)


class TowerBlock:
    """Mixed over a block's class. `_hfpatch.runtime` is that of its list of blocks."""

    _gradient_checkpointing_func = TiledLayer._gradient_checkpointing_func

    def forward(self, *args, **kwargs):
        known = vars(self).get("_hfpatch")
        x = args[0] if args else None
        stock = known is None or torch.compiler.is_compiling() or not self.training
        stock = stock or not isinstance(x, Tensor) or x.dim() < 2
        # A block that writes to a cache (a second decoder's) cannot run again.
        stock = stock or any(isinstance(value, Cache) for value in (*args, *kwargs.values()))
        if stock or needs_no_gradient(self, args, kwargs):
            return super().forward(*args, **kwargs)

        tower = known.runtime
        rest = args[1:]  # `run` lives until backward and must not hold x

        def run(x):
            with tower.turn:
                return super(TowerBlock, self).forward(x, *rest, **kwargs)

        return offloaded_checkpoint(tower, _place(tower, x), self, run, x)


def find_towers(model: nn.Module, stack: nn.Module) -> dict[str, list[tuple]]:
    """The towers beside a model's decoder stack: name -> lists of blocks. Blocks with a forward of
    another library are left out.
    """
    if model.config.get_text_config() is model.config:
        return {}
    around = {m for m in model.modules() if any(inner is stack for inner in m.modules())}
    inside = {m for parent in around - {stack} for m in parent.children()} - around
    towers = {name: _lists(m) for name, m in model.named_modules() if m in inside}
    return {name: lists for name, lists in towers.items() if lists}


def _lists(tower: nn.Module) -> list[tuple]:
    found = []
    taken = set()
    for blocks in tower.modules():
        if not isinstance(blocks, nn.ModuleList) or not blocks or blocks[0] in taken:
            continue
        if all(
            isinstance(b, GradientCheckpointingLayer) and "forward" not in vars(b) for b in blocks
        ):
            found.append(tuple(blocks))
            taken.update(blocks.modules())
    return found
