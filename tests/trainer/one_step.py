"""A user's script that knows nothing of hfpatch: two steps of a Trainer; each rank writes what
trained into argv[1].
"""

import json
import os
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed


def main(folder: str) -> None:
    """Trains, and writes rank{n}.json: the classes of the first layer, and the losses."""
    set_seed(0)
    config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                         num_attention_heads=2, num_key_value_heads=1,
                         max_position_embeddings=64)  # fmt: skip
    args = TrainingArguments(
        output_dir=folder, max_steps=2, logging_steps=1, save_strategy="no", report_to="none",
        use_cpu=True,
        disable_tqdm=True, dataloader_pin_memory=False, per_device_train_batch_size=1,
    )  # fmt: skip
    rows = [
        {"input_ids": torch.arange(i, i + 16), "labels": torch.arange(i, i + 16)} for i in range(8)
    ]
    trainer = Trainer(LlamaForCausalLM(config), args, train_dataset=rows)
    trainer.train()
    layer = [kind.__module__ for kind in type(trainer.model.model.layers[0]).__mro__]
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    report = {"layer": layer, "losses": losses, "ranks": args.world_size}
    Path(folder, f"rank{os.environ.get('RANK', '0')}.json").write_text(json.dumps(report))
    if torch.distributed.is_initialized():  # gloo's threads abort a process that ends before them
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
