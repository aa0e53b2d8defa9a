"""Launches and host seconds of a layer, beside stock transformers, checkpointing and Liger."""

import pytest

MODEL = "llama-3.1-8b"
WAYS = ("hfpatch", "stock", "stock checkpointed", "liger", "liger checkpointed")
# Launches of a layer that keeps all, forward and backward. Backward takes 28 to 32, by the attention kernel.
LIMITS = {"hfpatch": (14, 32)}
TILE_LIMIT = 219  # of a layer and tile, forward and backward
TILES = {"LoRA on all linear layers": {"adapters": "lora"}, "experts": {"model": "qwen3_moe"}}


def per_layer(dry, tokens: int, **case) -> dict:
    """A twelfth of what twelve more layers add. Host seconds are the least of the last six steps."""
    found = []
    for layers in (2, 14):
        alone = "liger" in case.get("way", "")  # Liger patches the family for the whole process
        case = {"model": MODEL} | case
        ran = dry.run(layers=layers, rows=[(1, tokens)] * 8, alone=alone, **case)
        assert ran.end == "ok", ran.end
        seconds = [min(s["host_seconds"][i] for s in ran.steps[2:]) for i in (0, 1)]
        step = ran.last
        launches = step["launches_forward"], step["launches_backward"]
        found.append((*launches, *seconds))
    names = ("forward", "backward", "forward_ms", "backward_ms")
    values = [(more - less) / 12 for less, more in zip(*found)]
    return dict(zip(names, (values[0], values[1], 1e3 * values[2], 1e3 * values[3])))


@pytest.mark.long
@pytest.mark.parametrize("tokens", [4096, 8192])
def test_a_layer_that_keeps_all_launches_less_than_others(tokens, dry, table):
    found = {way: per_layer(dry, tokens, way=way) for way in WAYS}
    for way, values in found.items():
        limits = dict(zip(("forward", "backward"), LIMITS.get(way, ("", ""))))
        for name, value in values.items():
            case = f"{way}, {tokens} tokens"
            table("a layer", case, name.replace("_ms", ", host ms"), value, limits.get(name, ""))
    ours = found["hfpatch"]
    assert ours["forward"] <= LIMITS["hfpatch"][0] and ours["backward"] <= LIMITS["hfpatch"][1]
    total = {way: values["forward"] + values["backward"] for way, values in found.items()}
    assert all(total["hfpatch"] < total[way] for way in WAYS[1:]), total
    seconds = {way: v["forward_ms"] + v["backward_ms"] for way, v in found.items()}
    assert seconds["hfpatch"] < min(seconds["stock checkpointed"], seconds["liger checkpointed"])


@pytest.mark.long
@pytest.mark.parametrize("name", TILES)
def test_a_tile_of_a_layer(name, dry, table):
    settings = {"offload": "host", "every": 1, "plain": 0, "tile": 1024}
    tiles = {}
    for tokens in (4096, 8192):
        found = per_layer(dry, tokens, checkpointing=settings, **TILES[name])
        tiles[tokens] = found["forward"] + found["backward"]
    launches = (tiles[8192] - tiles[4096]) / 4
    table("a layer and tile", name, "launches", launches, TILE_LIMIT)
    assert launches <= TILE_LIMIT
