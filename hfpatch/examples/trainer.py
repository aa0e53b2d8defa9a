"""A stock Trainer script. The one line that hfpatch adds is marked; without it the script runs as
before.

python -m hfpatch.examples.trainer MODEL TEXT_FILE OUTPUT_DIR

`python -m hfpatch.examples.trainer --small` runs it on a CPU, on a tiny model and made data.
"""

import os

# before torch is imported: threads that wait leave their core; fixed segments fragment
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import torch
from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

import hfpatch
from hfpatch.examples.made import run


def main(model_name: str, text_file: str, output_dir: str) -> Trainer:
    tokenizer = AutoTokenizer.from_pretrained(model_name)
    model = AutoModelForCausalLM.from_pretrained(model_name, dtype=torch.bfloat16)
    hfpatch.apply(model)  # <- the one line

    data = load_dataset("text", data_files=text_file, split="train").filter(lambda row: row["text"])
    data = data.map(
        lambda row: tokenizer(row["text"], truncation=True, max_length=256), remove_columns="text"
    )
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=output_dir,
            learning_rate=1e-5,
            # rounds at random: to the nearest, bf16 weights would lose updates this small
            optim="adamw_torch_8bit",
            optim_args="bf16_stochastic_round=True",
            per_device_train_batch_size=2,
            max_steps=4,
            logging_steps=1,
            save_strategy="no",
            seed=0,
        ),
        train_dataset=data,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        callbacks=[hfpatch.Callback()],  # optional: tokens/s, MFU and peak memory in each log line
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    run(main, __doc__, "text")
