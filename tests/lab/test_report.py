"""The report's files: what each must say, and that the page needs nothing but itself."""

import json
import re
from html.parser import HTMLParser

import pytest

from hfpatch.lab.profile import page
from hfpatch.lab.profile import run as writer
from hfpatch.lab.profile.report import family_table, markdown, module_table
from hfpatch.lab.profile.timeline import Run
from tests.lab.test_timeline import MIB, a_run


@pytest.fixture
def runs():
    finished = a_run(impl="hfpatch", scale=0)
    finished.step_seconds = [0.5, 0.4, 0.6]
    finished.planned = {"gpu_peak_bytes": 11 * MIB}
    finished.memory |= {
        "allocated_peak_bytes": 10 * MIB,
        "reserved_peak_bytes": 12 * MIB,
        "fragmentation_bytes": 2 * MIB,
    }
    finished.memory |= {"pinned_host_peak_bytes": 3 * MIB, "copy_wait_seconds": 0.02}
    finished.memory |= {"trace_file": "trace.json.gz", "trace_file_bytes": 2048}
    finished.families = {"matmul": 0.3, "attention": 0.1}
    finished.applied = ["hfpatch on LlamaForCausalLM:", "  mlp  2 x <LlamaMLP>"]
    failed = a_run(impl="hf", error="out of memory: tried <b>5 GiB</b>")
    return [failed, finished, Run(impl="liger", seq_len=128, error="killed by the system")]


def test_markdown_has_every_part(runs):
    text = markdown(
        runs, command="hfpatch profile --model x", commit="abc1234", notes=["Liger is out."]
    )
    lead = text.splitlines()[2]
    assert lead.count(". ") == 2 and lead.startswith("hfpatch peaks at 10.0 MiB"), (
        "three sentences open the report"
    )
    for part in (
        "`hfpatch profile --model x`", "commit abc1234", "Liger is out.", "hf (did not finish)",
        "| **peak** | **17.0 MiB** | **10.0 MiB** | **0 B** |",
        "| planned / peak here |  | 1.100 |  |",
        "| seconds a step (median, without the profiler) |  | 500 ms |  |",
        "| tokens a second |  | 256 |  |",
        "fragmentation (reserved, not allocated) |  | 2.00 MiB",
        "pinned host memory, peak |  | 3.00 MiB",
        "waiting for copies |  | 20 ms", "| matmul |  | 300 ms |  |",
        "`trace.json.gz` (2.00 KiB, one step)",
        "out of memory: tried", "killed by the system", "a.py:2",
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
        families=dict.fromkeys(names, 1.0),
    )
    assert (
        [name.strip("`") for name, _ in module_table([run])]
        == [name for name, _ in family_table([run])]
        == names
    )


class Checker(HTMLParser):
    """Notes what a page would load, and that every element that was opened is closed."""

    void = ("meta", "line", "br", "img", "wbr")

    def __init__(self):
        super().__init__()
        self.open, self.loads, self.text = [], [], []

    def handle_starttag(self, tag, attributes):
        self.loads += [value for name, value in attributes if name in ("src", "href", "xlink:href")]
        assert tag not in ("script", "link", "iframe", "b5"), tag
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.void:
            assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data):
        self.text.append(data)


def test_page_stands_alone(runs):
    text = page.html(runs, command="c", commit="abc")
    checker = Checker()
    checker.feed(text)
    assert checker.open == [] and checker.loads == []
    assert "@import" not in text and "url(" not in text
    assert "prefers-color-scheme: dark" in text
    said = " ".join(checker.text)
    assert "peak 17.0 MiB" in said and "peak 10.0 MiB" in said and "15 MiB" in said, (
        "peaks and axis are labelled"
    )
    assert "tried <b>5 GiB</b>" in said, "what an error says is text, not markup"
    assert (
        "<h3>hfpatch: what <code>hfpatch.apply</code> did</h3><pre>hfpatch on" in text
        and "<LlamaMLP>" in said
    )


# A panel is at least nine tenths of its own units wide before the next one wraps below it, all of
# one size; long names break.
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_panels_wrap_before_their_text_is_small(count):
    text = page.chart([a_run(impl=f"impl{i}") for i in range(count)])
    views = [tuple(map(float, v.split())) for v in re.findall(r'viewBox="([^"]+)"', text)]
    (least,) = (float(b) for b in re.findall(r"--panel: (\d+)px", text))
    assert len(views) == count and len(set(views)) == 1 and least >= 0.9 * views[0][2]
    assert min(2, count) * least < 1100
    assert (
        "grid-template-columns: repeat(auto-fit, minmax(min(100%, var(--panel)), 1fr))"
        in page.STYLE
    )
    assert len(re.findall(">0 [KMG]?i?B<", text)) == count, (
        "each has its own memory axis: it may stand alone in its row"
    )


def test_the_line_of_a_block_breaks_where_its_name_does():
    line = "transformers/models/llama/modeling_llama.py:402"
    text = page._table(("bytes", "line"), [("256.0 MiB", line)], "top")
    assert text.replace("<wbr>", "").count(line) == 1
    pieces = text.split("<td>")[2].split("</td>")[0].split("<wbr>")
    assert max(map(len, pieces)) <= len("transformers/") and pieces[-1] == "llama.py:402"


def test_blocks_of_which_no_line_is_known_have_no_column_of_lines():
    text = page._table(("bytes", "line"), [("256.0 MiB", ""), ("1 B", "")], "top")
    assert "line" not in text and text.count("<td>") == 2
    assert page._table(("figure", "hf"), [("steps", "")]).count("<td>") == 2, (
        "a run that has none is still a run"
    )


def test_simulated_is_marked_everywhere():
    runs = [a_run(impl="hf", source="simulated")]
    assert "# Memory profile of a model (simulated)" in markdown(runs)
    assert "hf (simulated)" in markdown(runs) and "| figure |" in markdown(runs)
    text = page.html(runs)
    assert (
        "<title>Memory profile of a model (simulated)</title>" in text
        and text.count("hf (simulated)") >= 3
    )


@pytest.mark.parametrize(
    "top",
    [1, 700, 1024, 5000, 9.7 * MIB, 1000 * MIB, 1020 * MIB, 3.3 * 1024 * MIB, 900 * 1024 * MIB],
)
def test_ticks_are_few_and_round(top):
    found = page.ticks(top)
    assert 2 <= len(found) <= 8 and found[0] == 0 and found[-1] <= top
    assert all(len(page._tick_label(t, page.unit_of(top)).split()[0]) <= 5 for t in found)


def test_an_axis_has_one_unit():
    """Just above a GiB: the ticks below it, and the peak's label, are in GiB too."""
    run = a_run(impl="hf")
    run.peak_bytes = 950 * MIB
    axis = re.findall(r'text-anchor="end">([\d.]+ \w+)<', page.chart([run]))
    assert len(axis) > 3 and {label.split()[1] for label in axis} == {"GiB"}
    assert "peak 0.93 GiB" in page.chart([run])


def test_a_simulated_8b_of_a_tebibyte_has_ticks_too():
    assert len(page.ticks(1100 * 1024 * MIB)) >= 3


def test_folder_and_back(tmp_path, runs):
    writer.write(tmp_path, runs, command="c")
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "memory.png",
        "report.html",
        "report.md",
        "results.json",
    ]
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    results = json.loads((tmp_path / "results.json").read_text())
    assert (
        results["runs"][1]["peak_split"]["parameters"] == 10 * MIB
        and len(results["sentences"]) == 3
    )
    assert [r.to_dict() for r in writer.read(tmp_path)] == json.loads(
        json.dumps([r.to_dict() for r in runs])
    )
