"""What a run's own steps teach it, on simulated devices: no step takes more than there is, and what
is left is used.
"""

import json
import sys

import pytest
import torch
from tiny import gradients

import hfpatch
from hfpatch.budget.measured import Kind, StepPlan
from hfpatch.budget.policy import LEAST
from hfpatch.lab.presets import preset_config
from hfpatch.lab.simulate import simulator
from hfpatch.lab.simulate.implementations import build
from hfpatch.layer import policies
from hfpatch.layer.meter import Meter
from tests.layer.deep import tiny_llama, tokens
from tests.layer.devices import Counters, GiB, OfLedger, Told, on_device

pytestmark = pytest.mark.usefixtures("exact_loss")

GLM = {
    "model_type": "glm4_moe", "hidden_size": 1024, "intermediate_size": 4096,
    "moe_intermediate_size": 512, "num_hidden_layers": 5, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 64, "n_routed_experts": 8, "num_experts_per_tok": 4,
    "first_k_dense_replace": 1, "vocab_size": 8192,
}  # fmt: skip
LLAMA = preset_config("llama-3.2-1b") | {"num_hidden_layers": 6, "vocab_size": 8192}


class Run:
    """Steps of a model on a device of `size` GiB. policies: of each step; peaks: the
    most bytes up to then."""

    def __init__(self, monkeypatch, size: float, config=LLAMA, **settings):
        self.model = build(config)
        hfpatch.apply(self.model, **settings)  # its trials run on the CPU
        on_device(monkeypatch, OfLedger, size=int(size * GiB))
        self.model._hfpatch_logits = False
        self.patch, self.policies, self.peaks = monkeypatch, [], []

    def step(self, ids, tokens: int):
        ids = ids[:, :tokens]
        self.model(input_ids=ids, labels=ids).loss.backward()
        (self.meter,) = self.model.model._hfpatch.runtime.meters.values()
        self.policies.append(self.meter.step.plan.policy)
        self.peaks.append(self.meter.gauge.read().peak)

    def run(self, work, tokens: int) -> list:
        """work(run, ids): called in a simulation."""
        self.patch.setattr(
            simulator, "train_step", lambda model, follower, ids, labels: work(self, ids)
        )
        simulator.simulate(self.model, 1, tokens)
        return self.policies


def clear(run):
    run.model.zero_grad(set_to_none=True)


def test_layers_come_to_keep_what_there_is_room_for(monkeypatch, capfd):
    def work(run, ids):
        for _ in range(5):
            run.step(ids, 16384)
            clear(run)

    run = Run(monkeypatch, 8.0)
    plain = [policy.plain for policy in run.run(work, 16384)]
    assert plain[:2] == [0, 1] and plain[2] > 1 and plain == sorted(plain)
    assert 0 < plain[-1] < 6 and plain[-1] == plain[-2]
    size = 8.0 * GiB
    assert 0.85 * size < run.peaks[-1] <= 0.97 * size
    said = capfd.readouterr().err
    assert said.count("1 x 16,384 tokens") == len(dict.fromkeys(run.policies)), said
    # An estimate until a layer of the kind kept everything: the first line that announces bytes.
    announced = [line for line in said.splitlines() if "GiB of the device" in line]
    assert ["; at most " in line for line in announced] == [True, *[False] * (len(announced) - 1)]
    assert len(announced) > 1


def test_what_the_first_layer_that_keeps_all_keeps_is_announced_for_all(monkeypatch):
    """The model's forward holds the first layer's input, so its bytes do not return with its copy."""
    kept = []

    def work(run, ids):
        for _ in range(3):
            run.step(ids, 4096)
            kept.append([kind.cost for kind in run.meter.kinds.values()])
            clear(run)

    assert [policy.plain for policy in Run(monkeypatch, 80.0).run(work, 4096)] == [0, 1, 6]
    assert kept[1] == pytest.approx(kept[2], rel=0.001)


