"""Words that somebody new reads, and links that they follow, from README to the command of their case.

python profiles/house/walk.py [COMMIT]    # a row for each case, at the commit (HEAD)
"""

import subprocess
import sys

WORDS_A_MINUTE = 240
SEVERAL = "docs/guides/several-gpus.md"
# Case: the pages in their order, each read up to these words.
CASES = {
    "Trainer, 8B, one 80 GB GPU": [
        ("README.md", "--seq-len 128k --gpu a100-80gb --host-ram 96GiB"),
    ],
    "TRL, LoRA at 64k tokens, 24 GB": [
        ("README.md", "--seq-len 64k --gpu rtx4090 --host-ram 64GiB --lora-r 16"),
    ],
    "eight GPUs, 1M tokens": [("README.md", SEVERAL), (SEVERAL, "--output_dir runs/long")],
}


def read(commit: str, page: str, end: str) -> int:
    """Words of the page at the commit, from its top to where `end` ends."""
    shown = ["git", "show", f"{commit}:{page}"]
    text = subprocess.run(shown, capture_output=True, text=True, check=True).stdout
    return len(text[: text.index(end) + len(end)].split())


if __name__ == "__main__":
    at = (sys.argv[1:] or ["HEAD"])[0]
    for case, way in CASES.items():
        words = sum(read(at, page, end) for page, end in way)
        minutes = words / WORDS_A_MINUTE
        print(f"| {case} | {len(way) - 1} | {words} | {minutes:.1f} |")
