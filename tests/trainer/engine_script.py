"""A user's script for two gloo processes: a stock Trainer under ZeRO-3 or FSDP2. It knows nothing
of hfpatch.

The lines before `main` only make the engines real on a CPU, which they are not made for.
"""

import json
import os
import sys
from pathlib import Path

import tiny
import torch
from transformers import Trainer, TrainingArguments


def zero3() -> dict:
    import deepspeed

    # else it builds an extension, half a minute of C++
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return {}  # the rest is the launcher's


def fsdp2() -> dict:
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    state = PartialState(backend="gloo")
    state.distributed_type = DistributedType.MULTI_GPU
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
    fsdp = {
        "version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "reshard_after_forward": True,
    }
    return {"fsdp": True, "fsdp_config": fsdp, "accelerator_config": {"use_configured_state": True}}


def rows(count: int = 24) -> list[dict]:
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(3, tiny.VOCAB, (16,), generator=generator) for _ in range(count)]
    return [
        {"input_ids": i, "labels": torch.where(torch.arange(16) < n % 7, -100, i)}
        for n, i in enumerate(ids)
    ]


def train(folder, *, batch: int, dtype=torch.float32, **engine) -> Trainer:
    args = TrainingArguments(
        str(folder), per_device_train_batch_size=batch, gradient_accumulation_steps=2, max_steps=3,
        logging_steps=1,
        learning_rate=1e-2, save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
        dataloader_pin_memory=False, **engine,
    )  # fmt: skip
    trainer = Trainer(tiny.llama(dtype=dtype, pad_token_id=None), args, train_dataset=rows())
    trainer.train()
    return trainer


def losses(trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main(kind: str, folder: str) -> None:
    torch.set_num_threads(1)
    trainer = train(folder, batch=1, **{"zero3": zero3, "fsdp2": fsdp2}[kind]())
    layer = trainer.accelerator.unwrap_model(trainer.model_wrapped).model.layers[0]
    found = {
        "losses": losses(trainer),
        "engine": str(trainer.accelerator.distributed_type.value),
        "layer": [c.__module__ for c in type(layer).__mro__],
        "weight": type(next(layer.parameters())).__name__,
        "sharded": hasattr(next(layer.parameters()), "ds_tensor"),
    }
    (Path(folder) / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's own teardown aborts about one run in ten


if __name__ == "__main__":
    main(*sys.argv[1:])
