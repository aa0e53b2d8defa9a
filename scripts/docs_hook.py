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


def on_files(files, config):
    """Adds the pages above, and each profile with its pictures."""
    pages = dict(PAGES)
    for readme in sorted(ROOT.glob("profiles/*/README.md")):
        folder = readme.parent
        pages[f"profiles/{folder.name}/README.md"] = f"benchmarks/{folder.name}/index.md"
        for picture in folder.glob("*.png"):
            name = f"benchmarks/{folder.name}/{picture.name}"
            files.append(File.generated(config, name, abs_src_path=str(picture)))
    # The help of each command, as the installed program prints it.
    files.append(File.generated(config, "reference/cli.md", content=_docs().cli()))
    for source, page in pages.items():
        text = (ROOT / source).read_text()
        files.append(File.generated(config, page, content=linked(text, source, page, pages)))
    return files


def _docs():
    """scripts/docs.py, which no package holds."""
    spec = importlib.util.spec_from_file_location("hfpatch_docs", ROOT / "scripts/docs.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def on_page_markdown(markdown, page, config, files):
    """Leaves benchmarks and the log out of search."""
    if page.file.src_uri.startswith("benchmarks/"):
        page.meta["search"] = {"exclude": True}
    return markdown


def linked(text: str, source: str, page: str, pages: dict) -> str:
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
        named = pages.get(full) or pages.get(f"{full}/README.md")
        if named is None and full.startswith("docs/"):
            named = full.removeprefix("docs/")
        return f"[{words}]({'../' * depth}{named}{'#' * bool(anchor)}{anchor})" if named else words

    return re.sub(r"\[([^\]]+)\]\(([^)\s]+)\)", link, text)
