"""Sequence parallelism in closed form: who computes which heads, and what a rank holds."""

import dataclasses

import pytest

from hfpatch.budget.flops import step_flops
from hfpatch.budget.formula import GiB, ModelShape, step_memory
from hfpatch.budget.policy import Policy
from hfpatch.budget.sequence import rounds_of
from hfpatch.lab.presets import preset_config

RANKS = 8
HOST = Policy("host")
M = 1 << 20
PROMISED = {M: 9.0, 4 * M: 35.0}  # GiB of a GPU beyond sharded parameters and gradients


def shape(layers=32, ranks=RANKS):
    config = preset_config("llama-3.1-8b") | {"num_hidden_layers": layers}
    return dataclasses.replace(ModelShape.from_config(config), ranks=ranks)


@pytest.mark.parametrize(
    "n_heads, n_kv_heads, ranks", [(32, 8, 8), (32, 8, 16), (8, 1, 4), (16, 16, 2), (12, 6, 2)]
)
@pytest.mark.parametrize("tokens", [512, 16384, 1 << 20])
def test_every_head_is_computed_once_with_its_own_keys(n_heads, n_kv_heads, ranks, tokens):
    rounds, seen = rounds_of(1, tokens, n_heads, n_kv_heads, ranks), []
    for rank in range(ranks):
        first = rank * n_kv_heads // ranks  # KV head of this rank's first query head
        known = None
        for r in range(rounds.count):
            heads = range(
                rank * rounds.own + r * rounds.width, rank * rounds.own + (r + 1) * rounds.width
            )
            keys = range(first + rounds.keys(r).start, first + rounds.keys(r).stop)
            assert {h * n_kv_heads // n_heads for h in heads} == set(keys)
            assert rounds.new_keys(r) is (known != keys)
            known = keys if not rounds.last_keys(r) else None
            seen += heads
        assert known is None
    assert seen == list(range(n_heads))
    assert rounds.width * -(-tokens // 128) >= 512 or rounds.count == 1


def simulated(policy, tokens, layers=2):
    from hfpatch.lab.simulate.simulator import simulate
    from hfpatch.planner.simulated import build, prepare

    config = preset_config("llama-3.1-8b") | {"num_hidden_layers": layers}
    return simulate(
        prepare(build(config), "hfpatch"), 1, tokens // RANKS, policy=policy, ranks=RANKS
    )


@pytest.mark.parametrize("policy, tokens", [
    (HOST, M), (Policy("host", tile=16384), M),
    pytest.param(dataclasses.replace(HOST, tile=8192), 4 * M, marks=pytest.mark.long),
    pytest.param(Policy("host", tile=8192), 1 << 16, marks=pytest.mark.long),
])  # fmt: skip
def test_agrees_with_the_simulator(policy, tokens):
    found, planned = (
        simulated(policy, tokens),
        step_memory(shape(2), policy, batch=1, tokens=tokens // RANKS),
    )
    assert planned.peak == pytest.approx(found.peak_bytes, rel=0.03)
    assert planned.host == pytest.approx(found.host_peak_bytes, rel=0.03)
    flops = step_flops(shape(2), policy, batch=1, tokens=tokens // RANKS)
    assert flops.total == pytest.approx(found.flops["total"], rel=1e-3)
    if tokens in PROMISED:
        assert found.beyond_bytes <= PROMISED[tokens] * GiB


def test_llama_8b_on_eight_keeps_its_promise():
    for tokens, most in PROMISED.items():
        assert step_memory(shape(), HOST, batch=1, tokens=tokens // RANKS).beyond <= most * GiB
