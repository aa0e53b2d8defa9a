"""A training step meets no more functions of ours than docs/internals/architecture.md says."""

import importlib.util
from pathlib import Path

import pytest
import torch

FILE = Path(__file__).parent.parent / "profiles" / "house" / "road.py"
MOST = {"forward": 190, "inside": 60, "backward": 110}


@pytest.fixture
def road():
    spec = importlib.util.spec_from_file_location("road", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module.road
    torch.autograd.set_multithreading_enabled(True)


def test_the_road_of_a_step_stays_short(road):
    """One more function is one more thing to know: merge two, or say why it earns its place."""
    met = road("llama")
    assert {part: len(names) for part, names in met.items() if len(names) > MOST[part]} == {}
    assert len(met["inside"]) > 30, "the layers were found"
