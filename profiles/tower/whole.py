"""Memory of a step of the whole Qwen3-VL-8B, tower and text trained, on one row with a video's frames
in it, bf16, simulated at true size on fake tensors: real code, no GPU.

    python profiles/tower/whole.py 110000 100000
"""

import sys
from dataclasses import replace

import torch

import hfpatch
from hfpatch.budget.policy import LEAST
from hfpatch.lab.models import config_of, with_images
from hfpatch.lab.simulate.simulator import simulate

SIDE = 64  # patches a side of a frame, 1,024 visual tokens
FRAME = SIDE * SIDE // 4


def row(config, tokens: int, visual: int) -> dict:
    """Frames with a token of text between them, and text behind."""
    frames, vision = -(-visual // FRAME), config.vision_config
    ids = torch.full((1, tokens), 7)
    for start in range(1, frames * (FRAME + 1), FRAME + 1):
        ids[0, start : start + FRAME] = config.image_token_id
    seen = ids == config.image_token_id
    assert seen.sum() == frames * FRAME, "the row is too short for its frames"
    width = vision.patch_size**2 * vision.temporal_patch_size * 3
    return {
        "ids": ids,
        "labels": ids.masked_fill(seen, -100),
        "inputs": {
            "pixel_values": torch.zeros(frames * SIDE * SIDE, width, dtype=torch.bfloat16),
            "image_grid_thw": torch.tensor([[1, SIDE, SIDE]] * frames),
            "mm_token_type_ids": seen.long(),
            "position_ids": torch.arange(tokens).repeat(3, 1, 1),
        },
    }


def main(tokens: int, visual: int):
    model = with_images(config_of("Qwen/Qwen3-VL-8B")[1]).train()
    hfpatch.apply(model, checkpointing="host")
    policy = replace(LEAST, tile=4096)
    found = simulate(model, 1, tokens, policy=policy, **row(model.config, tokens, visual))
    assert not found.whole, found.whole
    gib = {n: f"{v / 2**30:.1f}" for n, v in found.categories.items()}
    peak, beyond, host = found.peak_bytes, found.beyond_bytes, found.host_peak_bytes
    print(
        f"{tokens:,} tokens, {visual:,} visual: peak {peak / 2**30:.1f} GiB, beyond parameters and"
    )
    print(
        f"gradients {beyond / 2**30:.1f} then, {found.most_beyond_bytes / 2**30:.1f} at most, host"
    )
    print(f"{host / 2**30:.1f}; at the peak, in the {found.peak_phase}: {gib}", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
