"""The clock: copies that hide, copies that do not once the overlap is broken on purpose, and what
it writes.
"""

import dataclasses
import json
import time
from functools import cache, partial
from unittest import mock

import pytest

from hfpatch.budget.adapters import Adapters
from hfpatch.budget.copies import weight_bytes
from hfpatch.budget.flops import step_flops
from hfpatch.budget.formula import step_memory
from hfpatch.budget.hardware import GPUS
from hfpatch.budget.policy import KEEPABLE, Policy
from hfpatch.budget.seconds import step_time
from hfpatch.budget.sequence import sent_bytes
from hfpatch.budget.shape import ModelShape
from hfpatch.lab import clock as lab
from hfpatch.lab.presets import preset_config
from hfpatch.lab.simulate.implementations import build, prepare
from hfpatch.layer import policies
from hfpatch.layer.backward import Backward
from hfpatch.layer.runtime import LayerRuntime
from hfpatch.parallel.shards import Shards
from hfpatch.planner.placements import Resident
from hfpatch.planner.plan import plan
from hfpatch.planner.seconds import run_time
from hfpatch.store.transfers import Transfers
from profiles.clock.clocked import clock, clocked
from profiles.clock.timeline import trace_events, write_trace

# A Llama's true layer, of which four tell as much as thirty-two; the head is small, so that it
# hides nothing.
CONFIG = preset_config("llama-3.1-8b") | {"num_hidden_layers": 4, "vocab_size": 1000}
TOKENS = 8192
WAYS = {
    "one tile": Policy("host", tile=TOKENS, keep=KEEPABLE),
    "tiles": Policy("host", tile=2048, keep=KEEPABLE, wide=True),
    "one tile, plain": Policy("host", tile=TOKENS, keep=KEEPABLE, plain=2),
}


@cache
def model():
    return prepare(build(CONFIG), "hfpatch")


def step(policy: Policy, share: float = 0.7):
    """One clocked step on an H100 whose link takes `share` of a layer's forward for what that layer
    saves.
    """
    gpu, shape = GPUS["h100"], ModelShape.from_config(CONFIG)
    flops = step_flops(shape, policy, batch=1, tokens=TOKENS)
    forward = (flops.model - flops.model_attention) / 3 / gpu.matmul_flops
    forward = (forward + flops.model_attention / 3 / gpu.attention_forward) / shape.num_layers
    tiled = shape.num_layers - policy.plain
    saved = step_memory(shape, policy, batch=1, tokens=TOKENS).host / tiled
    gpu = dataclasses.replace(
        gpu, measured=True, peak_flops=gpu.matmul_flops, link=saved / (share * forward)
    )
    with mock.patch.object(lab, "LAUNCH_SECONDS", 0.0):
        return clocked(model(), gpu, policy, batch=1, seq_len=TOKENS)


whole = cache(step)


def exposed(timeline, turn: str) -> float:
    """Share of the turn."""
    return timeline.exposed("turn").get((turn,), 0.0) / timeline.seconds[turn]


@pytest.mark.parametrize("way", ["one tile", "tiles"])
def test_copies_hide(way):
    """The last layer's have no layer beside them: what it saves last, and its first tile's way
    back.
    """
    found = whole(WAYS[way])
    for (turn, layer), seconds in found.exposed("turn", "layer").items():
        assert layer == "layer 3" or seconds < 0.005 * found.seconds[turn], (turn, layer, seconds)
    assert exposed(found, "forward") < 0.7 / 4 and exposed(found, "backward") < 0.7 / 8
    assert found.busy(lab.UP) > 0.5 * found.seconds["forward"], "nothing to hide"


def test_a_plain_layer_hides_the_first_tiles_of_the_one_before():
    found = whole(WAYS["one tile, plain"])
    assert exposed(found, "backward") < 0.005
    with mock.patch.object(LayerRuntime, "_prefetch", lambda *args: None):
        assert exposed(step(WAYS["one tile, plain"]), "backward") > 0.03


