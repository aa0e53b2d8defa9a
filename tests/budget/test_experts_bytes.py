"""Bytes that experts move beside their products: the plan against the simulator, at true size."""

import pytest
from torch import Tensor

from hfpatch.budget.pace import _matrices
from hfpatch.budget.policy import Policy
from hfpatch.budget.shape import ModelShape
from hfpatch.budget.traffic import OUR_EXPERTS
from hfpatch.lab.presets import preset_config
from hfpatch.lab.simulate.follow import Follower
from hfpatch.lab.simulate.implementations import build, prepare
from hfpatch.lab.simulate.kernels_cost import bytes_of
from hfpatch.lab.simulate.simulator import simulate

TOKENS = 8192  # one tile


class ByOperation(Follower):
    """Bytes of operations whose first result has a row for each routed one, and of our own; and
    those of products.
    """

    rows = 0

    def __init__(self, **settings):
        super().__init__(**settings)
        self.ledger.of_experts = self.ledger.of_products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = sum(self.ledger.traffic.values())
        out = super().__torch_dispatch__(func, types, args, kwargs)
        name, shape = func.__name__, getattr(out, "shape", ())
        gathered = name == "index.Tensor" and len(shape) == 2 and shape[0] == self.rows
        if name.startswith("expert_") or gathered:
            self.ledger.of_experts += sum(self.ledger.traffic.values()) - before
        if "mm" in name:
            matrices = [x for x in args if isinstance(x, Tensor) and x.dim() > 1]
            self.ledger.of_products += sum(map(bytes_of, (*matrices, out)))
        return out


def simulated(preset: str, layers: int, impl: str = "hfpatch"):
    """The ledger of a step."""
    config = preset_config(preset) | {"num_hidden_layers": layers}
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:layers]
    ByOperation.rows = TOKENS * ModelShape.from_config(config).experts_per_token
    model, policy = prepare(build(config), impl), Policy("host", tile=TOKENS)
    return simulate(model, 1, TOKENS, policy=policy, follower=ByOperation).ledger


@pytest.mark.parametrize("preset, most", [("Qwen/Qwen3-30B-A3B", 6.0), ("openai/gpt-oss-20b", 7.0)])
def test_bytes_of_a_layer(preset, most):
    """gpt-oss' angles have half the usual width, its attention has sinks."""
    one, two = simulated(preset, 1), simulated(preset, 2)
    layer = sum(two.traffic.values()) - sum(one.traffic.values())
    assert layer <= most * 1e9
    shape = ModelShape.from_config(preset_config(preset))
    routed, ways = shape.experts_per_token * shape.expert_size, shape.experts_per_token + 1
    (inner, rows), (inner_back, rows_back) = OUR_EXPERTS
    moved = routed * (inner + inner_back) + ways * shape.hidden_size * (rows + rows_back)
    moved += ways * shape.hidden_size  # the rows again, which products read
    planned = 2 * TOKENS * moved
    assert planned == pytest.approx(one.of_experts, rel=0.1)


@pytest.mark.parametrize("preset", ["Qwen/Qwen3-30B-A3B", "openai/gpt-oss-20b"])
def test_weights_that_products_read(preset):
    """With 512 rows an expert its weights are half of what a product moves."""
    one, two = (simulated(preset, layers, "hfpatch-off").of_products for layers in (1, 2))
    shape = ModelShape.from_config(preset_config(preset) | {"num_hidden_layers": 1})
    planned = sum(
        2 * ways * often * count * (rows * inner + inner * columns + rows * columns)
        for ways, often, count, rows, inner, columns in _matrices(shape, TOKENS)
        if columns != shape.vocab_size
    )
    assert planned == pytest.approx(two - one, rel=0.1)
