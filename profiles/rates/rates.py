"""Others' measured steps beside the step model: python profiles/rates/rates.py prints the table.

Each row of rows.csv is priced as the code that ran it: `code` says whose passes over memory
(transformers' own, or fused ones), `again` what runs a second time in backward, `attention` which
kernel, `placement` where weights and optimizer are. The constants are those of hfpatch/budget.
"""

import csv
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

from hfpatch.budget import hardware, pace
from hfpatch.lab.adapters import Adapters, layer_linears
from hfpatch.budget.hardware import GPUS, Gpu
from hfpatch.budget.shape import ModelShape
from hfpatch.lab import stock
from hfpatch.lab.presets import preset_config
from hfpatch.lab.stock import STOCK, STOCK_CHECKPOINTING, STOCK_FACTOR, flops_of, memory_of
from hfpatch.planner.placements import resident
from hfpatch.planner.seconds import RunTime, run_time

MOST = 0.15  # a miss above it is printed
# Part of a second forward that runs inside backward: (matmuls, attention, passes over memory).
# torchtitan's "selective op" keeps attention's outputs and every second product.
AGAIN = {
    "none": (0, 0, 0), "half": (0.5, 0, 1), "layer": (0.5, 0.5, 0.5), "full": (1, 1, 1),
    "alst": (1, 1, 1),
}  # fmt: skip
# Automodel's experts, fused: what lab/stock.py would count, in units of its STOCK_FACTOR.
_FUSED = tuple(tuple(STOCK_FACTOR * n for n in way) for way in ((3, 6), (5, 8)))
FUSED_EXPERTS = {False: _FUSED, True: _FUSED}
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

    @property
    def shape(self) -> ModelShape:
        config = LLAMA_2_13B if self.model == "llama-2-13b" else preset_config(self.model)
        shape = replace(ModelShape.from_config(config), ranks=self.ranks)
        return replace(shape, adapters=Adapters(16)) if self.placement == "lora" else shape

    @property
    def seconds(self) -> float:
        """Of one pass forward and backward, and its part of the optimizer's step."""
        if self.unit == "s":
            return self.measured
        if self.unit == "tok/s":
            return self.batch * self.tokens / self.measured
        flops = flops_of(self.shape, STOCK, batch=self.batch, tokens=self.tokens)
        return flops.model / (self.measured * GPUS["h100"].peak_flops)


def rows() -> list[Row]:
    with open(Path(__file__).with_name("rows.csv")) as file:
        return [Row(**values) for values in csv.DictReader(file)]


def _placed(row: Row, shape: ModelShape) -> tuple:
    """(the bytes that stay, the shape of one GPU's experts, seconds that experts' tokens travel)."""
    if row.placement == "lora":
        return resident("gpu8bit", shape, 1, STOCK), shape, 0.0
    if row.placement == "offload":
        return resident("zero3-offload", shape, 1, STOCK), shape, 0.0
    stays = resident("fsdp2", shape, row.gpus, STOCK)
    if row.placement != "experts":
        return stays, shape, 0.0
    # Each GPU has an eighth of the experts and all tokens for them; the others' weights are
    # gathered.
    part = (row.gpus - 1) / row.gpus
    routed = 4 * row.batch * row.tokens * shape.experts_per_token * shape.hidden_size * 2 * part
    travel = routed * shape.num_layers / GPUS["h100"].peer_rate
    own = replace(shape, experts=shape.experts // row.gpus)
    held = shape.num_layers * 3 * shape.experts * shape.expert_size * shape.hidden_size
    gathers = int(2 * part * max(0, shape.parameters - held))
    return replace(stays, gathers=gathers), own, travel


def planned(row: Row, ratio: float | None = None) -> RunTime:
    """The step model's seconds of a row. ratio: of cuDNN's attention, backward over forward; None
    for the table's.
    """
    gpu, whole = gpu_of(row.gpu, row.attention), row.shape
    if ratio and row.attention == "cudnn":
        gpu = replace(gpu, attention_backward=ratio * gpu.attention_forward)
    stays, shape, travel = _placed(row, whole)
    sizes = {"batch": row.batch, "tokens": row.tokens // row.ranks}

    def time(policy):
        counts = {} if row.code == "stock" else FUSED_EXPERTS
        with mock.patch.dict(stock.EXPERT_PASSES, counts):
            return _time(policy)

    def _time(policy):
        flops = flops_of(shape, policy, **sizes)
        if row.again == "alst" and policy == STOCK_CHECKPOINTING:  # its MLP runs once more
            more = 2 * row.batch * row.tokens * shape.over(shape.mlp_weights)
            flops = replace(flops, matmul=flops.matmul + more)
        memory = memory_of(shape, policy, **sizes)
        return run_time(gpu, flops, memory, policy, shape, stays, **sizes)[0]

    once, twice, fused = time(STOCK), time(STOCK_CHECKPOINTING), time("off")
    share = dict(zip(("matmul", "attention", "elementwise"), AGAIN[row.again]))
    found = {
        name: getattr(once, name) + part * (getattr(twice, name) - getattr(once, name))
        for name, part in share.items()
    }
    if row.code == "fused":
        found["elementwise"] /= STOCK_FACTOR
    if row.placement == "lora":  # Automodel scales the adapter's few columns, PEFT its output
        outs = sum(n for _, n in layer_linears(shape, 0).values()) * shape.num_layers
        found["elementwise"] -= 2 * 4 * row.batch * row.tokens * outs / gpu.memory_rate
    whole_logits = row.code == "stock" and row.placement == "fsdp2"
    found["loss"] = once.loss if whole_logits else fused.loss
    found["optimizer"] = once.optimizer / row.accumulation
    found["exchange"] = once.exchange + travel
    if row.placement in ("cp", "offload"):  # inputs of layers, copied on the compute stream
        inputs = 2 * row.batch * sizes["tokens"] * shape.hidden_size * shape.num_layers
        found["copy_wait"] = once.copy_wait + 2 * inputs / gpu.link_rate
    return replace(once, **found)


def error(row: Row, ratio: float | None = None) -> float:
    """Planned over measured, less one."""
    return planned(row, ratio).total / row.seconds - 1


def line(row: Row) -> str:
    time, miss = planned(row), error(row)
    parts = ", ".join(
        f"{k.replace('_', ' ')} {v:.2f}" for k, v in time.parts().items() if v >= 0.005
    )
    numbers = (
        f"{row.seconds:.2f} | {time.total:.2f} | {miss:+.0%}{' **miss**' * (abs(miss) > MOST)}"
    )
    return f"| {row.half} | {row.row} | {numbers} | {parts} |"


def fitted() -> tuple[float, float]:
    """(MATMUL_SHARE, Hopper's attention backward over its forward): the least squares of the
    logarithms of planned over measured over the rows that may fit. A row counts as off by a quarter
    at most, so that one which the model lacks something for does not move the others.
    """
    chosen, best = None, math.inf
    mine = [row for row in rows() if row.half == "fits"]
    for percent in range(50, 81):
        for ratio in range(70, 101, 2):
            with mock.patch.object(hardware, "MATMUL_SHARE", percent / 100):
                pace.slowdown.cache_clear(), pace._paced.cache_clear()
                logs = (math.log(1 + error(row, ratio / 100)) for row in mine)
                off = sum(min(abs(n), 0.25) ** 2 for n in logs)
            if off < best:
                chosen, best = (percent / 100, ratio / 100), off
    pace.slowdown.cache_clear(), pace._paced.cache_clear()
    return chosen


if __name__ == "__main__":
    if "--fit" in sys.argv:
        print(fitted())
    else:
        print("\n".join(map(line, rows())))
