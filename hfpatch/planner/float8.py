"""`hfpatch plan --fp8`: products faster, and casts that take memory. For runs that `hfpatch train
--fp8` takes: all weights, without an engine.
"""

from dataclasses import replace

from hfpatch.budget.policy import refuse_unknown

# torchao's recipes that scale by rows, and the speedup of the layers' matmuls. Of torchtitan's
# Llama-3-8B on eight H100, 8,192 tokens, compiled, 8,532 against 6,667 tokens/s (its table of
# December 2024). That is the whole step. Matmuls alone gain more, and torchao's casts without
# torch.compile take some of it back: not measured. With "gw_hp" the weight gradients, a third of
# the matmuls, stay in bf16.
RECIPES = {
    "rowwise": 8532 / 6667,
    "rowwise_with_gw_hp": 3 / (1 + 2 * 6667 / 8532),
}
SAID = (
    "float8 products at the rate of torchtitan's published steps, which were compiled; not measured "
    "here"
)
GPUS = ("h100", "h200", "b200", "l40s", "rtx4090", "rtx5090", "mi300x")
CAST_TOKENS = 8192  # the most tokens of a tile for which casts are counted


def in_float8(run, recipe: str):
    """The run with its layers' matmuls in float8 by this recipe. ValueError if none can be."""
    refuse_unknown([recipe], RECIPES, "--fp8")
    if run.shape.adapters or not (run.gpu.measured or run.gpu.name in GPUS):
        raise ValueError(
            "hfpatch: --fp8 is planned for all weights, on a GPU that multiplies in float8 "
            f"({', '.join(GPUS)}), got {'adapters' if run.shape.adapters else run.gpu.name}. Leave "
            "it out."
        )
    return replace(run, gpu=replace(run.gpu, float8=RECIPES[recipe]))


def cast_bytes(run) -> int:
    """The extra GPU bytes of torchao's float8 over bf16, at the peak of one Linear that is not
    compiled: the casts pass through float32 twice, and both operands exist in float8.
    """
    if run.gpu.float8 == 1:
        return 0
    tokens = min(run.batch * run.seq_len, CAST_TOKENS)
    sizes = [size for size, _ in run.shape.matrices]
    largest = max(max(n * m, tokens * n, tokens * m) for n, m in sizes)
    return 8 * largest + max(n * m + tokens * max(n, m) for n, m in sizes)
