"""The fenced blocks of README and docs/, and what runs of them."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Why a block does not run: `<!-- docs: WHY -->` above it.
REASONS = ("gpu", "hub", "network", "long", "fragment")
_BLOCK = re.compile(r"(?:^<!-- docs: (\w+) -->\n)?^```(bash|python)\n(.*?)^```", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """A block: where it stands, its language, its text, and why it does not run ("" if it does)."""

    name: str
    language: str
    text: str
    reason: str

    @property
    def commands(self) -> list[str]:
        """Of a bash block: its commands, one a line."""
        joined = re.sub(r"\\\n\s*", " ", self.text)
        return [line for line in joined.splitlines() if line.strip() and not line.startswith("#")]


def blocks() -> list[Block]:
    found = []
    for page in PAGES:
        text = re.sub(r"(?m)^    (?=```|<!--)", "", page.read_text())  # inside a list
        for i, match in enumerate(_BLOCK.finditer(text)):
            name = f"{page.relative_to(ROOT).as_posix()}:{i}"
            found.append(Block(name, match[2], match[3], match[1] or ""))
    return found
