"""The pinned host memory of one step, in the blocks that layers allocate. Standard library only."""

from collections import Counter

from hfpatch.budget.cuts import head_groups, tile_bounds
from hfpatch.budget.policy import Policy
from hfpatch.budget.shape import ModelShape


def host_blocks(
    shape: ModelShape,
    policy: Policy,
    *,
    batch: int,
    tokens: int,
    layers: int | None = None,
    itemsize: int = 2,
    computed: int | None = None,
    whole: bool = False,
    ranks: int = 1,
    pieces: bool = False,
) -> Counter:
    """The host blocks of one step: {bytes: count}. Their sum is the host memory of
    formula.step_memory.

    Args:
        layers: the number of checkpointed layers, if not the shape's.
        itemsize: of hidden states; computed: of q, k, v and attention outputs, smaller under
            autocast.
        whole: layers keep only their input.
        ranks: the number of ranks that share each layer; each keeps a part of its input.
        pieces: attention outputs are kept in one block per group of heads.
    """
    n, s, rows = shape.num_layers if layers is None else layers, shape, batch * tokens
    computed, tiled = computed or itemsize, n - min(policy.plain, n)
    bounds, hidden = tile_bounds(batch, tokens, policy.tile), s.hidden_size * itemsize
    kept = batch * sum(-(-(b - a) // ranks) for a, b in bounds)
    sizes = Counter({kept * hidden: -(-tiled // policy.every)})
    if whole:
        return sizes
    if policy.parks_dx and tiled and len(bounds) > 1:
        sizes[rows * hidden] += 1
    groups = head_groups(batch, tokens, shape, policy.wide)
    saved = policy.save_attention and policy.every == 1
    saved *= tiled - min(policy.attends_again, tiled)
    parts = groups if pieces else 1
    sizes[rows * s.out_size // parts * computed] += saved * parts
    sizes[rows * s.num_heads // parts * max(4, computed)] += saved * parts
    if policy.every == 1:
        keeping = tiled - min(policy.keeps_less, tiled)
        _add_kept(sizes, shape, policy, keeping, [batch * (b - a) for a, b in bounds], itemsize,
                  computed)  # fmt: skip
    return +sizes


def _add_kept(
    sizes: Counter, s: ModelShape, policy, layers: int, tiles, itemsize, computed
) -> None:
    """Adds the tensors that `policy.keep` names. tiles: rows of each tile."""
    if "qkv" in policy.keep:
        for columns in (s.q_size, s.kv_size, s.v_size):
            sizes[sum(tiles) * columns * computed] += layers
    for rows in tiles:
        sizes[rows * s.hidden_size * itemsize] += layers * ("mid" in policy.keep)
        # gate and up, in one block if one matrix makes both
        inner, blocks = s.intermediate_size * (2 if s.joined else 1), 1 if s.joined else 2
        sizes[rows * inner * itemsize] += blocks * layers * ("gate_up" in policy.keep)
