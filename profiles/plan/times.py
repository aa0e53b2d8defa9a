"""Seconds that `hfpatch plan` takes, each command in a process of its own: the median of three.

    python profiles/plan/times.py > profiles/plan/times.csv

Run it on a quiet machine. XDG_CACHE_HOME is set to a new folder, so that no earlier answer is read.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time

COMMANDS = {
    "a plan": "llama-3.1-8b --seq-len 8k --gpu a100-80gb",
    "a long plan": "llama-3.1-8b --seq-len 128k --gpu a100-80gb",
    "a plan with LoRA": "llama-3.1-8b --seq-len 64k --gpu rtx4090 --host-ram 64GiB --lora-r 16",
    "a plan of experts": "qwen3-30b-a3b --seq-len 64k --gpu h100 --lora-r 16",
    "what would fit": "llama-3.1-8b --seq-len 128k --gpu rtx4090 --host-ram 64GiB",
    "what would fit of 70B": "llama-3.1-70b --seq-len 128k --gpu a100-80gb",
    "longest sequence": "llama-3.1-8b --max-seq-len --gpu a100-80gb",
    "longest sequence with LoRA": "llama-3.1-8b --max-seq-len --gpu rtx4090 --host-ram 64GiB --lora-r 16",
}
TIMES = 3


def seconds(command: list, folder: str) -> float:
    began = time.perf_counter()
    subprocess.run(command, env=os.environ | {"XDG_CACHE_HOME": folder}, capture_output=True)
    return time.perf_counter() - began


def main() -> None:
    print("what,command,seconds,asked again")
    for what, arguments in COMMANDS.items():
        words = [sys.executable, "-m", "hfpatch", "plan", *arguments.split()]
        first, again = [], []
        for _ in range(TIMES):
            with tempfile.TemporaryDirectory() as folder:
                first.append(seconds(words, folder))
                again.append(seconds(words, folder))
        print(what, arguments, f"{statistics.median(first):.1f}", f"{statistics.median(again):.2f}",
              sep=",", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
