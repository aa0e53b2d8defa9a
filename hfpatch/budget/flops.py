"""Closed forms: the FLOPs of a training step. Standard library only."""

from dataclasses import dataclass

from hfpatch.budget.cuts import tiles
from hfpatch.budget.policy import Policy
from hfpatch.budget.shape import ModelShape


@dataclass(frozen=True)
class Flops:
    """FLOPs of one step: matmuls, and attention forward and backward over the causal half.

    model: counted by the usual convention (step_flops). moved_forward, moved_backward: bytes that
    all other kernels read and write, if they were counted.
    """

    matmul: float
    attention_forward: float
    attention_backward: float
    model: float
    model_attention: float  # attention's part of `model`
    moved_forward: float = 0.0
    moved_backward: float = 0.0

    @property
    def total(self) -> float:
        return self.matmul + self.attention_forward + self.attention_backward


def attended(tokens: int, window: int) -> float:
    """Pairs of tokens in one causal row of attention: half the square, or a band of it with a
    window.
    """
    return tokens * window - window * window / 2 if 0 < window < tokens else tokens * tokens / 2


def recomputed_weights(shape: ModelShape, keep: tuple, layer: int, *, single: bool) -> int:
    """Weights that one token meets again in the backward of a layer that keeps `keep`. Matmuls
    whose output is unread are left out.
    """
    after = shape.o_weights + shape.mlp_weights(layer) - shape.dead_after(layer)
    before = shape.qkv_weights if single else 2 * shape.qkv_weights - shape.dead_before
    if shape.adapters:
        after += shape.trained_after(layer)
        before += (1 if single or "qkv" in keep else 2) * shape.trained_before(layer)
    if "qkv" in keep:
        before -= shape.qkv_weights if not single else shape.dead_before
    if "mid" in keep:
        after -= shape.o_weights
    if "gate_up" in keep:
        after -= (2 if shape.gated else 1) * shape.hidden_size * shape.intermediate_size
    return before + after


def step_flops(shape: ModelShape, policy: Policy, *, batch: int, tokens: int) -> Flops:
    """FLOPs of one step under a policy.

    `model` follows the usual convention: 6 for each trained weight and token, 4 for a frozen
    weight, attention three times its forward, no recomputation.
    """
    rows, n = batch * tokens, shape.num_layers
    layers = n * (shape.qkv_weights + shape.o_weights) + shape.over(shape.mlp_weights)

    def attention(first=0, last=n):
        """FLOPs of a range of layers: two matmuls over the causal half (or a window), q with k, and
        the probabilities with v.
        """
        pairs = sum(
            k * attended(tokens * shape.ranks, w)
            for w, k in shape.window_counts(first, last).items()
        )
        return 2 * batch * (shape.q_size + shape.out_size) * pairs / shape.ranks

    once = attention()
    least = 6 * rows * (layers + shape.embedding_parameters)
    if shape.adapters:
        # No weight gradients of the base, and none of the embedded tokens: the first layer's q, k
        # and v have no gradient to pass on.
        least = rows * (
            4 * (layers + shape.embedding_parameters)
            + 6 * shape.trained_parameters
            - 2 * shape.qkv_weights
        )
    tiled = n - min(policy.plain, n)
    single = tiles(batch, tokens, policy.tile)[0] == 1
    keeping = tiled - min(policy.keeps_less, tiled)
    again = sum(
        shape.over(lambda i, k=keep: recomputed_weights(shape, k, i, single=single), *layers)
        for keep, layers in ((policy.keep, (0, keeping)), ((), (keeping, tiled)))
    )
    if policy.every > 1:
        skipped = tiled - -(-tiled // policy.every)
        again += skipped * (layers / n)
    saves = policy.save_attention and policy.every == 1
    forwards = once
    forwards += attention(tiled - min(policy.attends_again, tiled) if saves else 0, tiled)
    # Kernels need values as wide as queries: the narrower values of latent attention are padded.
    padded = 2 * shape.q_size / (shape.q_size + min(shape.q_size, shape.out_size))
    return Flops(
        least + 2 * rows * again, padded * forwards, padded * 2.5 * once, least + 3 * once, 3 * once
    )
