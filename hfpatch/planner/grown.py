"""The next step's policy from the last step's memory, for layers that no closed form describes.

A tile's backward holds the graph of a layer over the tile's tokens: the part after attention and,
with several tiles, the part before it at another moment. So a layer that keeps everything keeps at
most those two graphs for each tile. If some layers kept everything already, it keeps at most their
share of the step. Both are upper bounds, so no step runs out of memory on the way; each measured
step tightens the next bound. Standard library only.
"""

from dataclasses import dataclass, replace

from hfpatch.budget.choice import reserve
from hfpatch.budget.ladder import TILES
from hfpatch.budget.policy import Checkpointing, Policy


@dataclass(frozen=True)
class Step:
    """A measured step.

    Attributes:
        policy: the policy of its layers.
        took: bytes that it added to the device at its peak, minus `gradients`.
        gradients: bytes of all gradients that it made.
        rows: tokens of its batch.
        layers: of the model.
    """

    policy: Policy
    took: int
    gradients: int
    rows: int
    layers: int

    @property
    def layer(self) -> int:
        """The most bytes that one more layer can keep. Gradients are added, because few of them may
        exist at the peak.
        """
        all_of_it, policy = self.took + self.gradients, self.policy
        if policy.plain:
            return -(-all_of_it // policy.plain)
        several = self.rows > policy.tile
        return -(-2 * all_of_it * self.rows // policy.tile) if several else all_of_it


def next_policy(step: Step, settings: Checkpointing, free: int) -> tuple[Policy, int]:
    """(the policy of the next step, the most bytes that it takes without its gradients).

    Tiles grow first, since each tile reads every weight again. A larger tile is measured before the
    last layers keep everything. Fields that the settings fix keep their value, and a policy without
    room to grow stays the same. free: bytes of the device without all gradients.
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
