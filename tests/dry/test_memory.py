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


# What waits for a policy that measures a step's bytes instead of planning them.
WAITS_FOR_MEASURED = {
    "32k, gradients kept": "the second micro-step takes 7% more than the line says, and the budget "
    "then falls to nothing",
}


@pytest.mark.parametrize("name", [n if n in SHORT else pytest.param(n, marks=long) for n in CASES])
def test_a_step_takes_what_it_announces(name, dry, table, request):
    if name in WAITS_FOR_MEASURED:
        request.applymarker(pytest.mark.xfail(reason=WAITS_FOR_MEASURED[name]))
    layers, tokens, case = CASES[name]
    ran = dry.run(MODEL, layers=layers, rows=[(1, tokens)] * 3, **case)
    assert ran.end == "ok" and not any("error" in step for step in ran.steps)
    planned = [step["planned_gib"] for step in ran.steps if "planned_gib" in step][-1]
    step = ran.last
    before, weights = step["allocated_before"] / GiB, ran.head["trained"] / GiB
    gradients = 0.0 if case.get("keep_gradients") else weights
    # The line speaks of what comes on top of weights, gradients and optimizer states. Where there
    # are no gradients yet, they grow while activations fall: the peak lies between these two.
    least, most = before + max(planned[0], gradients), before + planned[0] + gradients
    peak, reserved = step["allocated_peak"] / GiB, step["reserved_peak"] / GiB
    note = lambda *x: table("memory", name, *x)  # noqa: E731
    note("announced at least, GiB", least)
    note("peak, GiB", peak, 1.03 * most)
    note("reserved, GiB", reserved, 1.10 * max(s["allocated_peak"] for s in ran.steps) / GiB)
    note("announced on the host, GiB", planned[2])
    assert 0.97 * least <= peak <= 1.03 * most
    assert reserved <= 1.10 * max(s["allocated_peak"] for s in ran.steps) / GiB
    assert step["mallocs"] == step["retries"] == 0, "a third step of a length allocates nothing"


LENGTHS = (12594, 26843, 10259, 16550, 12594, 26843, 20000, 30000)


@long
@pytest.mark.xfail(reason="the budget falls with each length; a measured policy keeps it")
def test_the_budget_stays_over_lengths(dry, table):
    rows = [(1, tokens) for tokens in LENGTHS]
    ran = dry.run(MODEL, layers=32, rows=rows, optimizer="adamw", env={"DRY_MEM_MIB": 81008 * 2})
    assert ran.end == "ok" and not any("error" in step for step in ran.steps)
    budgets = [step["planned_gib"][1] for step in ran.steps if "planned_gib" in step]
    for i, budget in enumerate(budgets):
        table("lengths", f"line {i}", "budget, GiB", budget)
    assert min(budgets[2:]) >= 0.9 * budgets[1]
    assert sum(step["retries"] for step in ran.steps) == 0


def test_memory_runs_out_where_it_would_and_auto_fits(dry, table):
    """A card with room for weights, gradients and 3 GiB: everything kept does not fit, auto does."""
    case = {"layers": 4, "rows": [(1, 32768)] * 3, "env": {"DRY_MEM_MIB": 14000}}
    ran = dry.run(MODEL, **case, checkpointing={"offload": "gpu", "plain": 4})
    errors = [step["error"] for step in ran.steps if "error" in step]
    table("out of memory", "14,000 MiB, all kept", "errors in 3 steps", len(errors))
    assert len(errors) == 3 and all("out of memory" in error for error in errors)
    ran = dry.run(MODEL, **case)
    errors = [step["error"] for step in ran.steps if "error" in step]
    table("out of memory", "14,000 MiB, auto", "errors in 3 steps", len(errors), 0)
    assert ran.end == "ok" and not errors
