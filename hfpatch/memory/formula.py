"""Closed forms: the bytes and FLOPs of a training step. Standard library only, so a plan needs no torch.

A step's memory is the largest of a few moments, each a sum of named buffers that the code of that moment holds
(checkpoint/layer.py, ops/_linear_ce_loop.py, ops/embedding.py; for stock models transformers' own). The simulator runs
that code; tests hold the two within 3% of each other.

Legend: N = batch * tokens rows; D hidden, F intermediate, Q and KV columns of the query and key projections, H query
heads, V vocabulary, s bytes an element; u = N*D*s.
"""

from dataclasses import dataclass

from hfpatch.memory.shape import GiB, ModelShape, Policy

__all__ = ["GiB", "ModelShape", "Policy", "Moment", "StepMemory", "Flops", "step_memory", "step_flops"]

STOCK, STOCK_CHECKPOINTING, UNTILED = "stock", "stock-checkpointing", "off"
LOSS_WORKSPACE = 512 << 20  # ops.linear_cross_entropy's workspace_bytes
LOSS_BYTES_PER_TOKEN = 48
EMBEDDING_SLICE = 128 << 20  # ops/embedding.py: fp32 bytes of one column slice of the incoming gradient
RING_SLOTS = 3


@dataclass(frozen=True)
class Moment:
    """What is alive on the device at one moment beside the parameters, in bytes.

    gradients: those of the parameters that exist by then; checkpoints: kept for the backward of layers to come; layer:
    the working set of the layer (or embedding) that runs; loss; workspace: kernels' scratch and transfer buffers.
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
    """A step whose parameters and gradients stay on the device. Bytes; host: pinned memory for checkpoints."""

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
        """Beyond parameters and gradients at the moment of the highest total."""
        return self.peak_moment.beyond


@dataclass(frozen=True)
class Flops:
    """FLOPs of one step: matmuls, attention forward and backward over the causal half; model: the least there is."""

    matmul: float
    attention_forward: float
    attention_backward: float
    model: float

    @property
    def total(self) -> float:
        return self.matmul + self.attention_forward + self.attention_backward


def heads_per_group(batch: int, tokens: int, shape: ModelShape) -> int:
    """KV heads that go through attention together, as ops/attention.py decides it."""
    blocks = batch * (shape.num_heads // shape.num_kv_heads) * -(-tokens // 128)
    wanted, K = -(-512 // max(blocks, 1)), shape.num_kv_heads
    return next(n for n in range(1, K + 1) if K % n == 0 and (n >= wanted or n == K))


def attention_scratch(shape: ModelShape, batch: int, tokens: int, kv_heads: int, s: int) -> int:
    """Scratch of a flash attention backward over kv_heads: fp32 dq, softmax_d, and dk, dv of every query head."""
    repeat = shape.num_heads // shape.num_kv_heads
    heads, padded, width = kv_heads * repeat, -(-tokens // 128) * 128, -(-shape.head_dim // 32) * 32
    expanded = 2 * batch * heads * tokens * shape.head_dim * s if repeat > 1 else 0
    return 4 * batch * heads * padded * (width + 1) + expanded


def _embedding_partials(rows: int, vocabulary: int, columns: int) -> int:
    """Scratch of CUDA's embedding backward: fp32 sums a segment of ids, and the sort's arrays."""
    return (rows // 10 + min(rows, vocabulary)) * columns * 4 + 32 * rows if rows > 3072 else 0


def loss_chunk_rows(shape: ModelShape, rows: int, s: int) -> tuple[int, int]:
    """(rows of the largest chunk of logits, chunks) of ops.linear_cross_entropy."""
    row_bytes = -(-shape.vocab_size // 8) * 8 * s
    most = max(1, (LOSS_WORKSPACE - rows * LOSS_BYTES_PER_TOKEN) // row_bytes)
    size = most // 128 * 128 or most
    count = max(1, -(-(rows - (most - size)) // size))
    last = rows - (count - 1) * size
    return (max(size, last) if count > 1 else rows), count


class _Sizes:
    """The sizes every moment is made of."""

    def __init__(self, shape: ModelShape, batch: int, tokens: int, s: int):
        self.shape, self.batch, self.tokens, self.s = shape, batch, tokens, s
        self.rows = batch * tokens
        self.u = self.rows * shape.hidden_size * s
        self.q, self.kv = self.rows * shape.q_size * s, self.rows * shape.kv_size * s
        self.lse = self.rows * shape.num_heads * 4
        self.f = self.rows * shape.intermediate_size * s
        self.always = 2 * tokens * shape.head_dim * s + 2 * 8 * self.rows  # cos, sin, ids and labels
        self.embedding = shape.embedding_parameters * s
        self.layer = shape.layer_parameters * s
        self.ends = self.embedding * (1 if shape.tied else 2) + shape.hidden_size * s
        self.gradients = shape.parameters * s
        # A tied weight's gradient arrives twice, and is whole only at the end: until then the head's stands for it.
        self.head_gradient = self.embedding + shape.hidden_size * s

    def embedding_moments(self, fused: bool) -> list:
        """The backward of the token embedding, all other gradients being there."""
        D, V = self.shape.hidden_size, self.shape.vocab_size
        columns = max(1, EMBEDDING_SLICE // (4 * max(1, self.rows))) if fused else D
        if columns >= D:
            slices, scratch = 0, _embedding_partials(self.rows, V, D)
        else:
            slices = (V + self.rows) * columns * self.s
            scratch = _embedding_partials(self.rows, V, columns)
        slices += self.embedding if self.shape.tied else 0
        moments = [Moment("embedding backward", self.gradients, layer=self.u + slices + self.always, workspace=scratch)]
        if self.shape.tied and fused and loss_chunk_rows(self.shape, self.rows, self.s)[1] > 1:
            # Both gradients and their sum: the head's, a view of wider sums, is not added to in place.
            moments.append(Moment("embedding sum", self.gradients, layer=2 * self.embedding + self.always))
        return moments


def step_memory(shape: ModelShape, policy, *, batch: int, tokens: int, itemsize: int = 2) -> StepMemory:
    """Memory of one forward and backward. policy: a Policy, or "off" (hfpatch's kernels, layers whole), "stock" or
    "stock-checkpointing" (transformers without hfpatch)."""
    sizes = _Sizes(shape, batch, tokens, itemsize)
    if isinstance(policy, Policy):
        moments, host = _tiled(sizes, policy)
    elif policy in (STOCK, STOCK_CHECKPOINTING):
        moments, host = _stock(sizes, policy == STOCK_CHECKPOINTING), 0
    elif policy == UNTILED:
        moments, host = _untiled(sizes), 0
    else:
        raise ValueError(
            f"hfpatch: a policy, off, stock or stock-checkpointing was expected, {policy!r} came; pass one."
        )
    return StepMemory(shape.parameters * itemsize, sizes.gradients, tuple(moments), host)


def _loss_moment(z: _Sizes, checkpoints: int) -> Moment:
    rows, chunks = loss_chunk_rows(z.shape, z.rows, z.s)
    single = chunks == 1 or z.s == 4
    wide = z.embedding if single else z.shape.embedding_parameters * 4
    # The layer's output, the normed one and its rstd; loss, lse and shifted labels; logits of one chunk.
    loss = 2 * z.u + 4 * z.rows + 16 * z.rows + rows * -(-z.shape.vocab_size // 8) * 8 * z.s
    return Moment("loss", z.embedding, checkpoints=checkpoints, layer=z.always, loss=loss + wide - z.embedding)


def _tiled(z: _Sizes, policy: Policy):
    """Moments of hfpatch's tiled layers (the phases A to D of checkpoint/layer.py), and host bytes."""
    shape, s, n = z.shape, z.s, z.shape.num_layers
    D, F, Q = shape.hidden_size, shape.intermediate_size, shape.q_size
    step = max(1, policy.tile // z.batch)
    single = step >= z.tokens
    t = min(z.tokens, step) * z.batch
    save = policy.save_attention and policy.every == 1
    off = policy.offload != "gpu"
    stream = policy.stream_attention and save and off
    group = heads_per_group(z.batch, z.tokens, shape)
    groups = shape.num_kv_heads // group

    # What the layers keep, and where.
    kept_x, kept_out = -(-n // policy.every), n if save else 0
    each = z.u, z.q + z.lse
    stored = kept_x * each[0] + kept_out * each[1]
    host = stored if off else 0
    on_device = 0 if off else stored
    ring = 0
    if off:
        ring = (2 if single else RING_SLOTS) * t * (D + (Q if stream else 0)) * s

    tile_D, tile_F = t * D * s, t * F * s
    join = t * Q * s if groups > 1 else 0
    fetched = z.q if save and off and not stream else 0  # the attention outputs, whole on the device
    qkv = z.q + 2 * z.kv
    lse = z.lse if save and off else 0
    mlp_dw = D * F * s

    def layer_moments(name, gradients, checkpoints, extra, x_resident, saved=save):
        ring_here = 0 if x_resident else ring
        recomputed = 0 if saved else z.q + z.lse  # attention outputs computed again
        if single:
            mlp = max(3 * tile_F + 7 * tile_D, 5 * tile_F + 5 * tile_D, 4 * tile_F + 5 * tile_D + mlp_dw)
            held = fetched + recomputed + qkv + join + lse + z.always + extra
            return [Moment(f"{name}: tile", gradients, checkpoints, mlp + held, workspace=ring_here)]
        wide = 4 * (shape.mlp_parameters + D * Q + D)
        tile = max(5 * tile_F, 4 * tile_F + mlp_dw) + 3 * tile_D + join
        a = z.u + z.q + fetched + recomputed + (0 if saved else qkv) + wide + tile + lse + z.always + extra
        outs = (2 * z.q // groups if stream else fetched) + recomputed
        c = z.u + z.q + qkv + outs + lse + z.always + extra + (z.q + 2 * z.kv) // groups
        scratch = attention_scratch(shape, z.batch, z.tokens, group, s)
        done = mlp_dw * 3 + (D * Q + D) * s  # this layer's gradients that are rounded by then
        return [
            Moment(f"{name}: tiles", gradients, checkpoints, a, workspace=ring_here),
            Moment(f"{name}: attention", gradients + done, checkpoints, c, workspace=ring_here + scratch),
        ]

    moments = [_loss_moment(z, on_device)]
    moments += layer_moments("last layer", z.head_gradient, on_device, 0, not off) if not off else []
    k = min(policy.every, n)
    if k > 1:
        # The first segment's last layer: its other layers' inputs and attention outputs are on the device again.
        segment = (k - 1) * (z.u + z.q + z.lse)
        here = z.head_gradient + (n - k) * z.layer
        moments += layer_moments("segment", here, 0 if off else z.u, segment, True)
    first = 0 if off else each[0] + (each[1] if save else 0)
    # A segment that ran again has left its first layer's attention outputs on the device.
    again = z.q + z.lse if k > 1 else 0
    here = z.head_gradient + (n - 1) * z.layer
    moments += layer_moments("first layer", here, first, again, not off, save or k > 1)
    moments += z.embedding_moments(fused=True)
    return moments, host


def _stock(z: _Sizes, checkpointing: bool):
    """Moments of transformers' own Llama with sdpa: what autograd saves, and the logits in three fp32 copies."""
    shape, n = z.shape, z.shape.num_layers
    wide = z.rows * shape.hidden_size * 4
    norm = wide + 2 * z.u + 4 * z.rows  # fp32 input, normalised, scaled, rstd
    saved = 2 * norm + 2 * z.q + 2 * z.kv + z.lse + 4 * z.f
    kept = n * (z.u if checkpointing else saved)
    logits = z.rows * shape.vocab_size
    final = wide + z.u
    last = z.u + final + z.always
    moments = [Moment("loss", 0, checkpoints=kept, layer=last, loss=3 * 4 * logits)]
    working = saved - z.f + 3 * z.f + z.u + z.always  # gate, silu, up, their gradients and that of the product
    if checkpointing:
        moments.append(Moment("last layer", z.head_gradient, checkpoints=kept, layer=working))
        moments.append(Moment("first layer", z.head_gradient + (n - 1) * z.layer, checkpoints=z.u, layer=working))
    else:
        moments.append(Moment("last layer", z.head_gradient, checkpoints=kept - saved + z.u, layer=working))
        moments.append(Moment("first layer", z.head_gradient + (n - 1) * z.layer, checkpoints=z.u, layer=working))
    moments += z.embedding_moments(fused=False)
    return moments


def _untiled(z: _Sizes):
    """Moments of hfpatch's kernels in transformers' own layers, nothing checkpointed."""
    n = z.shape.num_layers
    saved = 4 * z.u + 8 * z.rows + 2 * z.q + 2 * z.kv + z.lse + 3 * z.f
    working = 2 * z.f + z.u + z.always
    moments = [_loss_moment(z, n * saved)]
    moments.append(Moment("last layer", z.head_gradient, checkpoints=n * saved, layer=working))
    moments.append(Moment("first layer", z.head_gradient + (n - 1) * z.layer, checkpoints=saved, layer=working))
    moments += z.embedding_moments(fused=True)
    return moments


def step_flops(shape: ModelShape, policy, *, batch: int, tokens: int) -> Flops:
    """FLOPs of one step under a policy (as step_memory takes it). `model` is what the mathematics needs: 6 a weight."""
    rows, n = batch * tokens, shape.num_layers
    D, Q = shape.hidden_size, shape.q_size
    qkv = D * (Q + 2 * shape.kv_size)
    mlp = 3 * D * shape.intermediate_size
    layer = qkv + D * Q + mlp
    once = 2 * batch * tokens * tokens * Q * n  # attention forward, causal half
    least = 6 * rows * (n * layer + shape.embedding_parameters)
    again, forwards = 0.0, 1.0
    if isinstance(policy, Policy):
        single = max(1, policy.tile // batch) >= tokens
        again = n * (layer + (0 if single else qkv))
        if policy.every > 1:
            again += (n - -(-n // policy.every)) * layer
        forwards = 1 if policy.save_attention and policy.every == 1 else 2
    elif policy == STOCK_CHECKPOINTING:
        # Recomputation stops before down_proj, whose output nothing needs.
        again, forwards = n * (layer - D * shape.intermediate_size), 2
    return Flops(least + 2 * rows * again, once * forwards, once * 2.5, least + 3.5 * once)
