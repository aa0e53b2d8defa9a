"""Bytes that experts move beside their products: the plan against the simulator, at true size."""

from collections import Counter

import pytest

from hfpatch.budget.policy import Policy
from hfpatch.budget.presets import preset_config
from hfpatch.budget.shape import ModelShape
from hfpatch.budget.traffic import OUR_EXPERTS
from hfpatch.lab.simulate.follow import Follower
from hfpatch.lab.simulate.rivals import build, prepare
from hfpatch.lab.simulate.simulator import simulate

TOKENS = 8192  # one tile


class ByOperation(Follower):
    """Bytes of operations whose first result has a row for each routed one, and of our own."""

    rows = 0

    def __init__(self, **settings):
        super().__init__(**settings)
        self.ledger.of_experts = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = sum(self.ledger.traffic.values())
        out = super().__torch_dispatch__(func, types, args, kwargs)
        name, shape = func.__name__, getattr(out, "shape", ())
        gathered = name == "index.Tensor" and len(shape) == 2 and shape[0] == self.rows
        if name.startswith("expert_") or gathered:
            self.ledger.of_experts += sum(self.ledger.traffic.values()) - before
        return out


def simulated(preset: str, layers: int) -> tuple[Counter, int]:
    config = preset_config(preset) | {"num_hidden_layers": layers}
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:layers]
    ByOperation.rows = TOKENS * ModelShape.from_config(config).experts_per_token
    model = prepare(build(config), "hfpatch")
    policy = Policy("host", tile=TOKENS)
    ledger = simulate(model, 1, TOKENS, policy=policy, follower=ByOperation).ledger
    return Counter(ledger.traffic), ledger.of_experts


@pytest.mark.parametrize("preset, most", [("Qwen/Qwen3-30B-A3B", 6.0), ("openai/gpt-oss-20b", 7.0)])
def test_bytes_of_a_layer(preset, most):
    """gpt-oss' angles have half the usual width, its attention has sinks."""
    (one, of_experts), (two, _) = simulated(preset, 1), simulated(preset, 2)
    layer = sum(two.values()) - sum(one.values())
    assert layer <= most * 1e9
    shape = ModelShape.from_config(preset_config(preset))
    routed, ways = shape.experts_per_token * shape.expert_size, shape.experts_per_token + 1
    (inner, rows), (inner_back, rows_back) = OUR_EXPERTS
    moved = routed * (inner + inner_back) + ways * shape.hidden_size * (rows + rows_back)
    moved += ways * shape.hidden_size  # the rows again, which products read
    planned = 2 * TOKENS * moved
    assert planned == pytest.approx(of_experts, rel=0.1)
