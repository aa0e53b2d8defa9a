"""Device memory of a step of Qwen3-VL-8B's image tower alone, bf16, simulated at true size on fake
tensors: real code, no GPU.

    python profiles/tower/measure.py 10000 100000
"""

import sys

import torch
from torch import nn
from transformers import AutoModelForImageTextToText, Qwen3VLConfig

import hfpatch
from hfpatch.budget.policy import LEAST
from hfpatch.lab.simulate.simulator import simulate

SIDE = 64  # patches a side of a frame, 1,024 visual tokens


class Loss:
    def __init__(self, loss):
        self.loss = loss


class Tower(nn.Module):
    def __init__(self, visual, config):
        super().__init__()
        self.visual, self.config = visual, config

    def forward(self, input_ids, labels, pixel_values, grid):
        out = self.visual(pixel_values, grid_thw=grid)
        return Loss(out.pooler_output.sum() + sum(x.sum() for x in out.deepstack_features))


def made() -> nn.Module:
    config = Qwen3VLConfig()
    config.text_config.num_hidden_layers = 2
    config.vision_config.out_hidden_size = config.text_config.hidden_size
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    return model.train()


def measured(tokens: int, way: str):
    model = made()
    if way == "hfpatch":
        hfpatch.apply(model, checkpointing="host")
    elif way == "checkpointing":
        model.activation_checkpointing_enable({"use_reentrant": False})
    visual = model.model.visual
    frames = -(-tokens // (SIDE * SIDE // 4))
    width = visual.config.patch_size**2 * visual.config.temporal_patch_size * 3
    pixels = torch.zeros(frames * SIDE * SIDE, width, dtype=torch.bfloat16)
    grid = torch.tensor([[1, SIDE, SIDE]] * frames)
    return simulate(
        Tower(visual, model.config), 1, 8, inputs={"pixel_values": pixels, "grid": grid},
        policy=LEAST,
    )  # fmt: skip


def main():
    for way in ("hfpatch", "checkpointing", "stock"):
        for tokens in map(int, sys.argv[1:]):
            found = measured(tokens, way)
            beyond, host = found.beyond_bytes / 2**30, found.host_peak_bytes / 2**30
            print(
                f"{tokens:7,} visual tokens  {way:13}  {beyond:6.2f} GiB, host {host:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
