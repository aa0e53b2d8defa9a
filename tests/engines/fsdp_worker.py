"""Two gloo processes under FSDP: train, save, resume, and the gradients of a hand-written loop."""

import functools
import json
import sys
from pathlib import Path

import common
import torch
import torch.distributed as dist
from accelerate.utils import DistributedType
from torch.distributed.checkpoint.state_dict import _init_optim_state
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor
from transformers import Trainer

import hfpatch
from hfpatch.trainer import configs


def fsdp2(model, **settings):
    for layer in [m for m in model.modules() if type(m).__name__ == "LlamaDecoderLayer"]:
        fully_shard(layer, **settings)
    return fully_shard(model, **settings)


def gradients(kind: str, version: int, patched: bool = True, **settings) -> dict[str, torch.Tensor]:
    """Two accumulated backward passes a rank, as a hand-written loop does them; whole gradients, on
    every rank.
    """
    model = common.variant(kind, patched=patched)
    if version == 2:
        model = fsdp2(model, **settings)
    else:
        layers = {type(m) for m in model.modules() if type(m).__name__ == "LlamaDecoderLayer"}
        policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=layers)
        model = FSDP(
            model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
        )
    world, rank = dist.get_world_size(), dist.get_rank()
    items = torch.tensor(common.label_count() / world)  # the engine averages over ranks
    for batch in common.micro_batches()[rank::world]:
        model(**batch, num_items_in_batch=items).loss.backward()
    if version == 2:
        return {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.requires_grad}
    with FSDP.summon_full_params(model, with_grads=True):
        return {
            n.replace("_fsdp_wrapped_module.", ""): p.grad.clone()
            for n, p in model.named_parameters()
            if p.requires_grad
        }


def main(name: str, folder: str) -> None:
    common.quiet()
    shim = common.as_if_on_gpus()
    config = configs.load(name)
    engine = configs.training_arguments(config)
    if config.values["version"] == 1:
        # Whole state dicts of FSDP1 crash on a CPU. From sharded ones accelerate restores only the
        # optimizer states that exist, and a fresh Adam has none: make them before they are loaded.
        engine["fsdp_config"]["state_dict_type"] = "SHARDED_STATE_DICT"
        load = Trainer._load_optimizer_and_scheduler
        Trainer._load_optimizer_and_scheduler = lambda self, path: (
            path and _init_optim_state(self.optimizer.optimizer),
            load(self, path),
        )
    out = Path(folder)

    def run(where, **extra):
        again = json.loads(json.dumps(engine))  # Trainer fills it in place
        model = common.make_model()
        report = hfpatch.apply(model, checkpointing=hfpatch.Checkpointing(tile=10, keep="gate_up"))
        assert report.count("checkpointing") == 2 and report.count("loss") == 1
        trainer = common.train(model, out / where, batch=1, **shim, **again, **extra)
        assert trainer.accelerator.distributed_type == DistributedType.FSDP
        return trainer

    whole = run("whole")
    parameters = list(whole.model_wrapped.parameters())
    local = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in parameters)
    classes = sorted({type(m).__name__ for m in whole.model_wrapped.modules()})
    resumed = run("resumed", resume=str(out / "whole" / "checkpoint-2"))
    version = config.values["version"]
    found = {kind: common.worst(kind, gradients(kind, version)) for kind in common.KINDS}
    if version == 2:
        # FSDP1's own run is a long test. Its views move between forward and backward.
        found["fsdp1"] = common.worst("plain", gradients("plain", 1))
        mixed = {
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32
            )
        }
        stock = gradients("plain", 2, patched=False, **mixed)
        found["bfloat16"] = common.worst(
            "plain", gradients("plain", 2, **mixed), stock, torch.bfloat16
        )
    refused = common.refused(lambda: gradients("lora-host", version))
    common.report(
        folder, refused=refused, losses=common.losses(whole), resumed=common.losses(resumed),
        local=local, classes=classes,
        dtensors=all(isinstance(p, DTensor) for p in parameters), worst=found,
    )  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
