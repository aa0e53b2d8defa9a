"""The policy of a first step, of which nothing was measured. Standard library only."""

import math

from hfpatch.budget.limits import gib
from hfpatch.budget.measured import HOST_SHARE
from hfpatch.budget.policy import KEEPS, LOSS_WORKSPACE, TILES, Checkpointing, auto_tile

# Bytes per token and hidden channel that a tile's backward takes at most: dense layers take 60 to
# 100, adapters in float32 included.
TILE_BYTES = 128
# The same of a mixer that runs in tiles through time: half of what Granite 4 takes in plain code.
# Kernels take far less.
MIXER_BYTES = 256
LEAST_MIXER_TILE = 2048  # a multiple of every known mixer's chunk
# [tokens, width] tensors that a layer's backward takes, and again as many where attention's runs all
# heads at once.
TENSORS = 6


def first_tile(tokens: int, width: int, card: int | None, token: int = TILE_BYTES) -> int:
    """Tokens per tile, by the length, the model's width and the card's memory alone.

    token: bytes per token and hidden channel.
    """
    tile = auto_tile(tokens)
    while card is not None and tile > TILES[0] and tile * width * token > card // 8:
        tile //= 2
    return tile


def first_policy(
    settings: Checkpointing,
    *,
    tokens: int,
    width: int,
    itemsize: int = 2,
    layers: int = 1,
    whole: bool = False,
    chains: bool = False,
    card: int | None = None,
    free: int | None = None,
    host: int | None = None,
) -> Checkpointing:
    """The policy of layers of which no step was measured: input and attention output go to the
    host, unless the settings name another place.

    Args:
        tokens: of the batch; width: of hidden states.
        layers: how many; whole: they run untiled.
        chains: some mix tokens by something other than attention, in tiles through time.
        card: bytes of the device, free: its free ones; None if unknown.
        host: free bytes of the host, None if unknown.

    Raises:
        ValueError: the host cannot hold what the settings demand.
    """
    # [Step 1] The place, and what each layer keeps there.
    place = "host" if settings.offload == "auto" else settings.offload
    every = 1 if whole or settings.every == "auto" else settings.every
    keep = KEEPS["attention"] if settings.keep == "auto" else settings.keep
    if whole or every > 1:
        keep = KEEPS["input"]
    one = tokens * width * itemsize
    # [Step 2] What the host cannot hold. Not of hybrids: their layers keep states too, and those
    # without attention no output, which this does not count.
    if place == "host" and host is not None and not chains:
        available = HOST_SHARE * host
        most = every
        if settings.every == "auto" and not whole:
            # a segment's inputs are on the device in its backward: no more than there are segments
            most = round(math.sqrt(layers))
        ways = [(every, keep)]
        if settings.keep == "auto":
            ways += [(n, KEEPS["input"]) for n in range(every, most + 1)]
        for every, keep in ways:
            needed = one * (-(-layers // every) * (2 if keep >= 0 else 1))
            # 4 bytes of lse a head of 128 columns, and the gradient that waits there under "least"
            needed += tokens * width // 32 * layers * (keep >= 0)
            needed += one * (_aim(settings, every, one, free) == "least")
            if needed <= available:
                break
        else:
            raise ValueError(
                f"hfpatch: checkpoints need {gib(needed)} of host memory, and "
                f'{gib(available)} are free to a rank. Leave every and keep "auto", pass a '
                "directory as offload, or take fewer tokens."
            )
    # [Step 3] The tile.
    tile = settings.tile
    if tile == "auto" and settings.aim == "least":
        # Small beside the layer's own tensors of all tokens; larger tiles start fewer kernels.
        tile = max(tile for tile in TILES if tile <= max(TILES[0], tokens // 32))
        tile = LEAST_MIXER_TILE if chains else tile
    elif tile == "auto":
        tile = first_tile(tokens, width, card, MIXER_BYTES if chains else TILE_BYTES)
    return Checkpointing(
        offload=place,
        every=every,
        tile=tile,
        frozen_weights="host" if settings.frozen_weights == "host" else "gpu",
        keep=keep,
        plain=0 if settings.plain == "auto" else settings.plain,
        aim=_aim(settings, every, one, free),
    )


def _aim(settings: Checkpointing, every: int, one: int, free: int | None) -> str:
    """Attention's backward takes all heads at once where twice a layer's tensors are known to fit.
    one: bytes of [tokens, width]."""
    return "least" if (TENSORS + _tensors(every)) * one >= (free or 0) else settings.aim


def step_bytes(policy: Checkpointing, tokens: int, width: int, itemsize: int) -> int:
    """About the bytes that a first step takes beside weights and gradients."""
    layer = _tensors(policy.every) * tokens * width * itemsize
    return layer + min(policy.tile, tokens) * width * TILE_BYTES + 2 * LOSS_WORKSPACE


def _tensors(every: int) -> int:
    """How many [tokens, width] tensors the backward of a segment of this many layers takes: for
    each further layer its input and its attention's output.
    """
    return TENSORS + 2 * (every - 1)
