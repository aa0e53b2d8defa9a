"""Which checkpoints are kept, and where: the user's `Checkpointing`, resolved from free memory into a `Policy`."""

import math
import os
from dataclasses import dataclass

from hfpatch.planner.formula import ModelShape, Policy

PLACES = ("auto", "gpu", "host")
TILE_MOST = 8192
HOST_SHARE = 0.9  # of the free host memory: the rest is for the process itself, the data loader, the page tables


@dataclass(frozen=True)
class Checkpointing:
    """What the layer engine keeps for backward. Every field may be "auto": chosen from the memory that is free.

    offload: "gpu", "host" (pinned memory), or a directory (an NVMe tier).
    every: keep the input of every k-th layer alone; the layers between are run again.
    save_attention: keep attention outputs too, so that the attention forward runs once.
    tile: tokens a tile of the token-wise parts.
    Raises ValueError for a value outside these.
    """

    offload: str = "auto"
    every: int | str = "auto"
    save_attention: bool | str = "auto"
    tile: int | str = "auto"

    def __post_init__(self):
        if not isinstance(self.offload, (str, os.PathLike)) or not str(self.offload):
            raise ValueError(
                f'hfpatch: offload must be "auto", "gpu", "host" or a directory, {self.offload!r} came; '
                'pass "host" for pinned memory.'
            )
        if self.offload not in PLACES and os.sep not in str(self.offload) and not os.path.isdir(self.offload):
            raise ValueError(
                f'hfpatch: offload must be "auto", "gpu", "host" or a directory, {str(self.offload)!r} came; '
                f'write a directory as a path, for example "./{self.offload}".'
            )
        for name in ("every", "tile"):
            value = getattr(self, name)
            if value == "auto" and isinstance(value, str):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                unit = "layers" if name == "every" else "tokens"
                raise ValueError(
                    f'hfpatch: {name} must be "auto" or a positive number of {unit}, {value!r} came; leave it "auto".'
                )
        if self.save_attention != "auto" and not isinstance(self.save_attention, bool):
            raise ValueError(
                f'hfpatch: save_attention must be "auto", True or False, {self.save_attention!r} came; leave it "auto".'
            )

    @property
    def directory(self) -> str | None:
        """The disk tier's folder, None where checkpoints stay in memory."""
        return None if self.offload in PLACES else os.fspath(self.offload)


def best_interval(num_layers: int, checkpoint_bytes: float, recompute_bytes: float) -> int:
    """Layers per checkpoint that keep the fewest bytes.

    a checkpoints of u bytes stand beside the n / a layers of one segment being run again, v bytes each:
    a * u + (n / a) * v is least at a = sqrt(n * v / u), so the interval is n / a = sqrt(n * u / v).
    """
    return max(1, min(num_layers, round(math.sqrt(num_layers * checkpoint_bytes / recompute_bytes))))


def auto_tile(tokens: int) -> int:
    """Tokens a tile: all of them up to 8192, 4096 up to 32,768, 8192 beyond.

    One tile needs no second q, k, v and no float32 sums, and up to 8192 rows its intermediates are small; 4096 rows keep matmuls
    at their rate, and the MLP's intermediates below what the layer holds anyway.
    """
    return 4096 if TILE_MOST < tokens <= 4 * TILE_MOST else TILE_MOST


def choose(
    checkpointing: Checkpointing,
    shape: ModelShape,
    *,
    batch: int,
    tokens: int,
    itemsize: int = 2,
    gpu_free: int | None = None,
    host_free: int | None = None,
    n_ranks: int = 1,
) -> Policy:
    """Resolves every "auto" for one batch shape.

    gpu_free, host_free: bytes left for the step on the device and on this machine (shared by its n_ranks), None
    where unknown. Raises ValueError when the host cannot hold what was asked for, naming what would.
    """
    rows = batch * tokens
    inputs = rows * shape.hidden_size * itemsize
    outputs = rows * (shape.q_size * itemsize + shape.num_heads * 4)
    host = None if host_free is None else int(host_free * HOST_SHARE) // n_ranks
    n = shape.num_layers

    offload = "disk" if checkpointing.directory else checkpointing.offload
    if offload == "auto":
        offload = "gpu" if host is not None and host < n * inputs // 4 else "host"
    budget = host if offload == "host" else None

    def need(every, save):
        return -(-n // every) * (inputs + (outputs if save and every == 1 else 0))

    save, every = checkpointing.save_attention, checkpointing.every
    if save == "auto":
        save = budget is None or need(1 if every == "auto" else every, True) <= budget
    if every == "auto":
        every = 1
        if budget is not None and need(1, save) > budget:
            every = next((k for k in range(1, n + 1) if need(k, save) <= budget), n)
    if budget is not None and need(every, save) > budget:
        saves = need(every, save) - need(best_interval(n, inputs, inputs), False)
        raise ValueError(
            f"hfpatch: checkpoints need {need(every, save) / 2**30:.1f} GiB of host memory, "
            f"{budget / 2**30:.1f} GiB are free to a rank; save_attention=False with every="
            f"{best_interval(n, inputs, inputs)} saves {saves / 2**30:.1f} GiB, or pass a directory as offload."
        )
    tile = auto_tile(rows) if checkpointing.tile == "auto" else checkpointing.tile
    return Policy(offload=offload, every=every, save_attention=save, stream_attention=False, tile=tile)
