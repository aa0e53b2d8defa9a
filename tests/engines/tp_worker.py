"""Two gloo processes that share each weight: tensor parallelism through transformers' tp_plan="auto"."""

import sys
import warnings
from pathlib import Path

import common
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM

import hfpatch


def load(folder: Path) -> LlamaForCausalLM:
    """The model of `common`, each rank with its half of every projection."""
    if dist.get_rank() == 0 and not folder.exists():
        common.make_model().save_pretrained(folder)
    dist.barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # 5.23 renames the argument; 4.57 knows this one alone
        return LlamaForCausalLM.from_pretrained(folder, tp_plan="auto", dtype=torch.float32).train()


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(model) -> dict[str, torch.Tensor]:
    for batch in common.micro_batches():
        model(**batch, num_items_in_batch=torch.tensor(common.label_count())).loss.backward()
    found = {name: whole(p.grad) for name, p in model.named_parameters()}
    model.zero_grad()
    return found


def main(folder: str) -> None:
    common.quiet()
    shim = common.as_if_on_gpus()
    out = Path(folder)

    def make():
        model = load(out / "start")
        report = hfpatch.apply(model, checkpointing=hfpatch.Checkpointing(tile=10))
        assert report.count("checkpointing") == 2
        return model, str(report)

    model, said = make()
    local = sum(p.to_local().numel() for p in model.parameters() if isinstance(p, DTensor))
    split = sum(p.numel() for p in model.parameters() if isinstance(p, DTensor))
    found = {"plain": common.worst("plain", gradients(model))}
    # transformers checkpoints no optimizer of a model sharded at load time, so there is nothing to resume from.
    trainer = common.train(model, out / "whole", batch=2, save_only_model=True, **shim)
    trainer.save_model(str(out / "final"))
    common.report(
        folder, losses=common.losses(trainer), local=local, split=split, said=said,
        worst=found,
    )  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
