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
HYBRID = SMALL | {
    "linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}  # fmt: skip
MAMBA = SMALL | {"mamba_d_ssm": 1024, "mamba_n_heads": 16, "mamba_d_head": 64, "mamba_d_state": 64}
TILES = {"offload": "host", "every": 1, "plain": 0, "tile": 512}
KEPT = TILES | {"keep": "gate_up"}
ONE = TILES | {"tile": 1 << 20}
DISK = TILES | {"offload": "DISK"}
AWAY = {"frozen_weights": "host", "plain": 0, "tile": 512}
LENGTHS = [(1, 4096), (1, 2050), (1, 5000)]
WAYS = {
    "tiles": {"checkpointing": TILES},
    "tiles, all kept": {"checkpointing": KEPT},
    "attention again": {"checkpointing": TILES | {"keep": "input"}},
    "one tile": {"checkpointing": ONE},
    "one tile, all kept": {"checkpointing": KEPT | ONE, "rows": LENGTHS},
    "every second": {"checkpointing": {"offload": "host", "every": 2, "plain": 0, "tile": 512}},
    "every third": {"checkpointing": ONE | {"every": 3}, "before": "raise in gradient"},
    "layers that keep all": {"checkpointing": TILES | {"plain": 2}, "before": "other order"},
    "weights on the host": {"adapters": "lora", "checkpointing": AWAY},
    "weights go to the host": {"adapters": "lora", "checkpointing": AWAY, "rows": [(1, 4096)]},
    "weights written at rest": {
        "adapters": "lora", "checkpointing": AWAY, "before": "written at rest",
    },
    "weights, other order": {"adapters": "lora", "checkpointing": AWAY, "before": "other order"},
    "packed": {"batch": "packed", "before": "batch in flight", "checkpointing": TILES},
    "padded": {"batch": "padded", "rows": [(2, 2048)] * 3, "checkpointing": TILES},
    "partial": {"before": "partial", "checkpointing": TILES},
    "dropped": {"before": "dropped", "checkpointing": TILES},
    "handed over": {"before": "handed over", "checkpointing": TILES},
    "retained": {"before": "retained", "checkpointing": KEPT},
    "other order": {"before": "other order", "checkpointing": TILES},
    "side stream": {"before": "side stream", "checkpointing": KEPT},
    "cut short": {"before": "cut short", "checkpointing": KEPT},
    "lengths": {"rows": LENGTHS, "checkpointing": TILES},
    "raise in mlp": {"before": "raise in mlp", "checkpointing": TILES},
    "raise in q": {"before": "raise in q", "checkpointing": TILES | {"keep": "input"}},
    "raise in gradient": {"before": "raise in gradient", "checkpointing": KEPT},
    "whole": {"before": "whole, retained", "checkpointing": TILES},
    "whole, side stream": {"before": "whole, side stream", "checkpointing": TILES},
    "disk": {"checkpointing": DISK},
    "disk, retained": {"before": "retained", "checkpointing": DISK | {"keep": "gate_up"}},
    "disk, an error": {"before": "raise in mlp, partial", "checkpointing": DISK},
    "least": {"checkpointing": "least"},
    "undone": {"before": "undone", "checkpointing": TILES, "rows": [(1, 4096)]},
    "hybrid": {
        "model": "qwen3_5_text", "layers": 8, "changes": HYBRID, "rows": [(1, 2048)] * 3,
        "checkpointing": TILES | {"tile": 1024},
    },
    "hybrid in one tile": {  # its mixers take two, as a tile of theirs has whole chunks
        "model": "falcon_h1", "layers": 3, "changes": MAMBA, "rows": [(1, 2040)] * 3,
        "checkpointing": TILES | {"tile": 2040, "keep": "input"},
    },
}  # fmt: skip
SHORT = ("tiles, all kept", "hybrid in one tile")


def logged(dry, path, way: str, **more) -> order.Found:
    case = {"model": "llama-3.1-8b", "layers": 3, "changes": SMALL, "rows": [(1, 4096)] * 3}
    case |= {"log": str(path)} | WAYS[way]
    settings = case.get("checkpointing")
    if isinstance(settings, dict) and settings.get("offload") == "DISK":
        case["checkpointing"] = settings | {"offload": str(path.parent)}
    ran = dry.run(**case, **more)
    assert ran.end == "ok" and not any("error" in step for step in ran.steps)
    return order.conflicts(path, f"step {len(case['rows']) - 1}")


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
    """(file, line, source) of each call that makes a stream or the host wait for a stream."""
    found = []
    for folder in ("store", "layer", "context", "loss"):
        for path in sorted((ROOT / "hfpatch" / folder).glob("*.py")):
            source = path.read_text()
            for node in ast.walk(ast.parse(source)):
                if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                    continue
                text = " ".join(ast.get_source_segment(source, node).split())
                host = text.startswith(("device.synch", "self.device.synch", "self.synch"))
                if host or node.func.attr == "wait" and node.args:
                    found.append((f"{folder}/{path.name}", node.lineno, text))
    return found


# Where a wait shows that is not needed in a step of tiles: a way in which the race is seen.
SEEN_IN = {
    "self.device.wait(self.ready or self.device.mark(self.side), self.owner)": "partial",
    "self.device.wait(self.device.mark(self.user), self.owner)": "handed over",
    "self.device.synchronize(copied)": "disk",
    "self.device.synchronize(self.landing[0][1])": "disk",
    "device.synchronize(ticket.ready)": "weights written at rest",
    "device.synchronize(device.mark())": "weights go to the host",
    "device.synchronize()": "undone",
    "transfers.device.wait(transfers.device.mark(), transfers.to_device)": "hybrid",
}


@pytest.mark.long
@pytest.mark.parametrize("file, line, source", waits(), ids=lambda x: str(x).split("(")[0])
def test_each_wait_is_needed(file, line, source, dry, table, tmp_path):
    way = SEEN_IN.get(source, "tiles")
    before = logged(dry, tmp_path / "with", way)
    found = logged(dry, tmp_path / "without", way, without_wait=[file, line])
    new = found.unordered - before.unordered
    table(
        "each wait is needed", f"{file}: {source}", "conflicts without an order", sum(new.values())
    )
    assert new, "nothing races without it: is it redundant?"