@pytest.mark.parametrize("way", ["one tile", "tiles"])
def test_it_shows_sources_that_are_let_go_at_the_end_of_a_layer(way):
    settle, unbroken = Transfers.settle, exposed(whole(WAYS[way]), "forward")
    with mock.patch.object(
        Transfers, "settle", lambda self, under_way=0, room=0: settle(self, under_way)
    ):
        assert exposed(step(WAYS[way]), "forward") > 2 * unbroken + 0.03


def test_it_shows_a_layer_that_fetches_its_own_last():
    run = Backward.run

    slow = partial(step, WAYS["one tile"], share=1.8)  # a backward is twice a forward
    unbroken = exposed(slow(), "backward")

    def last(self, dy, private, before):
        if before is not None:
            before.prefetch()
        return run(self, dy, private, None)

    with mock.patch.object(Backward, "run", last):
        assert exposed(slow(), "backward") > unbroken + 0.03


def test_without_copies_the_clock_is_the_closed_form():
    policy = Policy("host", tile=TOKENS, keep=KEEPABLE)
    found = step(policy, share=1e-3)
    shape, sizes = ModelShape.from_config(CONFIG), {"batch": 1, "tokens": TOKENS}
    taken = step_flops(shape, policy, **sizes), step_memory(shape, policy, **sizes)
    planned, _ = step_time(GPUS["h100"], *taken, policy, shape, **sizes)
    computing = (
        planned.matmul + planned.attention + planned.tails + planned.elementwise + planned.loss
    )
    assert found.seconds["step"] == pytest.approx(computing, rel=0.03)
    assert not any(s.end - s.start > 1e-4 for s in found.waits)


@pytest.mark.parametrize("more", [{}, {"tile": 2048, "wide": True}])
def test_nothing_hides_q_k_v_where_attention_runs_again(more):
    """They are sent for as a layer's backward begins, and attention is the first to need them."""
    config = preset_config("google/gemma-3-12b") | {"num_hidden_layers": 12}
    config |= {"layer_types": [*["sliding_attention"] * 5, "full_attention"] * 2}
    policy = Policy("host", **{"tile": 4096, "keep": KEEPABLE, "plain": 2} | more)
    policy = dataclasses.replace(policy, save_attention=False)
    gpu, shape = GPUS["a100-80gb"], ModelShape.from_config(config)
    found = clocked(prepare(build(config), "hfpatch"), gpu, policy, batch=1, seq_len=4096)
    assert planned_step(gpu, shape, policy, 4096).copy_wait == pytest.approx(
        found.exposed_seconds, abs=0.005 * found.seconds["step"]
    )
    assert found.exposed_seconds > 0.01 * found.seconds["step"]


def test_layers_that_keep_less_hide_what_others_copy():
    """A link that takes longer for what a layer keeps than the layer itself: once the last tiled
    ones keep less, the copies of those before end beside them.
    """
    config, tokens = CONFIG | {"num_hidden_layers": 12}, 4096
    policy = Policy("host", tile=tokens, keep=("gate_up",), plain=2)
    gpu, shape = dataclasses.replace(GPUS["h100"], link=52e9), ModelShape.from_config(config)
    patched, found = prepare(build(config), "hfpatch"), {}
    for again in (0, 6):
        policy = dataclasses.replace(policy, again=again)
        found[again] = clocked(patched, gpu, policy, batch=1, seq_len=tokens)
        planned = planned_step(gpu, shape, policy, tokens)
        step = found[again].seconds["step"]
        assert planned.copy_wait == pytest.approx(found[again].exposed_seconds, abs=0.035 * step)
        assert step == pytest.approx(planned.total - planned.optimizer, rel=0.035)
    assert exposed(found[0], "forward") > 0.3 and exposed(found[6], "forward") < 0.05
    assert found[6].seconds["step"] < 0.9 * found[0].seconds["step"]


