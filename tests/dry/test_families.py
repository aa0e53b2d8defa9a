"""Every family of docs/models.md trains at its true width: nothing is refused, the host
waits once, and memory stays where it was.
"""

import pytest
import transformers

from scripts.families import FAMILIES

GiB = 2**30
LAYERS, TOKENS, STEPS = 4, 4096, 3
SHORT = ("qwen3_moe", "qwen3_5_text")  # experts, and a hybrid through time
# What meaningless numbers cause: these families choose tokens by comparing on the device.
GARBAGE = {"qwen4_exp_text": "its indexer chooses other tokens in the second forward"}
# More waits than hfpatch's one, with where they come from: all are transformers' own.
WAITS = {
    "qwen3_next": 2, "qwen3_5_text": 2, "qwen3_5_moe_text": 2, "olmo_hybrid": 2, "kimi_linear": 2,
    "falcon_h1": 2, "granitemoehybrid": 2, "nemotron_h": 2, "bamba": 2, "zamba2": 2, "mamba2": 2,
    "lfm2": 2, "lfm2_moe": 2, "lfm3": 2,
    "bailing_hybrid": 2,  # create_recurrent_attention_mask asks whether the mask is full
    "minimax": 6,  # the same, and its decay constants come from the host
    "glm5_next": 5,  # constants made on the host in each forward
    # The same, and hfpatch samples the chunked mask's function in each forward (context/masks.py).
    "llama4_text": 16, "llama4": 24,
}  # fmt: skip
# The plain code of these mixers in transformers 5.17 takes 64 MiB a token and more.
PLAIN = ("falcon_h1", "granitemoehybrid", "bamba", "mamba2")
# Their towers step too. Gemma 3's default config has more tokens an image than patches.
TOWERS = {"llava": {}, "gemma3": {"mm_tokens_per_image": 49}}


@pytest.mark.parametrize(
    "family", [f if f in SHORT else pytest.param(f, marks=pytest.mark.long) for f in FAMILIES]
)
def test_a_family_trains(family, dry, table):
    if family in GARBAGE:
        pytest.skip(GARBAGE[family])
    changes, before = TOWERS.get(family, {}), "image" if family in TOWERS else ""
    few = family in PLAIN and transformers.__version__.startswith("5.17.")
    rows = [(1, 512 if few else TOKENS)] * STEPS
    ran = dry.run(family, layers=LAYERS, rows=rows, changes=changes, before=before)
    if "Unrecognized model identifier" in ran.end or "should have a `model_type`" in ran.end:
        pytest.skip("this transformers does not have the family")
    assert ran.end == "ok"
    assert sum(step["complaints"] for step in ran.steps) == 0
    step = ran.last
    assert "error" not in step and step["launches_forward"] and step["launches_backward"]
    waits = step["waits"]
    took = step["allocated_peak"] - step["allocated_before"]
    note = lambda *x: table("a family trains", family, *x)  # noqa: E731
    note("weights, GiB", ran.head["parameters"] / GiB)
    note("peak above weights, GiB", took / GiB)
    note("launches forward", step["launches_forward"])
    note("launches backward", step["launches_backward"])
    note("host waits", waits, WAITS.get(family, 1))
    assert waits <= WAITS.get(family, 1), step["stacks"]
    assert step["retries"] == step["ooms"] == 0
