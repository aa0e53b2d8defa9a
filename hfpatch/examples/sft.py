"""TRL's SFTTrainer, which loads the model itself. The one argument that hfpatch adds is marked.

    python -m hfpatch.examples.sft MODEL CHAT.jsonl OUTPUT_DIR

Or leave the script as it is: `accelerate launch -m hfpatch run your_sft_script.py ...`.

`python -m hfpatch.examples.sft --small` runs it on a CPU, on a tiny model and made data.
"""

import os

# before torch is imported: threads that wait leave their core; fixed segments fragment
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

import hfpatch
from hfpatch.examples.made import run


def main(model_name: str, data_file: str, output_dir: str) -> SFTTrainer:
    trainer = SFTTrainer(
        model=model_name,
        args=SFTConfig(
            output_dir=output_dir,
            model_init_kwargs={"dtype": "bfloat16"},
            learning_rate=1e-5,
            # rounds at random: to the nearest, bf16 weights would lose updates this small
            optim="adamw_torch_8bit",
            optim_args="bf16_stochastic_round=True",
            per_device_train_batch_size=2,
            max_steps=4,
            max_length=256,
            logging_steps=1,
            save_strategy="no",
            gradient_checkpointing=False,  # hfpatch checkpoints the layers itself
            bf16=False,
            seed=0,
        ),
        train_dataset=load_dataset("json", data_files=data_file, split="train"),
        callbacks=[hfpatch.Callback(apply=True)],  # <- the one line
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    run(main, __doc__, "chat")
