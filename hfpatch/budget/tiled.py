"""Moments of hfpatch's tiled layers (phases A to D of layer/backward.py), and the host bytes of
their checkpoints. Standard library only; sizes.py explains the names of sizes.
"""

from dataclasses import dataclass

from hfpatch.budget.cuts import head_groups, tiles
from hfpatch.budget.moments import (
    Moment,
    embedding_moments,
    forward_moment,
    loss_moment,
    plain_moments,
)
from hfpatch.budget.policy import RING_SLOTS, Policy
from hfpatch.budget.sequence import exchange_bytes
from hfpatch.budget.sizes import (
    Sizes,
    attention_scratch,
    experts_tile,
    inner_bytes,
    kept_columns,
    mlp_weight,
    plain_bytes,
    widened,
)


class TiledStep:
    """A step under a policy, as sizes in bytes that its moments share.

    Attributes:
        n: tiled layers.
        single: a layer runs in one tile.
        t: rows of a tile.
        save: attention outputs are kept.
        off: checkpoints leave the device.
        full: layers before those that run `again`.
        unsaved: layers that run attention again.
        kept_out, keeping: layers that keep attention outputs, and layers that keep `keep`.
        grads: of q, k and v in attention's backward.
        ring: buffers of fetched tiles.
    """

    def __init__(self, z: Sizes, policy: Policy):
        shape, s = z.shape, z.s
        self.z, self.policy = z, policy
        self.n = n = shape.num_layers - min(policy.plain, shape.num_layers)
        count, step = tiles(z.batch, z.tokens, policy.tile)
        self.single, self.t = count == 1, step * z.batch
        self.save = policy.save_attention and policy.every == 1
        self.off = policy.offload != "gpu"
        self.groups = head_groups(z.batch, z.tokens, shape, policy.wide)
        self.full, self.keeping = n - min(policy.again, n), n - min(policy.keeps_less, n)
        self.unsaved = min(policy.attends_again, n) if self.save else n
        self.kept_out = n - self.unsaved
        self.kept_inside = sum(z.rows * kept_columns(shape, name) * s for name in policy.keep)
        self.parked = z.u if policy.parks_dx and not self.single else 0
        self.qkv = z.q + z.kv
        self.tile_D = self.t * shape.hidden_size * s
        self.join = self.t * shape.out_size * s if self.groups > 1 and shape.ranks > 1 else 0
        # the attention outputs, whole on the device
        self.fetched = z.out if self.save and self.off else 0
        self.stored = (
            -(-n // policy.every) * z.u
            + self.kept_out * (z.out + z.lse)
            + self.keeping * self.kept_inside
        )
        self.on_device = 0 if self.off else self.stored
        self.scratch, self.grads = self._attention()
        self.ring = self._ring()

    def _attention(self) -> tuple[int, int]:
        """(attention backward's scratch, the gradients of q, k and v at that time)."""
        z, shape, groups = self.z, self.z.shape, self.groups
        scratch = attention_scratch(shape, z.batch, z.tokens, shape.num_kv_heads // groups, z.s)
        if groups > 1 and shape.ranks == 1:
            scratch += z.out // groups  # a group's copy out of the whole attention outputs
        if shape.ranks > 1:
            return scratch, exchange_bytes(shape, z.batch, z.tokens, z.s, ahead=True)
        return scratch, (z.q + z.kv) // groups

    def _ring(self) -> int:
        """The ring's buffers. q, k and v come back whole, for attention. The sum after attention
        takes the place of x, unless x stays.
        """
        if not self.off or not self.n:
            return 0
        shape, D = self.z.shape, self.z.shape.hidden_size
        back = {n: kept_columns(shape, n) for n in self.policy.keep if n != "qkv"}
        columns = sum(back.values()) + (D if self.single or "mid" not in back else 0)
        return (2 if self.single else RING_SLOTS) * self.t * max(D, columns) * self.z.s

    @property
    def host(self) -> int:
        """Bytes of pinned host memory, or of files."""
        return self.stored + self.parked if self.off and self.n else 0

    def moments(self) -> list[Moment]:
        """All moments of the step."""
        z, policy, n = self.z, self.policy, self.n
        plain = z.shape.over(lambda i: plain_bytes(z, i), n)
        moments = [loss_moment(z, self.on_device + plain)]
        forward = self._forward() if n else None
        moments += [forward] if n else []
        if policy.plain:
            coming = self.ring + self.fetched if policy.plain > 1 else 0
            moments += plain_moments(z, n, self.on_device, plain, coming)
        if n:
            moments += [*self._last(), *self._segment(forward), *self._first()]
        return moments + embedding_moments(z)

    def _forward(self) -> Moment:
        z, policy, off = self.z, self.policy, self.off
        # The forward's own tensors are counted in on_device too.
        twice = (min(self.n, 2) if policy.every == 1 else 1) * z.u
        twice += z.out + z.lse if self.save else 0
        # Tensors on their way to the host stay until the layer has run.
        leaving = self.qkv if off and "qkv" in policy.keep else 0
        on_device = 0 if off else self.on_device - twice
        return forward_moment(z, self.n - 1, self.t, self.single, self.join, on_device, leaving)

    def _last(self) -> list[Moment]:
        """The last tiled layer, and the last layer whose attention runs again."""
        z, shape, n, moments = self.z, self.z.shape, self.n, []
        after = z.head_gradient + shape.over(shape.trained_of, n) * z.g
        # With one kind of layer, the first layer holds as much and more gradients exist by then.
        if not self.off or self.policy.plain or len(shape.kinds) > 1:
            saved = self.save and not self.unsaved
            ahead = self.single and self.kept_out > 1 and not self.policy.plain
            layer = _Layer(
                self, "last layer", n - 1, after, self.on_device, saved=saved, ahead=ahead
            )
            moments += layer.moments()
        if 0 < self.full < n:
            here = z.head_gradient + z.body
            here -= shape.over(shape.trained_of, 0, self.full + 1) * z.g
            saved = self.save and not self.unsaved
            layer = _Layer(self, "again", self.full, here, self.on_device, saved=saved)
            moments += layer.moments()
        return moments

    def _segment(self, forward: Moment) -> list[Moment]:
        """The first segment's last layer, while inputs and attention outputs of the segment's other
        layers are on the device again.
        """
        z, shape, k = self.z, self.z.shape, min(self.policy.every, self.n)
        if k == 1:
            return []
        here = z.head_gradient + z.body - shape.over(shape.trained_of, 0, k) * z.g
        inside = (k - 1) * (z.u + z.out + z.lse)
        checkpoints = 0 if self.off else z.u
        layer = _Layer(self, "segment", k - 1, here, checkpoints, inside, saved=self.save)
        return layer.moments()

    def _first(self) -> list[Moment]:
        """The first layer and, with a single tile, the second."""
        z, k = self.z, min(self.policy.every, self.n)
        first = 0 if self.off else z.u + (z.out + z.lse if self.save else 0) + self.kept_inside
        # A segment that ran again has left its first layer's attention outputs on the device.
        again = z.out + z.lse if k > 1 else 0
        here = z.head_gradient + z.body - z.first
        saved = self.unsaved < self.n or k > 1
        moments = _Layer(self, "first layer", 0, here, first, again, saved=saved).moments()
        # the first layer's attention outputs are already on their way
        if self.single and self.fetched and self.kept_out > 1:
            here -= z.shape.trained_of(1) * z.g
            layer = _Layer(self, "second layer", 1, here, first, again, saved=self.save, ahead=True)
            moments += layer.moments()
        return moments


@dataclass
class _Layer:
    """The backward of one tiled layer.

    Attributes:
        gradients: of other parameters that exist by then.
        checkpoints: on the device, for layers before it.
        extra: bytes that a segment left on the device.
        saved: its attention outputs were kept.
        ahead: the attention outputs of the layer before are already on their way.
    """

    step: TiledStep
    name: str
    index: int
    gradients: int
    checkpoints: int
    extra: int = 0
    saved: bool = True
    ahead: bool = False

    def __post_init__(self):
        step, z, policy = self.step, self.step.z, self.step.policy
        self.keep = policy.keep if self.index < step.keeping else ()
        self.inner = inner_bytes(z, self.index, step.t)
        self.sparse = z.shape.is_sparse(self.index)
        # with x on the device nothing is fetched
        self.ring = step.ring if step.off else 0
        whole = not step.save or self.saved
        self.fetched = step.fetched if whole else 0
        self.lse = z.lse if step.save and step.off and whole else 0
        self.recomputed = 0 if self.saved else z.out + z.lse  # attention outputs computed again
        # Kept tensors are not computed again: gate and up, the projection's output, and the normed
        # input of q, k, v.
        self.known = 2 * self.inner if "gate_up" in self.keep else 0
        self.spared = step.tile_D * (("mid" in self.keep) + z.shape.last_unread(self.index))
        self.held = self.lse + z.always + self.extra

    def moments(self) -> list[Moment]:
        return self._in_one_tile() if self.step.single else self._in_tiles()

    @property
    def _beside(self) -> int:
        """Bytes that the MLP's backward holds beyond a fused gated MLP's.

        An MLP without a gate has two columns fewer. If it is frozen, no gradient takes their place.
        """
        shape, inner = self.step.z.shape, self.inner
        if shape.fused_mlp:
            beside = 0
        elif shape.gated:
            beside = inner
        else:
            beside = -inner if shape.adapters else -2 * inner
        return beside + widened(self.step.z, self.index, self.step.t, self.step.single)

    def _in_one_tile(self) -> list[Moment]:
        step, z, shape, qkv = self.step, self.step.z, self.step.z.shape, self.step.qkv
        inner, tile_D, gradients = self.inner, step.tile_D, self.gradients
        if self.sparse:
            rows = experts_tile(z, self.index, step.t)
            own = 4 * tile_D + z.normed if shape.is_common else 5 * tile_D + z.q
            mlps = [(nbytes + own, dw) for nbytes, dw in rows]
        else:
            dw = mlp_weight(z, self.index)
            mlp = max(3 * inner + 7 * tile_D, 5 * inner + 5 * tile_D, 4 * inner + 5 * tile_D + dw)
            mlps = [(mlp + self._beside - self.known, 0)]
        kept = "qkv" in self.keep
        spared = self.spared - tile_D * (shape.norms > 2)  # norms after attention read that sum
        spared += (z.u + (0 if step.off else qkv)) * kept
        # The graph of the part before attention waits for its gradients; with experts it is counted
        # above. Kernels get copies of q, k and v that latent attention joined, and of q and k
        # normed in a heads-first layout.
        graph = (0 if self.sparse else z.normed) + z.wide_tile + shape.joined_qkv * qkv
        graph += z.latent + qkv if z.latent else shape.heads_first * z.qk
        graph *= not kept
        held = graph - spared + (1 + self.ahead) * self.fetched + self.recomputed
        held += qkv + step.join + self.held
        tile, at = f"{self.name}: tile", self.checkpoints
        found = [Moment(tile, gradients + dw, at, b + held, workspace=self.ring) for b, dw in mlps]
        c = 2 * (z.u + z.out + qkv) + self.held + step.grads
        if shape.ranks == 1:
            gradients += shape.trained_after(self.index) * z.g
            c += z.u + graph - step.grads - (0 if self.saved else z.out)
        scratch = self.ring + step.scratch
        return [*found, Moment(f"{self.name}: attention", gradients, at, c, workspace=scratch)]

    def _tile(self) -> int:
        """Bytes of a tile's part after attention, forward and backward."""
        step, z, inner = self.step, self.step.z, self.inner
        if self.sparse:
            # Gradients of experts are summed in their matmuls too.
            made = max(nbytes for nbytes, _ in experts_tile(z, self.index, step.t))
            return made + 3 * step.tile_D + step.join - self.spared
        # A trained weight's gradient is summed in its matmul: no second one exists.
        own = mlp_weight(z, self.index) if z.shape.adapters or z.s > 2 else 0
        made = max(5 * inner, 4 * inner + own)
        made += self._beside + z.wide_tile * step.t // z.rows
        made += (4 if self.known else 3) * step.tile_D + step.join
        return made - self.known - self.spared

    def _in_tiles(self) -> list[Moment]:
        step, z, shape = self.step, self.step.z, self.step.z.shape
        qkv, groups, kept = step.qkv, step.groups, "qkv" in self.keep
        after = shape.trained_after(self.index)
        wide, tile = 4 * after, self._tile()
        # q, k and v exist before attention's backward needs them
        early = kept and step.off or not self.saved
        a = z.u + z.out + self.fetched + self.recomputed + qkv * early + wide + tile + self.held
        outs = self.fetched + self.recomputed
        if shape.ranks > 1 and groups > 2:
            # the outputs of the rounds under way are freed
            outs -= 2 * min(outs, z.out) // groups
        whole = 0 if kept and not step.off else qkv
        c = z.u - step.parked + z.out + whole + outs + self.held + step.grads
        done = after * z.g  # this layer's gradients that are rounded by then
        # A tile's latents, and the heads joined from them, while q, k and v are computed again.
        latents = (z.latent + 2 * z.q + z.kv) * step.t // z.rows
        joined = latents + 4 * step.tile_D if z.latent else 0
        scratch = self.ring + max(step.scratch, joined - step.grads)
        name, at, gradients = self.name, self.checkpoints, self.gradients
        return [
            Moment(f"{name}: tiles", gradients, at, a, workspace=self.ring),
            Moment(f"{name}: attention", gradients + done, at, c, workspace=scratch),
        ]
