"""Gloo processes that share each weight: tensor parallelism through transformers' tp_plan="auto".

Two of them through Trainer; four of them, or two pairs under FSDP2, in a loop of their own.
"""

import sys
import warnings
from functools import partial
from pathlib import Path
from unittest import mock

import common
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM

import hfpatch
from hfpatch.layer import policies


def load(folder: Path, **settings) -> LlamaForCausalLM:
    """The model of `common`, each rank with its part of every projection."""
    if dist.get_rank() == 0 and not folder.exists():
        common.make_model().save_pretrained(folder)
    dist.barrier()
    with warnings.catch_warnings():
        # 5.23 renames the argument; 4.57 knows this one alone
        warnings.simplefilter("ignore", FutureWarning)
        settings = settings or {"tp_plan": "auto"}
        return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, **settings).train()


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(model, mine=slice(None), rows: int = 1) -> dict[str, torch.Tensor]:
    """mine: of the micro-batches; rows: in how many parts they are dealt out, whose gradients are
    averaged.
    """
    for batch in common.micro_batches()[mine]:
        model(**batch, num_items_in_batch=torch.tensor(common.label_count() / rows)).loss.backward()
    found = {name: whole(p.grad) for name, p in model.named_parameters()}
    model.zero_grad()
    return found


def held(model, shared: bool) -> tuple[int, int, dict]:
    """Host bytes that one step's checkpoints take on this rank, those of the gathered tile, and the
    gradients.
    """
    hfpatch.apply(model, checkpointing=hfpatch.Checkpointing(offload="host", tile=12))
    find, policies.tensor_parallel_group = (
        policies.tensor_parallel_group,
        lambda _: None,
    )
    if shared:
        policies.tensor_parallel_group = find
    found = gradients(model)
    policies.tensor_parallel_group = find
    runtime = model.model.layers[0]._hfpatch.runtime
    assert (runtime.shards is not None) is shared
    gathered = runtime.shards.buffer.numel() * runtime.shards.buffer.element_size() if shared else 0
    return runtime.transfers.pool.bytes_held, gathered, found


def four(out: Path) -> None:
    """All four ranks share each weight, then two pairs whose parts FSDP2 shards again, each pair
    with rows of its own.
    """
    from transformers.distributed import DistributedConfig, mixin  # of 5.23

    common.make_config = partial(common.make_config, num_key_value_heads=4)
    dist.init_process_group("gloo")
    found = {}
    for name, rows in (("tp", 1), ("tp and fsdp2", 2)):
        settings = (
            {} if rows == 1 else {"distributed_config": DistributedConfig(tp_size=2, fsdp_size=2)}
        )
        # transformers shards as it loads, which apply() comes too late for: so we do it behind
        # apply.
        with mock.patch.object(
            mixin, "apply_fully_sharded_data_parallelism", lambda model, *_: model
        ):
            model = load(out / "start", **settings)
        hfpatch.apply(model, checkpointing=hfpatch.Checkpointing(tile=12, offload="host"))
        mine = slice(None)
        if rows == 2:
            mesh = model._mesh_manager.get_mesh("fsdp")
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            mine = slice(mesh.get_local_rank(), None, 2)
        found[name] = common.worst("plain", gradients(model, mine, rows))
        assert model.model.layers[0]._hfpatch.runtime.shards.world == 4 // rows
    common.report(out, worst=found)


def main(folder: str, kind: str = "") -> None:
    common.quiet()
    # a collective of ours by an old name
    warnings.filterwarnings("error", "`torch.distributed", FutureWarning)
    out = Path(folder)
    if kind:
        return four(out)
    shim = common.as_if_on_gpus()

    def make():
        model = load(out / "start")
        report = hfpatch.apply(model, checkpointing=hfpatch.Checkpointing(tile=10, keep="gate_up"))
        assert report.count("checkpointing") == 2
        return model, str(report)

    model, said = make()
    local = sum(p.to_local().numel() for p in model.parameters() if isinstance(p, DTensor))
    split = sum(p.numel() for p in model.parameters() if isinstance(p, DTensor))
    # tiles of 5 tokens do not divide between two ranks; those of 6, which wait on the host, do
    found = {"tiles of 5": common.worst("plain", gradients(model))}
    whole_bytes, _, alone = held(make()[0], shared=False)
    shared_bytes, gathered, together = held(make()[0], shared=True)
    found |= {
        "kept whole": common.worst("plain", alone),
        "kept in parts": common.worst("plain", together),
    }
    # transformers checkpoints no optimizer of a model sharded at load time, so there is nothing to
    # resume from.
    trainer = common.train(model, out / "whole", batch=2, save_only_model=True, **shim)
    trainer.save_model(str(out / "final"))
    common.report(
        folder, losses=common.losses(trainer), local=local, split=split, said=said, worst=found,
        whole_bytes=whole_bytes, shared_bytes=shared_bytes, gathered=gathered,
    )  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[-1], *sys.argv[1:-1])