def test_where_the_least_is_asked_for_nothing_grows(monkeypatch):
    def work(run, ids):
        for _ in range(3):
            run.step(ids, 4096)
            clear(run)

    run = Run(monkeypatch, 80.0, checkpointing="least")
    assert {(p.tile, p.plain, p.keep) for p in run.run(work, 4096)} == {(1024, 0, 0)}


@pytest.mark.parametrize("settings", [{"tile": 512, "plain": 2}, {"tile": 512, "plain": 0}])
def test_fixed_settings_have_the_same_bits_in_each_step(settings, monkeypatch):
    model = tiny_llama()
    hfpatch.apply(model, checkpointing=hfpatch.Checkpointing(**settings, keep="attention"))
    on_device(monkeypatch, Told)
    found = []
    for _ in range(4):
        model(tokens(), labels=tokens()).loss.backward()
        found.append(gradients(model))
        model.zero_grad()
    policies = {s.policy for s in model.model._hfpatch.runtime.shapes.values()}
    assert len(policies) == 1
    assert all(torch.equal(found[0][name], g) for one in found for name, g in one.items())


def test_gradients_arrive_alike_on_all_ranks_of_deepspeed(monkeypatch):
    """Its buckets take gradients as they come: a rank with more memory must not run another order of
    them. The same run lets layers keep all elsewhere.
    """

    def work(run, ids):
        for _ in range(4):
            run.step(ids, 4096)
            clear(run)

    def kept(deepspeed: bool) -> list[int]:
        with monkeypatch.context() as patch:
            run = Run(patch, 8.0)
            if deepspeed:
                patch.setitem(sys.modules, "deepspeed.comm.comm", type("M", (), {"cdb": True}))
                patch.setattr(torch.distributed, "is_initialized", lambda: True)
                patch.setattr(torch.distributed, "get_world_size", lambda: 2)
            return [policy.plain for policy in run.run(work, 4096)]

    assert kept(True) == [0, 0, 0, 0]
    assert kept(False)[-1] > 0


# --- counters that a test sets -------------------------------------------------------------------
def told_steps(monkeypatch, count=3, **fields):
    """A tiny model after steps on a device whose counters say little."""
    model = tiny_llama()
    hfpatch.apply(model)
    on_device(monkeypatch, Told, **fields)
    monkeypatch.setattr(Told, "counters", Counters())
    for _ in range(count):
        model(tokens(), labels=tokens()).loss.backward()
        model.zero_grad()
    (meter,) = model.model._hfpatch.runtime.meters.values()
    return model, meter


def step(model):
    model(tokens(), labels=tokens()).loss.backward()
    model.zero_grad()


def test_after_memory_ran_out_less_is_kept(monkeypatch, capfd):
    model, meter = told_steps(monkeypatch, 1, total=20 * GiB, free=8 * GiB)
    monkeypatch.setattr(Meter, "_note_kept", lambda self, solid: None)
    for kind in meter.kinds.values():
        kind.kept = [1.5 * GiB / 74, 74]
    step(model)
    kept = meter.step.plan.policy.plain
    assert kept == 3
    Told.counters = Counters(ooms=1)
    capfd.readouterr()
    meter.step.over = False  # the error came on the way
    step(model)
    assert meter.reserve >= 0.1 * meter.card
    said = capfd.readouterr().err
    assert 0 < meter.step.plan.policy.plain < kept and "memory ran out; 2 x 37 tokens:" in said, (
        said
    )
    before = meter.reserve
    step(model)
    assert meter.reserve == before and capfd.readouterr().err == ""


def test_errors_of_others_are_not_the_step_s(monkeypatch):
    """Out of memory in the optimizer, or in an evaluation."""
    model, meter = told_steps(monkeypatch, 2)
    Told.counters = Counters(ooms=3, retries=5)
    step(model)
    assert meter.reserve == 0


