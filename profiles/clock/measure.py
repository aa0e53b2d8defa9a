"""Clocked steps beside the plan's, as rows of a CSV.

python profiles/clock/measure.py matrix profiles/clock/matrix.csv     # goes on where it stopped
python profiles/clock/measure.py table profiles/clock/matrix.csv     # its rows, for the page
python profiles/clock/measure.py before before.csv    # one model; PYTHONPATH names the tree
python profiles/clock/measure.py picture llama-3.1-8b h100 16384 profiles/clock/h100-16384.png
"""

import csv
import re
import sys
from contextlib import suppress
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # for profiles

from profiles.clock.clocked import clock

NAMES = ("case", "model", "gpu", "host_gib", "tokens", "policy", "step_s", "forward_exposed_s",
         "backward_exposed_s", "exposed_percent", "planned_s", "difference_percent", "peak_gib",
         "command")  # fmt: skip
MODELS = ("llama-3.1-8b", "Qwen/Qwen3-8B", "google/gemma-3-12b", "openai/gpt-oss-20b")
GPUS = ("h100", "a100-80gb")
HOSTS = (512, 128)  # GiB
LENGTHS = (4096, 16384, 32768, 131072, 8192, 65536)
# Cases beside the matrix: a base of 4 bits whose weights wait on the host, files, ranks.
MORE = (
    ("8 ranks", "llama-3.1-8b", "h100", None, 131072, {"ranks": 8}),
    ("QLoRA, streamed weights", "llama-3.1-8b", "rtx4090", 128, 16384, {"weights": "host"}),
    ("QLoRA", "llama-3.1-8b", "h100", 128, 8192, {"weights": "gpu"}),
    ("disk", "llama-3.1-8b", "h100", 128, 65536, {"checkpointing": "/tmp"}),
    ("8 ranks", "llama-3.1-8b", "a100-80gb", None, 131072, {"ranks": 8}),
    ("QLoRA, streamed weights", "llama-3.1-70b", "h100", 128, 8192, {"weights": "host"}),
    *(("LoRA", "openai/gpt-oss-20b", gpu, 512, tokens, {"lora": 16})
      for gpu in ("h100", "a100-80gb") for tokens in (16384, 131072)),
    ("QLoRA", "llama-3.1-8b", "a100-80gb", 128, 32768, {"weights": "gpu"}),
    ("QLoRA", "Qwen/Qwen3-8B", "h100", 128, 131072, {"weights": "gpu"}),
    ("QLoRA, streamed weights", "llama-3.1-8b", "rtx4090", 128, 65536, {"weights": "host"}),
    ("QLoRA, streamed weights", "llama-3.1-70b", "a100-80gb", 128, 32768, {"weights": "host"}),
    ("disk", "llama-3.1-8b", "a100-80gb", 128, 131072, {"checkpointing": "/tmp"}),
    ("disk", "Qwen/Qwen3-8B", "h100", 128, 32768, {"checkpointing": "/tmp"}),
    ("disk", "google/gemma-3-12b", "h100", 128, 131072, {"checkpointing": "/tmp"}),
    ("8 ranks", "Qwen/Qwen3-8B", "h100", None, 1048576, {"ranks": 8}),
)  # fmt: skip


def settings(host, more: dict) -> dict:
    """Keyword arguments of `clock`."""
    more = dict(more)
    if host is not None:
        more["host_ram"] = f"{host}GiB"
    if (place := more.pop("weights", None)) is not None:
        from hfpatch import Checkpointing
        from hfpatch.budget.adapters import Adapters

        more["adapters"] = Adapters(16, "4bit")
        more["checkpointing"] = Checkpointing(frozen_weights=place)
    if (rank := more.pop("lora", None)) is not None:
        from hfpatch.budget.adapters import Adapters

        more["adapters"] = Adapters(rank)
    return more


def command(model, gpu, host, tokens, more: dict) -> str:
    words = [f"hfpatch profile --clock --model {model} --gpu {gpu} --seq-len {tokens}"]
    words += [f"--host-ram {host}GiB"] * (host is not None)
    if "weights" in more:
        words += ["--lora-r 16 --base 4bit", f"--checkpointing frozen_weights={more['weights']}"]
    words += [f"--lora-r {more['lora']}"] if "lora" in more else []
    words += [f"--sp-size {more['ranks']}"] if "ranks" in more else []
    words += [f"--checkpointing {more['checkpointing']}"] if "checkpointing" in more else []
    return " ".join(words)


def row(case, model, gpu, host, tokens, more: dict) -> list:
    """A row of NAMES; of a step that does not fit its policy says why."""
    ends = [case, model, gpu, host or "", tokens], command(model, gpu, host, tokens, more)
    try:
        found = clock(model, seq_len=tokens, gpu=gpu, **settings(host, more))
    except ValueError as error:
        return [*ends[0], str(error), *[""] * 7, ends[1]]
    step, exposed = found.seconds["step"], found.exposed("turn")
    parts = [exposed.get((turn,), 0.0) for turn in ("forward", "backward")]
    numbers = [step, *parts, 100 * sum(parts) / step, found.planned]
    numbers += [100 * (step / found.planned - 1), found.peak_bytes / 2**30]
    policy = found.title.partition(": ")[2]
    return [*ends[0], policy, *(f"{n:.3f}" for n in numbers), ends[1]]


