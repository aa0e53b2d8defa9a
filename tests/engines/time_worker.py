"""Two gloo ranks, rows of several tiles of a mixer: FSDP2, DeepSpeed ZeRO-3 and tensor parallelism,
every gradient against one process.
"""

import os
import sys
from pathlib import Path
from unittest import mock

os.environ["DS_ACCELERATOR"] = "cpu"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common
import deepspeed
import families
import numerics
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from tp_families_worker import TENSORS, load, worst

import hfpatch
from hfpatch.decoder.find import find_decoder
from hfpatch.layer.time_tiles import TimeTiles

# Else DeepSpeed builds a shared-memory extension at start, half a minute of C++.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
FAMILY, TOKENS = "qwen3_5_text", 165  # two tiles of 64 and an odd rest
TILED = hfpatch.Checkpointing(tile=64, plain=0, offload="host")


class Gathers(TorchDispatchMode):
    """Counts the collectives that gather weights."""

    count = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.count += "allgather" in op.name()
        return op(*args, **(kwargs or {}))


def rows() -> torch.Tensor:
    return torch.randint(3, 60, (2, TOKENS), generator=torch.Generator().manual_seed(0))


def loss_of(model, ids, ranks: int = 1):
    """Of these rows' part of the mean over both rows; ranks: over which an engine averages."""
    items = torch.tensor(2 * (TOKENS - 1) / ranks)
    return model(input_ids=ids, labels=ids, num_items_in_batch=items, use_cache=False).loss


def gradients(model) -> dict[str, torch.Tensor]:
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in found.items()}


def alone(model) -> dict[str, torch.Tensor]:
    loss_of(model, rows()).backward()
    return gradients(model)


def fsdp2(model, mine) -> dict[str, torch.Tensor]:
    for layer in find_decoder(model).layers:
        fully_shard(layer)
    fully_shard(model)
    loss_of(model, mine, 2).backward()
    return gradients(model)


def zero3(model, mine) -> dict[str, torch.Tensor]:
    config = {
        "train_micro_batch_size_per_gpu": 1, "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True, "zero_optimization": {"stage": 3},
    }  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.backward(loss_of(engine, mine, 2))
    found = {n: safe_get_full_grad(p) for n, p in model.named_parameters()}
    return {n: g.clone() for n, g in found.items() if g is not None}


def tensors(model, mine) -> dict[str, torch.Tensor]:
    return alone(model)


def main(folder: str) -> None:
    common.quiet()
    dist.init_process_group("gloo")
    rank, found, gathered = dist.get_rank(), {}, {}
    stock = families.small_model(FAMILY, torch.float32)
    if rank == 0:
        stock.save_pretrained(Path(folder) / FAMILY)
    dist.barrier()
    plain = alone(stock)
    with numerics.lifted():
        exact = alone(families.small_model(FAMILY))
    for way in (fsdp2, zero3, tensors):
        shared = way is tensors
        model = (
            load(Path(folder) / FAMILY, TENSORS)
            if shared
            else families.small_model(FAMILY, torch.float32)
        )
        hfpatch.apply(model, checkpointing=TILED)
        counted = mock.patch.object(TimeTiles, "_run", autospec=True, side_effect=TimeTiles._run)
        with counted as run, Gathers() as gathers:
            got = way(model, rows()[rank : rank + 1])
        found[way.__name__] = (*worst(got, plain, exact), run.call_count)
        gathered[way.__name__] = gathers.count
    layers = sum(bool(m._hfpatch.traits.timed) for m in find_decoder(model).layers)
    common.report(folder, found=found, layers=layers, gathered=gathered)


if __name__ == "__main__":
    main(*sys.argv[1:])