@pytest.mark.parametrize("every, tile", [(2, TOKENS), (4, TOKENS), (3, 2048)])
def test_a_segment_waits_for_the_input_from_which_it_runs_again(every, tile):
    config = CONFIG | {"num_hidden_layers": 12}
    policy = Policy("host", every=every, save_attention=False, tile=tile, plain=2, wide=True)
    gpu, shape = GPUS["h100"], ModelShape.from_config(config)
    found = clocked(prepare(build(config), "hfpatch"), gpu, policy, batch=1, seq_len=TOKENS)
    planned = planned_step(gpu, shape, policy, TOKENS)
    waits = found.exposed("turn")["backward",]
    assert planned.copy_wait == pytest.approx(waits, rel=0.02) and exposed(found, "forward") < 0.001
    assert 0.005 * found.seconds["step"] < waits < 0.03 * found.seconds["step"]


def planned_step(gpu, shape, policy, tokens: int):
    sizes = {"batch": 1, "tokens": tokens}
    taken = step_flops(shape, policy, **sizes), step_memory(shape, policy, **sizes)
    return run_time(gpu, *taken, policy, shape, Resident(), **sizes)[0]


@pytest.mark.parametrize("every", [1, 2])
def test_exchanges_of_ranks_take_their_bytes(every):
    """Behind attention on NVLink they hide; over a link of a fortieth compute waits for them."""
    policy = Policy("host", every=every, save_attention=every == 1, tile=2048)
    shape = dataclasses.replace(ModelShape.from_config(CONFIG), ranks=4)
    forwards = 1 if every == 1 else 2
    sent = sent_bytes(shape, 4096, 2, forwards=forwards)
    gpu, waits = GPUS["h100"], []
    for one in (gpu, dataclasses.replace(gpu, peer=gpu.peer / 40)):
        found = clocked(model(), one, policy, batch=1, seq_len=4096, ranks=4)
        assert found.busy(lab.EXCHANGES) == pytest.approx(sent / one.peer_rate, rel=0.05)
        waits.append(found.busy(lab.RANK_WAITS))
    assert waits[0] < 0.05 * found.seconds["step"] < waits[1]


@pytest.mark.parametrize("tile, passes", [(TOKENS, 1), (2048, 3)])
def test_tensor_parallel_ranks_gather_what_each_keeps_a_part_of(tile, passes, monkeypatch):
    """Half of each input goes to the host; each pass over its tiles gathers the other half, and
    waits for no more than its bytes take between GPUs. Products are not cut: no rank's are shown.
    """
    policy, found, clocks = Policy("host", tile=tile), {}, []
    init = lab.ClockDevice.__init__
    monkeypatch.setattr(
        lab.ClockDevice, "__init__", lambda self, *a: (init(self, *a), clocks.append(self))[0]
    )

    class Two(Shards):
        def __init__(self, group):
            self.group, self.rank, self.world, self.buffer = group, 0, 2, None

        def whole(self, part_BtD, length):
            clocks[-1].wait(clocks[-1].exchange(part_BtD.nbytes))
            B, t, D = part_BtD.shape
            return part_BtD.new_empty(B, 2 * t, D)[:, :length]

    for ranks in (1, 2):
        if ranks == 2:
            monkeypatch.setattr(policies, "tensor_parallel_group", lambda layer: "two")
            monkeypatch.setattr(policies, "together", lambda group, work: work())
            monkeypatch.setattr(policies, "Shards", Two)
        patched = prepare(build(CONFIG), "hfpatch")
        found[ranks] = clocked(patched, GPUS["h100"], policy, batch=1, seq_len=TOKENS)
    x = 2 * TOKENS * CONFIG["hidden_size"]
    up = [sum(s.nbytes for s in f.slices if s.stream == lab.UP) for f in found.values()]
    sent = sum(s.nbytes for s in found[2].slices if s.stream == lab.EXCHANGES)
    assert up[0] - up[1] == 4 * x / 2 and sent == 4 * passes * x / 2
    waits = found[2].busy(lab.RANK_WAITS)
    assert (
        0 < waits <= 1.001 * sent / GPUS["h100"].peer_rate
        and waits < 0.02 * found[2].seconds["step"]
    )
    assert sum(found[2].exposed("turn").values()) <= sum(found[1].exposed("turn").values()) + waits


