"""What a measured step says of the next one: bounds that no layer goes beyond."""

import pytest

from hfpatch.budget.choice import reserve
from hfpatch.budget.policy import Checkpointing, Policy
from hfpatch.planner.grown import Step, next_policy

GiB = 2**30
# A step of 10 layers: each keeps KEPT where it keeps everything, and as much a row in a tile; its
# backward holds WORKING beside it. Gradients come as it goes.
KEPT, WORKING, GRADIENTS, LAYERS = 2 * GiB, GiB, 3 * GiB, 10


def took(policy: Policy, rows: int) -> int:
    """Bytes of such a step less those of its gradients, at its highest."""
    tile = min(policy.tile, rows) / rows
    plain = policy.plain * KEPT + WORKING  # its first backward: no gradients yet
    tiled = int(tile * (KEPT + WORKING)) + GRADIENTS
    return (
        max(plain if policy.plain else 0, policy.plain * KEPT + int(tile * KEPT), tiled) - GRADIENTS
    )


# one tile; several, which grow to as many as are tried at most
@pytest.mark.parametrize("rows, tile", [(8192, 8192), (16384, 4096), (65536, 8192)])
@pytest.mark.parametrize("free", [1, 12, 40, 200])
def test_no_step_takes_more_than_was_said(rows, tile, free):
    policy, seen = Policy("host", tile=tile), []
    for _ in range(12):
        now = took(policy, rows)
        found, most = next_policy(
            Step(policy, now, GRADIENTS, rows, LAYERS), Checkpointing(), free * GiB
        )
        if found == policy:
            break
        assert took(found, rows) <= most and most + reserve(most) <= free * GiB
        assert found.plain == policy.plain or found.tile == policy.tile
        policy = found
        seen.append(policy)
    assert policy == found, "it comes to an end"
    if free == 200:
        assert policy.plain == LAYERS and policy.tile == min(rows, 16384)
    if free == 1:
        assert not seen


def test_what_is_asked_for_stays():
    step = Step(Policy("host", tile=4096), GiB, 0, 16384, LAYERS)
    found, _ = next_policy(step, Checkpointing(tile=4096, plain=0), 200 * GiB)
    assert found == step.policy
    found, _ = next_policy(step, Checkpointing(tile=4096), 200 * GiB)
    assert found.plain == LAYERS and found.tile == 4096
