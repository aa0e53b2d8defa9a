"""Card x CPU RAM -> the longest sequence that fits, by `hfpatch plan`: the table of README.md.

python profiles/plan/cards.py           # prints the table (minutes)
python profiles/plan/cards.py --write   # and puts it into README.md, between its marks
"""

import sys
from pathlib import Path

import hfpatch
from hfpatch.planner.plan import Adapters

README = Path(__file__).parents[2] / "README.md"
MARKS = "<!-- made by profiles/plan/cards.py -->", "<!-- end -->"
MODEL = "llama-3.1-8b"
RAM = ("32GiB", "64GiB", "128GiB", "256GiB")
# What is trained and on which card: the first column -> plan's arguments.
ROWS = {
    "24 GB (RTX 4090), QLoRA": {"gpu": "rtx4090", "adapters": Adapters(16, "4bit")},
    "24 GB (RTX 4090), LoRA": {"gpu": "rtx4090", "adapters": Adapters(16)},
    "48 GB (L40S), LoRA": {"gpu": "l40s", "adapters": Adapters(16)},
    "80 GB (H100), LoRA": {"gpu": "h100", "adapters": Adapters(16)},
    "80 GB (H100), all weights": {"gpu": "h100"},
}
LONGEST = 1 << 20  # a longer sequence takes a day a step


def length(tokens: int) -> str:
    """Tokens in thousands, two digits."""
    if tokens >= LONGEST:
        return "1M"
    step = 10 ** max(0, len(str(tokens >> 10)) - 2)
    return f"{(tokens >> 10) // step * step}k" if tokens >= 1024 else "-"


def table() -> str:
    lines = ["| Card, Llama-3.1-8B | " + " | ".join(f"{ram[:-3]} GB RAM" for ram in RAM) + " |"]
    lines.append("| --- |" + " ---: |" * len(RAM))
    for name, asked in ROWS.items():
        found = [
            hfpatch.plan(MODEL, seq_len=8192, host_ram=ram, max_seq_len=True, **asked).advice
            for ram in RAM
        ]
        lengths = " | ".join(length(advice.max_seq_len) for advice in found)
        lines.append(f"| {name} | {lengths} |")
        print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


if __name__ == "__main__":
    made = table()
    print(made)
    if "--write" in sys.argv:
        text = README.read_text()
        before, _, rest = text.partition(MARKS[0])
        _, _, after = rest.partition(MARKS[1])
        README.write_text(f"{before}{MARKS[0]}\n\n{made}\n\n{MARKS[1]}{after}")
