"""TRL's GRPOTrainer with long prompts and completions. The one argument that hfpatch adds is
marked.

    python -m hfpatch.examples.grpo MODEL PROMPTS.jsonl OUTPUT_DIR

PROMPTS.jsonl: {"prompt": ...} a line. Put a reward of your own in the place of `ends_itself`.

`python -m hfpatch.examples.grpo --small` runs it on a CPU, on a tiny model and made data.
"""

import os

# before torch is imported: threads that wait leave their core; fixed segments fragment
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

import hfpatch
from hfpatch.examples.made import run


def ends_itself(completions, **kwargs) -> list[float]:
    """1 for a completion that ends with a full stop."""
    return [float(str(text).endswith(".")) for text in completions]


def main(
    model_name: str, data_file: str, output_dir: str, max_completion_length: int = 16384
) -> GRPOTrainer:
    trainer = GRPOTrainer(
        model=model_name,
        reward_funcs=ends_itself,
        args=GRPOConfig(
            output_dir=output_dir,
            model_init_kwargs={"dtype": "bfloat16"},
            learning_rate=1e-6,
            # rounds at random: to the nearest, bf16 weights would lose updates this small
            optim="adamw_torch_8bit",
            optim_args="bf16_stochastic_round=True",
            per_device_train_batch_size=1,
            gradient_accumulation_steps=8,
            num_generations=8,
            max_completion_length=max_completion_length,
            max_steps=2,
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
    run(main, __doc__, "prompts", max_completion_length=8)
