"""A plan runs few layers and, of long rows, few tokens. What they tell is what all take, and the
policy is the one on which a run settles that reads its own memory.
"""

import dataclasses
from functools import partial
from unittest import mock

import pytest
import torch
from tiny import LONG

import hfpatch
from hfpatch.budget.policy import LEAST, Checkpointing
from hfpatch.lab.adapters import Adapters
from hfpatch.lab.hardware import GPUS, GiB
from hfpatch.lab.shallow import Model, Values, model_of
from hfpatch.lab.simulate.follow import current
from hfpatch.lab.simulate.implementations import build, prepare
from hfpatch.lab.simulate.simulator import simulate
from hfpatch.lab.step_meter import LedgerGauge
from hfpatch.lab.steps import Steps
from hfpatch.layer.meter import Meter
from hfpatch.layer.runtime import LayerRuntime
from hfpatch.planner import answer
from hfpatch.planner.answer import make_run
from hfpatch.planner.evaluate import Ladder, placements

WIDE = {
    "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "head_dim": 64,
    "num_key_value_heads": 2, "vocab_size": 4096, "pad_token_id": None,
}  # fmt: skip
FAMILIES = {
    "llama": WIDE | {"num_hidden_layers": 8},
    "qwen3": WIDE | {"num_hidden_layers": 8},
    "gemma3_text": WIDE | {
        "num_hidden_layers": 9, "sliding_window": 512,
        "layer_types": [*["sliding_attention", "full_attention"] * 4, "sliding_attention"],
    },
    "qwen3_moe": WIDE | {"num_hidden_layers": 7, "num_experts": 8, "moe_intermediate_size": 128},
    "deepseek_v3": WIDE | {
        "num_hidden_layers": 7, "n_routed_experts": 8, "moe_intermediate_size": 128, "n_group": 1,
        "topk_group": 1, "num_experts_per_tok": 2, "num_key_value_heads": 8, "kv_lora_rank": 64,
        "q_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 64,
        "head_dim": 32,
    },
}  # fmt: skip
POLICIES = {
    "host": dataclasses.replace(LEAST, tile=1024),
    "keep": dataclasses.replace(LEAST, tile=1024, keep=4, aim="fastest"),
    "plain": dataclasses.replace(LEAST, tile=1024, plain=3, aim="fastest"),
    "all": dataclasses.replace(LEAST, tile=1024, plain=99, aim="fastest"),
    "gpu": dataclasses.replace(LEAST, offload="gpu", tile=2048),
    "segments": dataclasses.replace(LEAST, tile=1024, every=2, keep="input"),
    "stock": Checkpointing("off"),
}
FEW = {("qwen3_moe", "host"), ("llama", "all")}
CASES = [
    (family, name) if (family, name) in FEW else pytest.param(family, name, marks=LONG)
    for family in FAMILIES
    for name in POLICIES
]


def steps_of(family: str, adapters=None, stock: str = "") -> Steps:
    model = model_of(Values(FAMILIES[family] | {"model_type": family}), adapters)
    return Steps(model, model.sizes, GPUS["h100"], 1, stock=stock)


def close(few, full, rel: float) -> None:
    assert max(m.gradients + m.beyond for m in few.moments) == pytest.approx(
        max(m.gradients + m.beyond for m in full.moments), rel=rel
    )
    assert few.host == pytest.approx(full.host, rel=rel)
    assert sum(few.seconds.values()) == pytest.approx(sum(full.seconds.values()), rel=2 * rel)
    assert few.flops == pytest.approx(full.flops, rel=1e-3)


@pytest.mark.parametrize("family, name", CASES)
def test_few_layers_tell_what_all_take(family, name):
    asked = {"family": family, "stock": "stock" if name == "stock" else ""}
    few = steps_of(**asked).cost(4096, POLICIES[name])
    with mock.patch.object(Model, "depths", lambda self, *_: (self.layers, 0)):
        full = steps_of(**asked).cost(4096, POLICIES[name])
    close(few, full, 0.02)


@LONG
@pytest.mark.parametrize("base", ["bf16", "4bit"])
def test_few_layers_tell_what_all_take_with_adapters(base):
    for policy in (
        POLICIES["host"],
        dataclasses.replace(LEAST, offload="gpu", tile=1024, frozen_weights="host"),
    ):
        few = steps_of("llama", Adapters(8, base)).cost(4096, policy)
        with mock.patch.object(Model, "depths", lambda self, *_: (self.layers, 0)):
            full = steps_of("llama", Adapters(8, base)).cost(4096, policy)
        close(few, full, 0.02)


