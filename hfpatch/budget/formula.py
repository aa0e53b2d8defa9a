"""Closed forms: the bytes of a training step; flops.py has its FLOPs. Standard library only, so a
plan needs no torch.

A step's memory is the largest of a few moments. Each moment is a sum of the buffers that its code
holds (layer/call.py, ops/_linear_ce_loop.py, ops/embedding.py; for stock models transformers'
own code). The simulator runs that code; tests hold the two within 3% of each other.

sizes.py explains the names of sizes.
"""

from dataclasses import dataclass, replace

from hfpatch.budget.cuts import head_groups, loss_chunk_rows, tiles
from hfpatch.budget.hardware import GiB
from hfpatch.budget.policy import LOSS_WORKSPACE, Policy
from hfpatch.budget.sequence import exchange_bytes
from hfpatch.budget.shape import ModelShape
from hfpatch.budget.sizes import (
    Sizes,
    attention_scratch,
    embedding_partials,
    experts_tile,
    inner_bytes,
    kept_columns,
    mlp_kept,
    mlp_weight,
    plain_bytes,
    widened,
    written_out,
)

__all__ = ["GiB", "ModelShape", "Policy", "Moment", "StepMemory", "step_memory"]

FORWARD = "last layer's forward"
STOCK, STOCK_CHECKPOINTING, UNTILED = "stock", "stock-checkpointing", "off"
# ops/embedding.py: fp32 bytes of one column slice of the incoming gradient
EMBEDDING_SLICE = 128 << 20
# layers whose frozen weights fit on the device at once, where they wait on the host
WEIGHT_SLOTS = 2
RING_SLOTS = 3  # fetched tiles on the device: one in use, one ready, one being copied


@dataclass(frozen=True)
class Moment:
    """Bytes that are alive on the device at one moment, parameters excluded.

    gradients: parameter gradients that exist by then.
    checkpoints: kept for the backward of the layers that follow.
    layer: the working set of the layer (or embedding) that runs.
    loss: hidden states and logits of the loss.
    workspace: kernels' scratch and transfer buffers.
    """

    name: str
    gradients: int
    checkpoints: int = 0
    layer: int = 0
    loss: int = 0
    workspace: int = 0

    @property
    def beyond(self) -> int:
        """Everything but the gradients."""
        return self.checkpoints + self.layer + self.loss + self.workspace

    @property
    def total(self) -> int:
        return self.gradients + self.beyond


@dataclass(frozen=True)
class StepMemory:
    """Bytes of a step whose parameters and gradients stay on the device; host: pinned
    checkpoints."""

    parameters: int
    gradients: int
    moments: tuple
    host: int

    @property
    def peak_moment(self) -> Moment:
        return max(self.moments, key=lambda m: m.total)

    @property
    def peak(self) -> int:
        return self.parameters + self.peak_moment.total

    @property
    def beyond(self) -> int:
        """Bytes beyond parameters and gradients at the moment of the highest total."""
        return self.peak_moment.beyond


def step_memory(
    shape: ModelShape, policy, *, batch: int, tokens: int, itemsize: int = 2
) -> StepMemory:
    """Memory of one forward and backward.

    policy: a Policy, or "off" (hfpatch's kernels, layers run whole), "stock" or
    "stock-checkpointing" (transformers without hfpatch).

    Raises:
        ValueError: another policy.
    """
    sizes = Sizes(shape, batch, tokens, itemsize)
    if isinstance(policy, Policy):
        moments, host = _tiled(sizes, policy)
    elif policy in (STOCK, STOCK_CHECKPOINTING):
        moments, host = _stock(sizes, policy == STOCK_CHECKPOINTING), 0
    elif policy == UNTILED:
        moments, host = _untiled(sizes), 0
    else:
        raise ValueError(
            f"hfpatch: a policy, off, stock or stock-checkpointing was expected, {policy!r} came; "
            "pass one."
        )
    return StepMemory(shape.parameter_bytes(itemsize), sizes.gradients, tuple(moments), host)


