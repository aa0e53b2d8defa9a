"""Towers of images in a plan: what the one in front of a text model takes of memory and time.

Sizes are read off the model's own modules, made without memory. Bytes are closed forms of a block
that runs again in backward (layer/tower.py); profiles/tower has the simulated ones beside them.

Legend: D hidden columns of a block, patches its rows; visual tokens are what the text model sees of
them. A block's Linear layers read `ins` and write `outs` columns together.
"""

import json
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from hfpatch.budget.flops import Flops
from hfpatch.budget.formula import STOCK, STOCK_CHECKPOINTING, UNTILED, StepMemory
from hfpatch.budget.moments import Moment
from hfpatch.budget.seconds import Resident
from hfpatch.budget.shape import ModelShape
from hfpatch.lab.models import config_of, with_images

# Visual tokens of an image where a family takes any size (1,024 x 1,024 pixels in Qwen3-VL), and of
# a video's frame, which see each other.
IMAGE_TOKENS, FRAME_TOKENS = 1024, 256
# Elements that transformers' code moves for each column that a Linear layer reads or writes: forward,
# backward (simulated, profiles/tower).
PASSES = 4.8, 5.9


@dataclass(frozen=True)
class Tower:
    """The image tower of a model, and what stands between it and the text.

    Attributes:
        depth: blocks; width: D; columns, weights: ins and outs, and weights, of a block's Linears.
        kept: columns that autograd keeps of a block; works: that its backward holds at most.
        after: (columns in, columns out) of the Linear layers behind, which see visual tokens.
        pixels: numbers of one patch.
        merge: patches of a visual token.
        per_image: visual tokens of an image.
        parameters: all that is neither the text model's nor its head's.
        images, video_tokens: in each row.
    """

    depth: int
    width: int
    columns: int
    weights: int
    kept: int
    works: int
    after: tuple
    pixels: int
    merge: int
    per_image: int
    parameters: int
    images: int = 0
    video_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Visual tokens of a row."""
        return self.images * self.per_image + self.video_tokens

    def resident(self, stays: Resident, text_parameters: int, frozen: bool) -> Resident:
        """What a placement keeps, of tower and text together: by as much as there are parameters."""
        if frozen:
            more = 2 * self.parameters
            return replace(stays, parameters=stays.parameters + more, passed=stays.passed + more)
        share = 1 + self.parameters / text_parameters
        kept = {n: v for n, v in vars(stays).items() if n != "gradients"}
        return replace(stays, **{n: int(share * v) for n, v in kept.items()})

    @property
    def _merged(self) -> int:
        """Columns that two Linear layers behind the blocks keep for each visual token, the norm in
        front of them too."""
        norms = len(self.after) * self.merge * self.width
        return (norms + 2 * sum(map(sum, self.after))) // max(1, len(self.after))

    def held(self, rows: int, policy, frozen: bool, itemsize: int = 2) -> int:
        """Bytes on the device from the tower's forward to its backward, for so many rows of text."""
        tokens = rows * self.tokens
        patches = tokens * self.merge
        nbytes = 4 * patches * self.pixels  # as processors give them
        if frozen:
            return nbytes + tokens * sum(out for _, out in self.after) * itemsize
        nbytes += tokens * len(self.after) * self._merged * itemsize // 2
        if policy in (UNTILED, STOCK):
            nbytes += self.depth * patches * self.kept * itemsize
        elif policy == STOCK_CHECKPOINTING or getattr(policy, "offload", "") == "gpu":
            nbytes += self.depth * patches * self.width * itemsize
        return nbytes

    def host(self, rows: int, policy, frozen: bool, itemsize: int = 2) -> int:
        """Bytes of the blocks' inputs there."""
        away = getattr(policy, "offload", "gpu") in ("auto", "host") and not frozen
        return away * rows * self.tokens * self.merge * self.depth * self.width * itemsize

    def beside(self, memory: StepMemory, rows: int, policy, frozen: bool) -> StepMemory:
        """A step's memory with the tower's in it. Its backward comes last: the text's gradients
        exist then, where they stay."""
        held = self.held(rows, policy, frozen)
        columns = self.columns if frozen else self.works
        works = 2 * rows * self.tokens * self.merge * columns
        text, own = memory.gradients, 0 if frozen else 2 * self.parameters
        moments = [replace(m, checkpoints=m.checkpoints + held) for m in memory.moments]
        if frozen:
            moments.append(Moment("the image tower", 0, checkpoints=held, layer=works))
        else:
            # The layers behind the last block are done; those behind earlier ones wait.
            left = held - 2 * rows * self.tokens * self._merged
            last = Moment("the image tower's last block", text, checkpoints=left, layer=works)
            moments += [last, Moment("the image tower's first block", text + own, layer=works)]
        host = memory.host + self.host(rows, policy, frozen)
        return replace(memory, gradients=text + own, moments=tuple(moments), host=host)

    def flops(self, rows: int, policy, frozen: bool) -> Flops:
        """Of one step. Patches of an image or a frame see each other."""
        tokens = rows * self.tokens
        products = 2 * tokens * self.merge * self.depth * self.weights
        behind = 2 * tokens * sum(map(prod, self.after))
        seen = self.images * self.per_image**2 + self.video_tokens * FRAME_TOKENS
        attended = 4 * rows * self.depth * self.width * self.merge**2 * seen
        again = 0 if frozen or policy in (UNTILED, STOCK) else 1
        passes, back = (1, 0) if frozen else (3, 2.5 * attended)
        model = passes * (products + behind)
        matmul, attention = model + again * products, attended * (1 + again)
        columns = 2 * tokens * self.merge * self.depth * self.columns
        return Flops(matmul, attention, back, model + passes * attended, passes * attended,
                     PASSES[0] * columns * (1 + again), passes // 3 * PASSES[1] * columns)  # fmt: skip

    def seconds(self, gpu, rows: int, policy, frozen: bool) -> float:
        """Of one step; copies of inputs hide behind the blocks, but for what takes longer."""
        counted = self.flops(rows, policy, frozen)
        moved = (counted.moved_forward + counted.moved_backward) / gpu.memory_rate
        attention = counted.attention_forward / gpu.attention_forward
        attention += counted.attention_backward / gpu.attention_backward
        work = counted.matmul / gpu.matmul_flops + attention + moved
        return max(work, 2 * self.host(rows, policy, frozen) / gpu.link_rate)


def tower_in_front(model, images: int, video_tokens: int, seq_len: int) -> Tower | None:
    """The tower of a model for rows with so many images and visual tokens of videos; None where
    there are none.

    Raises:
        ValueError: the model has none, or a row has more visual tokens than tokens.
    """
    for what, value in (("images", images), ("video_tokens", video_tokens)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(
                f"hfpatch: {what} must be a whole number, {value!r} came; pass 0 or more."
            )
    if not images and not video_tokens:
        return None
    name, values = ("model", {}) if isinstance(model, ModelShape) else config_of(model)
    tower = _tower(json.dumps(values, sort_keys=True, default=str))
    if tower is None:
        raise ValueError(
            f"hfpatch: expected a model with a tower of images, {name} came, which has none; leave "
            "--images and --video-tokens out."
        )
    tower = replace(tower, images=images, video_tokens=video_tokens)
    if tower.tokens > seq_len:
        raise ValueError(
            f"hfpatch: expected rows of at least the {tower.tokens:,} visual tokens of their images "
            f"and videos, --seq-len {seq_len:,} came; raise it: it counts text and images together."
        )
    return tower


@lru_cache(maxsize=8)
def _tower(values: str) -> Tower | None:
    from torch import nn

    from hfpatch.decoder.find import find_decoder
    from hfpatch.layer.tower import find_towers

    model = with_images(json.loads(values))
    if model is None:
        return None
    decoder = find_decoder(model)
    towers = {} if decoder is None else find_towers(model, decoder.stack)
    lists = [blocks for name, lists in towers.items() if "vis" in name for blocks in lists]
    if not lists:
        return None
    blocks = max(lists, key=len)
    others = [b for lists in towers.values() for blocks in lists for b in blocks]
    text = {m for part in (decoder.stack, model.get_output_embeddings()) for m in part.modules()}
    inside = text | {m for block in others for m in block.modules()}
    kept = {id(p) for m in text for p in m.parameters(recurse=False)}
    linears = [(m.in_features, m.out_features) for m in blocks[0].modules() if _is_linear(m)]
    rest = [m for m in model.modules() if m not in inside and isinstance(m, nn.Linear)]
    # Counted on simulated blocks (profiles/tower): a gate adds its activation and two gradients, norms
    # in plain float32 operations their copies.
    width, columns, widest = linears[0][0], sum(map(sum, linears)), max(o for _, o in linears)
    gates = [o for _, o in linears].count(widest)
    wide = 0 if any(isinstance(m, nn.LayerNorm) for m in blocks[0].modules()) else 6
    return Tower(
        depth=len(blocks), width=width, columns=columns, weights=sum(map(prod, linears)),
        kept=columns + (gates - 1) * widest + (3 + wide) * width,
        works=columns + (2 * gates - 1) * widest + (5 + wide) * width,
        after=tuple((m.in_features, m.out_features) for m in rest),
        parameters=sum(p.numel() for p in model.parameters() if id(p) not in kept),
        **_patches(model.config),
    )  # fmt: skip


def _is_linear(module) -> bool:
    return hasattr(module, "in_features") and hasattr(module, "out_features")


def _patches(config) -> dict:
    """How a config cuts images, by the names that families have for it."""
    vision = config.vision_config

    def said(name):
        return next((v for c in (vision, config) if (v := getattr(c, name, None))), None)

    side = lambda n: n[0] if isinstance(n, (list, tuple)) else n  # noqa: E731
    patch, size = side(said("patch_size") or 14), side(said("image_size") or 0)
    grid = (size // patch) ** 2
    if said("mm_tokens_per_image"):
        merge = max(1, grid // said("mm_tokens_per_image"))
    else:
        shrinks = said("downsample_ratio") or said("pixel_shuffle_ratio")
        grows = said("spatial_merge_size") or said("scale_factor") or said("pooling_kernel_size")
        merge = round((1 / shrinks if shrinks else grows or 1) ** 2)
    return {
        "pixels": (said("in_channels") or 3) * patch**2 * (said("temporal_patch_size") or 1),
        "merge": merge,
        "per_image": grid // merge or IMAGE_TOKENS,
    }