def test_a_retry_of_the_allocator_in_a_step_leaves_more_free(monkeypatch):
    model, meter = told_steps(monkeypatch, 1)
    hook = model.model.norm.register_forward_pre_hook(
        lambda *_: setattr(Told, "counters", Counters(retries=Told.counters.retries + 1)) and None
    )
    for _ in range(4):
        step(model)
    hook.remove()
    assert 0 < meter.reserve <= 0.1 * meter.card


def test_the_smallest_step_that_ran_out_has_smaller_tiles(monkeypatch):
    model, meter = told_steps(monkeypatch, 1, free=0)
    assert meter.step.plan.policy.tile == 8192

    def runs_out(*_):
        Told.counters = Counters(ooms=Told.counters.ooms + 1)
        raise torch.OutOfMemoryError("CUDA out of memory.")

    hook = model.model.norm.register_forward_pre_hook(runs_out)
    with pytest.raises(torch.OutOfMemoryError):
        step(model)
    hook.remove()
    step(model)
    assert meter.step.plan.policy.tile == 4096


def test_counters_are_never_reset(monkeypatch):
    """torch's peak belongs to the user."""
    for name in ("reset_peak_memory_stats", "reset_accumulated_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: pytest.fail("reset"))
    told_steps(monkeypatch, 3)


def test_what_one_run_measured_another_begins_with(monkeypatch):
    def work(run, ids):
        for _ in range(3):
            run.step(ids, 12000)
            clear(run)

    first = Run(monkeypatch, 8.0)
    plain = [policy.plain for policy in first.run(work, 12000)]
    state = json.loads(json.dumps(first.meter.state()))
    second = Run(monkeypatch, 8.0)

    def again(run, ids):
        run.model.model._hfpatch.runtime.meter_of(ids.device).load(state)
        work(run, ids)

    assert second.run(again, 12000)[0].plain >= plain[2] - 1 > 0
    assert max(second.peaks) <= 8.0 * GiB


class Card(Told):
    """A card of 310 bytes, of which `now` are allocated."""

    now = host = 0

    def __init__(self):
        self.device = torch.device("cpu")

    def read(self) -> Counters:
        return Counters(self.now, self.now, host=self.host)

    def limit(self) -> int:
        return 310

    def card(self) -> int:
        return 0

    def clock(self):
        return None


@pytest.mark.parametrize("stands, tiled", [((0, 0, 108, 208), 1), ((0, 100, 100, 208), 2)])
def test_a_layer_keeps_all_if_it_fits_into_what_is_free_as_it_begins(stands, tiled):
    """The first one that keeps all holds its input too, which later ones share with the layer before.
    If each were taken to keep as much as the first, they would run tiled although there is room. A
    tensor that the user made after the plan leaves room for one layer less."""
    gauge = Card()
    meter = Meter(gauge, list, 4)
    meter.kinds["a"] = Kind(kept=[100, 1])
    meter.begin()
    meter.step.tokens = 1
    meter.step.plan = StepPlan(LEAST, ["a"] * 4, [False, True, True, True])
    for index, gauge.now in enumerate(stands):
        meter.layer_begins(index, "a", 0)
    assert meter.step.kept_all == meter.step.plan.keeps_all == [i >= tiled for i in range(4)]


def test_frozen_layers_below_the_first_trained_one_keep_nothing(monkeypatch, capfd):
    """No host memory is asked for them, and no line counts them."""
    asked = []
    first = policies.first_policy
    monkeypatch.setattr(
        policies, "first_policy", lambda *a, **k: asked.append(k["layers"]) or first(*a, **k)
    )
    model = tiny_llama()
    hfpatch.apply(model)
    on_device(monkeypatch, Told)
    for part in (model.model.embed_tokens, *model.model.layers[:2]):
        part.requires_grad_(False)
    step(model)
    (meter,) = model.model._hfpatch.runtime.meters.values()
    assert [kind is None for kind in meter.step.forward.kinds] == [True, True, False]
    assert asked[-1] == 1 and "tokens: 1 keep" in capfd.readouterr().err
