"""TRL's SFT on the dry device: trainers_worker.py FOLDER. The last line of stdout is JSON."""

import json
import sys
import warnings
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import garbage  # noqa: E402
import steps  # noqa: E402
import torch  # noqa: E402

import hfpatch  # noqa: E402

GiB = 2**30
COMMON = {
    "per_device_train_batch_size": 1, "logging_steps": 1, "report_to": "none", "disable_tqdm": True,
    "save_strategy": "no",
}  # fmt: skip


def rows(count: int, tokens: int) -> list[dict]:
    ids = torch.randint(3, 90, (count, tokens)).tolist()
    return [{"input_ids": row, "labels": row} for row in ids]


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(100)} | {"<pad>": 100, "<eos>": 101, "<unk>": 102}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **names)


def model_of(layers: int, tokens: int):
    return steps.build(steps.Case("llama-3.1-8b", layers, rows=[(1, tokens)]))


def sft(folder: str) -> dict:
    """TRL's SFT with its default LoRA."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    args = SFTConfig(folder, max_length=4096, max_steps=3, dataset_num_proc=None, **COMMON)
    trainer = SFTTrainer(
        model=model_of(2, 4096), args=args, processing_class=tokenizer(),
        train_dataset=Dataset.from_list([{"input_ids": r["input_ids"]} for r in rows(3, 4096)]),
        peft_config=LoraConfig(), callbacks=[hfpatch.Callback(apply=True)],
    )  # fmt: skip
    trainer.train()
    return {"steps": trainer.state.global_step, "peak_gib": torch.cuda.max_memory_allocated() / GiB}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    garbage.answer_truly()
    torch.manual_seed(0)
    print("\n" + json.dumps(sft(sys.argv[1])))
