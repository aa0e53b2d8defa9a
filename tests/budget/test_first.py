"""The policy of a first step: sure to be little, and the same whatever memory is free."""

import pytest

from hfpatch.budget.first import first_policy, first_tile
from hfpatch.budget.limits import GiB
from hfpatch.budget.policy import Checkpointing


def first(tokens=131072, settings=None, **sizes):
    """Of Qwen3.5-9B: the input of each layer is 1 GiB."""
    given = {"width": 4096, "layers": 32, "card": 80 * GiB} | sizes
    return first_policy(Checkpointing(**settings or {}), tokens=tokens, **given)


def test_inputs_and_attention_go_to_the_host_in_tiles_by_length_width_and_card():
    for free in (None, GiB, 70 * GiB):
        found = first(free=free)
        assert (found.offload, found.every, found.saves_attention) == ("host", 1, True)
        assert (found.tile, found.plain, found.keep) == (8192, 0, 0)
    tiles = [first_tile(tokens, 4096, 80 * GiB) for tokens in (512, 8192, 8193, 32768, 32769)]
    assert tiles == [8192, 8192, 4096, 4096, 8192]
    assert first_tile(131072, 8192, 24 * GiB) == 2048  # a 70B model
    assert first_tile(131072, 1 << 20, 24 * GiB) == 1024 < first_tile(131072, 4096, None) == 8192


def test_a_host_that_is_too_small_is_said():
    # beside them lse, and the gradient of one layer's input, may wait
    inputs, one = 32 * GiB / 0.9, GiB / 0.9
    assert first(host=int(2 * inputs + 1.51 * one)).saves_attention
    assert not first(host=int(2 * inputs + 1.49 * one)).saves_attention
    assert not first(host=int(inputs + 1.01 * one)).saves_attention
    with pytest.raises(
        ValueError, match="^hfpatch: checkpoints need 7.0 GiB of host memory, and 3.6"
    ):
        first(host=4 * GiB)
    with pytest.raises(ValueError, match="pass a directory as offload"):
        first(settings={"keep": "attention"}, host=int(1.5 * inputs))
    assert first(host=32 * GiB, layers=7).saves_attention  # the others keep nothing
    for settings in ({"offload": "gpu"}, {"offload": "/tmp"}, {"every": 4}):
        first(settings=settings, host=16 * GiB)
