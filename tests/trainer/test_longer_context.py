"""profiles/longer-context/measure.py: its documents, and that it runs and writes its page at tiny size."""

import importlib.util
import random
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "profiles/longer-context/measure.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("longer_context", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_document_names_its_key_once_and_asks_for_it_later(script):
    rng = random.Random(0)
    for length in (32, 512, 4096):
        for asks in (1, 2):
            words = script.document(length, asks, rng)
            assert len(words) == length and words.count("KEY") == 1
            named = words.index("KEY")
            key = words[named + 1]
            at = [i for i, word in enumerate(words) if word == "ASK"]
            assert named < length // 4 <= min(at) and at[-1] == length - 2
            assert {words[i + 1] for i in at} == {key}


@pytest.mark.filterwarnings("ignore")  # of the stack's libraries about each other
def test_it_runs_and_both_implementations_learn_the_same(script, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    for name, value in (("SHORT", 64), ("LONG", 128), ("LENGTHS", (64, 128))):
        monkeypatch.setattr(script, name, value)
    monkeypatch.setattr(script, "YARN", script.YARN | {"factor": 2.0,
                        "original_max_position_embeddings": 64})  # fmt: skip
    monkeypatch.setattr(script, "LARGER", script.LARGER | {"rope_theta": 20000.0})
    monkeypatch.setattr(script, "MODEL", script.MODEL.replace("=512", "=64"))
    sizes = ["--base-steps", "3", "--steps", "2", "--seeds", "1", "--documents", "2"]
    assert script.main(["--out", str(tmp_path), *sizes]) == 0
    rows = [line.split(",") for line in (tmp_path / "results.csv").read_text().splitlines()[1:]]
    losses = {
        name: [float(r[4]) for r in rows if r[0] == name and r[2] == "loss"]
        for name in ("base", "hf", "hfpatch")
    }
    assert losses["hfpatch"] == pytest.approx(losses["hf"], abs=1e-3)
    assert losses["hf"] != losses["base"] and len(losses["hf"]) == 2
    page = (tmp_path / "README.md").read_text()
    assert "**Measured** on a CPU" in page and "trained on, hfpatch" in page
    assert (tmp_path / "picture.png").stat().st_size > 1000
