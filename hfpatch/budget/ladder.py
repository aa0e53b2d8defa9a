"""The ladder of policies that choice.py tries: the tensors that layers may keep, and their place.

Each rung of RUNGS is tried in several tile sizes, without plain
layers (which keep everything): choice.py adds those. Standard library only.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from hfpatch.budget.cuts import head_groups
from hfpatch.budget.policy import (
    TILES,
    Checkpointing,
    Policy,
)
from hfpatch.budget.shape import ModelShape

# The tensors that a tiled layer keeps, and their place. A rung that does not save attention is
# also tried with one input for several layers.
RUNGS = {
    "on the device": Policy("gpu"),
    "heads and residual on the device": Policy("gpu", keep=("qkv", "mid")),
    "residual and gates on the device": Policy("gpu", keep=("mid", "gate_up")),
    "segments on the device": Policy("gpu", save_attention=False),
    "on the host": Policy("host"),
    "heads on the host": Policy("host", keep=("qkv",)),
    "gates on the host": Policy("host", keep=("gate_up",)),
    "heads and residual on the host": Policy("host", keep=("qkv", "mid")),
    "heads and gates on the host": Policy("host", keep=("qkv", "gate_up")),
    "all on the host": Policy("host", keep=("qkv", "mid", "gate_up")),
    "segments on the host": Policy("host", save_attention=False),
}


def policies(
    settings: Checkpointing, shape: ModelShape, *, batch: int, tokens: int, able: tuple
) -> tuple[Policy, ...]:
    """The policies of all rungs that the settings allow, without plain layers.

    able: names of KEEPABLE that the layers can keep.
    """
    ladder = _Ladder(settings, shape, batch, tokens, able)
    found = (policy for rung in RUNGS.values() for policy in ladder.policies(rung))
    return tuple(dict.fromkeys(found))  # settings make some rungs equal


@dataclass(frozen=True)
class _Ladder:
    settings: Checkpointing
    shape: ModelShape
    batch: int
    tokens: int
    able: tuple

    @property
    def rows(self) -> int:
        return self.batch * self.tokens

    def policies(self, rung: Policy) -> Iterator[Policy]:
        """The rung in each interval, tile size and way of attention's backward. Fields that the
        settings fix keep their value."""
        place = rung.offload if self.settings.offload == "auto" else self.settings.offload
        place = "disk" if self.settings.directory else place
        keep = tuple(k for k in rung.keep if k in self.shape.keepable and k in self.able)
        keep = keep if self.settings.keep == "auto" else self.settings.keep
        weights = "host" if self.settings.frozen_weights == "host" else "gpu"
        for (every, save), tile in product(self._spans(rung), self._tiles()):
            base = Policy(
                place, every, save, tile=tile, keep=keep if every == 1 else (),
                frozen_weights=weights,
            )  # fmt: skip
            yield base
            if head_groups(self.batch, self.tokens, self.shape) > 1 and self.shape.ranks == 1:
                yield replace(base, wide=True)

    def _spans(self, rung: Policy) -> list[tuple[int, bool]]:
        """(every, save_attention) of a rung."""
        every, save = self.settings.every, self.settings.save_attention
        if every != "auto":
            intervals = [every]
        elif not rung.save_attention and save is not True:
            intervals = _intervals(self.shape.num_layers)
        else:
            intervals = [1]
        if save != "auto":
            return [(k, save) for k in intervals]
        if rung.save_attention:
            return [(k, k == 1) for k in intervals]
        # A segment runs attention again in any case; a layer that keeps its input does by choice.
        return [(k, False) for k in intervals]

    def _tiles(self) -> tuple[int, ...]:
        """Tile sizes below the number of rows, and the largest size if it holds all rows."""
        if self.settings.tile != "auto":
            return (self.settings.tile,)
        fewer = tuple(t for t in TILES if t < self.rows)
        return fewer + ((TILES[-1],) if self.rows <= TILES[-1] else ())


def _intervals(num_layers: int) -> list[int]:
    """Layers per checkpoint to try: all numbers up to 8, then a quarter more each time."""
    found = [1]
    while found[-1] < num_layers:
        found.append(min(num_layers, max(found[-1] + 1, found[-1] * 5 // 4)))
    return found
