"""Seconds of a step on eight rows of up to 512 tokens, 879 of them real: padded in transformers,
padded in a stack that runs padding too, padded as the stack runs them now, and as the packed row
that a collator would make; ratios to the last. Of the processor, and by the clock.

    python profiles/padding/measure.py
"""

import dataclasses
import statistics
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hfpatch

LENGTHS = (512, 31, 80, 47, 64, 12, 101, 32)
STEPS = 7


def model(patched: bool):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096, hidden_size=512, intermediate_size=1536, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=4,
    )  # fmt: skip
    made = LlamaForCausalLM(config).train()
    if patched:
        hfpatch.apply(made)
    return made


def batches():
    T = max(LENGTHS)
    mask = (torch.arange(T) < torch.tensor(LENGTHS)[:, None]).long()
    ids = torch.randint(3, 4096, mask.shape)
    padded = {"input_ids": ids, "attention_mask": mask}
    padded["labels"] = ids.masked_fill(mask == 0, -100)
    padded["labels"][:, 0] = -100
    packed = {name: padded[name][mask.bool()][None] for name in ("input_ids", "labels")}
    packed["position_ids"] = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    return padded, packed


def main():
    torch.set_num_threads(1)
    stock, ours, (padded, packed) = model(False), model(True), batches()
    stack = ours.model
    traits = stack._hfpatch.traits
    before = dataclasses.replace(traits, unpads=False)
    rows = {
        "stock": (stock, traits, padded), "padded": (ours, before, padded),
        "now": (ours, traits, padded), "packed": (ours, traits, packed),
    }  # fmt: skip
    seconds = {name: [] for name in rows}
    for _ in range(STEPS + 1):  # in turn: the machine's load changes; the first is not counted
        for name, (one, stack._hfpatch.traits, batch) in rows.items():
            began = time.process_time(), time.perf_counter()
            one(**batch).loss.backward()
            ended = time.process_time(), time.perf_counter()
            seconds[name].append([b - a for a, b in zip(began, ended)])
            one.zero_grad()
    median = {
        name: [statistics.median(column) for column in zip(*found[1:])]
        for name, found in seconds.items()
    }
    for name, values in median.items():
        cpu, wall = (a / b for a, b in zip(values, median["packed"]))
        print(f"{name:7} {cpu:5.2f} x packed, by the clock {wall:5.2f}")


if __name__ == "__main__":
    main()
