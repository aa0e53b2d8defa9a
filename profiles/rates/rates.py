"""Others' measured steps beside the planner's: python profiles/rates/rates.py prints the table.

Each row of rows.csv is priced as the code that ran it: `code` says whose passes over memory
(transformers' own, or fused ones), `again` what runs a second time in backward, `attention` which
kernel, `placement` where weights and optimizer are. Steps are simulated as `hfpatch plan` does it.
"""

import csv
import math
import sys
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path

from hfpatch.budget.policy import Checkpointing
from hfpatch.lab.adapters import Adapters
from hfpatch.lab.hardware import GPUS, MATMUL_SHARE, Gpu
from hfpatch.lab.presets import preset_config
from hfpatch.lab.steps import FREE, Cost, Steps
from hfpatch.planner.answer import make_run, seconds_of
from hfpatch.planner.placements import resident

STOCK = "stock"
STOCK_CHECKPOINTING = "stock-checkpointing"
UNTILED = "off"
OFF = Checkpointing("off")  # what layers of each of them keep
MOST = 0.15  # a miss above it is printed
# Part of a second forward that runs inside backward: (matmuls, attention, passes over memory).
# torchtitan's "selective op" keeps attention's outputs and every second product.
AGAIN = {
    "none": (0, 0, 0), "half": (0.5, 0, 1), "layer": (0.5, 0.5, 0.5), "full": (1, 1, 1),
    "alst": (1, 1, 1),
}  # fmt: skip
# Passes of Automodel's fused experts over the hidden columns and the inner ones of a routed row.
FUSED_EXPERTS = (9, 13)
LLAMA_2_13B = {
    "model_type": "llama", "hidden_size": 5120, "intermediate_size": 13824,
    "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 40,
    "vocab_size": 32000, "tie_word_embeddings": False,
}  # fmt: skip


def gpu_of(name: str, attention: str) -> Gpu:
    """A card as a row's source describes it.

    torchtitan's H100 have 96 GB of HBM2e (2.4 TB/s) and 500 W; "the actual peak TFLOPs number is
    between SXM and NVL": the middle of 989 and 835. Across machines a GPU has 400 Gb/s; for the
    A100s 200 Gb/s are assumed, none are published. FlashAttention-2 on an H100: forward 335
    TFLOP/s, published; backward 0.75 of it, assumed.
    """
    gpu = GPUS["a100-80gb" if name.startswith("a100") else "h100"]
    if "500w" in name:
        gpu = replace(gpu, peak_flops=(989.4e12 + 835e12) / 2, bandwidth=2.4e12)
    if name == "a100-64":
        gpu = replace(gpu, peer=25e9)
    if name in ("h100-500w-128", "h100-nodes"):
        gpu = replace(gpu, peer=50e9)
    if attention == "fa2" and name.startswith("h100"):
        gpu = replace(gpu, attention_forward=335e12, attention_backward=0.75 * 335e12)
    return gpu


@dataclass(frozen=True)
class Row:
    half: str
    row: str
    source: str
    gpu: str
    gpus: int
    model: str
    batch: int
    tokens: int
    code: str
    again: str
    attention: str
    placement: str
    accumulation: int
    measured: float
    unit: str

    def __post_init__(self):
        for name in ("gpus", "batch", "tokens", "accumulation"):
            object.__setattr__(self, name, int(getattr(self, name)))
        object.__setattr__(self, "measured", float(self.measured))

    @property
    def ranks(self) -> int:
        return self.gpus if self.placement == "cp" else 1

    @cached_property
    def config(self) -> dict:
        return dict(LLAMA_2_13B if self.model == "llama-2-13b" else preset_config(self.model))

    def run(self, config: dict, way: str):
        """The Run of one GPU, which has its part of a row and, where ranks share it, of attention."""
        adapters = Adapters(16) if self.placement == "lora" else None
        return make_run(
            config, seq_len=self.tokens, batch=self.batch, checkpointing=way, adapters=adapters,
            gpu=gpu_of(self.gpu, self.attention), gpus=1 if adapters else self.gpus,
        )  # fmt: skip

    @property
    def seconds(self) -> float:
        """Of one pass forward and backward, and its part of the optimizer's step."""
        if self.unit == "s":
            return self.measured
        if self.unit == "tok/s":
            return self.batch * self.tokens / self.measured
        flops = _cost(self, STOCK).model
        return flops / (self.measured * GPUS["h100"].peak_flops)


