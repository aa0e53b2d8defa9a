"""Trainers on the dry device, under program.py: trainers_worker.py sft|grpo|twice|again|verified FOLDER."""

import json
import sys

import steps
import torch

import hfpatch

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


def rollout(prompts: list, trainer) -> dict:
    """Completions of 1,024 tokens. What the model writes itself is garbage, and may be empty; whether
    all rows ended is garbage too."""
    ids = [[1, 2, 3]] * len(prompts)
    steps = iter(range(8))
    trainer.model._has_unfinished_sequences = lambda *_, **__: next(steps, None) is not None
    trainer.model.generate(torch.tensor(ids, device="cuda"), max_new_tokens=8, do_sample=False)
    completions = [[4] * 1024] * len(prompts)
    return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None}


def grpo(folder: str) -> dict:
    """TRL's GRPO."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    args = GRPOConfig(
        folder, max_steps=2, max_completion_length=1024, num_generations=2, bf16=True,
        **COMMON | {"per_device_train_batch_size": 2},
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=model_of(2, 4096), args=args, processing_class=tokenizer(), rollout_func=rollout,
        reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
        train_dataset=Dataset.from_list([{"prompt": "w1 w2 w3"}] * 4),
        callbacks=[hfpatch.Callback(apply=True)],
    )  # fmt: skip
    trainer.train()
    return {"steps": trainer.state.global_step, "peak_gib": torch.cuda.max_memory_allocated() / GiB}


def twice(folder: str) -> dict:
    """transformers' Trainer twice on one 8B model: short rows, then longer ones with a new AdamW."""
    from transformers import Trainer, TrainingArguments, default_data_collator

    model = model_of(32, 8192)
    hfpatch.apply(model)
    for tokens in (2048, 8192):
        args = TrainingArguments(folder, max_steps=4, gradient_accumulation_steps=2, **COMMON)
        trainer = Trainer(
            model=model, args=args, train_dataset=rows(8, tokens),
            data_collator=default_data_collator, callbacks=[hfpatch.Callback()],
        )  # fmt: skip
        torch.cuda.reset_peak_memory_stats()
        trainer.train()
        model.zero_grad()
    stats = torch.cuda.memory_stats()
    return {
        "steps": trainer.state.global_step, "peak_gib": torch.cuda.max_memory_allocated() / GiB,
        "retries": stats["num_alloc_retries"],
    }  # fmt: skip


def again(folder: str) -> dict:
    """A run whose memory runs out in its fourth step, where something else takes 6 GiB, and its next
    start, where the same happens."""
    from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator

    class Other(TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **_):
            steps.held_late(model, {}, state.global_step == 3)

    said = []
    torch.cuda.set_per_process_memory_fraction(24 * GiB / torch.cuda.mem_get_info()[1])
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        model, ours = model_of(8, 32768), hfpatch.Callback(apply=True)
        trainer = Trainer(
            model=model, args=TrainingArguments(folder, max_steps=6, optim="sgd", **COMMON),
            train_dataset=rows(6, 32768), data_collator=default_data_collator,
            callbacks=[ours, Other()],
        )  # fmt: skip
        ours.attach(trainer)
        try:
            trainer.train()
        except torch.OutOfMemoryError as error:
            said.append(str(error))
        ended = trainer.state.global_step
        model = ours = trainer = None
        steps.cleared()
    peak = torch.cuda.max_memory_allocated() / GiB
    assert len(said) == 1 and ended == 6 and peak > 0.7 * 24, (said, ended, peak)
    assert "hfpatch: out of memory in a step of 1 x 32,768 tokens" in said[0], said[0]
    return {"steps": ended, "peak_gib": peak}


def verified(folder: str) -> dict:
    """hfpatch.verify of a model whose frozen weights wait on the host, which trains before and after."""
    away = {"frozen_weights": "host"}
    case = steps.Case("llama-3.1-8b", 2, adapters="lora qv", checkpointing=away)
    model, ids = steps.build(case), torch.randint(1000, (1, 512), device="cuda")
    steps.patch(model, case)
    for _ in range(2):
        steps.loss_of(model, {"input_ids": ids, "labels": ids}).backward()
        frozen = [
            p for p in model.base_model.model.model.layers.parameters() if not p.requires_grad
        ]
        assert {p.device.type for p in frozen} == {"cpu"}
        found = hfpatch.verify(model, {"input_ids": ids})
    assert found.gradients == 8  # two for each of two projections of two layers
    return {"gradients": found.gradients}


if __name__ == "__main__":
    torch.manual_seed(0)
    kind, folder = sys.argv[1:]
    print("\n" + json.dumps(globals()[kind](folder)))