@pytest.mark.parametrize("placement", ["adamw", "adamw-fp32"])
def test_a_real_optimizer_takes_what_the_plan_says(placement):
    """Clipping and torch's fused AdamW run on the clock; a first step also writes zeros to both
    states.
    """
    found = clock("llama-3.2-1b", seq_len=2048, placement=placement)
    planned = plan("llama-3.2-1b", seq_len=2048, gpu="h100", placement=placement)
    states = 2 * ModelShape.from_config(preset_config("llama-3.2-1b")).parameters
    zeros = states * (4 if placement == "adamw-fp32" else 2) / GPUS["h100"].memory_rate
    assert found.seconds["optimizer"] == pytest.approx(
        planned.seconds["optimizer"] + zeros, rel=0.02
    )
    names = {s.name for s in found.slices if s.turn == "optimizer"}
    assert found.planned == planned.step_seconds and names == {"optimizer"}


@pytest.mark.parametrize("plain", [0, 2])
def test_shared_rows_take_what_the_plan_says(plain):
    """Each round is a launch with last blocks of its own, packs what it sends, and the first one's
    exchange has nothing beside it.
    """
    policy = Policy("host", tile=4096, plain=plain, wide=True)
    shape = dataclasses.replace(ModelShape.from_config(CONFIG), ranks=4)
    found = clocked(model(), GPUS["h100"], policy, batch=1, seq_len=TOKENS, ranks=4)
    # Heads go round by round, wide or not; the plan does not count an input's gradient that waits
    # on the host.
    rounds = dataclasses.replace(policy, wide=False)
    planned = planned_step(GPUS["h100"], shape, rounds, TOKENS)
    assert found.seconds["step"] == pytest.approx(planned.total - planned.optimizer, rel=0.006)


def test_the_first_tiles_of_a_layer_s_backward_are_waited_for_as_planned():
    """What several tiles keep inside is sent for behind attention: nothing long hides it."""
    config, tokens = CONFIG | {"num_hidden_layers": 12}, 16384
    policy = Policy("host", tile=4096, keep=KEEPABLE, plain=2)
    gpu, shape = GPUS["h100"], ModelShape.from_config(config)
    found = clocked(prepare(build(config), "hfpatch"), gpu, policy, batch=1, seq_len=tokens)
    planned = planned_step(gpu, shape, policy, tokens)
    assert found.exposed("turn")["backward",] > 0.05 * found.seconds["step"]
    assert found.seconds["step"] == pytest.approx(planned.total - planned.optimizer, rel=0.03)


def test_streamed_weights_are_copies_on_the_clock():
    config = CONFIG | {"num_hidden_layers": 6}
    policy = Policy("gpu", tile=TOKENS, frozen_weights="host")
    adapters, gpu = Adapters(16, "4bit"), GPUS["rtx4090"]
    shape = dataclasses.replace(ModelShape.from_config(config), adapters=adapters)
    patched = prepare(build(config, adapters=adapters), "hfpatch")
    found = clocked(patched, gpu, policy, batch=1, seq_len=TOKENS)
    moved = sum(s.nbytes for s in found.slices if s.stream == lab.DOWN)
    assert moved == pytest.approx(sum(weight_bytes(shape, policy)), rel=0.05)
    planned = planned_step(gpu, shape, policy, TOKENS).total
    assert found.seconds["step"] == pytest.approx(planned, rel=0.05)


def test_a_step_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="a step that fits, .* GiB on the GPU"):
        clock("openai/gpt-oss-20b", seq_len=4096)