def rows() -> list[Row]:
    with open(Path(__file__).with_name("rows.csv")) as file:
        return [Row(**values) for values in csv.DictReader(file)]


def _experts(config: dict) -> str | None:
    return next((n for n in ("num_experts", "num_local_experts") if n in config), None)


@cache
def _steps(row: Row, way: str, routes: int = 0) -> Steps:
    """routes: of each token, where they are other than the model's."""
    config, name = row.config, _experts(row.config)
    config = config | {"num_experts_per_tok": routes} if routes else config
    if row.placement == "experts":
        # Each GPU has an eighth of the experts and all tokens for them.
        config = config | {name: config[name] // row.gpus}
    run = row.run(config, way)
    return Steps(run.model, run.shape, replace(run.gpu, memory_bytes=0), row.batch, stock=run.stock)


@cache
def _cost(row: Row, way: str, tokens: int | None = None) -> Cost:
    return _steps(row, way).cost(tokens or row.tokens, OFF)


def _seconds(steps: Steps, tokens: int, layers: int) -> dict:
    """Seconds by part of a step of a few layers that run untiled."""
    numbers = steps._ran(tokens, None, FREE, OFF, layers, 0).numbers
    return {key[1]: value for key, value in numbers.items() if key[0] == "seconds"}


@cache
def _parts(row: Row, way: str, routes: int = 0) -> tuple[Counter, Counter]:
    """Seconds of a step by part: in all layers, and beside them. Ranks that share a row have their
    part of its tokens, and of its attention."""
    steps, tokens = _steps(row, way, routes), row.tokens // row.ranks
    n, period = steps.model.depths()
    few, more = (_seconds(steps, tokens, depth) for depth in (n, n + period))
    layer = {k: (more[k] - few[k]) / period for k in more}
    layers = Counter({k: steps.model.layers * v for k, v in layer.items()})
    beside = Counter({k: few[k] - n * v for k, v in layer.items()})
    if row.ranks > 1:
        layers["attention"] = _cost(row, way).seconds["attention"] / row.ranks
    return layers, beside


def _exchanged(row: Row, shape) -> float:
    """Seconds in which ranks that share a row send each other heads, in a step whose attention runs
    twice forward."""
    config, ranks = row.config, row.ranks
    heads, keys = shape.num_heads, shape.num_kv_heads
    width = config.get("head_dim") or config["hidden_size"] // heads
    own = max(1, keys // ranks) * ranks * 2 * width
    q = heads * width
    sent = 2 * (2 * q + own) + (3 * q + own) + (q + own)
    rows = row.batch * row.tokens // ranks
    nbytes = 2 * rows * sent * config["num_hidden_layers"] * (ranks - 1) / ranks
    return nbytes / gpu_of(row.gpu, row.attention).peer_rate


def planned(row: Row) -> Counter:
    """The seconds of a row by part."""
    fused = row.code == "fused"
    (once, beside), (twice, _), (ours, fewest) = (
        _parts(row, way) for way in (STOCK, STOCK_CHECKPOINTING, UNTILED)
    )
    whole_logits = row.code == "stock" and row.placement == "fsdp2"
    found = (ours if fused else once) + (beside if whole_logits else fewest)
    share = dict(zip(("matmul", "attention", "elementwise"), AGAIN[row.again]))
    for name, part in share.items():
        more = part * (twice[name] - once[name])
        found[name] += more * (ours[name] / once[name] if fused and name == "elementwise" else 1)
    whole = row.run(row.config, STOCK)
    sizes, gpu, config = whole.shape, whole.gpu, row.config
    rows_ = row.batch * row.tokens // row.ranks
    if row.placement == "experts":  # Automodel's own kernels in place of ours
        routes = config["num_experts_per_tok"]
        fewer, _ = _parts(row, UNTILED, routes // 2)
        size = config.get("moe_intermediate_size") or config["intermediate_size"]
        columns = FUSED_EXPERTS[0] * config["hidden_size"] + FUSED_EXPERTS[1] * size
        moved = 2 * rows_ * routes * columns * config["num_hidden_layers"]
        found["elementwise"] += moved / gpu.memory_rate
        found["elementwise"] -= 2 * (ours["elementwise"] - fewer["elementwise"])
    if row.again == "alst":  # its MLP runs once more
        mlp = 3 * config["hidden_size"] * config["intermediate_size"] * config["num_hidden_layers"]
        found["matmul"] += 2 * rows_ * mlp / gpu.matmul_flops
    if row.placement == "lora":  # Automodel scales the adapter's few columns, PEFT its output
        outs = sum(n * out for (_, out), n in sizes.matrices)
        found["elementwise"] -= 2 * 4 * rows_ * outs / gpu.memory_rate
    stays, experts = _stays(row, sizes)
    base = replace(_cost(row, STOCK), seconds={"copy_wait": 0.0, "exchange": 0.0} | found)
    if row.ranks > 1:
        share = sum(found.values()) / (base.forward + base.backward)
        base = replace(base, forward=share * base.forward, backward=share * base.backward)
    found = Counter(seconds_of(whole, base, stays))
    found["optimizer"] /= row.accumulation
    found["exchange"] += experts + (_exchanged(row, sizes) if row.ranks > 1 else 0.0)
    if row.placement in ("cp", "offload"):  # inputs of layers, copied on the compute stream
        inputs = 2 * rows_ * config["hidden_size"] * config["num_hidden_layers"]
        found["copy_wait"] += 2 * inputs / gpu.link_rate
    # What a step of a GPU waits for Python is not in others' figures, whose code is compiled.
    found.pop("python_wait", None)
    return found


def _stays(row: Row, shape) -> tuple:
    """(the bytes that stay, seconds that experts' tokens travel)."""
    if row.placement in ("lora", "offload"):
        return resident(
            "gpu8bit" if row.placement == "lora" else "zero3-offload", shape, 1, OFF
        ), 0.0
    stays = resident("fsdp2", shape, row.gpus, OFF)
    if row.placement != "experts":
        return stays, 0.0
    # The weights of all but the experts are gathered.
    part, config = (row.gpus - 1) / row.gpus, row.config
    layers, width = config["num_hidden_layers"], config["hidden_size"]
    routed = 4 * row.batch * row.tokens * config["num_experts_per_tok"] * width * 2 * part
    size = config.get("moe_intermediate_size") or config["intermediate_size"]
    held = layers * 3 * config[_experts(config)] * size * width
    gathers = int(2 * part * max(0, shape.parameters - held))
    return replace(stays, gathers=gathers), routed * layers / GPUS["h100"].peer_rate


def error(row: Row) -> float:
    """Planned over measured, less one."""
    return planned(row).total() / row.seconds - 1


def line(row: Row) -> str:
    time, miss = planned(row), error(row)
    parts = ", ".join(f"{k.replace('_', ' ')} {v:.2f}" for k, v in time.items() if v >= 0.005)
    numbers = (
        f"{row.seconds:.2f} | {time.total():.2f} | {miss:+.0%}{' **miss**' * (abs(miss) > MOST)}"
    )
    return f"| {row.half} | {row.row} | {numbers} | {parts} |"


def fitted() -> tuple[float, float]:
    """(MATMUL_SHARE, Hopper's attention backward over its forward): the least squares of the
    logarithms of planned over measured over the rows that may fit. A row counts as off by a quarter
    at most, so that one which the model lacks something for does not move the others.

    Products take time by the inverse of the share, and backward by that of the ratio.
    """
    h100, chosen, best = GPUS["h100"], None, math.inf
    known = h100.attention_backward / h100.attention_forward
    mine = [(row, planned(row)) for row in rows() if row.half == "fits"]
    for percent in range(50, 81):
        for ratio in range(70, 101, 2):
            off = 0.0
            for row, parts in mine:
                taken = parts.total() + parts["matmul"] * (100 * MATMUL_SHARE / percent - 1)
                if row.attention == "cudnn":
                    forward = 1 + AGAIN[row.again][1]
                    before, after = forward + 2.5 / known, forward + 250 / ratio
                    taken += parts["attention"] * (after / before - 1)
                off += min(abs(math.log(taken / row.seconds)), 0.25) ** 2
            if off < best:
                chosen, best = (percent / 100, ratio / 100), off
    return chosen


if __name__ == "__main__":
    if "--fit" in sys.argv:
        print(fitted())
    else:
        print("\n".join(map(line, rows())))
