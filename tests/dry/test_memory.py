"""A step takes the memory that its own line announces, and runs out of it with our sentence."""

import pytest

GiB = 2**30
MODEL = "llama-3.1-8b"
long = pytest.mark.long
HOST = {"offload": "host", "every": 1, "plain": 0, "tile": 8192}
# (layers, tokens, case): the lengths at full depth in the long run.
CASES = {
    "4 layers, 8k": (4, 8192, {}),
    "4 layers, 131k": (4, 131072, {}),
    "8k": (32, 8192, {}),
    "32k": (32, 32768, {}),
    "131k": (32, 131072, {}),
    "131k, host": (32, 131072, {"checkpointing": HOST}),
    "131k, least": (32, 131072, {"checkpointing": "least"}),
    "8k, 8-bit AdamW": (32, 8192, {"optimizer": "adamw8bit"}),
    "16 layers, 32k, AdamW": (16, 32768, {"optimizer": "adamw"}),
    "32k, gradients kept": (32, 32768, {"keep_gradients": True, "micro_steps": 2}),
}
SHORT = ("4 layers, 8k", "4 layers, 131k")


@pytest.mark.parametrize(
    "name", [n if n in SHORT else pytest.param(n, marks=long) for n in CASES]
)
def test_a_step_takes_what_it_announces(name, dry, table):
    layers, tokens, case = CASES[name]
    ran = dry.run(MODEL, layers=layers, rows=[(1, tokens)] * 3, **case)
    assert ran.end == "ok" and not any("error" in step for step in ran.steps)
    planned = [step["planned_gib"] for step in ran.steps if "planned_gib" in step][-1]
    step = ran.last
    kept = step["allocated_before"] - ran.head["parameters"] >= ran.head["trained"]
    gradients = 0 if case.get("keep_gradients") and kept else ran.head["trained"]
    # The line speaks of what comes on top of weights, gradients and optimizer states.
    announced = (step["allocated_before"] + gradients) / GiB + planned[0]
    peak = max(step["allocated_peak"] for step in ran.steps) / GiB
    reserved = max(step["reserved_peak"] for step in ran.steps) / GiB
    note = lambda *x: table("memory", name, *x)  # noqa: E731
    note("announced, GiB", announced)
    note("peak, GiB", peak, 1.03 * announced)
    note("reserved, GiB", reserved, 1.10 * peak)
    note("planned on the host, GiB", planned[2])
    assert peak <= 1.03 * announced
    assert peak >= 0.93 * announced, "much less than announced: a faster policy would have fitted"
    assert reserved <= 1.10 * peak
    assert step["mallocs"] == step["retries"] == 0
