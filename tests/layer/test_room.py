"""What a step may take: lengths in any order within the memory that the longest alone needs, and
what steps teach.
"""

import gc
import random
import sys

import pytest
import torch
from tiny import gradients
from transformers import Trainer, TrainingArguments

import hfpatch
from hfpatch.budget.choice import Budget, Option, reserve
from hfpatch.budget.free import gpu_fragments
from hfpatch.budget.hardware import GPUS, place_of
from hfpatch.budget.policy import Policy
from hfpatch.context.ranks import sharded
from hfpatch.lab.presets import preset_config
from hfpatch.lab.simulate import simulator
from hfpatch.lab.simulate.implementations import build, prepare
from hfpatch.lab.simulate.sequence import LoneRank
from hfpatch.layer import policies as session_module
from hfpatch.layer import room as room_module
from hfpatch.layer.policies import rounded
from hfpatch.layer.room import SHRINK, Gauge, Room
from tests.layer.deep import tiny_llama, tokens

pytestmark = pytest.mark.usefixtures("exact_loss")

GiB = 2**30


class Told(Gauge):
    """A device whose counters a test sets."""

    counters = {"free": 0, "allocated": 0, "peak": 0, "ooms": 0}

    free, allocated, peak, ooms = (
        lambda self, n=n: self.counters[n] for n in ("free", "allocated", "peak", "ooms")
    )
    wait = lambda self: None  # noqa: E731
    fragments = unused = lambda self: 0

    def gpu(self):
        return GPUS["h100"]


@pytest.fixture
def told(monkeypatch):
    monkeypatch.setattr(session_module, "metered", lambda device: True)
    monkeypatch.setattr(session_module, "Gauge", Told)
    monkeypatch.setattr(Told, "counters", {"free": 0, "allocated": 0, "peak": 0, "ooms": 0})
    return Told.counters


class OfLedger(Gauge):
    """A device of `size` bytes on which everything lies that a simulated run has made."""

    size = 0

    def __init__(self, device):
        self.device, self.seen, self.now, self.top = device, 0, 0, 0

    def allocated(self):
        from hfpatch.lab.simulate.follow import current

        ledger = current().ledger
        for index, delta in ledger.events[self.seen :]:
            self.now += 0 if ledger.blocks[index].host else delta
            self.top = max(self.top, self.now)
        self.seen = len(ledger.events)
        return self.now

    def peak(self):
        self.allocated()
        return self.top

    def free(self):
        return self.size - self.allocated()

    def ooms(self):
        return 0

    fragments = unused = ooms

    def gpu(self):
        return GPUS["h100"]


def run_lengths(monkeypatch, lengths, size, accumulation):
    """The highest total of training on those lengths, AdamW after each `accumulation` of them,
    evaluating in between.
    """
    config = preset_config("llama-3.2-1b") | {"num_hidden_layers": 3, "vocab_size": 8192}
    model = prepare(build(config), "hfpatch")
    # whole logits, and transformers' float32 copies of them, are no layer's
    model._hfpatch_logits = False
    monkeypatch.setattr(session_module, "metered", lambda device: True)
    monkeypatch.setattr(session_module, "Gauge", OfLedger)
    monkeypatch.setattr(OfLedger, "size", size)

    def run(model, follower, ids, labels):
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        for i, T in enumerate(lengths):
            model(input_ids=ids[:, :T], labels=labels[:, :T]).loss.backward()
            if (i + 1) % accumulation == 0:
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    model.eval()(input_ids=ids[:, :T], labels=labels[:, :T])
                model.train()

    monkeypatch.setattr(simulator, "train_step", run)
    return simulator.simulate(model, 1, max(lengths)).peak_bytes


def test_lengths_in_any_order_stay_within_what_there_is(monkeypatch, capfd):
    lengths = [9000, 1024, 65536, 3000, 65536]
    size = int(4.2 * GiB)
    peak = run_lengths(monkeypatch, lengths, size, accumulation=4)
    said = capfd.readouterr().err
    assert 0.8 * size < peak <= size, (peak / GiB, said)
    # What is short keeps more; and after the first optimizer step it is known what that made.
    assert (
        "1 x 1,024 tokens: 3 layers keep everything" in said
        and "1 x 65,536 tokens: 3 keep their input" in said
    ), said
    assert said.count("1 x 65,536 tokens") == 2, said


