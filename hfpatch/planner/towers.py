"""Image towers in a plan: the memory and time of the tower in front of a text model.

Sizes are read off the model's own modules, made without memory. Bytes are closed forms of a block
that runs again in backward (layer/tower.py); profiles/tower compares them with simulated bytes.

Legend: a block has patches as rows and D hidden columns. The text model reads visual tokens, each
merged from patches. A block's Linear layers together read `ins` and write `outs` columns.
"""

import json
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import NamedTuple

from hfpatch.lab.models import config_of, with_images
from hfpatch.lab.shallow import STOCK, STOCK_CHECKPOINTING, UNTILED
from hfpatch.lab.steps import Moment
from hfpatch.planner.placements import Resident

# Visual tokens of an image if a family takes any size (1,024 x 1,024 pixels in Qwen3-VL), and of a
# video's frame. The tokens of one frame attend to each other.
IMAGE_TOKENS, FRAME_TOKENS = 1024, 256
# Elements that transformers' code moves in forward and in backward for each column that a Linear
# layer reads or writes (simulated, profiles/tower).
PASSES = 4.8, 5.9


class Work(NamedTuple):
    """FLOPs of a step, and the bytes that other kernels move."""

    matmul: float
    attention_forward: float
    attention_backward: float
    model: float
    moved: float

    @property
    def total(self) -> float:
        return self.matmul + self.attention_forward + self.attention_backward


@dataclass(frozen=True)
class Tower:
    """The image tower of a model, and the Linear layers between the tower and the text model.

    Attributes:
        depth: the number of blocks.
        width: D.
        columns: ins + outs of a block's Linear layers.
        weights: weights of a block's Linear layers.
        kept: columns of a block that autograd keeps.
        works: columns that a block's backward holds at most.
        after: (columns in, columns out) of the Linear layers after the blocks, on visual tokens.
        pixels: numbers of one patch.
        merge: patches of a visual token.
        per_image: visual tokens of an image.
        parameters: all parameters outside the text model and its head.
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
        """A placement's bytes for the text model and the tower. They grow with the share of the
        tower's parameters."""
        if frozen:
            more = 2 * self.parameters
            return replace(stays, parameters=stays.parameters + more, passed=stays.passed + more)
        share = 1 + self.parameters / text_parameters
        kept = {n: v for n, v in vars(stays).items() if n != "gradients"}
        return replace(stays, **{n: int(share * v) for n, v in kept.items()})

    @property
    def _merged(self) -> int:
        """Columns that two Linear layers after the blocks, and the norm before them, keep for each
        visual token."""
        norms = len(self.after) * self.merge * self.width
        return (norms + 2 * sum(map(sum, self.after))) // max(1, len(self.after))

    def held(self, rows: int, policy, frozen: bool, itemsize: int = 2) -> int:
        """Bytes on the device from the tower's forward to its backward, for `rows` rows of text."""
        tokens = rows * self.tokens
        patches = tokens * self.merge
        nbytes = 4 * patches * self.pixels  # float32, as processors return pixels
        if frozen:
            return nbytes + tokens * sum(out for _, out in self.after) * itemsize
        nbytes += tokens * len(self.after) * self._merged * itemsize // 2
        if policy in (UNTILED, STOCK):
            nbytes += self.depth * patches * self.kept * itemsize
        elif policy == STOCK_CHECKPOINTING or getattr(policy, "offload", "") == "gpu":
            nbytes += self.depth * patches * self.width * itemsize
        return nbytes

    def host(self, rows: int, policy, frozen: bool, itemsize: int = 2) -> int:
        """Bytes of the blocks' inputs on the host."""
        away = getattr(policy, "offload", "gpu") in ("auto", "host") and not frozen
        return away * rows * self.tokens * self.merge * self.depth * self.width * itemsize

    def beside(self, moments, text: int, rows: int, policy, frozen: bool) -> list:
        """A step's moments with the tower's added. text: bytes of the text model's gradients, which
        exist when the tower's backward comes, if the placement keeps them."""
        held = self.held(rows, policy, frozen)
        columns = self.columns if frozen else self.works
        works = 2 * rows * self.tokens * self.merge * columns
        own = 0 if frozen else 2 * self.parameters
        moments = [m._replace(beyond=m.beyond + held) for m in moments]
        if frozen:
            moments.append(Moment("the image tower", 0, held + works))
        else:
            # The backward of the layers after the last block is over. The layers after earlier
            # blocks still wait for theirs.
            left = held - 2 * rows * self.tokens * self._merged
            moments.append(Moment("the image tower's last block", text, left + works))
            moments.append(Moment("the image tower's first block", text + own, works))
        return moments

    def flops(self, rows: int, policy, frozen: bool) -> "Work":
        """FLOPs of one step. The patches of an image or a frame attend to each other."""
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
        moved = PASSES[0] * columns * (1 + again) + passes // 3 * PASSES[1] * columns
        return Work(matmul, attention, back, model + passes * attended, moved)

    def seconds(self, gpu, rows: int, policy, frozen: bool) -> float:
        """Seconds of one step: those of the blocks, or of the copies of inputs that overlap them,
        whichever takes longer."""
        counted = self.flops(rows, policy, frozen)
        moved = counted.moved / gpu.memory_rate
        attention = counted.attention_forward / gpu.attention_forward
        attention += counted.attention_backward / gpu.attention_backward
        work = counted.matmul / gpu.matmul_flops + attention + moved
        return max(work, 2 * self.host(rows, policy, frozen) / gpu.link_rate)


def tower_in_front(model, images: int, video_tokens: int, seq_len: int) -> Tower | None:
    """The tower of a model for rows with so many images and visual tokens of videos; None if rows
    have neither.

    Raises:
        ValueError: the model has no tower, or a row has more visual tokens than tokens.
    """
    for what, value in (("images", images), ("video_tokens", video_tokens)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(
                f"hfpatch: {what} must be a whole number, got {value!r}. Pass 0 or more."
            )
    if not images and not video_tokens:
        return None
    name, values = config_of(model)
    tower = _tower(json.dumps(values, sort_keys=True, default=str))
    if tower is None:
        raise ValueError(
            f"hfpatch: --images and --video-tokens need a model with an image tower, and {name} "
            "has none. Leave them out."
        )
    tower = replace(tower, images=images, video_tokens=video_tokens)
    if tower.tokens > seq_len:
        raise ValueError(
            f"hfpatch: --seq-len must be at least the {tower.tokens:,} visual tokens of its images "
            f"and videos, got {seq_len:,}. Raise it: it counts text and images together."
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
    # Counted on simulated blocks (profiles/tower): a gate adds its activation and two gradients.
    # Norms in plain float32 operations add their copies.
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
    """How a config cuts images into patches, by the names of its fields in any family."""
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
