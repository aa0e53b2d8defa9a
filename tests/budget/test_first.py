"""The policy of a first step: sure to be little, and the same whatever memory is free."""

import pytest

from hfpatch.budget.first import first_policy, first_tile
from hfpatch.budget.policy import Checkpointing

GiB = 1 << 30


def first(rows=131072, settings=None, **sizes):
    """Of Qwen3.5-9B: the input of each layer is 1 GiB, its gradients in float32 0.8 GiB."""
    given = {"width": 4096, "layers": 32, "sums": 870 << 20, "card": 80 * GiB} | sizes
    return first_policy(Checkpointing(**settings or {}), rows=rows, **given)


def test_inputs_and_attention_go_to_the_host_in_tiles_by_length_width_and_card():
    for free in (None, GiB, 70 * GiB):
        found = first(free=free)
        assert (found.offload, found.every, found.save_attention) == ("host", 1, True)
        assert (found.tile, found.plain, found.keep, found.chain) == (8192, 0, (), 0)
    tiles = [first_tile(rows, 4096, 80 * GiB) for rows in (512, 8192, 8193, 32768, 32769)]
    assert tiles == [8192, 8192, 4096, 4096, 8192]
    assert first_tile(131072, 8192, 24 * GiB) == 2048  # a 70B model
    assert first_tile(131072, 1 << 20, 24 * GiB) == 1024
    assert first_tile(131072, 4096, None) == 8192


def test_a_host_that_is_too_small_is_said():
    # beside them the gradient of one layer's input waits, unless attention runs all heads at once
    inputs, one = 32 * GiB / 0.9, GiB / 0.9
    assert first(host=int(2 * inputs + 1.01 * one)).save_attention
    assert not first(host=int(2 * inputs + 0.99 * one)).save_attention
    assert first(host=int(2 * inputs + 0.99 * one), free=70 * GiB).save_attention
    assert not first(host=int(inputs + 1.01 * one)).save_attention
    with pytest.raises(
        ValueError, match="^hfpatch: checkpoints need 65.0 GiB of host memory, and 28.8"
    ):
        first(host=32 * GiB)
    with pytest.raises(ValueError, match="a directory as offload saves all"):
        first(settings={"save_attention": True}, host=int(1.5 * inputs))
    assert first(host=32 * GiB, layers=7).save_attention  # the others keep nothing
    for settings in ({"offload": "gpu"}, {"offload": "/tmp"}, {"every": 4}):
        first(settings=settings, host=16 * GiB)


def test_heads_go_at_once_where_twelve_tensors_have_room():
    assert first(free=13 * GiB).wide and not first(free=11 * GiB).wide
    assert not first(free=None).wide and not first(settings={"aim": "least"}, free=70 * GiB).wide


def test_layers_without_attention_go_through_time_where_that_saves_more_than_their_sums():
    """A quarter of the card holds the mixers' tile."""
    assert first(chains=True, card=None).chain == 1
    small = first(chains=True, card=8 * GiB)
    assert (small.chain, small.time_tile) == (1, 2048)
    large = first(chains=True)
    assert (large.chain, large.time_tile) == (1, 8192)
    # in small tiles, where the host has no room for all inputs
    short = first(chains=True, card=320 * GiB, host=16 * GiB)
    assert (short.chain, short.time_tile) == (1, 2048)
    # a short row: all sums of a layer at once are more than what that spares
    assert first(2048, chains=True, card=8 * GiB).chain == 0
    assert first(chains=True, settings={"every": 1}).chain == 0


@pytest.mark.parametrize("rows, tile", [(1000, 1024), (32768, 1024), (65536, 2048), (131072, 4096)])
def test_the_least_is_a_small_tile(rows, tile):
    """What a tile takes is 1% of what the layer's own tensors of all tokens take."""
    assert first(rows=rows, settings={"aim": "least"}).tile == tile


def test_the_least_of_layers_that_mix_along_time():
    least = first(settings={"aim": "least"}, chains=True)
    assert (least.tile, least.time_tile, least.chain) == (2048, 0, 1)
