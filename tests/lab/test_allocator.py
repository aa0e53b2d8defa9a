"""The model of PyTorch's caching allocator: its rules one by one, and a step placed by it."""

import random
from functools import partial

import pytest
import torch

from hfpatch.budget.policy import Policy
from hfpatch.lab.presets import preset_config
from hfpatch.lab.simulate.implementations import build, prepare
from hfpatch.lab.simulate.simulator import simulate
from profiles.clock.allocator import Allocator, MiB, PlacedFollower


# Up to 1 MiB a segment of 2, below 10 MiB one of 20, above that its own size in steps of 2 MiB.
@pytest.mark.parametrize(
    "nbytes, segment",
    [(1, 2), (MiB, 2), (MiB + 1, 20), (10 * MiB - 512, 20), (10 * MiB, 10), (11 * MiB, 12)],
)
def test_segments_by_size(nbytes, segment):
    allocator = Allocator()
    piece = allocator.malloc(nbytes)
    assert allocator.reserved == segment * MiB and nbytes <= piece.nbytes
    allocator.free(piece)
    assert (allocator.allocated, allocator.reserved) == (0, segment * MiB)


def test_the_best_fit_is_split_and_merged_again():
    allocator = Allocator()
    pieces = [allocator.malloc(n * MiB) for n in (40, 2, 30, 2)]
    allocator.free(pieces[0]), allocator.free(pieces[2])
    before = allocator.reserved
    first = allocator.malloc(26 * MiB)  # out of 30, not out of 40
    second = allocator.malloc(4 * MiB)
    assert allocator.reserved == before and first.after is second
    for piece in (first, second):
        allocator.free(piece)
    assert allocator.malloc(30 * MiB).nbytes == 30 * MiB and allocator.reserved == before
    assert allocator.malloc(39.5 * MiB // 512 * 512).nbytes == 40 * MiB, "a rest of 0.5 MiB stays"


def test_streams_share_no_memory():
    allocator = Allocator()
    allocator.free(allocator.malloc(40 * MiB, stream="side"))
    allocator.malloc(40 * MiB)
    assert allocator.reserved == 80 * MiB


@pytest.mark.parametrize("expandable", [False, True])
def test_at_the_limit_cached_memory_goes_first(expandable):
    allocator = Allocator(limit=100 * MiB, expandable=expandable)
    held, gone = allocator.malloc(40 * MiB), allocator.malloc(20 * MiB, stream="side")
    allocator.free(gone)
    more = allocator.malloc(60 * MiB)
    assert allocator.reserved == 100 * MiB and allocator.ooms == 0
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 0.02 GiB"):
        allocator.malloc(20 * MiB)
    assert allocator.ooms == 1 and allocator.allocated == 100 * MiB
    for piece in (held, more):
        allocator.free(piece)
    assert allocator.malloc(100 * MiB) and allocator.reserved == 100 * MiB


def test_a_segment_that_grows_leaves_less_unused():
    """Sizes that go up a little each time, which no freed segment fits."""
    plain, grows = Allocator(), Allocator(expandable=True)
    for allocator in (plain, grows):
        for n in range(20, 60, 3):
            allocator.free(allocator.malloc(n * MiB))
    assert plain.reserved > 5 * grows.reserved and grows.reserved <= 80 * MiB
    assert plain.peak == grows.peak


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_pieces_cover_what_is_reserved(expandable, seed):
    rng, allocator, held = random.Random(seed), Allocator(400 * MiB, expandable), []
    for _ in range(2000):
        if held and rng.random() < 0.5:
            allocator.free(held.pop(rng.randrange(len(held))))
            continue
        try:
            held.append(allocator.malloc(int(2 ** rng.uniform(8, 25)), rng.randrange(2)))
        except torch.OutOfMemoryError:
            assert allocator.reserved <= 400 * MiB
    kept = sum(n for rows in allocator.free_pieces.values() for n, *_ in rows)
    assert allocator.allocated == sum(piece.nbytes for piece in held)
    assert allocator.allocated + kept == allocator.reserved <= 400 * MiB
    for rows in allocator.free_pieces.values():
        for _, _, piece in rows:  # two free neighbours would be one
            assert not piece.used and not (piece.after and not piece.after.used)


@pytest.mark.parametrize("expandable", [False, True])
def test_a_step_is_placed_and_stopped_at_a_limit(expandable):
    config = preset_config("llama-3.2-1b") | {"num_hidden_layers": 2, "vocab_size": 1024}
    model = prepare(build(config), "hfpatch")

    def run(limit=None):
        allocator = Allocator(limit, expandable)
        follower = partial(PlacedFollower, allocator)
        policy = Policy("host", tile=2048)
        return allocator, simulate(model, 1, 8192, policy=policy, follower=follower)

    allocator, found = run()
    assert found.peak_bytes <= allocator.peak < 1.02 * found.peak_bytes
    assert allocator.peak <= allocator.most_reserved and allocator.allocated >= 0
    run(allocator.most_reserved)
    with pytest.raises(torch.OutOfMemoryError, match="simulated"):
        run(int(0.9 * found.peak_bytes))
