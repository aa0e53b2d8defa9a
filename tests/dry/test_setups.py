"""What people train, at the width of an 8B model: each way runs, and fits."""

import pytest

GiB = 2**30
MODEL, LAYERS = "llama-3.1-8b", 4
HOST = {"offload": "host", "every": 1, "plain": 0, "tile": 2048}
AWAY = {"frozen_weights": "host", "plain": 0}
SETUPS = {
    "full, AdamW": {"optimizer": "adamw"},
    "full, 8-bit AdamW": {"optimizer": "adamw8bit"},
    "micro-steps": {"micro_steps": 2, "optimizer": "adamw"},
    "LoRA": {"adapters": "lora", "optimizer": "adamw"},
    "LoRA, tiles on the host": {"adapters": "lora", "checkpointing": HOST},
    "LoRA of q and v": {"adapters": "lora qv", "optimizer": "adamw"},
    "LoRA, dropout": {"adapters": "lora dropout"},
    "LoRA, float32 adapters": {"adapters": "lora float32"},
    "QLoRA": {"adapters": "lora", "four_bits": True},
    "QLoRA of 70B on 24 GiB": {
        "model": "llama-3.1-70b", "layers": 80, "rows": [(1, 8192)] * 3, "adapters": "lora",
        "four_bits": True, "checkpointing": AWAY, "card": 24, "env": {"DRY_MEM_MIB": 200000},
    },
    "float8 by rows": {"float8": True},
    "FSDP2 over one rank": {"fsdp2": True, "alone": True},
    "weights on the host": {"adapters": "lora", "checkpointing": AWAY},
    "LoRA on experts": {"model": "qwen3_moe", "adapters": "lora experts"},
    "checkpoints on a disk": {"checkpointing": HOST | {"offload": "DISK"}},
    "packed": {"batch": "packed"},
    "padded": {"batch": "padded", "rows": [(3, 4096)] * 5},
    "packed, tiles on the host": {"batch": "packed", "checkpointing": HOST},
}  # fmt: skip
SHORT = ("LoRA",)
MORE_WAITS = {
    # Two for each layer: its parameters become views of host memory again, which the caller may
    # write to, so the copy from there must have ended. It began a layer earlier.
    "weights on the host": 2 * LAYERS + 1,
    "QLoRA of 70B on 24 GiB": 2 * 80 + 1,
    "packed": 2,  # the batch's own copy, and where documents start
    "packed, tiles on the host": 2,
    "padded": 2,
    "checkpoints on a disk": 10**6,  # files are read and written by the host
}


@pytest.mark.parametrize(
    "setup", [s if s in SHORT else pytest.param(s, marks=pytest.mark.long) for s in SETUPS]
)
def test_a_setup_trains(setup, dry, table, tmp_path):
    case = {"model": MODEL, "layers": LAYERS, "rows": [(1, 8192)] * 5} | SETUPS[setup]
    if "disk" in setup:
        case["checkpointing"] = case["checkpointing"] | {"offload": str(tmp_path)}
    ran = dry.run(**case)
    assert ran.end == "ok"
    assert sum(step["complaints"] for step in ran.steps) == 0
    step = ran.last
    assert "error" not in step and step["retries"] == step["ooms"] == 0
    waits, limit = step["waits"], MORE_WAITS.get(setup, 1)
    if case.get("micro_steps"):
        limit *= case["micro_steps"]
    note = lambda *x: table("a setup trains", setup, *x)  # noqa: E731
    note("peak, GiB", step["allocated_peak"] / GiB, case.get("card", ""))
    note("launches", step["launches_forward"] + step["launches_backward"])
    note("host waits", waits, limit)
    assert waits <= limit, step["stacks"]
    assert step["allocated_peak"] <= case.get("card", 80) * GiB
    assert step["mallocs"] == 0, "a step at a settled policy allocates nothing"
