"""Towers of images under DDP, FSDP2 and ZeRO-3, trained and frozen."""

import pytest
import tiny
from test_launch import torchrun

pytestmark = tiny.not_before_transformers((5, 17), "tells a Qwen3-VL's loss no number of items")
ENGINES = [f"{e}, {way}" for e in ("ddp", "fsdp2", "zero3") for way in ("trained", "frozen")]


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    return torchrun("tower_worker.py", folder=tmp_path_factory.mktemp("towers"))


@pytest.mark.parametrize("engine", ENGINES)
def test_gradients_are_those_of_one_process(engine, reports):
    """In float32 beside stock's float64; the two ranks have different numbers of images."""
    for report in reports:
        found = report["worst"][engine]
        assert any("visual" in name for name in found) == engine.endswith("trained")
        late = {name: error for name, error in found.items() if not error <= 1e-4}
        assert not late and len(found) >= 20, late
