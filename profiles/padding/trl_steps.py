"""Seconds and matmul FLOPs of real steps of TRL's GRPO and DPO trainers on eight rows of up to 512
tokens, 879 of them real: stock, patched, and as ratios to the same passes over the packed row of
these tokens, by a patched model without TRL. GRPO's completions are given (rollout_func): no time
is sampling's. The products of one more step are counted as the profiler saw them, attention's not.

    python profiles/padding/trl_steps.py
"""

import logging
import os
import statistics
import tempfile
import time
import warnings

import torch
import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback

import hfpatch

LENGTHS = (512, 31, 80, 47, 64, 12, 101, 32)
PROMPT, VOCAB, STEPS, ROUNDS = 8, 4096, 2, 2


def model(patched: bool = False, folder: str | None = None):
    """folder: where it is loaded from, as DPO loads the same one again for its reference."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=512, intermediate_size=1536, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=4, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    made = LlamaForCausalLM(config).train()
    if folder is not None:
        made.save_pretrained(folder)
        made = LlamaForCausalLM.from_pretrained(folder).train()
    if patched:
        hfpatch.apply(made)
    return made


def tokenizer():
    """A special token is found inside words too: "t1" would cut "t123" in two."""
    special = {"<pad>": 0, "<eos>": 1, "<unk>": 2}
    names = special | {f"t{i}": i for i in range(3, VOCAB)}
    inner = Tokenizer(models.WordLevel(names, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def words(n: int, seed: int) -> list[int]:
    made = torch.randint(3, VOCAB, (n,), generator=torch.Generator().manual_seed(seed))
    return made.tolist()


def text(ids) -> str:
    return " ".join(f"t{i}" for i in ids)


PROMPTS = [words(PROMPT, 0)] * len(LENGTHS)
COMPLETIONS = [words(n - PROMPT, i + 1) for i, n in enumerate(LENGTHS)]


def products(seen: profile) -> int:
    """FLOPs of the products over tokens: their weights have two dimensions."""
    count = 0
    for row in seen.key_averages(group_by_input_shape=True):
        if row.key in ("aten::mm", "aten::addmm", "aten::addmm_"):
            (m, k), (_, n) = [x for x in row.input_shapes if x][row.key != "aten::mm" :][:2]
            count += 2 * m * k * n * row.count
    return count


class Clock(TrainerCallback):
    """Seconds of each step, of the processor and by the clock; FLOPs of the first."""

    def __init__(self):
        self.steps, self.flops = [], None

    def on_step_begin(self, *args, **kwargs):
        self.seen = None
        if self.flops is None:
            self.seen = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
            self.seen.start()
        self.began = time.process_time(), time.perf_counter()

    def on_step_end(self, *args, **kwargs):
        ended = time.process_time(), time.perf_counter()
        if self.seen is None:
            self.steps.append([b - a for a, b in zip(self.began, ended)])
        else:
            self.seen.stop()
            self.flops = products(self.seen)


def settings(folder: str) -> dict:
    return {
        "output_dir": folder, "max_steps": STEPS + 1, "use_cpu": True, "bf16": False, "optim": "sgd",
        "gradient_checkpointing": False, "report_to": [], "disable_tqdm": True, "save_strategy": "no",
        "logging_strategy": "no", "dataloader_pin_memory": False,
        "train_sampling_strategy": "sequential",
    }  # fmt: skip


def grpo(folder: str, made) -> Clock:
    def rollout(prompts, trainer):
        zeros = [[0.0] * len(c) for c in COMPLETIONS]
        return {"prompt_ids": PROMPTS, "completion_ids": COMPLETIONS, "logprobs": zeros}

    args = trl.GRPOConfig(
        **settings(folder), per_device_train_batch_size=8, num_generations=8, beta=0.0,
        max_completion_length=512,
    )  # fmt: skip
    clock, rows = Clock(), Dataset.from_dict({"prompt": [text(PROMPTS[0])] * 64})
    reward = lambda completions, **kwargs: [float(len(c) % 7) for c in completions]  # noqa: E731
    trainer = trl.GRPOTrainer(
        made, reward_funcs=reward, args=args, train_dataset=rows, processing_class=tokenizer(),
        rollout_func=rollout, callbacks=[clock],
    )  # fmt: skip
    trainer.train()
    return clock


def dpo(folder: str, made) -> Clock:
    args = trl.DPOConfig(**settings(folder), per_device_train_batch_size=4, max_length=None)
    one = [text(c[:-1]) for c in COMPLETIONS]  # TRL puts the last token, that ends a row, behind
    columns = {"prompt": [text(PROMPTS[0]) + " "] * 4, "chosen": one[:4], "rejected": one[4:]}
    clock, rows = Clock(), Dataset.from_dict({name: 16 * of for name, of in columns.items()})
    trainer = trl.DPOTrainer(
        made, args=args, train_dataset=rows, processing_class=tokenizer(), callbacks=[clock]
    )
    trainer.train()
    return clock


def packed(made, reference: bool) -> Clock:
    """The passes of a step over one row: the reference model's without a graph, where there is one,
    then forward and backward; and the optimizer's step.
    """
    clock, optimizer = Clock(), torch.optim.SGD(made.parameters(), lr=1e-6)
    ids = torch.tensor([[i for c in COMPLETIONS for i in (*PROMPTS[0], *c)]])
    labels = torch.tensor([[i for c in COMPLETIONS for i in (*([-100] * PROMPT), *c)]])
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    for _ in range(STEPS + 1):
        clock.on_step_begin()
        if reference:
            with torch.no_grad():
                made(input_ids=ids, position_ids=positions, labels=labels)
        made(input_ids=ids, position_ids=positions, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        clock.on_step_end()
    return clock


def main():
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    for name, run in (("GRPO", grpo), ("DPO", dpo)):
        found, flops = {"stock": [], "patched": [], "packed": []}, {}
        for _ in range(ROUNDS):  # in turn: the machine's load changes
            with tempfile.TemporaryDirectory() as folder:
                clocks = {
                    "stock": run(folder, model(False, folder)),
                    "patched": run(folder, model(True, folder)),
                    "packed": packed(model(True), name == "DPO"),
                }
            for way, clock in clocks.items():
                found[way] += clock.steps
                flops[way] = clock.flops
        median = {way: [statistics.median(x) for x in zip(*rows)] for way, rows in found.items()}
        for way, values in median.items():
            cpu, wall = (a / b for a, b in zip(values, median["packed"]))
            print(
                f"{name:5} {way:8} {values[0]:6.2f} s of the processor, {cpu:5.2f} x packed; "
                f"by the clock {values[1]:6.2f} s, {wall:5.2f} x; "
                f"{flops[way] / 1e9:7.1f} GFLOPs, {flops[way] / flops['packed']:5.3f} x",
                flush=True,
            )


if __name__ == "__main__":
    main()
