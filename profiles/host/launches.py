"""Kernels that a step launches: for a tile of 8,192 tokens of hfpatch, and for a row of as many
under transformers' checkpointing.

    python -W ignore profiles/host/launches.py qwen3_5_text > profiles/host/launches.csv

Counted are operations that PyTorch dispatches in a step of a small model of each family, on fake
tensors; not views, empty tensors and questions (of a device, of a dtype), which launch nothing; a
fused one counts once, as it launches one kernel on a GPU. Loops over chunks run as they are. A tile
is what one more of them adds to a row, of 16,384 tokens and of 32,768.
"""

import contextlib
import csv
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch

from hfpatch.budget.policy import LEAST
from hfpatch.decoder.small_instance import scaled_config
from hfpatch.lab.simulate import simulator
from hfpatch.lab.simulate.follow import Follower
from hfpatch.lab.simulate.implementations import build, config_class, prepare

sys.path.append(str(Path(__file__).resolve().parents[2]))  # for scripts

from scripts.families import family_config

TILE = 8192
LAYERS = {"qwen3_5_text": 4, "nemotron_h": 4, "granitemoehybrid": 4, "lfm2": 3}


NONE = "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view"


def launches_one(func) -> bool:
    """Whether an operation of torch takes a kernel."""
    if getattr(func, "is_view", False) or func.namespace == "prim":
        return False
    of_tensors = any("Tensor" in str(r.type) for r in func._schema.returns)
    return of_tensors and func._schema.name.partition("::")[2] not in NONE


class Launches(Follower):
    """What operations take a kernel, by phase."""

    found: dict = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if launches_one(func):
            self.found[self.phase] = self.found.get(self.phase, 0) + self.times
        return super().__torch_dispatch__(func, types, args, kwargs)


def launches(model, tokens: int, policy=None) -> tuple[int, int]:
    """Of one step's forward and backward."""
    Launches.found = {}
    with mock.patch.object(simulator, "scans_by_blocks", contextlib.nullcontext):
        simulator.simulate(model, 1, tokens, policy=policy, follower=Launches)
    return Launches.found["forward"], Launches.found["backward"]


def small(family: str):
    config = family_config(family)
    kind = config.pop("model_type")
    made = scaled_config(config_class(kind)(**config), LAYERS[family]).to_dict()
    return build(made, torch.bfloat16)


def main(families) -> None:
    table = csv.writer(sys.stdout)
    table.writerow(["family", "what", "tokens", "forward", "backward"])
    for family in families:
        row = launches(prepare(small(family), "hf-ckpt"), TILE)
        table.writerow([family, "a row, transformers' checkpointing", TILE, *row])
        ours, policy = prepare(small(family), "hfpatch"), replace(LEAST, offload="gpu", tile=TILE)
        for tokens in (2 * TILE, 4 * TILE):
            few, many = (launches(ours, n, policy) for n in (tokens - TILE, tokens))
            table.writerow([family, "a tile", tokens, *(b - a for a, b in zip(few, many))])
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:] or LAYERS)
