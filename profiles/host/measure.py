"""Host time of a layer: trees of this repository, each with a layer in 1 tile and in 16, and what
users have beside them, in turns.

    python profiles/host/measure.py before=/path/to/old/tree after=. > results.csv

A step of a Llama whose tensors are so small that only the host counts, on one thread of a CPU. Each
runs in a process of its own that answers round by round, so that what else the machine does meets
all of them; the ratios are those of one round. What a layer costs is a step of five layers less one
of one layer. Beside the microseconds stand calls of functions, in Python and from it, and what
torch's ops take of them: those of a step, inside fused ops too, called again one behind the other,
nothing in between. What is left is the host's own; `own` compares that, as `ratio` compares all.
"""

import csv
import os
import statistics
import subprocess
import sys

LAYERS, TILES, ROUNDS, STEPS = 4, 16, 33, 8
WORKER = f"""
import inspect, sys, time, torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM
torch.set_num_threads(1)
kind, tiles = sys.argv[1], int(sys.argv[2])
ids = torch.zeros(1, 2 * {TILES}, dtype=torch.long)
def made(layers):
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=64, intermediate_size=96, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512)).train()
    if kind == "ours":
        import hfpatch
        trust = {{"verdict": False}} if "verdict" in inspect.signature(hfpatch.apply).parameters else {{}}
        plain = {{"plain": 0}} if "plain" in inspect.signature(hfpatch.Checkpointing).parameters else {{}}
        kept = hfpatch.Checkpointing(tile=2 * {TILES} // tiles, offload="gpu", every=1, **plain)
        hfpatch.apply(model, checkpointing=kept, **trust)
    elif kind == "checkpointing":
        model.gradient_checkpointing_enable({{"use_reentrant": False}})
    return model
def step(model):
    began = time.thread_time()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    half = time.thread_time()
    loss.backward()
    return half - began, time.thread_time() - half
def low(times):
    return sorted(times)[len(times) // 4] * 1e6
class Ops(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls, self.fused = [], {{}}
        if kind == "ours":
            from hfpatch.ops._library import IMPLEMENTATIONS
            self.fused = IMPLEMENTATIONS
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {{}}
        if op in self.fused:
            with self:
                return self.fused[op](*args, **kwargs)
        self.calls.append((self.bound(op, args, kwargs), args, kwargs))
        return op(*args, **kwargs)
    def bound(self, op, args, kwargs):
        # As Python code calls it, where that takes these arguments: an overload's own call takes longer.
        name = op._schema.name.split("::")[1]
        for where in (torch, torch.Tensor, torch.nn.functional):
            try:
                getattr(where, name)(*[a.clone() if isinstance(a, torch.Tensor) else a for a in args], **kwargs)
                return getattr(where, name)
            except (AttributeError, TypeError, ValueError, RuntimeError):
                pass
        return op
def ops_of(model):
    with Ops() as seen:
        step(model)
    return seen.calls
@torch.no_grad()
def again(ops):
    began = time.thread_time()
    for op, args, kwargs in ops:
        op(*args, **kwargs)
    return time.thread_time() - began
def calls(model):
    count = [0]
    def counted(frame, event, _):
        count[0] += event in ("call", "c_call")
    sys.setprofile(counted)
    step(model)
    sys.setprofile(None)
    return count[0]
few, many = made(1), made(1 + {LAYERS})
for model in (few, many) * 3:
    step(model)
print((calls(many) - calls(few)) / {LAYERS} / tiles, flush=True)
ops = [ops_of(model) for model in (few, many)]
for _ in sys.stdin:
    times = [
        [*(low(way) for way in zip(*[step(model) for _ in range({STEPS})])), low([again(o) for _ in range({STEPS})])]
        for model, o in zip((few, many), ops)
    ]
    print(*[(m - f) / {LAYERS} / tiles for f, m in zip(*times)], flush=True)
"""
PEERS = {"stock": "stock", "stock with checkpointing": "checkpointing"}


class Process:
    def __init__(self, tree: str, kind: str, tiles: int):
        env = os.environ | {"PYTHONPATH": os.path.abspath(tree), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", WORKER, kind, str(tiles)],
            env=env, cwd=tree, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self.calls = self.read()[0]

    def read(self) -> list[float]:
        return [float(x) for x in self.process.stdout.readline().split()]

    def round(self) -> list[float]:
        """Microseconds forward, backward and of torch's ops alone, of a layer in one tile or of a
        tile.
        """
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.read()


def main(trees: dict[str, str]) -> None:
    last = list(trees.values())[-1]
    rows = {(name, n): Process(tree, "ours", n) for name, tree in trees.items() for n in (1, TILES)}
    rows |= {(name, 1): Process(last, kind, 1) for name, kind in PEERS.items()}
    found = {key: [] for key in rows}
    for _ in range(ROUNDS):
        for key, process in rows.items():
            found[key].append(process.round())
    first, table = next(iter(trees)), csv.writer(sys.stdout)
    table.writerow(
        [
            "who",
            "tiles",
            "us_forward",
            "us_backward",
            "us_ops",
            "ratio",
            "ratio_low",
            "ratio_high",
            "own",
            "calls",
        ]
    )
    for (name, n), times in found.items():
        pairs = [*zip(times, found[first, n])]
        low, ratio, high = statistics.quantiles([sum(t[:2]) / sum(b[:2]) for t, b in pairs], n=4)
        own = statistics.median((t[0] + t[1] - t[2]) / (b[0] + b[1] - b[2]) for t, b in pairs)
        us = [f"{statistics.median(way):.0f}" for way in zip(*times)]
        table.writerow(
            [
                name,
                n,
                *us,
                *(f"{r:.2f}" for r in (ratio, low, high, own)),
                f"{rows[name, n].calls:.0f}",
            ]
        )


if __name__ == "__main__":
    main(dict(argument.split("=", 1) for argument in sys.argv[1:]))
