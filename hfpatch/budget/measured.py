"""What the next step may keep, by what the last one took: for layers that no closed form describes.

Backward of a tile holds the graph of a layer over that tile's tokens, of the part after attention
and, where there are several tiles, of the part before it at another moment. So a layer that keeps
everything keeps no more than those two a tile; where some layers kept everything already, no more
than their share of the step. Both are bounds, so that no step runs out of memory on the way; each
step that was measured makes the next bound tighter. Standard library only.
"""

from dataclasses import dataclass, replace

from hfpatch.budget.choice import reserve
from hfpatch.budget.ladder import TILES
from hfpatch.budget.policy import Checkpointing, Policy


@dataclass(frozen=True)
class Step:
    """A step that was measured.

    policy: what its layers kept; took: bytes that it added to the device at its highest, less
    `gradients`, those of all gradients that it made; rows: tokens of its batch; layers: of the
    model.
    """

    policy: Policy
    took: int
    gradients: int
    rows: int
    layers: int

    @property
    def layer(self) -> int:
        """The most bytes that one more layer can keep. At its highest a step may have few
        gradients yet.
        """
        all_of_it, policy = self.took + self.gradients, self.policy
        if policy.plain:
            return -(-all_of_it // policy.plain)
        several = self.rows > policy.tile
        return -(-2 * all_of_it * self.rows // policy.tile) if several else all_of_it


def next_policy(step: Step, settings: Checkpointing, free: int) -> tuple[Policy, int]:
    """(the policy of the next step, the most bytes that it takes, its gradients left out).

    First tiles grow, since each tile reads every weight anew; what such a tile takes is measured
    before the last layers keep everything. What the settings name stays, and so does a policy that
    has no room to grow. free: bytes of the device beside all gradients.
    """
    policy, most = step.policy, step.took
    fits = lambda nbytes: nbytes + reserve(nbytes) <= free  # noqa: E731
    while settings.tile == "auto" and policy.tile < min(step.rows, TILES[-1]):
        twice = 2 * most + step.gradients
        if not fits(twice):
            break
        policy, most = replace(policy, tile=2 * policy.tile), twice
    last = step.layers if settings.plain == "auto" and policy == step.policy else policy.plain
    while policy.plain < last and fits(most + step.layer):
        policy, most = replace(policy, plain=policy.plain + 1), most + step.layer
    return policy, most
