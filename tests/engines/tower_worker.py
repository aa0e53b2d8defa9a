"""Two gloo processes train a model with images, one image on the first rank and two on the second:
gradients of each engine against stock's in one process.
"""

import copy
import sys
from pathlib import Path

import common
import deepspeed
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "decoder"), str(TESTS / "layer"), str(TESTS), str(TESTS.parent)]
import test_vision  # noqa: E402

import hfpatch  # noqa: E402

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # half a minute of C++


def batches(batch: dict) -> list[dict]:
    """A row with one image, and one with two."""
    two = {n: x.clone() for n, x in batch.items()}
    two["input_ids"][0, 20:24] = test_vision.IMAGE
    two["mm_token_type_ids"][0, 20:24], two["labels"][0, 20:24] = 1, -100
    two["pixel_values"] = torch.cat([batch["pixel_values"], batch["pixel_values"].flip(0)])
    two["image_grid_thw"] = batch["image_grid_thw"].repeat(2, 1)
    return [{n: x.float() if x.is_floating_point() else x for n, x in b.items()}
            for b in (batch, two)]  # fmt: skip


def gradients(stock, rows: list[dict], engine: str) -> dict[str, torch.Tensor]:
    model = copy.deepcopy(stock).float()
    hfpatch.apply(model, checkpointing=hfpatch.Checkpointing(offload="host", tile=16))
    rank = dist.get_rank()
    items = torch.tensor(sum(int((b["labels"][:, 1:] != -100).sum()) for b in rows) / 2)
    if engine == "ddp":
        ddp = DistributedDataParallel(model)
        ddp(**rows[rank], num_items_in_batch=items).loss.backward()
        return {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    if engine == "fsdp2":
        for block in (*model.model.visual.blocks, *model.model.language_model.layers):
            fully_shard(block)
        fully_shard(model)
        model(**rows[rank], num_items_in_batch=items).loss.backward()
        named = model.named_parameters()
        return {n: p.grad.full_tensor() for n, p in named if p.requires_grad}
    config = {
        "train_micro_batch_size_per_gpu": 1, "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True, "zero_optimization": {"stage": 3},
    }  # fmt: skip
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.0)
    zero, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    zero.backward(zero(**rows[rank], num_items_in_batch=items).loss)
    full = deepspeed.utils.safe_get_full_grad
    return {n: full(p).clone() for n, p in model.named_parameters() if p.requires_grad}


def main(folder: str) -> None:
    common.quiet()
    deepspeed.init_distributed("gloo", dist_init_required=True)
    found = {}
    for way in ("trained", "frozen"):
        stock, batch = test_vision.small("qwen3_vl")
        stock = test_vision.in_a_way(stock, way)
        rows = batches(batch)
        items = sum(int((b["labels"][:, 1:] != -100).sum()) for b in rows)
        alone = copy.deepcopy(stock)
        for row in rows:
            loss = alone(**test_vision.tiny.as_double(row), num_items_in_batch=items).loss
            loss.backward()
        wanted = {n: p.grad for n, p in alone.named_parameters() if p.requires_grad}
        for engine in ("ddp", "fsdp2", "zero3"):
            got = gradients(stock, rows, engine)
            assert got.keys() == wanted.keys()
            found[f"{engine}, {way}"] = {
                n: ((got[n] - g).abs().max() / g.abs().max().clamp(min=1e-6)).item()
                for n, g in wanted.items()
            }
    common.report(folder, worst=found)


if __name__ == "__main__":
    main(*sys.argv[1:])
