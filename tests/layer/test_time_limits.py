"""Mixers in tiles through time at their limits: a tile that is no multiple of the chunk, a document
that memory does not hold. What cannot go in tiles at all is in test_time.py.
"""

import copy

import families
import pytest
import tiny
import torch
from numerics import lifted

import hfpatch
from hfpatch.decoder.find import find_decoder
from hfpatch.layer.time_tiles import TimeTiles
from tests.decoder.test_families import batch, step
from tests.layer.test_time import (
    TILE,
    TOKENS,
    assert_same,
    lengths,
    patched,
    timed_mixers,
)

pytestmark = tiny.not_before_transformers((5, 16), "hands mixers their states by other ways")
LONG = 500


@pytest.mark.parametrize("tile", [100, 300], ids=str)
def test_a_tile_is_made_a_multiple_of_the_chunk(tile):
    """Of 96 tokens here and of 64: to 192, up where it is less and down where it is more."""
    stock = families.small_model("bamba")
    for layer in find_decoder(stock).layers:
        for module in layer.modules():
            if hasattr(module, "chunk_size"):
                module.chunk_size = 96
    ours, _ = patched(stock, hfpatch.Checkpointing(offload="host", tile=tile))
    assert timed_mixers(ours)
    runs = lengths(ours)
    with lifted():
        assert_same(step(ours, batch(LONG))[2], step(stock, batch(LONG))[2], 1e-12)
    assert max(runs) == 192 and 500 - 2 * 192 in runs


@pytest.mark.parametrize("at", [2, 14])  # in forward, in backward
def test_a_step_that_memory_does_not_hold(at, monkeypatch):
    """The device's own error comes, whichever tile meets it, and the next step is exact."""
    stock = families.small_model("qwen3_5_text")
    ours, _ = patched(stock, TILE)
    calls, short, run = [], [True], TimeTiles._run

    def full(*args):
        calls.append(args[1])
        if short and len(calls) > at:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return run(*args)

    monkeypatch.setattr(TimeTiles, "_run", full)
    given = batch(TOKENS)
    with pytest.raises(torch.OutOfMemoryError, match="^CUDA out of memory"):
        step(ours, given)
    short.clear(), calls.clear()
    with lifted():
        assert_same(step(ours, given)[2], step(copy.deepcopy(stock), given)[2], 1e-12)
    assert calls and all(type(c).__name__ in ("LayerAsMixer", "Mixer") for c in calls)