def learned_steps(monkeypatch, size, steps, checkpointing="auto", rows=2048):
    """(policies of the steps of a GLM-4.5 of 5 layers on a device of `size` bytes, the highest total
    of each, the most bytes that each was planned to take).
    """
    config = {
        "model_type": "glm4_moe", "hidden_size": 1024, "intermediate_size": 4096,
        "moe_intermediate_size": 512, "num_hidden_layers": 5, "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 64, "n_routed_experts": 8, "num_experts_per_tok": 4,
        "first_k_dense_replace": 1, "vocab_size": 8192,
    }  # fmt: skip
    model = build(config)
    hfpatch.apply(model, checkpointing=checkpointing)
    monkeypatch.setattr(session_module, "metered", lambda device: True)
    monkeypatch.setattr(session_module, "Gauge", OfLedger)
    monkeypatch.setattr(OfLedger, "size", size)
    found = []

    def run(model, follower, ids, labels):
        runtime = model.model._hfpatch_runtime
        for _ in range(steps):
            model(input_ids=ids, labels=labels).loss.backward()
            (room,) = runtime.rooms.values()
            policy, *shape = runtime.learned.step
            room.measure()
            found.append((policy, room.took[0], runtime.planned.get((policy, *shape))))
            model.zero_grad()

    monkeypatch.setattr(simulator, "train_step", run)
    return found, simulator.simulate(model, 1, rows).peak_bytes


def test_layers_without_a_closed_form_learn_to_keep_more(monkeypatch, capfd):
    """Each step shows what there is room for; none takes more than was said, nor than there is."""
    size = 3 * GiB
    found, peak = learned_steps(monkeypatch, size, 4)
    plain = [policy.plain for policy, *_ in found]
    assert plain[0] == 0 < plain[1] and plain == sorted(plain) and plain[-1] == 5, plain
    assert all(took <= planned for _, took, planned in found[1:]), found
    assert peak <= size and "5 layers keep everything" in capfd.readouterr().err


def test_layers_without_a_closed_form_keep_no_more_where_less_is_asked_or_free(monkeypatch):
    for size, asked in ((3, "least"), (0.5, "auto")):
        found, _ = learned_steps(monkeypatch, int(size * GiB), 2, asked)
        assert [policy.plain for policy, *_ in found] == [0, 0]


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_any_lengths_stay_within_what_there_is(seed, monkeypatch):
    lengths = [2 ** random.Random(seed).uniform(10, 17) for _ in range(11)] + [131072]
    lengths = [int(n) for n in lengths]
    random.Random(seed).shuffle(lengths)
    assert run_lengths(monkeypatch, lengths, int(6.5 * GiB), accumulation=4) <= 6.5 * GiB


def step(model):
    model(tokens(), labels=tokens()).loss.backward()


def room_of(model) -> Room:
    return next(iter(model.model._hfpatch_runtime.rooms.values()))


def policy_of(model):
    return next(iter(model.model._hfpatch_runtime.policies.values()))


@pytest.mark.parametrize(
    "free, step", [(80 * GiB, 80 * GiB / 1.1), (12 * GiB, 10 * GiB), (2 * GiB, 0), (0, 0)]
)
def test_more_is_left_until_a_step_was_measured(free, step):
    """A tenth and at least 2 GiB: the largest step that fits leaves that."""
    given = room_module.unmeasured(free)
    largest = max((n for n in range(0, free + 1, 1 << 20) if n + reserve(n) <= given), default=0)
    assert abs(largest - step) <= 2 << 20 and given <= free


