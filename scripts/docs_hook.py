"""mkdocs' hook: pages of the site whose text stands elsewhere in the repository."""

import importlib.util
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "CHANGELOG.md": "changelog.md",
    "ds_configs/README.md": "reference/configs.md",
    "scripts/gpu/README.md": "internals/gpu-queue.md",
    "profiles/LOG.md": "benchmarks/log.md",
}
for readme in sorted(ROOT.glob("profiles/*/README.md")):
    PAGES[f"profiles/{readme.parent.name}/README.md"] = f"benchmarks/{readme.parent.name}/index.md"


def on_files(files, config):
    """Adds the pages above, and each profile with its pictures."""
    for picture in sorted(ROOT.glob("profiles/*/*.png")):
        name = f"benchmarks/{picture.parent.name}/{picture.name}"
        files.append(File.generated(config, name, abs_src_path=str(picture)))
    # The help of each command, as the installed program prints it.
    files.append(File.generated(config, "reference/cli.md", content=_docs().cli()))
    for source, page in PAGES.items():
        text = (ROOT / source).read_text()
        files.append(File.generated(config, page, content=linked(text, source, page)))
    return files


def _docs():
    """scripts/docs.py, which no package holds."""
    spec = importlib.util.spec_from_file_location("hfpatch_docs", ROOT / "scripts/docs.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def on_page_markdown(markdown, page, config, files):
    """Leaves benchmarks and the log out of search. Pages of docs/ link to files as they are in the
    repository.
    """
    name = page.file.src_uri
    if name.startswith("benchmarks/"):
        page.meta["search"] = {"exclude": True}
    return linked(markdown, f"docs/{name}", name) if (ROOT / "docs" / name).is_file() else markdown


def linked(text: str, source: str, page: str) -> str:
    """The text with its relative links pointing at pages of the site; a link to what the site does
    not hold becomes its words.
    """
    here, depth = Path(source).parent, page.count("/")

    def link(match):
        words, target = match.groups()
        if target.startswith(("http", "#")) or target.endswith(".png"):
            return match[0]
        path, _, anchor = target.partition("#")
        full = (ROOT / here / path).resolve().relative_to(ROOT).as_posix()
        named = PAGES.get(full) or PAGES.get(f"{full}/README.md")
        if named is None and full.startswith("docs/"):
            named = full.removeprefix("docs/")
        return f"[{words}]({'../' * depth}{named}{'#' * bool(anchor)}{anchor})" if named else words

    return re.sub(r"\[([^\]]+)\]\(([^)\s]+)\)", link, text)
