"""Two gloo processes: forwards that are stopped at their attention leave an engine's hooks as they
were, step after step.
"""

import os
import sys

os.environ["DS_ACCELERATOR"] = "cpu"

import common
import deepspeed
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import Lfm2Config, Lfm2ForCausalLM

import hfpatch

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else half a minute of C++


def make_model():
    """A mixer and an attention layer, each asked by its own forward."""
    torch.manual_seed(0)
    config = Lfm2Config(
        vocab_size=common.VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2, layer_types=["conv", "full_attention"], pad_token_id=None,
    )  # fmt: skip
    model = Lfm2ForCausalLM(config).train()
    report = hfpatch.apply(model, checkpointing=hfpatch.Checkpointing(tile=10))
    assert not any("untiled" in note for note in report.notes), report.notes
    return model


def hooks(model) -> int:
    tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(m, table)) for m in model.modules() for table in tables)


def fsdp2():
    """(one step, what must be the same after each)"""
    model = make_model()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)

    def step(batch):
        model.zero_grad()
        model(**batch).loss.backward()

    def state():
        whole = [p for p in model.parameters() if not isinstance(p, DTensor)]
        return [p.grad.to_local().tolist() for p in model.parameters()], len(whole), hooks(model)

    return step, state


def zero3():
    model = make_model()
    config = {
        "train_micro_batch_size_per_gpu": 1, "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 3},
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), config=config
    )
    losses = []

    def step(batch):
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())

    def state():
        gathered = [n for n, p in model.named_parameters() if p.ds_status.name != "NOT_AVAILABLE"]
        gathering = [n for n, p in model.named_parameters() if p.ds_active_sub_modules]
        return losses[-1], gathered, gathering, hooks(model)

    return step, state


def main(engine: str, steps: str, folder: str) -> None:
    common.quiet()
    deepspeed.init_distributed(
        "gloo", verbose=False
    ) if engine == "zero3" else dist.init_process_group("gloo")
    step, state = {"fsdp2": fsdp2, "zero3": zero3}[engine]()
    ids = common.make_rows()[dist.get_rank()]["input_ids"][None]
    states = []
    for _ in range(int(steps)):
        step({"input_ids": ids, "labels": ids, "use_cache": False})
        states.append(state())
    common.report(
        folder,
        steps=len(states),
        same=all(s == states[1] for s in states[2:]),
        last=str(states[-1][1:]),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
