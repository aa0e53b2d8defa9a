"""Bytes of the tensors in formula.py's moments: activations, weight gradients, kept tensors.
Standard library only.

Legend: N = batch * tokens rows; D hidden, F intermediate, Q, K, O columns of queries, keys (or
values), attention outputs, H query heads, V vocabulary, s bytes per element; u = N*D*s.
"""

from hfpatch.budget.adapters import attention_linears, expert_tensors, mlp_linears
from hfpatch.budget.sequence import rounds_for
from hfpatch.budget.shape import ModelShape


def attention_scratch(shape: ModelShape, batch: int, tokens: int, kv_heads: int, s: int) -> int:
    """Scratch of a flash attention backward over kv_heads heads: fp32 dq, softmax_d, and dk, dv of
    every query head."""
    repeat = shape.num_heads // shape.num_kv_heads
    if shape.ranks > 1:
        rounds = rounds_for(shape, batch, tokens)
        tokens *= shape.ranks
        kv_heads, repeat = max(1, rounds.width // rounds.repeat), min(rounds.width, rounds.repeat)
    heads, padded, width = kv_heads * repeat, -(-tokens // 128) * 128, -(-shape.head_dim // 32) * 32
    column = batch * heads * tokens * s
    expanded = 2 * column * shape.head_dim if repeat > 1 else 0
    # Values narrower than queries are padded to the queries' width, as are the outputs and their
    # gradient, and dv comes in that width.
    narrow = shape.v_head_dim or shape.head_dim
    expanded += column * (4 * shape.head_dim - narrow) if narrow < shape.head_dim else 0
    return 4 * batch * heads * padded * (width + 1) + expanded


def embedding_partials(rows: int, vocabulary: int, columns: int) -> int:
    """Scratch of CUDA's embedding backward: an fp32 sum for each segment of ids, and the arrays of
    the sort."""
    return (rows // 10 + min(rows, vocabulary)) * columns * 4 + 32 * rows if rows > 3072 else 0


class Sizes:
    """Bytes of the tensors that appear in most moments."""

    def __init__(self, shape: ModelShape, batch: int, tokens: int, s: int):
        self.shape, self.batch, self.tokens, self.s = shape, batch, tokens, s
        self.rows = batch * tokens
        self.u = self.rows * shape.hidden_size * s
        self.q, self.out = self.rows * shape.q_size * s, self.rows * shape.out_size * s
        self.qk = self.rows * (shape.q_size + shape.kv_size) * s
        self.kv = self.rows * (shape.kv_size + shape.v_size) * s
        self.lse = self.rows * shape.num_heads * 4
        # Norms of q and k keep their inputs, and a factor for each head or row.
        factors = {"": 0, "head": shape.num_heads + shape.num_kv_heads, "full": 2}[shape.qk_norm]
        self.normed = bool(factors) * self.qk + self.rows * 4 * factors
        # Latent attention keeps the latents before and after their norms, and the keys joined with
        # their rotary columns.
        latents = (
            2 * (shape.q_rank + shape.kv_rank)
            + shape.rope_dim
            + shape.q_size
            - shape.num_heads * shape.rope_dim
        )
        self.latent = self.rows * latents * s if shape.kv_rank else 0
        # Norms and rotations in unfused float32 operations keep several times the hidden states:
        # for the last norm, for a layer that keeps everything, for a tile that runs again. The
        # factors are the simulator's counts for Cohere.
        self.wide_loss, self.wide_plain, self.wide_tile = (
            n * shape.wide_norms * self.u for n in (7, 4, 11)
        )
        self.f = self.rows * shape.intermediate_size * s
        rotary = (shape.rope_dim or shape.head_dim) * shape.rotary_kinds
        self.always = 2 * tokens * rotary * s + 2 * 8 * self.rows  # cos, sin, ids and labels
        self.embedding = shape.embedding_parameters * s
        self.head = shape.trained_head * s
        self.g = shape.trained_itemsize(s)  # bytes of a gradient's element
        self.first = shape.trained_of(0) * self.g
        self.body = shape.trained_body * self.g
        self.gradients = shape.trained_parameters * self.g
        self.parameters = shape.parameter_bytes(s)
        # A tied weight gets its gradient twice, from head and embedding. The embedding's part comes
        # at the end.
        self.head_gradient = 0 if shape.adapters else self.embedding + shape.norm_parameters * s


def inner_bytes(z: Sizes, layer: int, t: int) -> int:
    """Bytes of an MLP's intermediate columns for t rows, of all experts of a token together."""
    shape = z.shape
    if not shape.is_sparse(layer):
        return t * shape.intermediate_size * z.s
    return t * (shape.experts_per_token * shape.expert_size + shape.shared_size) * z.s


def experts_tile(z: Sizes, layer: int, t: int) -> tuple:
    """(bytes, bytes of new weight gradients) at three moments of the experts' backward over t rows,
    in the order of ops/experts.py.

    The moments: the gradients of the activation and of gate and up exist; the second weight's
    gradient has come; the gathered rows' gradient exists. Each token has one gathered row per
    expert, kept if the first weight or its adapter has a gradient, and one of dy. An adapter's
    product is a tensor of its own. Gate and up stay until the end, as autograd saves them.
    """
    shape, inner = z.shape, inner_bytes(z, layer, t)
    gathered = t * shape.experts_per_token * shape.hidden_size * z.s
    adapted = expert_tensors(shape, layer, not shape.adapters.targets) if shape.adapters else {}
    names = shape.adapters.targets if shape.adapters and shape.adapters.targets else adapted
    first, second = (f"experts.{n}_proj" in {*adapted} & {*names} for n in ("gate_up", "down"))
    # Frozen experts have no weight gradients.
    down = 0 if shape.adapters else shape.experts * shape.hidden_size * shape.expert_size * z.s
    kept = gathered * (first or not shape.adapters)
    made = inner * (second or not shape.adapters)
    return (
        (gathered + kept + 5 * inner + made, 0),
        (gathered + kept + 4 * inner + made, down),
        ((1 + first) * gathered + kept + 4 * inner, 3 * down),
    )


def mlp_weight(z: Sizes, layer: int) -> int:
    """Bytes of the largest weight gradient of a dense MLP; in a frozen MLP, of the dequantised
    copy."""
    shape = z.shape
    if shape.adapters:
        return shape.dense_bytes(mlp_linears(shape, layer), z.s)
    return (2 if shape.joined else 1) * shape.hidden_size * shape.intermediate_size * z.s


def widened(z: Sizes, layer: int, t: int, single: bool) -> int:
    """Extra bytes in the backward of t rows if adapters have a wider dtype than the model: a copy
    of each adapter's input, and the last adapter's output, unscaled and scaled."""
    shape = z.shape
    if z.g <= z.s or not shape.adapters:
        return 0
    after = list(mlp_linears(shape, layer))
    names = [
        "o_proj",
        *after,
        *after[-1:],
        *[n for n in attention_linears(shape) if single and n != "o_proj"],
    ]
    adapted = [n for n in names if not shape.adapters.targets or n in shape.adapters.targets]
    return len(adapted) * t * shape.hidden_size * z.g


def mlp_kept(z: Sizes, layer: int) -> int:
    """Bytes that autograd keeps of a layer's MLP in addition to its input: intermediate columns,
    and for experts the gathered rows."""
    shape, inner = z.shape, inner_bytes(z, layer, z.rows)
    if not shape.is_sparse(layer):
        return ((3 if shape.fused_mlp else 4) if shape.gated else 2) * inner
    gathered = z.rows * shape.experts_per_token * shape.hidden_size * z.s
    return gathered + 2 * inner + 2 * z.rows * shape.shared_size * z.s


def plain_bytes(z: Sizes, layer: int) -> int:
    """Bytes that autograd keeps of a layer with fused parts that runs whole."""
    shape = z.shape
    norms = (2 + shape.norms) * z.u + 4 * shape.norms * z.rows
    # in the kernel's layout, and in the projection's
    outs = (1 + shape.heads_first) * z.out
    # copies in addition to the values, which are a view of one projection's output
    joined = z.qk * shape.joined_qkv
    return (
        norms
        + z.wide_plain
        + z.normed
        + z.latent
        + joined
        + z.q
        + z.kv
        + outs
        + z.lse
        + mlp_kept(z, layer)
    )


def kept_columns(shape: ModelShape, name: str) -> int:
    """Columns of the tensors that `name`, one of KEEPABLE, keeps per layer."""
    qkv, inner = (
        shape.q_size + shape.kv_size + shape.v_size,
        (2 if shape.gated else 1) * shape.intermediate_size,
    )
    return {"qkv": qkv, "mid": shape.hidden_size, "gate_up": inner}[name]
