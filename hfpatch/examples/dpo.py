"""TRL's DPOTrainer at long context. What hfpatch adds is marked: it patches policy and reference.

    python -m hfpatch.examples.dpo MODEL PAIRS.jsonl OUTPUT_DIR

PAIRS.jsonl: {"prompt": ..., "chosen": ..., "rejected": ...} a line.

`python -m hfpatch.examples.dpo --small` runs it on a CPU, on a tiny model and made data.
"""

import os

# before torch is imported: threads that wait leave their core; fixed segments fragment
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

from datasets import load_dataset
from trl import DPOConfig, DPOTrainer

import hfpatch
from hfpatch.examples.made import run


def main(model_name: str, data_file: str, output_dir: str, max_length: int = 65536) -> DPOTrainer:
    trainer = DPOTrainer(
        model=model_name,
        args=DPOConfig(
            output_dir=output_dir,
            model_init_kwargs={"dtype": "bfloat16"},
            learning_rate=1e-6,
            # rounds at random: to the nearest, bf16 weights would lose updates this small
            optim="adamw_torch_8bit",
            optim_args="bf16_stochastic_round=True",
            per_device_train_batch_size=1,  # a pair: two sequences of max_length
            max_length=max_length,
            max_steps=2,
            logging_steps=1,
            save_strategy="no",
            gradient_checkpointing=False,  # hfpatch checkpoints the layers itself
            bf16=False,
            seed=0,
        ),
        train_dataset=load_dataset("json", data_files=data_file, split="train"),
        callbacks=[hfpatch.Callback(apply=True)],  # <- the first line
    )
    hfpatch.apply(trainer.ref_model)  # <- the second: equal weights give equal numbers
    trainer.train()
    return trainer


if __name__ == "__main__":
    run(main, __doc__, "pairs", max_length=256)
