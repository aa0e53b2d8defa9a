"""Seconds of a step on eight rows of up to 512 tokens, 879 of them real: padded, as the stack runs
them now, and as the packed row that a collator would make; a ratio to the last.

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


def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096, hidden_size=512, intermediate_size=1536, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=4,
    )  # fmt: skip
    made = LlamaForCausalLM(config).train()
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
    ours, (padded, packed) = model(), batches()
    stack = ours.model
    traits = stack._hfpatch_traits
    before = dataclasses.replace(traits, unpads=False)
    rows = {"padded": (before, padded), "now": (traits, padded), "packed": (traits, packed)}
    seconds = {name: [] for name in rows}
    for _ in range(STEPS + 1):  # in turn: the machine's load changes; the first is not counted
        for name, (stack._hfpatch_traits, batch) in rows.items():
            began = time.process_time()
            ours(**batch).loss.backward()
            seconds[name].append(time.process_time() - began)
            ours.zero_grad()
    median = {name: statistics.median(found[1:]) for name, found in seconds.items()}
    for name, value in median.items():
        print(f"{name:7} {value / median['packed']:5.2f} x packed")


if __name__ == "__main__":
    main()
