"""What one call of a layer keeps between forward and backward, and how it comes back, tile by tile.

x, out and lse as ever; of a policy's `keep`, q, k and v whole, and inside each tile the sum after
attention ("mid") and gate and up ("gate_up"), which wait and return tile by tile. All of it lives
where the policy says.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from hfpatch.attention.head_groups import InTier
from hfpatch.budget.formula import RING_SLOTS
from hfpatch.budget.policy import Policy
from hfpatch.compat import version
from hfpatch.store.transfers import FetchQueue, Saved, Transfers


class Cut:
    """x[:, a:b] of tiles that cover x [B, T, ...], one behind the other: made in one call where x
    is a tensor, for a view costs the host as much as an op; where its parts wait elsewhere
    (groups.py), as each is asked for.
    """

    def __init__(self, x, bounds: list[tuple[int, int]]):
        self.x, self.bounds, self.views = x, bounds, None
        if isinstance(x, Tensor):
            self.views = (x,) if len(bounds) == 1 else x.split([b - a for a, b in bounds], 1)

    def __getitem__(self, index: int) -> Tensor:
        a, b = self.bounds[index]
        return self.x[:, a:b] if self.views is None else self.views[index]


@dataclass(eq=False, kw_only=True)
class Kept:
    """The saved tensors of a call. bounds: of its tiles; queue: of its device and tier, None where
    nothing is kept.
    """

    policy: Policy
    device: torch.device
    # parallel.shards.Shards: x is kept in parts, one a tensor-parallel rank
    shards: "object | None" = None
    keep: tuple[str, ...] = ()  # of the policy's, what this layer can
    bounds: list[tuple[int, int]] = field(default_factory=list)
    queue: FetchQueue | None = None
    mixes: bool = True  # something in the layer mixes tokens; else one pass is all
    x: Saved | None = None
    outs: list[Saved] = field(default_factory=list)
    lses: list[Saved] = field(default_factory=list)
    qkv: list[Saved] = field(default_factory=list)
    # of each tile: what is kept inside it
    inside: list[dict[str, list[Saved]]] = field(default_factory=list)
    out_buffers: list | None = None
    gone: bool = False

    @property
    def transfers(self) -> Transfers:
        return self.queue.transfers

    @property
    def kept_bounds(self) -> list[tuple[int, int]]:
        """Where each tile of x lies in what is kept of it."""
        return self.bounds if self.shards is None else self.shards.bounds(self.bounds)

    @property
    def streams(self) -> bool:
        """Whether attention outputs come back by tiles and groups, never whole."""
        return self.policy.stream_attention or self.policy.by_group

    @property
    def keep_inside(self) -> tuple[str, ...]:
        return tuple([name for name in self.keep if name != "qkv"]) if self.keep else ()

    @staticmethod
    def on_device(x: Tensor) -> Saved:
        return Saved(tuple(x.shape), x.dtype, kept=x, version=version(x))

    def save(self, x: Tensor) -> Saved:
        """x on its way to the tier. What stays on the device must not hold more than itself."""
        if (
            self.transfers.tier == "gpu"
            and x.untyped_storage().nbytes() > x.numel() * x.element_size()
        ):
            x = x.contiguous()
        return self.transfers.save(x)

    def save_inside(self, noted: dict, room: int) -> None:
        """Saves what was noted inside the next tile. room: bytes that the sources of copies may
        take meanwhile.
        """
        self.inside.append({name: [self.save(x) for x in xs] for name, xs in noted.items()})
        self.transfers.settle(under_way=1, room=room)

    def release(self) -> None:
        """Returns every block; the graph cannot be walked again."""
        tiles = (saved for tile in self.inside for xs in tile.values() for saved in xs)
        for saved in (self.x, *self.outs, *self.lses, *self.qkv, *tiles):
            if saved is not None:
                saved.release()
        self.outs, self.lses, self.qkv, self.inside, self.out_buffers, self.gone = (
            [],
            [],
            [],
            [],
            None,
            True,
        )

    # -- passes over the tiles ---------------------------------------------------------------------
    def passes(self) -> list[tuple[str, ...]]:
        """What each pass over the tiles of a backward brings back, in the order of the passes. The
        sum after attention stands for x, which nobody reads behind it.
        """
        first = (*(() if "mid" in self.keep else ("x",)), "out", *self.keep_inside)
        if len(self.bounds) == 1 or not self.mixes:
            return [("x", "out", *self.keep_inside)]
        again = [] if "qkv" in self.keep else [("x",)]
        return [first, *again, ("x",)] if self.outs else [*again, first, ("x",)]

    def _requests(self, names: tuple[str, ...]):
        """One request a tile for the fetch queue: into the ring, out into its whole buffers (or the
        ring when streamed).
        """
        if "out" in names:
            self.out_buffers = None  # those of a backward that was cut short may still be read

        def request(index):
            (a, b), pieces = self.bounds[index], []
            if "x" in names:
                pieces.append((self.x, *self.kept_bounds[index], None))
            if "out" in names and self.outs and not self.outs[0].resident:
                if self.streams:
                    pieces += [(o, a, b, None) for o in self.outs]
                else:
                    if self.out_buffers is None:
                        self.out_buffers = [
                            torch.empty(o.shape, dtype=o.dtype, device=self.device)
                            for o in self.outs
                        ]
                        self.transfers.device.wait(
                            self.transfers.device.mark(), self.transfers.to_device
                        )
                    pieces += [
                        (o, a, b, buf[:, a:b]) for o, buf in zip(self.outs, self.out_buffers)
                    ]
            return pieces + [
                (s, 0, s.shape[1], None) for name in names for s in self._inside(index, name)
            ]

        return [lambda index=index: request(index) for index in range(len(self.bounds))]

    def _inside(self, index: int, name: str) -> list[Saved]:
        return self.inside[index][name] if name in self.keep_inside else []

    def _slot_bytes(self, names: tuple[str, ...]) -> int:
        """Of a ring slot that takes the first tile, the largest, of a pass."""
        rows = {"x": [(self.x, self.kept_bounds[0][1])], "out": []}
        if self.streams:
            rows["out"] = [(o, self.bounds[0][1]) for o in self.outs]
        pieces = [
            p
            for name in names
            for p in rows.get(name) or [(s, s.shape[1]) for s in self._inside(0, name)]
        ]
        return sum(saved.shape[0] * n * saved.row_bytes for saved, n in pieces) + 256 * len(pieces)

    def push_passes(self) -> None:
        """Queues all passes of the backward that begins, but for the first where it is under
        way.
        """
        first, *rest = self.passes()
        if not self.queue.is_for(self):
            self.prefetch()
        for names in rest:
            self.queue.push(self, self._requests(names))

    def prefetch(self) -> None:
        """Queues this call's first pass, so that its first tiles are under way before its backward
        starts.
        """
        if self.x is None or self.x.resident or self.gone:
            return
        passes = self.passes()
        nbytes = max(self._slot_bytes(names) for names in passes)
        self.queue.make_ring(RING_SLOTS if len(self.bounds) > 1 else 2, nbytes)
        self.queue.push(self, self._requests(passes[0]))

    def tiles(self, names: tuple[str, ...]):
        """Yields (index, x tile or None, out tiles, what is kept inside) of one pass; a tile's
        memory is re-used once the next is asked for.
        """
        outs = (
            [Cut(o.tensor(), self.bounds) for o in self.outs if o.resident]
            if "out" in names
            else []
        )
        inside = [name for name in names if name in self.keep_inside]
        whole = Cut(self.x.tensor(), self.kept_bounds) if self.x.resident and "x" in names else None
        for index, (a, b) in enumerate(self.bounds):
            resident = [o[index] for o in outs]
            if self.x.resident:
                x = None if whole is None else self._whole(whole[index], b - a)
                yield (
                    index,
                    x,
                    resident,
                    {name: [s.tensor() for s in self.inside[index][name]] for name in inside},
                )
                continue
            ticket = self.queue.next()
            tensors = list(ticket.wait())
            x = self._whole(tensors.pop(0), b - a) if "x" in names else None
            known = {}
            for name in reversed(inside):
                n = len(tensors) - len(self.inside[index][name])
                known[name], tensors = tensors[n:], tensors[:n]
            yield index, x, resident or tensors, known
            del tensors, known, x, resident
            self.queue.release(ticket)

    def _whole(self, kept: Tensor, length: int) -> Tensor:
        return kept if self.shards is None else self.shards.whole(kept, length)

    # -- what comes back whole ---------------------------------------------------------------------
    def ticket(self, saved: list[Saved]):
        """A fetch of whole tensors, None of none."""
        return self.transfers.fetch([(s, 0, s.shape[1], None) for s in saved]) if saved else None

    def whole_outs(self, outs):
        """A function giving group g's whole attention output, freed (or fetched one ahead) as the
        groups go by.

        outs: where they were computed again.
        """
        kept = self.outs
        if outs is None and self.out_buffers is not None:
            outs = self.out_buffers
        if outs is not None and isinstance(outs[0], InTier):
            kept = [out.saved for out in outs]
        elif outs is not None:

            def take(g):
                out, outs[g] = outs[g], None
                return out

            return take
        if kept[0].resident:
            return lambda g: kept[g].tensor()
        tickets = {0: self.ticket(kept[:1])}

        def stream(g):
            if g + 1 < len(kept):
                tickets[g + 1] = self.ticket(kept[g + 1 : g + 2])
            return tickets.pop(g).wait()[0]

        return stream
