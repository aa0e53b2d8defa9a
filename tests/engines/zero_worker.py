"""Two gloo processes under DeepSpeed ZeRO-3 with parameters and optimizer on the host, started by
accelerate launch.
"""

import os
import sys
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"

import common
import deepspeed
import torch
import torch.distributed as dist
from accelerate.utils import DistributedType

import hfpatch

# Else DeepSpeed builds a shared-memory extension at start, half a minute of C++.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def gradients(
    kind: str, offload: dict, stage: int = 3, late: bool = False
) -> dict[str, torch.Tensor]:
    """Two accumulated backward passes a rank through deepspeed.initialize; whole gradients, on
    every rank. late: the model took a step without it before.
    """
    from deepspeed.utils import safe_get_full_grad

    model = common.variant(kind)
    if late:
        model(**common.micro_batches()[0]).loss.backward()
        torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0).step()
        model.zero_grad()
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True, "zero_optimization": {"stage": stage, **offload},
    }  # fmt: skip
    trained = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(trained, lr=0.0), config=config
    )
    world, rank = dist.get_world_size(), dist.get_rank()
    # the engine averages over ranks and over micro-batches
    items = torch.tensor(common.label_count() / world / 2)
    for i, batch in enumerate(common.micro_batches()[rank::world]):
        engine.backward(engine(**batch, num_items_in_batch=items).loss)
        if i == 0:
            engine.step()
    found = {n: safe_get_full_grad(p) for n, p in model.named_parameters() if p.requires_grad}
    engine.step()
    return {n: g.clone() for n, g in found.items()}


def main(folder: str, *kinds: str) -> None:
    common.quiet()
    out = Path(folder)

    def run(where, **extra):
        model = common.make_model()
        report = hfpatch.apply(model, checkpointing=hfpatch.Checkpointing(tile=10, keep="gate_up"))
        assert report.count("checkpointing") == 2 and report.count("loss") == 1
        return common.train(model, out / where, batch=1, **extra)

    whole = run("whole")
    assert whole.accelerator.distributed_type == DistributedType.DEEPSPEED
    engine = whole.model_wrapped
    local = sum(p.ds_tensor.numel() for p in engine.module.parameters())
    zero = engine.zero_optimization_stage(), type(engine.optimizer).__name__
    offloaded = [engine.zero_offload_param().device, engine.zero_offload_optimizer().device]
    whole.save_model(str(out / "final"))
    resumed = run("resumed", resume=str(out / "whole" / "checkpoint-2"))
    host = {"device": "cpu"}
    found = {
        k: common.worst(k, gradients(k, {"offload_param": host, "offload_optimizer": host}))
        for k in (kinds or common.KINDS)
    }
    found["plain, stage 2"] = common.worst("plain", gradients("plain", {}, stage=2))
    found["lora-host, stage 1"] = common.worst("lora-host", gradients("lora-host", {}, stage=1))
    if not kinds:
        found |= more_of_them(host)
    refused = common.refused(lambda: gradients("lora-host", {}))
    common.report(
        folder, refused=refused, losses=common.losses(whole), resumed=common.losses(resumed),
        local=local, zero=zero,
        offloaded=[str(getattr(d, "value", d)) for d in offloaded], worst=found,
    )  # fmt: skip


def more_of_them(host: dict) -> dict:
    found = {}
    found["plain without offload"] = common.worst("plain", gradients("plain", {}))
    found["lora, begun late"] = common.worst("lora", gradients("lora", {}, late=True))
    found["tied, stage 1"] = common.worst("tied", gradients("tied", {}, stage=1))
    found["lora, stage 2 with offload"] = common.worst(
        "lora", gradients("lora", {"offload_optimizer": host}, stage=2)
    )
    found["lora-host, stage 2"] = common.worst("lora-host", gradients("lora-host", {}, stage=2))
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
