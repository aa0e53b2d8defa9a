"""The report's files and what each must say."""

import json
import sys

import pytest
from matplotlib import image
from matplotlib.figure import Figure

from hfpatch.lab.profile import run as writer
from hfpatch.lab.profile.picture import draw
from hfpatch.lab.profile.report import markdown, module_table
from hfpatch.lab.profile.timeline import Run
from tests.lab.test_timeline import MIB, a_run


@pytest.fixture
def runs():
    finished = a_run(impl="hfpatch", scale=0)
    finished.step_seconds = [0.5, 0.4, 0.6]
    finished.memory |= {
        "allocated_peak_bytes": 10 * MIB,
        "reserved_peak_bytes": 12 * MIB,
        "fragmentation_bytes": 2 * MIB,
    }
    finished.memory |= {"pinned_host_peak_bytes": 3 * MIB}
    finished.memory |= {"snapshot_file": "snapshot.pickle", "snapshot_file_bytes": 2048}
    finished.applied = ["hfpatch on LlamaForCausalLM:", "  mlp  2 x <LlamaMLP>"]
    failed = a_run(impl="hf", error="out of memory: tried <b>5 GiB</b>")
    return [failed, finished, Run(impl="liger", seq_len=128, error="killed by the system")]


def test_markdown_has_every_part(runs):
    text = markdown(
        runs, command="hfpatch profile --model x", commit="abc1234", notes=["Liger is out."]
    )
    lead = text.splitlines()[2]
    assert lead.count(". ") == 1 and lead.startswith("hfpatch peaks at 10.0 MiB"), (
        "two sentences open the report"
    )
    for part in (
        "`hfpatch profile --model x`", "commit abc1234", "Liger is out.", "hf (did not finish)",
        "| **peak** | **17.0 MiB** | **10.0 MiB** | **0 B** |",
        "| seconds a step (median) |  | 500 ms |  |",
        "| tokens a second |  | 256 |  |",
        "fragmentation (reserved, not allocated) |  | 2.00 MiB",
        "pinned host memory, peak |  | 3.00 MiB",
        "`snapshot.pickle` (2.00 KiB, one step)",
        "out of memory: tried", "killed by the system",
        "### hfpatch: what `hfpatch.apply` did\n\n```\nhfpatch on LlamaForCausalLM:\n  mlp  2 x "
        "<LlamaMLP>\n```",
    ):  # fmt: skip
        assert part in text, part


def test_what_takes_the_same_stands_in_one_order_in_every_report():
    names, lasting = (
        [f"part{chr(97 + i)}" for i in range(12)],
        {"category": "activations", "phase": "forward", "bytes": 4},
    )
    run = Run(
        impl="hf",
        seq_len=128,
        rows=[{"module": n, **lasting} for n in names],
    )
    assert [name.strip("`") for name, _ in module_table([run])] == names


def test_simulated_is_marked_everywhere():
    runs = [a_run(impl="hf", source="simulated", memory={"host_peak_bytes": MIB})]
    assert "# Memory profile of a model (simulated)" in markdown(runs)
    assert "hf (simulated)" in markdown(runs) and "| figure |" in markdown(runs)


def test_the_folder_has_a_report_a_picture_and_results(tmp_path, runs):
    assert writer.write(tmp_path, runs, command="c") == []
    assert {p.name for p in tmp_path.iterdir()} == {"memory.png", "report.md", "results.json"}
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["runs"][1]["peak_split"]["parameters"] == 10 * MIB
    assert len(results["sentences"]) == 2
    assert image.imread(tmp_path / "memory.png").std() > 0.1, "a picture, and no empty one"
    assert "(memory.png)" in (tmp_path / "report.md").read_text()


def test_the_picture_shows_the_peak_that_the_report_names(runs):
    run = runs[0]
    axis = Figure().subplots()
    areas = draw(axis, run, "hf", MIB)
    top = areas[-1].get_paths()[0].vertices[:, 1].max()  # of the stack's last category
    assert top == run.peak_bytes / MIB == 17
    assert axis.get_title().endswith("peak 17.0 MiB") and "**17.0 MiB**" in markdown(runs)


def test_without_matplotlib_a_note_says_what_to_install(tmp_path, runs, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install 'hfpatch[report]'" in writer.write(tmp_path, runs)[0]
    assert "pip install 'hfpatch[report]'" in (tmp_path / "report.md").read_text()
