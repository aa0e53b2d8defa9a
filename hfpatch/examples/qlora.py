"""QLoRA with transformers' Trainer and PEFT: a base of 4 bits, adapters on every Linear layer. What
hfpatch adds is marked.

    python -m hfpatch.examples.qlora MODEL TEXT_FILE OUTPUT_DIR

`hfpatch plan --model MODEL --lora-r 16 --base 4bit --gpu rtx4090 --max-seq-len` says beforehand
what fits.

`python -m hfpatch.examples.qlora --small` runs it on a CPU, on a tiny model and made data.
"""

import os
from pathlib import Path

# before torch is imported: threads that wait leave their core; fixed segments fragment
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    Trainer,
    TrainingArguments,
    set_seed,
)

import hfpatch
from hfpatch.examples.made import run

SEQ_LENGTH = 128


def main(model_name: str, text_file: str, output_dir: str) -> Trainer:
    set_seed(0)  # of new adapters too
    tokenizer = AutoTokenizer.from_pretrained(model_name)
    bits = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    model = AutoModelForCausalLM.from_pretrained(
        model_name, quantization_config=bits, dtype=torch.bfloat16
    )
    # No prepare_model_for_kbit_training: get_peft_model freezes the base, and no more.
    model = get_peft_model(
        model, LoraConfig(r=16, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    for parameter in model.parameters():
        if parameter.requires_grad:  # adapters in the dtype that they compute in
            parameter.data = parameter.data.to(torch.bfloat16)
    print(hfpatch.apply(model))  # <- the one line

    tokens = tokenizer(Path(text_file).read_text(encoding="utf-8"))["input_ids"]
    rows = [tokens[i : i + SEQ_LENGTH] for i in range(0, len(tokens) - SEQ_LENGTH + 1, SEQ_LENGTH)]
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=output_dir,
            learning_rate=2e-4,
            # rounds at random: to the nearest, bf16 adapters would lose small updates
            optim="adamw_torch_8bit",
            optim_args="bf16_stochastic_round=True",
            per_device_train_batch_size=1,
            max_steps=2,
            logging_steps=1,
            save_strategy="no",
            seed=0,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
    )
    trainer.train()
    model.save_pretrained(output_dir)
    return trainer


if __name__ == "__main__":
    run(main, __doc__, "text")
