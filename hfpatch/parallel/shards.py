"""Tensor parallelism: every rank has the same layer input, so each keeps a part and gathers the
rest in backward.

The gathered tile lies in one buffer, shared by all tiles and layers. A checkpoint shrinks by the
number of ranks on the device, the host or the disk. The price is one all-gather per tile and pass.

B batch, T tokens, D hidden; t tokens of a tile.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hfpatch.compat import in_fsdp2, other_hooks, split_by_hooks

_of_hosts: dict = {}  # process group -> the gloo group of its ranks
# torch 2.13 deprecates the old name
_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def tensor_parallel_group(layer: nn.Module):
    """The group of ranks that share this layer's weights; None without one. They run its modules
    equally often, since each run exchanges values.
    """
    # Shards of FSDP2, of modules inside: its ranks have rows of their own, and may choose alone.
    if any(in_fsdp2(module) for module in layer.modules() if module is not layer):
        return None
    meshes = [split_by_hooks(module) for module in layer.modules()]
    meshes += [
        parameter.device_mesh
        for parameter in layer.parameters()
        if any(placement.is_shard() for placement in getattr(parameter, "placements", ()))
    ]
    for mesh in meshes:
        if mesh is not None and mesh.ndim == 1 and mesh.size() > 1:
            return mesh.get_group()
    return None


def have_one_input(layer: nn.Module) -> bool:
    """Whether all ranks of that group get the same input of the layer.

    A norm with another library's forward or hooks may see only a part of the sequence on each rank
    (sequence-parallel norms).
    """
    norm = getattr(layer, "input_layernorm", None)
    return norm is not None and "forward" not in vars(norm) and not other_hooks(norm)


def of_hosts(group):
    """A gloo group of the same ranks, for small numbers that the host reads. A collective: all
    ranks call it.

    NCCL orders all launches of one communicator, so a number that travelled with the layers'
    tensors would arrive after all of them: the host would wait until the device is idle.
    """
    group = group or dist.group.WORLD
    if group not in _of_hosts:
        ranks = dist.get_process_group_ranks(group)
        _of_hosts[group] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return _of_hosts[group]


def least_of(group, numbers: list[int | None]) -> list[int | None]:
    """The least of each number over the ranks of a group; None if one rank has None. A collective:
    all ranks call it.
    """
    least = torch.tensor([-1 if n is None else n for n in numbers], device="cpu")
    dist.all_reduce(least, dist.ReduceOp.MIN, group=of_hosts(group))
    return [None if n < 0 else n for n in least.tolist()]


class Shards:
    """This rank's part of tiles that are the same on all ranks of `group`."""

    def __init__(self, group):
        self.group = group
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)
        self.buffer: Tensor | None = None

    def bounds(self, bounds: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """The range of each tile [a, b) in mine()'s result; the same lengths on every rank."""
        parts = []
        start = 0
        for a, b in bounds:
            length = -(-(b - a) // self.world)
            parts.append((start, start + length))
            start += length
        return parts

    def mine(self, x_BTD: Tensor, bounds: list[tuple[int, int]]) -> Tensor:
        """This rank's part of every tile, concatenated; zeros fill a tile that does not divide
        evenly."""
        mine = self.bounds(bounds)
        part = x_BTD.new_zeros(x_BTD.shape[0], mine[-1][1], *x_BTD.shape[2:])
        for (a, b), (start, end) in zip(bounds, mine):
            first = min(b, a + self.rank * (end - start))
            last = min(b, first + end - start)
            part[:, start : start + last - first] = x_BTD[:, first:last]
        return part

    def whole(self, part_BtD: Tensor, length: int) -> Tensor:
        """The tile of `length` tokens from all ranks' parts, in a buffer that the next call
        overwrites.
        """
        B, t = part_BtD.shape[:2]
        numel = self.world * part_BtD.numel()
        kept = self.buffer
        if kept is None or kept.numel() < numel or kept.dtype != part_BtD.dtype:
            self.buffer = part_BtD.new_empty(numel)
        tile = self.buffer[:numel].view(B, self.world * t, *part_BtD.shape[2:])
        with torch.no_grad():
            for row in range(B):
                _gather(tile[row], part_BtD[row].contiguous(), group=self.group)
        return tile[:, :length]
