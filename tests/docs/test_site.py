"""The site builds without a warning, its generated parts are current, and three people find their
command.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from blocks import PAGES, ROOT
from packaging.version import Version

STATUS = ("Measured", "Simulated", "Planned", "Compiled", "Counted")


def script(name):
    spec = importlib.util.spec_from_file_location(f"script_{name}", ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site, built strictly: a broken link or anchor, or a page that no menu has, is an
    error.
    """
    for name in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(name)
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(out)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_the_site_builds_strictly(site):
    for page in ("index.html", "models/index.html", "benchmarks/plan/index.html"):
        assert (site / page).is_file()
    notebook = json.loads((site / "prove.ipynb").read_text())
    assert notebook["nbformat"] == 4, "the guide of `hfpatch prove` links to it"
    assert 'href="../../prove.ipynb"' in (site / "guides/prove/index.html").read_text()
    api = (site / "reference/api/index.html").read_text()
    assert "frozen_weights" in api and "linear_cross_entropy" in api


def test_search_finds_what_people_type(site):
    """Benchmarks and the log are left out of it."""
    index = json.loads((site / "search/search_index.json").read_text())
    found, between = index["docs"], index["config"]["separator"]
    text = " ".join(re.sub("<[^>]+>", " ", entry["title"] + " " + entry["text"]) for entry in found)
    words = re.split(between, text.lower())  # the site's search finds whole words
    assert not {"4090", "grpo", "oom", "colab"} - {*words}
    assert not [entry["location"] for entry in found if "benchmarks/" in entry["location"]]


def links(site: Path, page: str) -> set[str]:
    """Pages of the site that a page's own text links to, menus left out."""
    file = site / page / "index.html"
    html = file.read_text()
    body = html[html.index("<article") : html.index("</article>")]
    found = set()
    for target in re.findall(r'href="([^"#]+)', body):
        if "://" not in target:
            full = Path(os.path.normpath(file.parent / target))
            found.add(full.relative_to(site).as_posix())
    return found


def readme_links() -> list[str]:
    """Pages of the site that README's links into docs/ are, in their order."""
    text = (ROOT / "README.md").read_text()
    return re.findall(r"\]\(docs/([\w/-]+?)(?:/?index)?\.md", text)


# (a) a Trainer script, 8B, 80 GB; (b) Axolotl's YAML, QLoRA, 24 GB; (c) eight GPUs, 1M tokens.
@pytest.mark.parametrize("words", [
    ("hfpatch.apply(model)", "--gpu a100-80gb --host-ram 96GiB --placement gpu8bit"),
    ("hfpatch.trainer.plugins.axolotl.HFPatchPlugin", "--gpu rtx4090 --host-ram 128GiB --lora-r 16",
     "axolotl train config.yaml"),
    ("--seq-len 1M", "--sp_size 8", "hfpatch plan", "--gpus 8 --sp-size 8"),
])  # fmt: skip
@pytest.mark.parametrize("first", ["README.md", "."])
def test_a_person_finds_the_command_in_three_clicks(site, words, first):
    """One page, at most three links of the text from the first one, has what this person types. The
    first page is README in the repository, or the site's.
    """
    seen, reached = {first}, [first]
    for _ in range(3):
        reached = [
            p
            for page in reached
            for p in (readme_links() if page == "README.md" else links(site, page))
            if (site / p).is_dir()
        ]
        reached = [p for p in dict.fromkeys(reached) if p not in seen]
        seen |= set(reached)
        for page in reached:
            text = re.sub(r"<[^>]+>", "", (site / page / "index.html").read_text())
            if all(word in text for word in words):
                return
    pytest.fail(f"no page within three clicks has {words}")


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files_of_the_repository(page):
    """Of pages that are read there; the site's own are checked as it is built."""
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), target


def test_each_page_of_benchmarks_says_first_how_its_figures_were_had():
    for page in [
        *sorted((ROOT / "profiles").glob("*/README.md")),
        ROOT / "docs/benchmarks/index.md",
    ]:
        first = page.read_text().split("\n\n", 2)[1]
        assert first.startswith(tuple(f"**{word}" for word in STATUS)), page


def test_the_description_for_an_index_is_current():
    """No relative link and no picture: an index has neither."""
    made = script("docs").description()
    assert (ROOT / "DESCRIPTION.md").read_text() == made, "run python scripts/docs.py description"
    assert "](" not in re.sub(r"\]\(https?:", "", made)