class Card(LedgerGauge):
    """A card of `memory` bytes, whose step the follower follows."""

    def __init__(self, device, memory: int):
        self.device, self.memory, self.missing, self.top = device, memory, 0, 0

    @property
    def follower(self):
        return current()

    def limit(self) -> int:
        return self.memory

    card = limit

    def clock(self):
        return None


@pytest.mark.parametrize("family, tokens, batches", [
    pytest.param("llama", 8192, 1, marks=LONG), ("llama", 8192, 6), pytest.param("gemma3_text", 4096, 1, marks=LONG),
    pytest.param("llama", 16384, 1, marks=LONG), pytest.param("qwen3_moe", 8192, 1, marks=LONG),
])  # fmt: skip
def test_the_policy_is_the_one_on_which_a_run_settles(family, tokens, batches):
    """Six steps of the whole model, or six batches of one, whose meter reads the simulated device,
    choose by themselves.
    """
    values = FAMILIES[family] | {"model_type": family}
    gpu = dataclasses.replace(GPUS["h100"], memory_bytes=2 * GiB)
    settings = Checkpointing(keep="attention")
    run = make_run(
        values, seq_len=tokens, gpu=gpu, checkpointing=settings, gradient_accumulation_steps=batches
    )
    with mock.patch.object(answer, "RESERVE_LEAST", 0):  # of larger cards
        planned = Ladder(run, "adamw").plan("settled")
    model, chosen = build(values), []
    hfpatch.apply(model, checkpointing=settings)
    free = gpu.usable_bytes - 2 * run.shape.nbytes  # beside AdamW's states

    def meter_of(self, device):
        if device not in self.meters:
            self.meters[device] = Meter(Card(device, free), model.parameters, self.n_layers)
        return self.meters[device]

    def noted(self, meter, policy, *_):
        chosen.append(policy)

    with (
        mock.patch.object(LayerRuntime, "meter_of", meter_of),
        mock.patch.object(LayerRuntime, "_say", noted),
    ):
        steps = partial(torch.optim.SGD, lr=0.0) if batches == 1 else None
        simulate(model, 1, tokens, steps=6, optimizer=steps)
    assert abs(chosen[-1].plain - planned.policy.plain) <= 1, (chosen, planned.policy)
    assert chosen[-1].tile == planned.policy.tile


@pytest.mark.parametrize("name", ["host", pytest.param("plain", marks=LONG)])
def test_a_batch_is_planned_beside_the_gradients_of_earlier_ones(name):
    values, tokens = FAMILIES["llama"] | {"model_type": "llama"}, 4096
    run = {"seq_len": tokens, "placement": "adamw", "checkpointing": POLICIES[name]}
    one, several = (
        hfpatch.plan(values, **run, gradient_accumulation_steps=n).gpu.parts for n in (1, 8)
    )
    model = prepare(build(values), "hfpatch")
    two = simulate(model, 1, tokens, steps=2, policy=POLICIES[name]).peak_bytes
    planned = several["parameters"] + several["gradients"] + several["activations"]
    assert planned == pytest.approx(two, rel=0.02)
    assert one["gradients"] + one["activations"] < several["gradients"] + several["activations"]


def test_auto_steps_in_backward_for_one_batch_a_step_alone():
    """What a batch adds to must stand until the last one; train refuses it."""
    run = make_run(FAMILIES["llama"] | {"model_type": "llama"}, seq_len=4096)
    assert "gpu8bit-fused" in placements(run, "auto")
    several = dataclasses.replace(run, accumulates=True)
    assert "gpu8bit-fused" not in placements(several, "auto")
    assert placements(several, "gpu8bit-fused") == ["gpu8bit-fused"]


@pytest.mark.parametrize(
    "run", [pytest.param({"placement": "adamw"}, marks=LONG), {"placement": "fsdp2", "gpus": 2}]
)
def test_a_plan_that_climbed_too_far_steps_down_until_it_fits(run):
    """The slack of so small a card is more than what a run leaves free."""
    values = FAMILIES["llama"] | {"model_type": "llama"}
    gpu = dataclasses.replace(GPUS["h100"], memory_bytes=2 * GiB)
    found = hfpatch.plan(values, seq_len=8192, gpu=gpu, **run)
    assert found.fits and found.policy.plain > 1
    # most gradients come once the layers that keep all have let go
    assert found.gpu.parts["gradients"] < found.gpu.parts["parameters"] / 2


def test_what_a_tile_s_backward_takes_is_per_token():
    """The sums of the weights' gradients, which a layer's first tile makes, are no tile's."""
    found = []
    for tile in (256, 1024):
        steps = steps_of("llama")
        steps.cost(2048, dataclasses.replace(POLICIES["host"], tile=tile))
        found += [kind.walk for kind in steps.kinds.values()]
    assert found == pytest.approx([found[0]] * 2, rel=0.02)
