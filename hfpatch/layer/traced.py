"""The two parts of a layer by its own forward on a tile of tokens: up to attention, and after it.

No family has code in this file.
"""

from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hfpatch.compat import collecting, values_for_now
from hfpatch.context.current import (
    Answering,
    AttentionOptions,
    Noting,
    Stopped,
    having,
    in_role,
    our_attention,
)
from hfpatch.layer.adapted_experts import experts_forwards
from hfpatch.layer.arguments import Arguments
from hfpatch.layer.condition import Condition
from hfpatch.layer.gate_up import gates_of
from hfpatch.layer.graph_bytes import tile_graph, unmeasured
from hfpatch.layer.mixers import Mixer, standing_in
from hfpatch.layer.random_state import replayed
from hfpatch.layer.shared_keys import NAME as SHARED_KEYS
from hfpatch.layer.shared_keys import left_by
from hfpatch.layer.traits import LayerTraits
from hfpatch.layer.weight_gradients import walk
from hfpatch.parts.unread import add_up, skippable, skipping


@dataclass
class Traced:
    """One call of any layer.

    Attributes:
        layer, arguments, traits, configs, batch: as the call met them.
        condition: layer.condition.Condition, as long as it holds.
        forward: the layer's own.
        autocast: its dtype in forward, or None.
        rng: generator states, by phase and tile; None if nothing in the layer draws random numbers.
        records: keys of what else transformers records inside the layer (router logits); None if it
            records nothing in this forward.
        found: (names, adding) -> temporary forwards, as rows.
        adding: WeightGradients.adding, in a backward over several tiles; None if autograd collects
            the weights' gradients.

    Of the last `before`:
        attention_options: scale, pattern and sinks of each attention call.
        mixers: modules that mix tokens otherwise.
        left: entries for later layers: key -> indices of k and v in the result of `before`.

    Of the last `after`:
        recorded: (key, dimensions) of each recorded tensor.
        beside: the layer's further return values, the class Tensor in place of each tensor; None if
            it returns its output alone.
    """

    layer: nn.Module
    arguments: Arguments
    traits: LayerTraits
    configs: tuple
    batch: object
    condition: Condition
    forward: object
    autocast: torch.dtype | None = None
    rng: dict | None = None
    records: tuple[str, ...] | None = ()
    found: dict = field(default_factory=dict)
    adding: object = None
    attention_options: list[AttentionOptions] = field(default_factory=list)
    mixers: list[Mixer] = field(default_factory=list)
    left: dict = field(default_factory=dict)
    recorded: list = field(default_factory=list)
    beside: tuple | None = None

    # -- one run of a part -------------------------------------------------------------------------
    def _run(self, role, x_BtD: Tensor, args: tuple, kwargs: dict):
        """The layer's own forward on a tile, in which `role` meets attention and mixers."""
        mixers = self.traits.mixers
        stand_ins = standing_in(self.layer, mixers, role.mixer) if mixers else nullcontext()
        with in_role(role), stand_ins, our_attention(self.configs, self.batch):
            return self.forward(x_BtD, *args, **kwargs)

    def before(self, x_BtD: Tensor, a: int, b: int, unread: bool = False) -> list[Tensor]:
        """q [B, t, H, E], k [B, t, K, E], v [B, t, K, E_v] of each attention call, then each
        mixer's input [B, t, D].

        unread: skips the values of LayerTraits.unread_before. NotStopped if the forward runs past
        its attention.
        """
        if not (self.traits.attention or self.traits.mixers):
            return []
        # An argument's gradient may read any value. It goes to the tile's stand-in for the
        # argument.
        unread = unread and not self.arguments.wanted
        names = self.traits.unread_before if unread else ()
        device = x_BtD.device
        with (
            self._forwards(names, device.type, unread),
            replayed(self.rng, ("before", a), device),
        ):
            parts = self._before(x_BtD, a, b)
        # mixers cast their input themselves, and autocast leaves float64
        if self.autocast is not None:
            for i, x in enumerate(parts[: 3 * len(self.attention_options)]):
                if x.dtype != torch.float64:
                    parts[i] = x.to(self.autocast)
        return parts

    def _before(self, x_BtD: Tensor, a: int, b: int) -> list[Tensor]:
        note = Noting(len(self.traits.mixing))
        args, kwargs = self.arguments.tile(a, b)
        # `after` runs this code too and records there (JetMoE's router of heads).
        unrecorded = nullcontext() if self.records is None else collecting({})
        with suppress(Stopped), unrecorded:
            self._run(note, x_BtD, args, kwargs)
            raise note.not_stopped()
        self.attention_options = [call.options() for call in note.calls]
        shared = kwargs.get(SHARED_KEYS)
        if shared is not None:
            self.left = left_by(shared.written, note.calls)
        parts = []
        for call in note.calls:
            self.condition.drops |= call.dropout > 0
            parts += [x.transpose(1, 2) for x in (call.q_BHTE, call.k_BKTE, call.v_BKTE)]
        self.mixers = []
        for name in self.traits.mixers:
            module = self.layer.get_submodule(name)
            args, kwargs = note.mixed[name]
            mixer, x = self.arguments.mixer(module, args, kwargs, self.configs, self.batch)
            self.mixers.append(mixer)
            parts.append(x)
        return parts

    def _forwards(self, names: tuple[str, ...], device: str, backward: bool):
        """A context in which unread Linears skip their matmul, and other temporary forwards run.

        Looked up once a call: a layer has many tiles. backward: for a backward, with weight gradients
        going to `adding`.
        """
        adding = self.adding if backward else None
        key = names, adding
        if key not in self.found:
            self.found[key] = self._rows(names, device, adding)
        rows = self.found[key]
        return values_for_now(rows) if rows else nullcontext()

    def _rows(self, names: tuple[str, ...], device: str, adding) -> list[tuple]:
        found = []
        if names:
            # found once while the layer has the same modules and tensors
            can_skip = self.condition.can_skip
            if names not in can_skip:
                can_skip[names] = skippable(self.layer, names)
            draws = self.rng is not None  # dropout needs the usual memory layout
            found = skipping(can_skip[names], device, adding=adding, contiguous=draws)
        if adding:
            found += add_up(self.layer, found, device, adding)
        layouts, chains = self.condition.experts
        if layouts:
            found += experts_forwards(layouts, chains, dict(found), adding)
        return [(module.__dict__, "forward", forward) for module, forward in found]

    def after(
        self,
        x_BtD: Tensor,
        outs_BtHE: list[Tensor],
        a: int,
        b: int,
        unread: bool = False,
        noted=None,
        gates=None,
    ) -> list[Tensor]:
        """The layer's output for a tile of its input and of the attention outputs [B, t, H, E_v],
        one per call.

        The recorded tensors follow, then other tensors that the layer returns, each as [B, t, ...].
        noted: a list that takes the MLP's gate and up; gates: these two, if they were kept.
        unread: skips the values of LayerTraits.unread_after, and of the projections that make gates.
        """
        # [Step 1] Choose the values that are not computed, and what answers attention, mixers and
        # MLP.
        found = {key: [] for key in self.records} if self.records else {}
        names = self.traits.unread_always
        if unread and not self.arguments.wanted:
            names = self.traits.unread_after
        if gates:
            names = (*names, *gates_of(self.layer))
        n = len(self.traits.attention)
        role = Answering(outs_BtHE[:n], dict(zip(self.traits.mixers, outs_BtHE[n:])))
        device = x_BtD.device
        recording = nullcontext() if self.records is None else collecting(found)
        in_mlp = nullcontext()
        if noted is not None or gates:
            in_mlp = having(gate_up=(noted, gates))
        # [Step 2] Run the layer's own forward.
        with (
            self._forwards(names, device.type, unread),
            recording,
            in_mlp,
            replayed(self.rng, ("after", a), device),
        ):
            y = self._run(role, x_BtD, *self.arguments.tile(a, b))
        # [Step 3] Put the recorded tensors, then the layer's other tensors, behind its output.
        self.recorded = []
        self.beside = None
        if isinstance(y, Tensor) and not found:
            return [y]
        extras = []
        for key, xs in found.items():
            for x in xs:
                self.recorded.append((key, x.dim()))
                extras.append(_by_rows(x, x_BtD))
        if isinstance(y, Tensor):
            return [y, *extras]
        self.beside = tuple(Tensor if isinstance(x, Tensor) else x for x in y[1:])
        return [y[0], *extras, *(x for x in y[1:] if isinstance(x, Tensor))]

    def run(self, args: tuple, kwargs: dict, unread: bool):
        """The layer's return value for a tile, with the mixers' states among these arguments.
        unread: a backward follows, and the values are unread.
        """
        # unread_always is left out: the mixers run here and read those values.
        before = self.traits.unread_always
        names = tuple(n for n in self.traits.unread_after if unread and n not in before)
        with self._forwards(names, args[0].device.type, True):
            y = self.forward(*args, **kwargs)
        self.beside = None if isinstance(y, Tensor) else y[1:]
        return y

    # -- what a LayerCall and its Backward call ----------------------------------------------------
    def after_with_graph(
        self, x, outs_BtHE, a: int, b: int, dys, gates: list, need_x: bool, weights
    ):
        """Runs `after` on a tile with a graph, and its backward.

        Args:
            x, outs_BtHE: the tile [B, t, D] of the layer's input, those of attention's outputs.
            dys: gradients of what `after` returns, each [B, t, ...] or None.
            gates: gate and up of the tile, if they were kept. Emptied, which frees them.
            weights: layer.weight_gradients.WeightGradients, which sums the weights' gradients.

        Returns:
            dx [B, t, D], None without need_x; the gradient [B, t, H, E_v] of each attention output.
        """
        x = x.detach().requires_grad_(need_x)
        leaves = [out.contiguous().detach().requires_grad_(True) for out in outs_BtHE]
        built = unmeasured if gates else tile_graph("after", x)
        with torch.enable_grad():
            # Each is an alias, because FlopCounterMode hooks what a module gets, and autograd.grad
            # refuses such hooks on leaves. view_as would change the gradient's strides.
            given = [y[...] for y in (x, *leaves)]
            tiles = self.after(given[0], given[1:], a, b, unread=True, gates=gates)
        built(tiles)
        gates.clear()
        dx, *douts = self._walk(weights, tiles, dys, [x, *leaves], self.arguments.stand_ins)
        # A product without a derivative gives no gradient (torchao's of int8 activations).
        return dx, [torch.zeros_like(y) if d is None else d for y, d in zip(leaves, douts)]

    def before_with_graph(self, x, a: int, b: int, need_x: bool, weights, unread: bool):
        """Runs `before` on a tile x [B, t, D] with a graph.

        Returns:
            What `before` returns: q [B, t, H, E], k and v [B, t, K, E] of each attention call, each
            mixer's input [B, t, D].
            A function that takes their gradients, of the same shapes, and returns dx [B, t, D] or
            None. The weights' gradients are summed in `weights`.
        """
        x = x.detach().requires_grad_(need_x)
        built = tile_graph("before", x)
        with torch.enable_grad():
            parts = self.before(x[...], a, b, unread)
        built(parts)
        given = self.arguments.stand_ins

        def back(grads, dsinks=None):
            """dsinks: gradients of the sinks, with the first tile only: the sinks are shared by all
            tiles.
            """
            ys = list(parts)
            dys = list(grads)
            for options, dsinks_H in zip(self.attention_options, dsinks or ()):
                ys.append(options.sinks_H)
                dys.append(dsinks_H)
            return self._walk(weights, ys, dys, [x], given)[0]

        return parts, back

    def _walk(self, weights, outputs, grads, inputs: list[Tensor], given: list) -> list:
        """The gradients of `inputs`, as of weight_gradients.walk. given: stand-ins of the layer's
        other arguments, with the sums of their gradients.
        """
        # Tiles of several rows are not contiguous, which some of torchao's products need.
        grads = [None if dy is None else dy.contiguous() for dy in grads]
        leaves = [leaf for _, leaf in given]
        found = walk([weights], outputs, grads, [*inputs, *leaves])
        n = len(inputs)
        for (into, _), grad in zip(given, found[n:]):
            if grad is not None:
                into.add_(grad)
        return found[:n]

    @contextmanager
    def for_backward(self, weights, many_tiles: bool):
        """Context of a backward over the tiles. Yields the sums of the gradients of the arguments
        that require one, each with its argument's shape. With many tiles, weight gradients are
        added to `weights` inside their matmuls where the device can.
        """
        self.adding = weights.adding if many_tiles else None
        try:
            with self.arguments.gradients() as gradients:
                yield gradients
        # also after an out-of-memory error: the graph may live on, and would keep the sums
        finally:
            self.adding = None
            self.found = {}

    def hand_on(self, y: Tensor, extras: list[Tensor], into: dict, shared):
        """Hands on what the layer's call made, and returns what the layer's own forward returns.

        Args:
            y: the output [B, T, D].
            extras: the recorded tensors [B, T, ...], the further return values, then the keys and
                values [B, T, K, E] for later layers.
            into: transformers' lists of recorded tensors, by key.
            shared: takes the keys and values [B, K, T, E] for later layers, by key.
        """
        extras = iter(extras)
        for key, dims in self.recorded:
            x = next(extras)
            into[key].append(x.flatten(0, 1) if x.dim() > dims else x)
        beside = self.beside and tuple(next(extras) if x is Tensor else x for x in self.beside)
        for key, places in self.left.items():
            shared[key] = tuple(next(extras).transpose(1, 2) for _ in places)
        return y if beside is None else (y, *beside)


def _by_rows(recorded: Tensor, x_BtD: Tensor) -> Tensor:
    """A recorded tensor as [B, t, ...]; it may come as [B*t, ...]."""
    B, t = x_BtD.shape[:2]
    if recorded.shape[:2] == (B, t) or recorded.shape[0] != B * t:
        return recorded
    return recorded.unflatten(0, (B, t))