def test_the_picture_is_current():
    made = script("docs").memory()
    assert (ROOT / "docs/assets/memory.svg").read_text() == made, (
        "run python scripts/docs.py memory"
    )
    words = (ROOT / "README.md").read_text().split("](docs/assets/memory.svg)")[0]
    said = re.findall(r" (\d+)(?: GiB)?(?:,|$)", words.split("simulated: ")[-1])
    assert re.findall(r">(\d+) GiB</text>", made) == said


def hosts(page: str) -> dict[tuple[str, str], str]:
    """Of a page's table of trainers: (name, version), and what its second column says."""
    rows = r"^\| ([A-Za-z][\w-]*) (\d+\.[\d.]+)[^|]*\| ([^|]*) \|"
    return {row[:2]: row[2] for row in re.findall(rows, (ROOT / page).read_text(), re.M)}


def test_each_trainer_of_the_tests_has_a_row():
    """On the page of other trainers."""
    listed = (ROOT / "scripts/test.sh").read_text().split("declare -A HOSTS=(")[1].split("\n)")[0]
    tested = {name.replace("_", "") for name in re.findall(r"\[(\w+)\]=", listed)}
    page = hosts("docs/start/run.md")
    assert {name.replace("-", "").lower() for name, _ in page} == tested


def test_figures_of_the_readme_are_those_of_the_benchmarks():
    """GPU and host at each length, beside "A / most, host" of the larger table."""
    table = re.findall(r"^\| (.+?) \| (.+) \|$", (ROOT / "README.md").read_text(), re.M)
    rows = {name: cells.split(" | ") for name, cells in table}
    names = {"transformers": "transformers, no checkpointing"}
    page = (ROOT / "docs/benchmarks/index.md").read_text().split("## Seconds")[0]
    wanted = dict(re.findall(r"^\| (.+?) \| (.+) \|$", page, re.M))
    for name in (n for n in rows if n.startswith(("transformers", "Liger", "hfpatch"))):
        theirs = re.findall(r"[\d.]+ / ([\d.]+), (\d+)", wanted[names.get(name, name)])
        assert rows[name] == [figure for pair in theirs for figure in pair], name


@pytest.mark.long
@pytest.mark.skipif(Version(transformers.__version__).release[:2] != (5, 24), reason="5.24's table")
def test_the_models_page_is_current():
    assert (ROOT / "docs/models.md").read_text() == script("docs").models()


def test_the_page_of_untiled_layers_is_the_list():
    made = script("docs").untiled()
    page = (ROOT / "docs/internals/untiled.md").read_text()
    assert page == made, "run python scripts/docs.py untiled"


# Sentences that were true once, each with the code that made it false.
UNTRUE = {
    "takes whole rows": "layer/time_tiles.py",
    "take whole rows": "layer/time_tiles.py",
    "pip install hfpatch ": "no index has it",
    "gain grows with the context": "in memory alone",
}


@pytest.mark.parametrize("words", UNTRUE)
def test_pages_do_not_say_what_is_no_longer_so(words):
    pages = [*PAGES, *(ROOT / "profiles").glob("*/README.md"), ROOT / "CHANGELOG.md"]
    for page in [*pages, ROOT / "scripts/docs.py", ROOT / "hfpatch/layer/mixers.py"]:
        assert words not in " ".join(page.read_text().split()), page


def test_scripts_that_are_shown_leave_idle_cores_and_repeat_their_numbers():
    shown = {*(ROOT / "hfpatch/examples").glob("*.py")} - {ROOT / "hfpatch/examples/made.py"}
    others = ("scripts/quickstart.sh", "scripts/step_memory.py", "profiles/host/laptop.py")
    for script in [*shown, ROOT / "docs/start/first-run.md", *(ROOT / name for name in others)]:
        text = script.read_text()
        assert "OMP_WAIT_POLICY" in text and "seed" in text, script


def test_the_newest_tested_version_is_named():
    newest = re.search(r"transformers 5\.5 to 5\.(\d+)", (ROOT / "docs/models.md").read_text())
    assert Version(transformers.__version__) < Version(f"5.{int(newest[1]) + 1}")


def test_lines_of_pages_say_nothing_of_one_machine():
    for page in PAGES:
        assert not re.search(r"/(tmp|root|home)/", page.read_text()), page
