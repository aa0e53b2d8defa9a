"""Closed forms of steps whose layers run whole: transformers' own, and hfpatch's kernels without
checkpoints. Standard library only.

A policy here is a `Policy` or a word: STOCK and STOCK_CHECKPOINTING (transformers without hfpatch),
or UNTILED (hfpatch's kernels, layers run whole).
"""

from dataclasses import replace

from hfpatch.budget.flops import Flops, step_flops
from hfpatch.budget.formula import ModelShape, StepMemory, step_memory
from hfpatch.budget.moments import Moment
from hfpatch.budget.policy import Policy
from hfpatch.budget.sizes import Sizes, embedding_partials
from hfpatch.budget.traffic import (
    layer_passes,
    passes_again,
    sinks_and_adapters,
    unfused_made_again,
)

STOCK, STOCK_CHECKPOINTING, UNTILED = "stock", "stock-checkpointing", "off"
STOCKS = STOCK, STOCK_CHECKPOINTING
# transformers' own layers move STOCK_FACTOR times the bytes of fused ones, and this many bytes per
# logit (counted on their code, tests/budget/test_flops.py): norms and logits run in float32,
# rotation and activation are not fused.
STOCK_FACTOR, STOCK_LOGIT_BYTES = 3.2, 44
# As budget/traffic.py's OUR_EXPERTS, of transformers' grouped matmuls, by whether experts have
# biases.
EXPERT_PASSES = {False: ((5, 6.25), (13, 12.25)), True: ((24, 11), (36, 14))}


def untiled(shape: ModelShape) -> Policy:
    """The policy under which no layer runs again, with all heads in one launch."""
    return Policy("gpu", plain=shape.num_layers, wide=True)


def memory_of(
    shape: ModelShape, policy: Policy | str, *, batch: int, tokens: int, itemsize: int = 2
) -> StepMemory:
    """Memory of one forward and backward."""
    sizes = {"batch": batch, "tokens": tokens, "itemsize": itemsize}
    if policy not in STOCKS:
        return step_memory(shape, untiled(shape) if policy == UNTILED else policy, **sizes)
    z = Sizes(shape, batch, tokens, itemsize)
    moments = _stock_moments(z, policy == STOCK_CHECKPOINTING)
    return StepMemory(z.parameters, z.gradients, tuple(moments), 0)


def _stock_moments(z: Sizes, checkpointing: bool) -> list[Moment]:
    """Moments of transformers' own Llama with sdpa: autograd's saved tensors, and three fp32
    logits."""
    shape, n = z.shape, z.shape.num_layers
    wide = z.rows * shape.hidden_size * 4
    norm = wide + 2 * z.u + 4 * z.rows  # fp32 input, normalised, scaled, rstd
    saved = 2 * norm + z.q + z.out + z.kv + z.lse + 4 * z.f
    kept = n * (z.u if checkpointing else saved)
    logits = z.rows * shape.vocab_size
    final = wide + z.u
    last = z.u + final + z.always
    moments = [Moment("loss", 0, checkpoints=kept, layer=last, loss=3 * 4 * logits)]
    # gate, silu, up, their gradients and the gradient of the product
    working = saved - z.f + 3 * z.f + z.u + z.always
    others = kept if checkpointing else kept - saved + z.u
    moments.append(Moment("last layer", z.head_gradient, checkpoints=others, layer=working))
    moments.append(
        Moment("first layer", z.head_gradient + z.body - z.first, checkpoints=z.u, layer=working)
    )
    if shape.adapters:
        return moments
    scratch = embedding_partials(z.rows, shape.vocab_size, shape.hidden_size)
    held = z.u + z.always + (z.embedding if shape.tied else 0)
    return [*moments, Moment("embedding backward", z.gradients, layer=held, workspace=scratch)]


def flops_of(shape: ModelShape, policy: Policy | str, *, batch: int, tokens: int) -> Flops:
    """FLOPs of one step."""
    if isinstance(policy, Policy):
        return step_flops(shape, policy, batch=batch, tokens=tokens)
    once = step_flops(shape, untiled(shape), batch=batch, tokens=tokens)
    if policy != STOCK_CHECKPOINTING:
        return once
    # Recomputation stops before the last projection, whose output is unread.
    unread = 0 if shape.norm_after or shape.experts else shape.hidden_size * shape.intermediate_size
    again = shape.num_layers * (shape.qkv_weights + shape.o_weights - unread)
    again += shape.over(shape.mlp_weights)
    matmul = once.matmul + 2 * batch * tokens * again
    return replace(once, matmul=matmul, attention_forward=2 * once.attention_forward)


def stock_elementwise(shape: ModelShape, again: bool) -> tuple[float, float]:
    """Elements per token that transformers' own layers move outside matmuls: (forward, backward).
    again: forward runs a second time in backward.
    """
    fore, back = (shape.over(lambda i, k=k: layer_passes(shape, i)[k]) for k in (0, 1))
    own = [shape.over(lambda i, k=k: _unfused(shape, i)[k]) for k in (0, 1)]
    if again:
        back += shape.over(lambda i: passes_again(shape, i))
        own[1] += shape.over(lambda i: unfused_made_again(shape, i))
    return STOCK_FACTOR * fore + own[0], STOCK_FACTOR * back + own[1]


def _unfused(shape: ModelShape, layer: int) -> tuple[float, float]:
    """As budget/traffic.unfused_passes, of transformers' code."""
    k = shape.experts_per_token * shape.is_sparse(layer)
    inner, ways = k * shape.expert_size, k * shape.hidden_size
    passes = zip(EXPERT_PASSES[shape.expert_bias], sinks_and_adapters(shape, layer))
    fore, back = (
        of_inner * inner + of_ways * ways + other for (of_inner, of_ways), other in passes
    )
    return fore, back
