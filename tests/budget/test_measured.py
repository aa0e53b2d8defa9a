"""The ladder on made numbers: no step takes more than there is, and settings stay."""

from dataclasses import replace

import pytest

from hfpatch.budget.limits import GiB
from hfpatch.budget.measured import Abilities, Kind, Line, StepSizes, climb
from hfpatch.budget.policy import LEAST, Checkpointing

# A step of 10 layers: one that keeps all takes KEPT a token, a tile's backward TILE a token, the
# loss LOSS; GRADIENTS are left.
KEPT, TILE, LOSS, GRADIENTS, LAYERS = 100_000, 150_000, 2 * GiB, 3 * GiB, 10


def call(tokens: int, **changes) -> StepSizes:
    made = StepSizes(kinds=["layer"] * LAYERS, gradients=GRADIENTS)
    for line, value in ((made.stands, 0), (made.loss, LOSS), (made.after, 0), (made.tiled, 0)):
        line.put(tokens, value)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def plan(tokens, room, settings=None, able=None, kind=None, made=None, first=None):
    return climb(
        first or replace(LEAST, tile=4096), made or call(tokens),
        {"layer": kind or Kind([KEPT, 1], {"after": [TILE, 0.0, 1]})}, settings or Checkpointing(),
        able or Abilities(), tokens, room,
    )  # fmt: skip


def took(found, tokens: int) -> float:
    """The most bytes of such a step."""
    keep_all = sum(found.keeps_all)
    tiled = GRADIENTS + TILE * min(found.policy.tile, tokens) if keep_all < LAYERS else 0
    return max(keep_all * KEPT * tokens + LOSS, tiled)


@pytest.mark.parametrize("tokens", [8192, 16384, 65536])
@pytest.mark.parametrize("room", [4, 6, 12, 40, 200])
def test_no_step_takes_more_than_there_is(tokens, room):
    found = plan(tokens, room * GiB)
    assert took(found, tokens) <= max(room * GiB, took(plan(tokens, 0), tokens))
    if found.policy.plain < LAYERS and room > 4:  # another layer would not fit
        assert took(found, tokens) + KEPT * tokens > room * GiB or found.policy.tile < 16384
    assert found.keeps_all == [i >= LAYERS - found.policy.plain for i in range(LAYERS)]
    if room == 200:
        assert found.policy.plain == LAYERS


def test_a_layer_that_keeps_all_leaves_room_for_a_widest_tensor_in_one_piece():
    """At 131,072 tokens of 8B widths that is 3.5 GiB, which the allocator may hold in holes."""
    wide, tokens = 2 * GiB, 65536
    room = 5 * KEPT * tokens + LOSS + wide
    made, able = call(tokens, sure=True), Abilities(gate_up=2 * wide // tokens)
    found = [plan(tokens, room - less, able=able, made=made) for less in (0, 1)]
    assert [step.policy.plain for step in found] == [5, 4]
    made.sure = False  # a tenth of the card is free
    assert plan(tokens, room - wide, able=able, made=made).policy.plain == 5


def test_gate_and_up_go_to_the_host_as_far_as_the_link_has_time():
    made = call(8192)
    made.seconds.put(8192, 1.0)
    able = Abilities(gate_up=50_000, checkpoint=20_000, host=200 * GiB, link=6e9)
    found = plan(8192, 6 * GiB, able=able, made=made)
    left = LAYERS - found.policy.plain
    spare = 6e9 - left * 20_000 * 8192
    assert found.policy.keep == min(left, int(spare / (50_000 * 8192)))
    for less in ({"link": 0.0}, {"host": GiB}, {"gate_up": 0}):
        given = Abilities(**vars(able) | less)
        assert plan(8192, 6 * GiB, able=given, made=made).policy.keep == 0


def test_what_is_asked_for_stays():
    found = plan(16384, 200 * GiB, Checkpointing(tile=4096, plain=0))
    assert (found.policy.tile, found.policy.plain, sum(found.keeps_all)) == (4096, 0, 0)
    found = plan(16384, 200 * GiB, Checkpointing(tile=4096))
    assert (found.policy.tile, found.policy.plain) == (4096, LAYERS)


def test_one_length_serves_the_others():
    line = Line()
    line.put(8192, 100)
    assert (line.most(4096), line.most(8192), line.most(16384)) == (100, 100, 200)
    line.put(16384, 140)
    assert (line.most(12288), line.most(32768)) == (120, 280)
    line.put(8190, 50)  # in place of a length nearly as long
    assert len(line.points) == 2 and line.most(8190) == 50
    assert line.least(4095) == pytest.approx(50 / 4) and line.least(9828) == pytest.approx(60)
