"""The host's own work for a tile of a layer, counted in calls: the same on every machine."""

import sys

import tiny
import torch

import hfpatch

MOST = 1160  # functions called, in Python and from it, for a tile's forward and backward


def calls(tiles: int) -> int:
    """In one step of two layers in `tiles` tiles."""
    model = tiny.llama(num_hidden_layers=2)
    hfpatch.apply(model, checkpointing=hfpatch.Checkpointing(offload="gpu", tile=32 // tiles, plain=0), verdict=False)
    ids, count = torch.zeros(1, 32, dtype=torch.long), 0

    def counted(frame, event, _):
        nonlocal count
        count += event in ("call", "c_call")

    for follow in (None, counted):
        sys.setprofile(follow)
        try:
            model(input_ids=ids, labels=ids).loss.backward()
        finally:
            sys.setprofile(None)
    return count


def test_a_tile_costs_few_calls():
    assert (calls(16) - calls(4)) / 12 / 2 <= MOST
