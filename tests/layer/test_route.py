"""`route` as a table: how one call of a layer runs, without a model."""

from types import SimpleNamespace

import pytest
import torch
from transformers.cache_utils import DynamicCache

from hfpatch.budget.policy import Policy
from hfpatch.context.masks import Batch, Mask
from hfpatch.layer.layer import TiledLayer
from hfpatch.layer.route import Request, Stock, Tiled, Whole, route
from hfpatch.layer.traits import LayerTraits
from hfpatch.layer.why_whole import REASONS, first, why

B, T, D = 2, 4, 8
ALL = Policy(plain=1)  # by which the only layer is one of the last, which keep everything


class Session:
    """What `route` asks of a layer's session."""

    n_layers = 1

    def __init__(self):
        self.lines, self.policy_is = [], Policy()

    def policy(self, layer, x, sequence=None, whole=False):
        return self.policy_is

    def untiled(self, layer, x, policy):
        return torch.is_grad_enabled() and policy.plain > 0

    def tell(self, line):
        self.lines.append(line)


def call(training=True, policy=None, settled=None, causal=True, **changes):
    """A call that is tiled, with these changes."""
    session = Session()
    session.policy_is = session.policy_is if policy is None else policy
    attn = SimpleNamespace(is_causal=causal)
    traits = LayerTraits(attention=("self_attn",), looked=True)
    layer = SimpleNamespace(
        training=training, _hfpatch_runtime=session, _hfpatch_traits=traits,
        gradient_checkpointing=False, _hfpatch_index=0,
    )  # fmt: skip
    condition = SimpleNamespace(now=settled, mixing=[attn], head_dim=8, traits=traits)
    x = changes.get("x", torch.zeros(B, T, D))
    made = {"x": x, "given": x, "args": (), "kwargs": {}, "batch": Batch(B, T, x.device)}
    made |= {"sequence": None, "condition": condition, "mask": None, "shared": None}
    return Request(layer, **(made | changes))


def described(**settings) -> Batch:
    batch = Batch(B, T, torch.device("cpu"))
    vars(batch).update(settings)
    return batch


BUILT = Mask(Batch(B, T, torch.device("cpu")), build=lambda: None)
ENCODER = {"encoder_hidden_states": torch.zeros(1)}
# (changes, the way, its reason, a word of the line that the user reads)
TABLE = {
    "as usual": ({}, Tiled, None, None),
    "causal, by a mask": ({"mask": Mask(described())}, Tiled, None, None),
    "one of the last": ({"policy": ALL}, Stock, None, None),
    "settled for this forward": (
        {"settled": why("dropout")}, Whole, "attention dropout", "attention dropout"
    ),
    "a reason that the report has": (
        {"settled": why("buffer", "calls")}, Whole, "it writes to calls", None
    ),
    "the same among the last": (
        {"settled": why("buffer", "calls"), "policy": ALL}, Stock, "it writes to calls", None
    ),
    "a mask of the caller's own": (
        {"mask": torch.ones(B, 1, T, T)}, Whole, "an attention mask of the caller's own", "own"
    ),
    "a mask of no known kind": (
        {"mask": BUILT}, Whole, "a mask that is neither causal, a window nor chunks", "neither"
    ),
    "attention that is not causal": (
        {"mask": Mask(described()), "causal": False}, Whole, "attention that is not causal", "not"
    ),
    "an encoder's states": ({"kwargs": ENCODER}, Whole, "it attends to an encoder's states", "to"),
    "transformers' own attention": ({"batch": None}, Whole, "not described", None),
    "probabilities": ({"batch": described(weights=True)}, Whole, "not described", None),
    "an input of another shape": ({"x": torch.zeros(B, D)}, Whole, "not described", None),
    "no tokens": ({"x": torch.zeros(B, 0, D)}, Stock, "not described", None),
    "output_attentions": (
        {"batch": None, "kwargs": {"output_attentions": True}}, Stock, "not described", None
    ),
    "a cache": ({"cache": DynamicCache()}, Stock, why("cache"), "run untiled"),
    "a cache, in a layer that runs untiled": (
        {"cache": DynamicCache(), "settled": why("buffer", "calls")}, Stock, why("cache"), "not checkpointed"
    ),
    "evaluation, whole": ({"training": False, "batch": None}, Stock, "not described", None),
    "an adapter told by the model's forward": (
        {"settled": why("handed adapter", "a task for each row")},
        Stock, "an adapter in it has a task for each row", "not checkpointed"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_the_way_of_a_call(name):
    changes, way, reason, words = TABLE[name]
    request = call(**changes)
    found = route(request)
    assert type(found) is way and getattr(found, "reason", None) == reason
    lines = request.layer._hfpatch_runtime.lines
    assert words in lines[0] if words else not lines


@pytest.mark.parametrize("by_place", [True, False])
def test_a_cache_is_found_by_any_name_and_by_place(by_place):
    layer, cache = SimpleNamespace(_hfpatch_condition=object()), DynamicCache()
    given = ((None, cache), {}) if by_place else ((), {"some_name": cache})
    batch, x = described(), torch.zeros(B, T, D)
    assert TiledLayer._request(layer, x, batch, *given).cache is cache
    assert TiledLayer._request(layer, x, batch, (None,), {"other": 1}).cache is None


def test_a_whole_layer_of_another_shape_keeps_its_input_on_the_device():
    assert route(call(x=torch.zeros(B, D))).policy is None
    assert route(call(batch=None)).policy is not None


def test_without_gradients_a_layer_of_the_last_runs_in_tiles():
    with torch.no_grad():
        assert isinstance(route(call(policy=ALL)), Tiled)


def test_every_reason_of_a_call_decides_somewhere():
    """One that none of these calls needs would be one too many."""
    given = [call(**changes) for changes, *_ in TABLE.values()]
    found = {getattr(first("call", r.condition.now, r), "name", None) for r in given}
    assert {r.name for r in REASONS if r.when == "call"} - found == {"kernels"}, (
        "a CPU has them all"
    )


def test_the_first_reason_of_the_list_decides():
    """Whichever stage found it."""
    settled = why("dropout")
    assert first("call", settled, call(mask=torch.ones(B, 1, T, T))) is settled
    assert first("call", settled, call(cache=DynamicCache())).name == "cache"
    assert len({reason.name for reason in REASONS}) == len(REASONS)
