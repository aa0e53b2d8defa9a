"""The policy of a first step, of which nothing was measured. Standard library only."""

import math

from hfpatch.budget.measured import HOST_SHARE
from hfpatch.budget.policy import (
    LOSS_WORKSPACE,
    TILES,
    Checkpointing,
    Policy,
    auto_tile,
)

GiB = 1 << 30
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


def first_tile(rows: int, width: int, card: int | None, token: int = TILE_BYTES) -> int:
    """Tokens per tile, by the length, the model's width and the card's memory alone.

    token: bytes per token and hidden channel.
    """
    tile = auto_tile(rows)
    while card is not None and tile > TILES[0] and tile * width * token > card // 8:
        tile //= 2
    return tile


def least_tile(rows: int) -> int:
    """Tokens of a tile that takes little beside the layer's own tensors of all tokens, 1% of a step
    at most; larger ones start fewer kernels."""
    return max(tile for tile in TILES if tile <= max(TILES[0], rows // 32))


def first_policy(
    settings: Checkpointing,
    *,
    rows: int,
    width: int,
    itemsize: int = 2,
    layers: int = 1,
    whole: bool = False,
    chains: bool = False,
    card: int | None = None,
    free: int | None = None,
    host: int | None = None,
) -> Policy:
    """The policy of layers of which no step was measured: input and attention output go to the
    host, unless the settings name another place.

    Args:
        rows: tokens of the batch; width: of hidden states.
        layers: how many; whole: they run untiled.
        chains: some mix tokens by something other than attention, in tiles through time.
        card: bytes of the device, free: its free ones; None if unknown.
        host: free bytes of the host, None if unknown.

    Raises:
        ValueError: the host cannot hold what the settings demand.
    """
    tier = settings.offload
    if settings.directory:
        tier = "disk"
    elif tier == "auto":
        tier = "host"
    every = 1 if whole or settings.every == "auto" else settings.every
    save = every == 1 if settings.save_attention == "auto" else settings.save_attention
    save = save and not whole
    one, room = rows * width * itemsize, host and HOST_SHARE * host
    wide = settings.aim != "least" and free is not None and 2 * TENSORS * one < free
    # a gradient of one layer's input waits there too, where attention does not run all heads at once
    needs = lambda save: ((1 + save) * -(-layers // every) + (not wide)) * one  # noqa: E731
    if tier == "host" and room is not None and needs(save) > room:
        if settings.save_attention == "auto" and not chains:
            save = False
        if needs(save) > room and not chains:
            raise ValueError(_host_too_small(needs(True), room, layers, one))
    tile = settings.tile
    if tile == "auto" and settings.aim == "least":
        tile = LEAST_MIXER_TILE if chains else least_tile(rows)
    elif tile == "auto":
        tile = first_tile(rows, width, card, MIXER_BYTES if chains else TILE_BYTES)
    gates = settings.keep not in ("auto", ()) and every == 1 and not whole
    return Policy(
        offload=tier,
        every=every,
        save_attention=save,
        tile=tile,
        plain=0 if settings.plain == "auto" else settings.plain,
        again=0 if gates else None,
        wide=wide,
        frozen_weights="host" if settings.frozen_weights == "host" else "gpu",
    )


def step_bytes(policy: Policy, rows: int, width: int, itemsize: int) -> int:
    """About the bytes that a first step takes beside weights and gradients."""
    loss = 2 * LOSS_WORKSPACE
    return TENSORS * rows * width * itemsize + min(policy.tile, rows) * width * TILE_BYTES + loss


def _host_too_small(wanted: int, room: int, layers: int, one: int) -> str:
    least = max(1, round(math.sqrt(layers)))
    saved = wanted - -(-layers // least) * one
    return (
        f"hfpatch: checkpoints need {wanted / GiB:.1f} GiB of host memory, and {room / GiB:.1f} "
        f"GiB are free to a rank. Checkpointing(save_attention=False, every={least}) saves "
        f"{saved / GiB:.1f} GiB, a directory as offload saves all."
    )