@pytest.mark.parametrize("tokens, slow", [(512, True), (8192, False)])
def test_a_step_that_waits_for_python_says_so(tokens, slow):
    """The plan prices Python by what a layer was measured to take, the clock by launches: where a
    step is Python's, they differ by more than anything else explains.
    """
    found = clock("llama-160m", seq_len=tokens)
    off = abs(found.seconds["step"] / found.planned - 1)
    assert (off > 0.05) == slow
    python = found.planned_python if slow else 0.0
    assert off * found.planned <= python + 0.05 * found.planned
    said = f", {python:.3f} s of it Python's (" if slow else " s ("
    assert said in str(found) and ("which counts launches)" in str(found)) == slow


def test_a_real_step_of_131072_tokens_takes_less_than_three_minutes():
    begin = time.process_time()
    found = clock("llama-3.1-8b", seq_len=131072)
    assert time.process_time() - begin < 180
    assert found.seconds["step"] == pytest.approx(found.planned, rel=0.05)


def test_rows_are_streams_and_slices_are_layers_and_phases(tmp_path):
    found = whole(WAYS["tiles"])
    rows = {}
    for s in found.slices:
        rows.setdefault(s.stream, []).append(s)
    assert {lab.COMPUTE, lab.UP, lab.DOWN} <= rows.keys()
    for row in rows.values():  # one stream, one thing at a time
        assert all(a.end <= b.start + 1e-9 for a, b in zip(row, row[1:]))
    names = {s.name for s in rows[lab.COMPUTE]}
    assert {
        f"layer 2 {phase}" for phase in ("before attention", "attention", "after attention")
    } <= names
    assert found.seconds["step"] == pytest.approx(max(s.end for s in rows[lab.COMPUTE]))

    events = json.loads(write_trace(found, tmp_path / "deep" / "trace.json").read_text())[
        "traceEvents"
    ]
    assert events == trace_events(found)
    threads = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert threads == {*rows, lab.WAITS}
    assert sum(e["ph"] == "X" for e in events) == len(found.slices) + len(found.waits)


def test_weights_that_an_engine_moves_are_refused():
    with pytest.raises(ValueError, match="zero3-offload.* came; pass one of gpu8bit"):
        clock("llama-3.1-8b", seq_len=65536, placement="zero3-offload")


@pytest.mark.parametrize(
    "more", [{"save_attention": False}, {"save_attention": False, "every": 2}, {"keep": KEEPABLE}]
)
def test_files_hold_up_what_the_plan_says(more):
    """A disk that eight GPUs share: the host waits for buffers to write from, and short passes of
    backward for what is read.
    """
    config, tokens = CONFIG | {"num_hidden_layers": 12}, 32768
    policy = Policy("disk", tile=8192, plain=2, **more)
    gpu, shape = dataclasses.replace(GPUS["h100"], sharing=8), ModelShape.from_config(config)
    found = clocked(prepare(build(config), "hfpatch"), gpu, policy, batch=1, seq_len=tokens)
    planned = planned_step(gpu, shape, policy, tokens)
    assert found.seconds["step"] == pytest.approx(planned.total - planned.optimizer, rel=0.04)
    assert found.exposed_seconds > 0.05 * found.seconds["step"]
    written = [s.nbytes for s in found.slices if s.stream == lab.UP]
    taken = step_memory(shape, policy, batch=1, tokens=tokens)
    assert sum(written) == pytest.approx(taken.host, rel=0.02)


def test_files_that_a_disk_writes_in_time_hold_up_nothing():
    """A layer's input and attention outputs take 0.61 s of its 1.15 s; each is more than the bounce
    buffers hold, so the host waits, but behind work that it has launched.
    """
    config, tokens = CONFIG | {"num_hidden_layers": 5}, 131072
    gpu, shape = GPUS["a100-80gb"], ModelShape.from_config(config)
    policy = Policy("disk", tile=16384, plain=1)
    found = clocked(prepare(build(config), "hfpatch"), gpu, policy, batch=1, seq_len=tokens)
    planned = planned_step(gpu, shape, policy, tokens)
    assert found.exposed("turn").get(("forward",), 0.0) < 0.002 * found.seconds["step"]
    assert found.seconds["step"] == pytest.approx(planned.total - planned.optimizer, rel=0.02)
