"""Image towers in a plan: the tower in front of a text model, and the layers between the two.

The model's own `get_image_features` runs forward and backward on fake tensors and a clock, as the
text model's step does (lab/steps.py), with a few images, and is carried on to all of them.
"""

import inspect
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import nn

import hfpatch
from hfpatch.lab.clock import run_on_clock
from hfpatch.lab.device import one_line
from hfpatch.lab.hardware import Gpu
from hfpatch.lab.models import config_of, with_images
from hfpatch.lab.shallow import STOCK, Values, layers_of
from hfpatch.lab.shorter_rows import onward
from hfpatch.lab.simulate.implementations import prepare
from hfpatch.lab.simulate.ledger import kept_bytes, moments_of
from hfpatch.lab.simulate.operations import tensors_in
from hfpatch.lab.steps import Moment
from hfpatch.planner.placements import Resident

# Visual tokens of an image where a family takes any size (1,024 x 1,024 pixels in Qwen3-VL), and of
# a video's frame. The tokens of one frame attend to each other.
IMAGE_TOKENS = 1024
FRAME_TOKENS = 256
FEW = 2, 4, 6  # pictures of the steps from which more are carried on


class Pictures(NamedTuple):
    """A step of the tower alone, without its optimizer.

    Attributes:
        numbers: tokens, that the text model reads; held and host, bytes that forward keeps for
            backward on the device and on the host; seconds, flops, model, as of lab.steps.Cost.
        moments: "operation in block" -> bytes of gradients, and beyond parameters and gradients.
    """

    numbers: dict
    moments: dict


def _joined(join, *steps: Pictures) -> Pictures:
    """A step whose numbers and bytes are join(those of each of the steps), with the last one's
    gradients."""
    numbers = {name: join(*(x.numbers[name] for x in steps)) for name in steps[0].numbers}
    all_have = set.intersection(*({*x.moments} for x in steps))
    beyond = {at: join(*(x.moments[at][1] for x in steps)) for at in all_have}
    return Pictures(numbers, {at: (steps[-1].moments[at][0], beyond[at]) for at in all_have})


class Alone(nn.Module):
    """A model's image features, with a loss: `tokens` is how many the last forward made."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        self.trains = nn.Parameter(torch.empty((), device="meta"))  # where the tower is frozen

    def forward(self, input_ids, labels, **pictures):
        out = self.model.get_image_features(**pictures, return_dict=True)
        pooled = getattr(out, "pooler_output", None)
        features = tensors_in([out.last_hidden_state if pooled is None else pooled], [])
        self.tokens = sum(x.numel() // x.shape[-1] for x in features)
        features += tensors_in([getattr(out, "deepstack_features", ())], [])
        return type("Loss", (), {"loss": self.trains + sum(x.sum() for x in features)})


def _said(config, name: str, otherwise):
    """A vision config's number: a family has it there or in the whole config, as one or a pair."""
    value = getattr(config.vision_config, name, None) or getattr(config, name, None) or otherwise
    return value[0] if isinstance(value, (list, tuple)) else value


def pictures_of(model: nn.Module, count: int, tokens: int) -> dict:
    """The arguments of the model's get_image_features. Where a family takes any size: patches and
    their grid, for `count` times IMAGE_TOKENS in pictures of `tokens`. Else `count` whole pictures of
    its own size."""
    named = _named(model)
    config = model.config
    patch = _said(config, "patch_size", 14)
    channels = _said(config, "in_channels", 3)
    if "image_grid_thw" in named:
        side = round(tokens**0.5) * _said(config, "spatial_merge_size", 2)
        count *= IMAGE_TOKENS // tokens
        numbers = channels * patch**2 * _said(config, "temporal_patch_size", 1)
        grid = torch.tensor([[1, side, side]] * count)
        return {"pixel_values": torch.zeros(count * side**2, numbers), "image_grid_thw": grid}
    size = _said(config, "image_size", 32 * patch)
    pictures = {"pixel_values": torch.zeros(count, channels, size, size)}
    if "image_sizes" in named:
        pictures["image_sizes"] = torch.tensor([[size, size]] * count)
    return pictures


def _named(model: nn.Module) -> set:
    """The names of the arguments of its get_image_features."""
    return {*inspect.signature(inspect.unwrap(model.get_image_features)).parameters}


@lru_cache(maxsize=8)
def _model(config: Values, stock: str, offload: str, frozen: bool) -> nn.Module:
    """The model with one layer of text, whose blocks keep their inputs as a run's do."""
    model = with_images(config)
    del layers_of(model)[1:]
    model.requires_grad_(not frozen)
    if stock:
        return prepare(model, STOCK[stock])
    # files: host blocks stand in
    hfpatch.apply(model, checkpointing=offload if offload in ("gpu", "off") else "host")
    return model


