"""The host's own work for a layer and for a tile of one, counted in calls: the same on every
machine.
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest
import tiny
import torch

import hfpatch

pytestmark = pytest.mark.usefixtures("exact_loss")

MOST_OF_A_TILE = 1380  # functions called, in Python and from it, for a tile's forward and backward
# for a layer in one tile, looked through for adapters where PEFT is imported
MOST_OF_A_LAYER = 2350


def calls(layers: int, tiles: int) -> int:
    """In one step of that many layers in `tiles` tiles."""
    model = tiny.llama(num_hidden_layers=layers)
    hfpatch.apply(
        model, checkpointing=hfpatch.Checkpointing(offload="gpu", tile=32 // tiles, plain=0)
    )
    ids, count = torch.zeros(1, 32, dtype=torch.long), 0

    def counted(frame, event, _):
        nonlocal count
        count += event in ("call", "c_call")

    for follow in (None, None, counted):  # what is found of a layer stands behind its second step
        sys.setprofile(follow)
        try:
            model(input_ids=ids, labels=ids).loss.backward()
        finally:
            sys.setprofile(None)
    return count


@pytest.fixture(scope="module")
def counted():
    """Counted in a process of its own: what other tests left in this one (hooks, patched
    constructors) would count.
    """
    paths = [str(pathlib.Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, __file__], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_tile_costs_few_calls(counted):
    assert counted["tile"] <= MOST_OF_A_TILE


@pytest.mark.skipif(
    sys.version_info < (3, 11), reason="counted on Python 3.11, whose calls are fewer"
)
def test_a_layer_in_one_tile_costs_few_calls(counted):
    assert counted["layer"] <= MOST_OF_A_LAYER


if __name__ == "__main__":
    tile = (calls(2, 16) - calls(2, 4)) / 12 / 2
    print(json.dumps({"tile": tile, "layer": (calls(4, 1) - calls(2, 1)) / 2}))
