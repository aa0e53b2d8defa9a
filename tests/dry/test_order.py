"""Every copy is ordered after what it conflicts with, and each wait that hfpatch puts between two
streams is needed: without it, the log shows a race.
"""

import ast

import pytest

from tests.dry import order
from tests.dry.conftest import ROOT

SMALL = {
    "hidden_size": 512, "intermediate_size": 1024, "vocab_size": 4096, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip
TILES = {"offload": "host", "every": 1, "plain": 0, "tile": 512, "save_attention": True}
WAYS = {
    "tiles": {"checkpointing": TILES},
    "tiles, all kept": {"checkpointing": TILES | {"keep": ("gate_up",)}},
    "attention again": {"checkpointing": TILES | {"save_attention": False}},
    "one tile": {"checkpointing": TILES | {"tile": 1 << 20}},
    "every second": {"checkpointing": {"offload": "host", "every": 2, "tile": 512}},
    "weights on the host": {
        "adapters": "lora", "checkpointing": {"frozen_weights": "host", "plain": 0, "tile": 512},
    },
    "packed": {"batch": "packed", "before": "batch in flight", "checkpointing": TILES},
    "partial": {"before": "partial", "checkpointing": TILES},
    "dropped": {"before": "dropped", "checkpointing": TILES},
    "handed over": {"before": "handed over", "checkpointing": TILES},
    "least": {"checkpointing": "least"},
    "auto": {},
}  # fmt: skip
SHORT = ("tiles, all kept",)


def logged(dry, path, way: str, **more) -> order.Found:
    case = {"layers": 3, "changes": SMALL, "rows": [(1, 4096)] * 3, "log": str(path)}
    ran = dry.run("llama-3.1-8b", **case, **WAYS[way], **more)
    assert ran.end == "ok" and not any("error" in step for step in ran.steps)
    return order.conflicts(path, "step 2")


@pytest.mark.parametrize(
    "way", [w if w in SHORT else pytest.param(w, marks=pytest.mark.long) for w in WAYS]
)
def test_every_copy_is_ordered(way, dry, table, tmp_path):
    found = logged(dry, tmp_path / "log", way)
    table("order", way, "conflicts", sum(found.seen.values()))
    table("order", way, "without an order", sum(found.races().values()), 0)
    assert found.races() == {}
    assert found.seen, "nothing was compared"


def waits() -> list[tuple[str, int, str]]:
    """(file, line, source) of each call that makes one stream wait for another."""
    found = []
    for folder in ("store", "layer", "context", "loss"):
        for path in sorted((ROOT / "hfpatch" / folder).glob("*.py")):
            source = path.read_text()
            for node in ast.walk(ast.parse(source)):
                called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
                if called and node.func.attr == "wait" and node.args:
                    text = " ".join(ast.get_source_segment(source, node).split())
                    found.append((f"{folder}/{path.name}", node.lineno, text))
    return found


# Where a wait shows that is not needed in a step of tiles: a way in which the race is seen.
SEEN_IN = {
    "device.wait(self.ready or device.mark(self.side), self.owner)": "partial",
    "device.wait(device.mark(self.user), self.owner)": "handed over",
    "self.device.wait(self.event, self.stream)": "handed over",
    "device.wait(event, device.side)": "packed",
    "device.wait(event, device.current())": "handed over",
}
# Needed, but not seen here: the allocator never gave these buffers memory that kernels had used
# after the slot's last use. tests/faults/test_copies.py shows the race on a CPU.
NOT_SEEN = ("transfers.device.wait(transfers.device.mark(), transfers.to_device)",)


@pytest.mark.long
@pytest.mark.parametrize("file, line, source", waits(), ids=lambda x: str(x).split("(")[0])
def test_each_wait_is_needed(file, line, source, dry, table, tmp_path):
    if source in NOT_SEEN:
        pytest.skip("the allocator hides what this wait is for")
    way = SEEN_IN.get(source, "tiles")
    before = logged(dry, tmp_path / "with", way)
    found = logged(dry, tmp_path / "without", way, without_wait=[file, line])
    new = found.unordered - before.unordered
    table(
        "each wait is needed", f"{file}: {source}", "conflicts without an order", sum(new.values())
    )
    assert new, "nothing races without it: is it redundant?"