def spare_bytes(
    memory: StepMemory,
    shape: ModelShape,
    policy: Policy,
    *,
    batch: int,
    tokens: int,
    itemsize: int = 2,
) -> tuple[int, ...]:
    """Bytes that the sources of copies may take while each layer runs forward, and none behind the
    last: the most that the step holds less what that layer's forward does. memory: of the same
    policy and sizes.
    """
    n, tiled = shape.num_layers, shape.num_layers - min(policy.plain, shape.num_layers)
    if (
        policy.offload == "gpu"
        or policy.every > 1
        or policy.by_group
        or shape.ranks > 1
        or not tiled
    ):
        return (0,) * (n + 1)
    (forward,) = (m.beyond for m in memory.moments if m.name == FORWARD)
    left, sizes, found = (
        max(m.beyond for m in memory.moments) - forward,
        Sizes(shape, batch, tokens, itemsize),
        [],
    )
    for layer in range(n):
        left -= plain_bytes(sizes, layer) if layer >= tiled else 0
        found.append(max(0, left))
    return (*found, 0)


def _embedding_moments(z: Sizes, fused: bool, workspace: int = LOSS_WORKSPACE) -> list:
    """The backward of the token embedding, when all other gradients exist. workspace: the
    loss's."""
    if z.shape.adapters:
        return []
    D, V = z.shape.hidden_size, z.shape.vocab_size
    columns = max(1, EMBEDDING_SLICE // (4 * max(1, z.rows))) if fused else D
    if columns >= D:
        slices, scratch = 0, embedding_partials(z.rows, V, D)
    else:
        slices = (V + z.rows) * columns * z.s
        scratch = embedding_partials(z.rows, V, columns)
    slices += z.embedding if z.shape.tied else 0
    moments = [
        Moment("embedding backward", z.gradients, layer=z.u + slices + z.always, workspace=scratch)
    ]
    if z.shape.tied and fused and loss_chunk_rows(z.shape, z.rows, z.s, workspace)[1] > 1:
        # Both gradients and their sum: the head's, a view of wider sums, is not added to in place.
        moments.append(Moment("embedding sum", z.gradients, layer=2 * z.embedding + z.always))
    return moments


def _loss_moment(z: Sizes, checkpoints: int, workspace: int = LOSS_WORKSPACE) -> Moment:
    rows, chunks = loss_chunk_rows(z.shape, z.rows, z.s, workspace)
    single = chunks == 1 or z.s == 4
    wide = z.head if single else z.shape.trained_head * 4
    # The layer's output, the normed one and its rstd; loss, lse and shifted labels; logits of one
    # chunk.
    loss = (
        2 * z.u
        + z.wide_loss
        + 4 * z.rows
        + 16 * z.rows
        + rows * -(-z.shape.vocab_size // 8) * 8 * z.s
    )
    return Moment(
        "loss", z.head, checkpoints=checkpoints, layer=z.always, loss=loss + wide - z.head
    )


def _tiled(z: Sizes, policy: Policy):
    """Moments of hfpatch's tiled layers (the phases A to D of layer/call.py), and host
    bytes."""
    shape, s, n = z.shape, z.s, z.shape.num_layers - min(policy.plain, z.shape.num_layers)
    D, O = shape.hidden_size, shape.out_size
    count, step = tiles(z.batch, z.tokens, policy.tile)
    single, t = count == 1, step * z.batch
    save = policy.save_attention and policy.every == 1
    off = policy.offload != "gpu"
    stream = policy.stream_attention and save and off
    groups = head_groups(z.batch, z.tokens, shape, policy.wide)
    scratch = attention_scratch(shape, z.batch, z.tokens, shape.num_kv_heads // groups, s)
    if groups > 1 and shape.ranks == 1 and not (policy.stream_attention or policy.by_group):
        scratch += z.out // groups  # of whole attention outputs a group is copied out
    grads = (z.q + z.kv) // groups
    if shape.ranks > 1:
        grads = exchange_bytes(shape, z.batch, z.tokens, s, ahead=not policy.stream_attention)

    # What the layers keep, and where.
    unsaved = min(policy.again, n) if save else n
    kept_x, kept_out = -(-n // policy.every), n - unsaved
    each = z.u, z.out + z.lse
    more = sum(z.rows * kept_columns(shape, name) * s for name in policy.keep)
    stored = kept_x * each[0] + kept_out * each[1] + n * more
    park = policy.park and off and not single
    passing = 0
    if policy.by_group and n:
        passing = (
            z.q
            + z.kv
            + z.out
            + (z.out if unsaved else 0)
            + (min(policy.every, n) - 1) * (each[0] + each[1])
        )
    host = stored + passing + (z.u if park else 0) if off else 0
    plain = shape.over(lambda i: plain_bytes(z, i), n)
    on_device = 0 if off else stored
    ring = 0
    if off and n:
        # q, k and v come back whole, for attention; the sum after attention in the place of x, but
        # where that stays.
        back = {name: kept_columns(shape, name) for name in policy.keep if name != "qkv"}
        columns = (
            (O if stream else 0) + sum(back.values()) + (D if single or "mid" not in back else 0)
        )
        ring = (2 if single else RING_SLOTS) * t * max(D, columns) * s

    tile_D = t * D * s
    join = t * O * s if groups > 1 and (stream or policy.by_group or shape.ranks > 1) else 0
    # the attention outputs, whole on the device
    fetched = z.out if save and off and not stream else 0
    qkv = z.q + z.kv
    whole_outs = fetched, z.lse if save and off else 0, stream

    def layer_moments(
        name, index, gradients, checkpoints, extra, x_resident, saved=save, ahead=False
    ):
        inner, sparse = inner_bytes(z, index, t), shape.is_sparse(index)
        # An MLP without a gate has two columns fewer; frozen, it has no gradient that would stand
        # in their place.
        beside = (
            0
            if shape.fused_mlp
            else inner
            if shape.gated
            else -inner
            if shape.adapters
            else -2 * inner
        )
        beside += widened(z, index, t, single)
        mlp_dw = 0 if sparse else mlp_weight(z, index)
        ring_here = 0 if x_resident else ring
        fetched, lse, stream = (0, 0, False) if save and not saved else whole_outs
        recomputed = 0 if saved else z.out + z.lse  # attention outputs computed again
        # What is kept is not made again: gate and up, the projection's output, and the normed input
        # that q, k, v come from.
        known = 2 * inner if "gate_up" in policy.keep else 0
        spared = tile_D * (("mid" in policy.keep) + shape.last_unread(index))
        if single:
            if sparse:
                mlps = [(nbytes + 5 * tile_D + z.q, dw) for nbytes, dw in experts_tile(z, index, t)]
            else:
                mlp = max(
                    3 * inner + 7 * tile_D, 5 * inner + 5 * tile_D, 4 * inner + 5 * tile_D + mlp_dw
                )
                mlps = [(mlp + beside - known, 0)]
            spared -= tile_D * (shape.norms > 2)  # what norms behind attention read
            spared += (z.u + (0 if off else qkv)) * ("qkv" in policy.keep)
            # The graph of what stands before attention waits for its gradients; that of experts has
            # it above. q, k and v that latent attention joined, or q and k that were normed heads
            # first, are copied for the kernels.
            graph = (0 if sparse else z.normed) + z.wide_tile + shape.joined_qkv * qkv
            graph += z.latent + qkv if z.latent else shape.heads_first * z.qk
            graph *= "qkv" not in policy.keep
            held = (
                graph
                - spared
                + (1 + ahead) * fetched
                + recomputed
                + qkv
                + join
                + lse
                + z.always
                + extra
            )
            found = [
                Moment(
                    f"{name}: tile", gradients + dw, checkpoints, mlp + held, workspace=ring_here
                )
                for mlp, dw in mlps
            ]
            c = 2 * (z.u + z.out + qkv) + lse + z.always + extra + grads
            if shape.ranks == 1:
                gradients += shape.trained_after(index) * z.g
                c += z.u + graph - grads - (0 if saved else z.out)
            found.append(
                Moment(
                    f"{name}: attention", gradients, checkpoints, c, workspace=ring_here + scratch
                )
            )
            return found
        after = shape.trained_after(index)
        wide = 4 * after
        if sparse:
            # Gradients of experts add up in their products too.
            tile = max(nbytes for nbytes, _ in experts_tile(z, index, t))
            tile += 3 * tile_D + join - spared
        else:
            # A trained matrix's gradient adds up in its matmul: none stands beside the sums.
            own = mlp_dw if shape.adapters or s > 2 else 0
            made = (
                5 * inner + written_out(z, index)
                if policy.dense
                else max(5 * inner, 4 * inner + own)
            )
            tile = (
                made
                + beside
                + z.wide_tile * t // z.rows
                + (4 if known else 3) * tile_D
                + join
                - known
                - spared
            )
        # q, k and v are there before they are wanted
        early = "qkv" in policy.keep and off or not saved
        a = z.u + z.out + fetched + recomputed + qkv * early + wide + tile + lse + z.always + extra
        outs = (2 * z.out // groups if stream else fetched) + recomputed
        if shape.ranks > 1 and not stream and groups > 2:
            # those of the rounds that are under way have gone
            outs -= 2 * min(outs, z.out) // groups
        whole = 0 if "qkv" in policy.keep and not off else qkv
        # A parked dx comes back tile by tile: one in use, one on its way.
        c = (0 if park else z.u) + z.out + whole + outs + lse + z.always + extra + grads
        if policy.by_group:
            # Tiles of out and dout; q, k, v, out and dout of a group and of the next, and gradients
            # on their way.
            a = z.u + wide + tile + 4 * t * O * s + z.lse + z.always + extra
            c = (
                z.u
                + min(2, groups) * (qkv + 2 * z.out) // groups
                + 2 * grads
                + z.lse
                + z.always
                + extra
            )
        done = after * z.g  # this layer's gradients that are rounded by then
        # A tile's latents, and the heads that are joined of them, while q, k and v are made again.
        joined = (z.latent + 2 * z.q + z.kv) * t // z.rows + 4 * tile_D if z.latent else 0
        return [
            Moment(f"{name}: tiles", gradients, checkpoints, a, workspace=ring_here),
            Moment(
                f"{name}: attention",
                gradients + done,
                checkpoints,
                c,
                workspace=ring_here + max(scratch, joined - grads),
            ),
        ]

    moments = [_loss_moment(z, on_device + plain, policy.loss_bytes)]
    if n:
        # What the forward holds anyway is among what stays on the device.
        twice = (min(n, 2) if policy.every == 1 else 1) * z.u + (each[1] if save else 0)
        by_groups = groups if policy.by_group else 0
        # What is on its way to the host stays until the layer has run, and dense weights as long as
        # their phase.
        leaving = qkv if off and "qkv" in policy.keep else 0
        leaving += written_out(z, n - 1) if policy.dense else 0
        forward = _forward_moment(
            z, n - 1, t, single, join, 0 if off else on_device - twice, by_groups, leaving
        )
        moments.append(forward)
    if policy.plain:
        moments += _plain_moments(z, n, on_device, plain, ring + fetched if policy.plain > 1 else 0)
    if not n:
        return moments + _embedding_moments(z, True, policy.loss_bytes), 0
    after = z.head_gradient + shape.over(shape.trained_of, n) * z.g
    if not off or policy.plain:
        moments += layer_moments(
            "last layer", n - 1, after, on_device, 0, not off, save and not unsaved
        )
    if 0 < unsaved < n:
        here = z.head_gradient + z.body - shape.over(shape.trained_of, 0, kept_out + 1) * z.g
        moments += layer_moments("attention again", kept_out, here, on_device, 0, not off, False)
    k = min(policy.every, n)
    if k > 1:
        # The first segment's last layer: its other layers' inputs and attention outputs are on the
        # device again.
        segment = 0 if policy.by_group else (k - 1) * (z.u + z.out + z.lse)
        here = z.head_gradient + z.body - shape.over(shape.trained_of, 0, k) * z.g
        if policy.by_group:  # the incoming gradient stands where the embedded tokens did
            moments.append(replace(forward, name="segment", gradients=here))
        moments += layer_moments("segment", k - 1, here, 0 if off else z.u, segment, not off)
    first = 0 if off else each[0] + (each[1] if save else 0) + more
    # A segment that ran again has left its first layer's attention outputs on the device.
    again = z.out + z.lse if k > 1 and not policy.by_group else 0
    here = z.head_gradient + z.body - z.first
    moments += layer_moments("first layer", 0, here, first, again, not off, unsaved < n or k > 1)
    # the first layer's attention outputs are on their way already
    if single and fetched and kept_out > 1:
        here -= shape.trained_of(1) * z.g
        moments += layer_moments("second layer", 1, here, first, again, not off, ahead=True)
    moments += _embedding_moments(z, True, policy.loss_bytes)
    return moments, host


def _forward_moment(
    z: Sizes,
    layer: int,
    t: int,
    single: bool,
    join: int,
    on_device: int,
    by_groups: int = 0,
    leaving: int = 0,
) -> Moment:
    """The last tiled layer's forward.

    The model holds the embedded tokens; the layer holds its input, the attention output, and then
    either q, k and v, or its own output and a tile's MLP.

    by_groups: groups of heads that come one after the other, 0 where all heads are there at once.
    leaving: bytes that stay beside the MLP (q, k and v on their way out, dequantised weights).
    """
    shape = z.shape
    inner, beside, tile_D = inner_bytes(z, layer, t), 0, t * shape.hidden_size * z.s
    if shape.is_sparse(layer):  # gathered, given by the experts, weighted
        beside = 3 * shape.experts_per_token * tile_D + (5 * inner if shape.expert_bias else 0)
    # An adapter's output, the same scaled and the base's stand beside each other where the sum is
    # made.
    wide = z.g // z.s
    acts = (
        3
        if not shape.adapters
        else (2 if shape.joined else 1) * (1 + 2 * wide) + (shape.gated and not shape.joined)
    )
    beside += wide * tile_D * (wide > 1)  # the copy that the adapter reads
    mlp = acts * inner + beside + 3 * tile_D + join - (z.u if single else 0)
    working, out = max(z.q + z.kv, leaving + z.u + mlp), z.out
    if by_groups:
        passing = min(2, by_groups) * (z.q + z.kv + z.out) // by_groups
        working, out = max(passing, leaving + z.u + mlp + 2 * t * shape.out_size * z.s), 0
    return Moment(FORWARD, 0, on_device, 2 * z.u + out + z.lse + working + z.always)


def _plain_moments(z: Sizes, n: int, on_device: int, plain: int, coming: int = 0) -> list:
    """The backward of the last layer that keeps everything, and of the first one (layer n).

    coming: bytes that the tiled layer before the first one has on its way to the device meanwhile.
    """
    shape, last = z.shape, z.shape.num_layers - 1
    scratch = attention_scratch(shape, z.batch, z.tokens, shape.num_kv_heads, z.s)

    def layer_moments(name, i, gradients, checkpoints, coming=0):
        working, mlp = [((1 + shape.gated) * inner_bytes(z, i, z.rows), 0)], mlp_kept(z, i)
        if shape.is_sparse(i):
            working = [(nbytes - mlp, dw) for nbytes, dw in experts_tile(z, i, z.rows)]
        found = [
            Moment(name, gradients + dw, checkpoints, b + z.u + z.always, workspace=coming)
            for b, dw in working
        ]
        gradients += shape.trained_after(i) * z.g
        attention = z.out + z.q + z.kv + z.always - mlp
        return [
            *found,
            Moment(
                f"{name}: attention", gradients, checkpoints, attention, workspace=scratch + coming
            ),
        ]

    done = shape.over(shape.trained_of, n + 1) * z.g
    return [
        *layer_moments("last layer, plain", last, z.head_gradient, on_device + plain),
        *layer_moments(
            "first plain layer", n, z.head_gradient + done, on_device + plain_bytes(z, n), coming
        ),
    ]


def _stock(z: Sizes, checkpointing: bool):
    """Moments of transformers' own Llama with sdpa: what autograd saves, and three fp32 logits."""
    shape, n = z.shape, z.shape.num_layers
    wide = z.rows * shape.hidden_size * 4
    norm = wide + 2 * z.u + 4 * z.rows  # fp32 input, normalised, scaled, rstd
    saved = 2 * norm + z.q + z.out + z.kv + z.lse + 4 * z.f
    kept = n * (z.u if checkpointing else saved)
    logits = z.rows * shape.vocab_size
    final = wide + z.u
    last = z.u + final + z.always
    moments = [Moment("loss", 0, checkpoints=kept, layer=last, loss=3 * 4 * logits)]
    # gate, silu, up, their gradients and that of the product
    working = saved - z.f + 3 * z.f + z.u + z.always
    others = kept if checkpointing else kept - saved + z.u
    moments.append(Moment("last layer", z.head_gradient, checkpoints=others, layer=working))
    moments.append(
        Moment("first layer", z.head_gradient + z.body - z.first, checkpoints=z.u, layer=working)
    )
    moments += _embedding_moments(z, fused=False)
    return moments


def _untiled(z: Sizes):
    """Moments of hfpatch's kernels in layers that run whole, nothing checkpointed."""
    plain = z.shape.over(lambda i: plain_bytes(z, i))
    return [
        _loss_moment(z, plain),
        *_plain_moments(z, 0, 0, plain),
        *_embedding_moments(z, fused=True),
    ]