@lru_cache(maxsize=64)
def _ran(config: Values, way: tuple, gpu: Gpu, count: int, tokens: int) -> Pictures:
    """way: _model's other arguments."""
    model = _model(config, *way)
    alone = Alone(model)
    try:
        inputs = pictures_of(model, count, tokens)
        found, clock, follower = run_on_clock(alone, gpu, None, batch=1, seq_len=8, inputs=inputs)
    except Exception as error:  # a family's own forward may raise anything
        raise ValueError(
            f"hfpatch: pictures of {type(model).__name__} cannot be planned ({one_line(error)}). "
            "Leave --images and --video-tokens out: the text is planned without them."
        ) from error
    attention = found.flops["attention"]
    once = attention.get("backward", 0) / 2.5 or attention.get("forward", 0)
    model_flops = found.flops["matmul"].get("forward", 0) + once
    numbers = {
        "tokens": alone.tokens, "held": kept_bytes(found.ledger), "host": found.host_peak_bytes,
        "seconds": clock.compute.now - follower.begins["forward"],
        "flops": found.flops["total"], "model": model_flops if way[-1] else 3 * model_flops,
    }  # fmt: skip
    return Pictures(numbers, moments_of(found.ledger, 0)[0])


@dataclass(frozen=True)
class Tower:
    """The image tower of a model, and the layers between the tower and the text model.

    Attributes:
        parameters: all parameters outside the text model and its head.
        sizes: it takes pictures of any size.
        images, video_tokens: in each row.
    """

    config: Values
    parameters: int
    sizes: bool
    images: int = 0
    video_tokens: int = 0

    def tokens(self, run) -> int:
        """Visual tokens of a row."""
        return round(self.cost(run).numbers["tokens"] / run.batch)

    def cost(self, run) -> Pictures:
        """A step of the pictures of a run's batch."""
        images = run.batch * self.images
        frames = run.batch * self.video_tokens
        if not self.sizes:
            one = self._few(run, FEW[0], IMAGE_TOKENS).numbers["tokens"] / FEW[0]
            return self._many(run, images + -(-frames // round(one)), IMAGE_TOKENS)
        if not frames:
            return self._many(run, images, IMAGE_TOKENS)
        moving = self._many(run, frames / IMAGE_TOKENS, FRAME_TOKENS)
        standing = [self._many(run, images, IMAGE_TOKENS)] if images else []
        return _joined(lambda *each: sum(each), *standing, moving)

    def _few(self, run, count: int, tokens: int) -> Pictures:
        way = (run.stock, run.checkpointing.offload, bool(run.shape.adapters))
        return _ran(self.config, way, replace(run.gpu, memory_bytes=0), count, tokens)

    def _many(self, run, count: float, tokens: int) -> Pictures:
        if count in range(1, FEW[0] + 1):
            return self._few(run, int(count), tokens)
        steps = [self._few(run, n, tokens) for n in FEW]
        # Where pictures attend to each other, bytes and seconds have a square.
        beyond = (count - FEW[2]) / (FEW[2] - FEW[1])
        return _joined(lambda x, y, z: onward(x, y, z, beyond, True), *steps)

    def resident(self, stays: Resident, text_parameters: int, frozen: bool) -> Resident:
        """A placement's bytes for the text model and the tower. They grow with the share of the
        tower's parameters."""
        if frozen:
            more = 2 * self.parameters
            return replace(stays, parameters=stays.parameters + more, skipped=stays.skipped + more)
        share = 1 + self.parameters / text_parameters
        grown = {n: int(share * v) for n, v in vars(stays).items() if n != "gradients"}
        return replace(stays, **grown)

    def beside(self, moments, run) -> list:
        """A step's moments with the tower's added. The text model's gradients exist when the tower's
        backward comes."""
        own = self.cost(run)
        held = int(own.numbers["held"])
        text = 0 if run.shape.adapters else run.shape.trained_bytes
        inside = [
            Moment(f"{at}, in the image tower", text + gradients, int(beyond))
            for at, (gradients, beyond) in own.moments.items()
        ]
        return [*(m._replace(beyond=m.beyond + held) for m in moments), *inside]


def tower_in_front(model, images: int, video_tokens: int) -> Tower | None:
    """The tower of a model for rows with so many images and visual tokens of videos; None if rows
    have neither.

    Raises:
        ValueError: the model has no tower.
    """
    if not images and not video_tokens:
        return None
    name, values = config_of(model)
    made = with_images(values)
    if not hasattr(made, "get_image_features"):
        raise ValueError(
            f"hfpatch: --images and --video-tokens need a model with an image tower, and {name} "
            "has none, or none that is planned. Leave them out."
        )
    text = [*made.get_decoder().parameters(), *made.get_output_embeddings().parameters()]
    own = sum(p.numel() for p in {*made.parameters()} - {*text})
    return Tower(Values(values), own, "image_grid_thw" in _named(made), images, video_tokens)
