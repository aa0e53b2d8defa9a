"""Which checkpoints are kept, and where: the user's `Checkpointing`, resolved from free memory into a `Policy`."""

import math
import os
from dataclasses import dataclass, replace

from hfpatch.memory.formula import GiB, ModelShape, Policy, step_memory

PLACES = ("auto", "gpu", "host")
TILE_LEAST, TILE_MOST = 1024, 8192
SMALL_SHARE = 1 / 8  # of the free device memory: checkpoints below it stay there, without any copy
HOST_SHARE = 0.9  # of the free host memory: the rest is for the process itself, the data loader, the page tables


@dataclass(frozen=True)
class Checkpointing:
    """What decoder layers keep for backward, for `hfpatch.apply(model, checkpointing=...)`.

    Every field may be "auto" (the default): chosen at the first step from the memory that is free.

    offload: where checkpoints live: "gpu", "host" (pinned memory) or a directory (an NVMe tier, one file a tensor).
    every: layers per checkpoint: keep the input of every k-th layer alone; the layers between are run again.
    save_attention: keep attention outputs too, one more [batch, tokens, hidden] a layer, so that the attention forward
        is never run twice.
    tile: tokens a tile of the parts that work token by token (norms, projections, MLP).

    Raises ValueError for a value outside these.

    >>> hfpatch.apply(model, checkpointing=hfpatch.Checkpointing(offload="host", tile=8192))
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

    One tile needs no second q, k, v and no float32 sums, and up to 8192 rows its intermediates are small; 4096 rows
    keep matmuls at their rate, and the MLP's intermediates below what the layer holds anyway.
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

    Host memory is saved in the order of what it costs: first on the attention outputs (their forward runs again: at
    128k tokens a fifth of the step), then on layers' inputs, for which the layers between run again as well. On the
    device, attention outputs are streamed per KV group, then tiles shrink, where the step would not fit otherwise.
    """
    n = shape.num_layers
    host = None if host_free is None else int(host_free * HOST_SHARE) // n_ranks
    inputs = batch * tokens * shape.hidden_size * itemsize
    every, save = checkpointing.every, checkpointing.save_attention
    tile = auto_tile(batch * tokens) if checkpointing.tile == "auto" else checkpointing.tile

    def kept(every, save):
        policy = Policy(offload="host", every=every, save_attention=save, tile=tile)
        return step_memory(shape, policy, batch=batch, tokens=tokens, itemsize=itemsize).host

    offload = "disk" if checkpointing.directory else checkpointing.offload
    if offload == "auto":
        small = gpu_free is not None and kept(1, True) <= gpu_free * SMALL_SHARE
        short = host is not None and kept(best_interval(n, inputs, inputs), False) > host
        offload = "gpu" if small or short else "host"
    budget = host if offload == "host" else gpu_free if offload == "gpu" else None

    # Attention outputs are kept with every layer's input or not at all.
    spans = (every,) if every != "auto" else (1,) if save is True else range(1, n + 1)
    keeps = (True, False) if save == "auto" else (save,)
    options = [(k, s) for k in spans for s in keeps if not (s and k > 1 and save == "auto")]
    every, save = next((o for o in options if budget is None or kept(*o) <= budget), options[0])
    if offload == "gpu" and budget is not None and kept(every, save) > budget and len(options) > 1:
        # More than the device has, whatever is kept: the interval that keeps the fewest bytes comes closest.
        every, save = best_interval(n, inputs, inputs) if len(spans) > 1 else every, keeps[-1]
    if offload == "host" and budget is not None and kept(every, save) > budget:
        least = best_interval(n, inputs, inputs)
        raise ValueError(
            f"hfpatch: checkpoints need {kept(every, save) / GiB:.1f} GiB of host memory, {budget / GiB:.1f} GiB are "
            f"free to a rank; Checkpointing(save_attention=False, every={least}) saves "
            f"{(kept(every, save) - kept(least, False)) / GiB:.1f} GiB, a directory as offload saves all."
        )

    def fits(policy):
        return gpu_free is None or (
            step_memory(shape, policy, batch=batch, tokens=tokens, itemsize=itemsize).beyond <= gpu_free
        )

    policy = Policy(offload=offload, every=every, save_attention=save, stream_attention=False, tile=tile)
    if not fits(policy) and save and every == 1 and offload != "gpu":
        policy = replace(policy, stream_attention=True)
    if checkpointing.tile == "auto" and not fits(policy):
        smaller = (replace(policy, tile=tile >> i) for i in range(1, 4) if tile >> i >= TILE_LEAST)
        policy = next((p for p in smaller if fits(p)), policy)
    return policy