def largest_step(room: Room) -> float:
    """GiB of the largest step that a policy may plan, to a thousandth."""
    budget, low, high = Budget(room.bytes(), None), 0, 128 * 1024
    while high - low > 1:
        n = (low + high) // 2
        fits = budget.admits_device(Option(Policy(), n * GiB // 1024, 0, 0.0))
        low, high = (n, high) if fits else (low, n)
    return low / 1024


@pytest.mark.parametrize("free, first, later", [
    (78.0, 78 / 1.10, 78 / 1.04),  # a tenth, then 4%
    (12.0, 12 - 2.00, 12 / 1.04),  # 2 GiB are more than a tenth
    (4.0, 4 - 2.00, 4 - 0.25),  # and 256 MiB more than 4%
])  # fmt: skip
def test_a_tenth_is_left_until_a_step_was_measured_and_four_percent_after(free, first, later, told):
    """The numbers themselves: of what is free beside gradients, the largest step that is planned."""
    model = tiny_llama()
    hfpatch.apply(model)
    told["free"] = int(free * GiB)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step(model)
    assert largest_step(room_of(model)) == pytest.approx(first, abs=0.003)
    optimizer.step()
    assert largest_step(room_of(model)) == pytest.approx(later, abs=0.003)


def test_the_second_step_has_what_the_first_one_left(told):
    model = tiny_llama()
    hfpatch.apply(model)
    told["free"] = 40 * GiB
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step(model)
    room = room_of(model)
    left = 40 * GiB - 2 * sum(p.numel() * 8 for p in model.parameters())  # the gradients are there
    assert (
        not room.proven
        and room.bytes() == room_module.unmeasured(left)
        and room.bytes(careful=False) == left
    )
    optimizer.step()
    assert room.proven and room.bytes() == 40 * GiB


def test_after_memory_ran_out_less_is_kept(told, capfd):
    model = tiny_llama()
    hfpatch.apply(model)
    told["free"] = 4 * GiB
    step(model)
    expected, before = gradients(model), policy_of(model)
    (planned,) = (
        n for (policy, *_), n in model.model._hfpatch_runtime.planned.items() if policy == before
    )
    assert before.plain == 3 and "3 layers keep everything" in capfd.readouterr().err
    told["ooms"] = 1
    model.zero_grad()
    step(model)
    assert room_of(model).most == int(SHRINK * (planned + reserve(planned)))
    assert "hfpatch: memory ran out: layers keep less from now on." in capfd.readouterr().err
    step(model)
    assert capfd.readouterr().err == ""
    assert all(g is not None for g in expected.values())


class RunsOut(torch.optim.SGD):
    """Runs out of memory in its first step, as where its states have no room."""

    def step(self, closure=None):
        if not Told.counters["ooms"]:
            Told.counters["ooms"] = 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().step(closure)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_after_memory_ran_out_in_the_optimizer_less_is_kept(accumulation, told, capfd):
    model = tiny_llama()
    hfpatch.apply(model)
    told["free"] = 4 * GiB
    optimizer = RunsOut(model.parameters(), lr=0.0)
    for _ in range(accumulation):
        step(model)
    before = room_of(model).bytes()
    with pytest.raises(torch.OutOfMemoryError):
        optimizer.step()
    optimizer.zero_grad()
    capfd.readouterr()
    step(model)
    assert "hfpatch: memory ran out: layers keep less from now on." in capfd.readouterr().err
    bound = room_of(model).most
    assert 0 < bound < before and room_of(model).bytes() <= bound
    optimizer.step()
    told["ooms"] = 2  # in an evaluation, say: no step of ours is under way
    step(model)
    assert room_of(model).most == bound and "ran out" not in capfd.readouterr().err


def test_a_smaller_batch_after_memory_ran_out_in_the_optimizer_keeps_less(told, capfd, tmp_path):
    model = tiny_llama().float()
    hfpatch.apply(model)
    told["free"] = 4 * GiB
    arguments = TrainingArguments(
        output_dir=str(tmp_path), auto_find_batch_size=True, per_device_train_batch_size=4,
        max_steps=2, use_cpu=True,
        report_to="none", disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in tokens(8, 16)]
    trainer = Trainer(
        model, arguments, train_dataset=rows, optimizer_cls_and_kwargs=(RunsOut, {"lr": 0.0})
    )
    trainer.train()
    assert trainer.state.global_step == 2 and room_of(model).most is not None
    assert (
        capfd.readouterr().err.count("hfpatch: memory ran out: layers keep less from now on.") == 1
    )


def test_a_step_that_took_more_than_planned_gives_the_next_one_less(told, capfd):
    model = tiny_llama()
    hfpatch.apply(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    told["free"] = 4 * GiB
    step(model)
    room = room_of(model)
    before = room.bytes()
    # Two states of each parameter might have come, and did not.
    told["peak"] = int(3 * GiB)
    optimizer.step()
    assert room.over > 2 and room.bytes() < before
    step(model)
    assert "were planned: layers keep less from now on." in capfd.readouterr().err
    over = room.over
    optimizer.step()
    assert room.over == over  # nothing new


def test_memory_in_which_backends_were_tried_is_no_step_s(told, monkeypatch, capfd):
    """A first step tries attention's backends, which takes more than the layers of a narrow model,
    and may find no room.
    """
    monkeypatch.setattr(room_module, "trial_peaks", {})
    model = tiny_llama()
    hfpatch.apply(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    told["free"] = 4 * GiB
    step(model)
    room = room_of(model)
    room_module.trial_peaks[room.gauge.device] = told["peak"] = 3 * GiB
    monkeypatch.setitem(room_module.trials_without_room, room.gauge.device, 1)
    told["ooms"] = 1
    for _ in range(2):
        optimizer.step()
        step(model)
    assert (room.over, room.most) == (1.0, None) and "less" not in capfd.readouterr().err
    told["peak"] = 3 * GiB + 1  # beyond the trial's: the step's own
    optimizer.step()
    assert room.over > 2
    told["ooms"] = 2
    step(model)
    step(model)
    assert room.most is None  # nothing was planned between the optimizer and the next step
    told["ooms"] = 3
    step(model)
    assert room.most is not None


def test_what_the_allocator_held_and_could_not_use_is_left_out_of_the_next_budget(
    told, monkeypatch
):
    """The most of all steps, and no less than what lies beside tensors now; a rank that must choose
    as others do learns nothing.
    """
    model, held = tiny_llama(), {"unused": 3 * GiB, "fragments": 0}
    hfpatch.apply(model)
    for name in held:
        monkeypatch.setattr(Told, name, lambda self, name=name: held[name])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    told["free"] = 40 * GiB
    for unused, fragments, left in ((3, 0, 37), (1, 0, 37), (1, 5, 35), (4, 2, 36)):
        held |= {"unused": unused * GiB, "fragments": fragments * GiB}
        step(model)
        optimizer.step()
        assert room_of(model).bytes() == left * GiB
    room_of(model).alone, held["unused"] = False, 9 * GiB
    step(model)
    optimizer.step()
    assert room_of(model).unused == 4 * GiB


def test_free_bytes_beside_tensors_are_fragments(monkeypatch):
    """Of this device alone, in segments that hold something; not in those that expand."""
    segment = {"device": 0, "total_size": 20, "allocated_size": 5, "is_expandable": False}
    others = ({"device": 1}, {"allocated_size": 0}, {"is_expandable": True}, {"total_size": 7})
    monkeypatch.setattr(
        torch.cuda, "memory_snapshot", lambda: [segment, *(segment | other for other in others)]
    )
    assert gpu_fragments(torch.device("cuda", 0)) == 15 + 2


def test_ranks_that_must_choose_alike_learn_nothing(told):
    model = tiny_llama()
    hfpatch.apply(model)
    told["free"] = 4 * GiB
    step(model)
    room_of(model).alone = False
    told["ooms"], told["peak"] = 1, 3 * GiB
    step(model)
    assert room_of(model).most is None and room_of(model).over == 1.0


def test_ranks_with_other_cards_plan_for_the_slowest(told, monkeypatch):
    """Rates decide what is kept too: ranks that disagreed would wait for each other for ever."""
    planned, decide = [], session_module.decide
    monkeypatch.setattr(
        session_module, "decide", lambda *a, **k: planned.append(k["gpu"]) or decide(*a, **k)
    )
    told["free"] = 4 * GiB
    model = tiny_llama()
    hfpatch.apply(model)
    for other in (GPUS["l40s"], GPUS["b200"], None):
        ranks = LoneRank(2)
        mine_and = [1 << 50, 1 << 50, place_of(other)]
        ranks.least = lambda numbers, _, theirs=mine_and: [
            None if a is None or b is None else min(a, b) for a, b in zip(numbers, theirs)
        ]
        with sharded(ranks):
            model(
                tokens(), labels=tokens(), position_ids=torch.arange(37)[None], use_cache=False
            ).loss.backward()
    assert planned == [GPUS["l40s"], GPUS["h100"], None]


def test_states_are_to_come_until_an_optimizer_has_stepped(told):
    model = tiny_llama()
    hfpatch.apply(model)
    told["free"] = 4 * GiB
    step(model)
    own = sum(p.numel() * 8 for p in model.parameters())
    # the gradients are there
    assert room_of(model).bytes() == room_module.unmeasured(4 * GiB - 2 * own)
    step(model)
    torch.optim.SGD(model.parameters(), lr=0.0).step()
    assert room_of(model).bytes() == 4 * GiB


def test_an_optimizer_of_another_model_tells_nothing(told):
    """Of a critic beside its actor, say: its states are not the actor's."""
    actor, critic = tiny_llama(), tiny_llama()
    told["free"] = 4 * GiB
    for model in (actor, critic):
        hfpatch.apply(model)
        step(model)
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.0)
    optimizer.step()
    assert room_of(critic).stepped and not room_of(actor).stepped
    # An engine's may hold parameters of its own alone, of which nobody knows whose they are.
    flat = torch.optim.SGD([torch.zeros(3, requires_grad=True)], lr=0.0)
    flat.step()
    assert room_of(actor).stepped


def test_an_optimizer_of_a_model_that_is_not_patched_tells_nothing(told, capfd):
    """Of a reward model or a discriminator, say. A model that is frozen has no optimizer but those
    of what stands around it.
    """
    actor, critic = tiny_llama(), torch.nn.Linear(3, 3)
    told["free"] = 4 * GiB
    hfpatch.apply(actor)
    step(actor)
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.0)
    optimizer.step()
    room = room_of(actor)
    assert (
        not room.stepped and room.bytes() < 4 * GiB and "first step" not in capfd.readouterr().err
    )
    # FSDP1 keeps a model's parameters in one of its own.
    critic.weight._is_flat_param = True
    optimizer.step()
    assert room.stepped
    room.stepped = False
    del critic.weight._is_flat_param
    actor.requires_grad_(False)
    optimizer.step()
    assert room.stepped


def test_gradients_arrive_alike_on_all_ranks_of_deepspeed(told, monkeypatch):
    """Its buckets take gradients as they come: a rank with more memory must not run another order
    of them.
    """
    model = tiny_llama()
    hfpatch.apply(model)
    told["free"] = 4 * GiB
    with monkeypatch.context() as patch:
        assert not session_module.arrival_counts()
        patch.setitem(sys.modules, "deepspeed", sys)
        patch.setattr(torch.distributed, "is_initialized", lambda: True)
        patch.setattr(torch.distributed, "get_world_size", lambda: 2)
        assert session_module.arrival_counts()
    monkeypatch.setattr(session_module, "arrival_counts", lambda: True)
    step(model)
    assert policy_of(model).plain == 0


def test_lengths_that_are_close_have_one_policy(told):
    assert [rounded(n) for n in (1, 16, 17, 31, 33, 8192, 8193, 131072)] == [
        1,
        16,
        17,
        31,
        34,
        8192,
        8704,
        131072,
    ]
    model = tiny_llama()
    hfpatch.apply(model)
    told["free"] = 4 * GiB
    for T in (33, 34):
        model(tokens(2, T), labels=tokens(2, T)).loss.backward()
    assert len(model.model._hfpatch_runtime.policies) == 1


def test_a_room_goes_with_its_model(told):
    from torch.optim.optimizer import _global_optimizer_pre_hooks as hooks

    gc.collect()
    before = len(hooks)
    model = tiny_llama()
    hfpatch.apply(model)
    told["free"] = 4 * GiB
    step(model)
    assert len(hooks) == before + 1
    hfpatch.undo(model)
    assert len(hooks) == before


def test_a_stack_whose_first_layer_runs_whole_looks_back_too(told, capfd):
    model = tiny_llama()
    hfpatch.apply(model)
    model.model.layers[0].self_attn.register_forward_hook(lambda *_: None)
    told["free"] = 4 * GiB
    step(model)
    room = room_of(model)
    planned = model.model._hfpatch_runtime.planned
    assert len({policy for policy, *_ in planned}) == 2 and room.step[2] == max(planned.values())
    told["ooms"] = 1
    step(model)
    assert "memory ran out" in capfd.readouterr().err and room.most is not None


@pytest.mark.parametrize("autocast, settings, left", [
    (False, {}, ("qkv", "mid", "gate_up")), (True, {}, ("qkv",)),
    (False, {"mlp": False}, ("qkv", "mid")),
])  # fmt: skip
def test_what_a_layer_cannot_keep_is_not_planned(autocast, settings, left, told, monkeypatch):
    model, able = tiny_llama().float(), []
    hfpatch.apply(model, **settings)
    told["free"] = 4 * GiB
    decide = session_module.decide
    monkeypatch.setattr(
        session_module, "decide", lambda *a, **k: able.append(k["able"]) or decide(*a, **k)
    )
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        step(model)
    assert able == [left]
