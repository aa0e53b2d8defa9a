"""Kernels are compiled and launched, and the host waits once a step, for each card."""

import pytest

LLAMA = "llama-3.1-8b"
CASES = {
    "dense": {"model": LLAMA},
    "dense, tiles": {"model": LLAMA, "checkpointing": "least"},
    "LoRA": {"model": LLAMA, "adapters": "lora"},
    "experts": {"model": "qwen3_moe"},
    "packed": {"model": LLAMA, "batch": "packed"},
    "padded": {"model": LLAMA, "batch": "padded", "rows": [(2, 4096)] * 4},
}
MOST = {"packed": 2, "padded": 2}  # the batch's own copy, and where documents start


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("sm", [80, 90, 100])  # a process for each
def test_the_host_waits_once(name, sm, dry, table):
    case = {"layers": 2, "rows": [(1, 8192)] * 4, "env": {"DRY_SM": sm}} | CASES[name]
    ran = dry.run(**case)
    assert ran.end == "ok" and sum(step["complaints"] for step in ran.steps) == 0
    step, case = ran.last, f"{name}, 2 layers, 8192 tokens"
    table("cards", case, "launches forward", step["launches_forward"], sm=sm)
    table("cards", case, "launches backward", step["launches_backward"], sm=sm)
    most = MOST.get(name, 1)
    table("cards", case, "host waits", step["waits"], most, sm=sm)
    assert step["waits"] == most, step["stacks"]