def cells():
    """The matrix, the rows that tell most first; what 512 GiB of host memory choose at 128 too is
    left out by `matrix`.
    """
    for tokens in LENGTHS[:4]:
        for gpu in GPUS:
            for model in MODELS:
                yield "matrix", model, gpu, HOSTS[0], tokens, {}
        yield from MORE[:2] if tokens == LENGTHS[0] else MORE[2:4] if tokens == LENGTHS[1] else ()
    yield from MORE[4:]
    for tokens in LENGTHS[4:]:
        for gpu in GPUS:
            for model in MODELS:
                yield "matrix", model, gpu, HOSTS[0], tokens, {}
    for tokens in LENGTHS:
        for gpu in GPUS:
            for model in MODELS:
                yield "matrix", model, gpu, HOSTS[1], tokens, {}


def planned_alike(model, gpu, tokens) -> bool:
    """Whether both sizes of host memory give the same policy."""
    from hfpatch.planner.plan import plan

    found = [
        plan(model, seq_len=tokens, gpu=gpu, placement="gpu8bit", host_ram=f"{host}GiB")
        for host in HOSTS
    ]
    return found[0].policy == found[1].policy and found[0].fits == found[1].fits


def matrix(path: Path) -> None:
    """Adds the rows that the file lacks."""
    done, fresh = set(), not path.exists()
    if not fresh:
        with open(path) as file:
            done = {tuple(r[n] for n in NAMES[:5]) for r in csv.DictReader(file)}
    with open(path, "a") as file:
        out = csv.writer(file, lineterminator="\n")
        if fresh:
            out.writerow(NAMES)
        for cell in cells():
            case, model, gpu, host, tokens, _ = cell
            if (case, model, gpu, str(host or ""), str(tokens)) in done:
                continue
            if case == "matrix" and host == HOSTS[1] and planned_alike(model, gpu, tokens):
                continue
            out.writerow(row(*cell))
            file.flush()


def table(path: Path) -> None:
    """The file's rows as the page has them."""
    names = {"llama": "Llama", "gemma": "Gemma", "gpt": "gpt", "Qwen3": "Qwen3"}
    cards = {"h100": "H100 PCIe 5", "a100-80gb": "A100 PCIe 4", "rtx4090": "RTX 4090"}
    with open(path) as file:
        rows = list(csv.DictReader(file))
    for r in sorted(rows, key=lambda r: r["case"] != "matrix"):
        first, *rest = r["model"].split("/")[-1].split("-")
        rest = [
            w.upper() if w[:-1].isdigit() and w[-1] == "b" and first != "gpt" else w for w in rest
        ]
        case = "" if r["case"] == "matrix" else f", {r['case']}"
        cells = ["-".join([names.get(first, first), *rest]) + case, cards[r["gpu"]]]
        cells += [r["host_gib"] or "enough", f"{int(r['tokens']):,}"]
        if r["step_s"]:
            cells += [r["step_s"], r["planned_s"], f"{float(r['difference_percent']):+.1f}%"]
            cells += [f"{r['forward_exposed_s']} + {r['backward_exposed_s']}"]
            cells += [f"{float(r['exposed_percent']):.1f}%"]
        else:
            of = re.search(r"takes ([\d.]+ of [\d.]+ GiB) on the GPU", r["policy"])
            cells += [f"does not fit: {of[1]}", *[""] * 4]
        print("|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|")


def before(path: Path) -> None:
    """Llama-8B with all weights trained and host memory enough, of any tree that has the clock."""
    with open(path, "w") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(NAMES)
        for gpu in ("a100-80gb", "h100"):
            for tokens in (8192, 16384, 32768, 131072):
                out.writerow(row("before", "llama-3.1-8b", gpu, None, tokens, {}))
                file.flush()


# By a word of a slice's name; a slice without one is grey.
COLOURS = {
    "before": "#7aa6da", "attention": "#e78c45", "after": "#70c0b1", "whole": "#b9ca4a",
    "head": "#c397d8", "waits": "#d54e53", "copies": "#999999", "optimizer": "#e7c547",
}  # fmt: skip


def picture(model: str, gpu: str, tokens: int, path: Path) -> None:
    """The step's streams as a PNG, and beside it the trace that Perfetto opens."""
    from matplotlib import pyplot

    from profiles.clock.timeline import trace_events, write_trace

    found = clock(model, seq_len=tokens, gpu=gpu)
    write_trace(found, path.with_suffix(".json"))
    events = trace_events(found)
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    figure, axes = pyplot.subplots(2, 1, figsize=(14, 5), layout="constrained")
    end = max(e["ts"] + e["dur"] for e in events if e["ph"] == "X")
    layer = 1e6 * found.seconds["forward"] / 32
    for axis, (low, high) in zip(axes, ((0, end), (3 * layer, 9 * layer))):
        for e in (e for e in events if e["ph"] == "X"):
            if e["ts"] + e["dur"] < low or e["ts"] > high:
                continue
            words = e["name"].split(" ")
            phase = next((w for w in words if w in COLOURS), "")
            colour = COLOURS["waits"] if names[e["tid"]] == "waits" else COLOURS.get(phase, "#bbb")
            axis.barh(e["tid"], e["dur"] / 1e3, left=e["ts"] / 1e3, height=0.8, color=colour)
        axis.set_yticks(list(names), list(names.values()))
        axis.set_xlim(low / 1e3, high / 1e3)
        axis.set_ylim(max(names) + 0.6, min(names) - 0.6)
    axes[0].set_title(found.title + " (simulated)", fontsize=9, wrap=True)
    axes[1].set_xlabel("ms; below: six layers of forward")
    patches = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    figure.legend(patches, [*COLOURS], ncols=len(COLOURS), fontsize=8, loc="outside lower center")
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    with suppress(KeyboardInterrupt):
        if what == "picture":
            picture(rest[0], rest[1], int(rest[2]), Path(rest[3]))
        else:
            {"matrix": matrix, "table": table, "before": before}[what](Path(rest[0]))
