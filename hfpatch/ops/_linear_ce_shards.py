"""One chunk of linear_cross_entropy and linear_log_prob with the vocabulary split over ranks.

Each rank computes the logits of its words. Two small all-reduces per chunk combine the results: one
of the largest logit, one of sums. With s_r = exp(lse_r - lse) for rank r:
    lse = top + log sum_r exp(lse_r - top), top being the largest z
    z_y = the value of the rank that has the label, 0 of the others
    entropy = sum_r s_r (entropy_r + lse - lse_r)
    sum p^2 = sum_r s_r^2 square_r
The ordinary backward of a chunk computes this rank's gradient from them. The gradient of hidden is
the sum over the ranks.

Legend: C rows of one chunk, V vocabulary of all ranks, v columns of this one.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from hfpatch.ops._library import wide_dtype
from hfpatch.ops._linear_ce_chunk import (
    cross_entropy_chunk_,
    cross_entropy_chunk_bwd_,
    loss_factors,
    whole_lse,
)

IGNORED = -1  # in place of the caller's ignore_index, which may be a valid column of this part


class VocabShard:
    """This rank's rows [start, stop) of a head of `size` rows, split over the ranks of a process
    group.

    The split is that of torch.chunk and DTensor's Shard(0): ceil(size / ranks) rows on each rank,
    fewer or none on the last ones. Every rank has the same hidden states and labels.

    Args:
        group: a torch.distributed process group, None for all ranks.
        size: rows of the whole head.
    """

    def __init__(self, group, size: int):
        self.group, self.size = group, size
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        self.widest = -(-size // ranks)
        self.start, self.stop = (min(size, r * self.widest) for r in (rank, rank + 1))

    def reduce_(self, x: Tensor, op) -> None:
        """Combines the ranks' x, in place."""
        dist.all_reduce(x, op, group=self.group)

    def _local(self, labels_C: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
        """(column of each label in this rank's part, whether this rank has the label).

        The column is arbitrary where another rank has the label, and IGNORED where it is ignored.
        """
        keep_C, here_C = labels_C != ignore_index, (labels_C >= self.start) & (labels_C < self.stop)
        local_C = (labels_C - self.start).clamp(0, max(0, self.stop - self.start - 1))
        return local_C.masked_fill_(~keep_C, IGNORED), here_C & keep_C

    def chunk_(
        self, logits_Cv, labels_C, scale, loss_C, lse_2C, best_C, stats_3C, opts, grad: bool
    ) -> None:
        """`cross_entropy_chunk_` over all ranks, without smoothing.

        grad: whether the logits become their gradient.
        """
        v, (top_C, log_C), inner, outer = logits_Cv.shape[1], lse_2C, opts.inner, opts.outer
        local_C, here_C = self._local(labels_C, opts.ignore_index)
        keep_C, ruled_out = local_C != IGNORED, float("-inf")
        if v:
            row = logits_Cv, local_C, scale, loss_C, lse_2C, best_C, stats_3C
            cross_entropy_chunk_(*row, IGNORED, 0.0, inner, outer, 0.0, False)
            u_C = logits_Cv.gather(1, local_C.clamp(min=0).long().unsqueeze(1)).squeeze(1)
            u_C = u_C.to(loss_C.dtype)
            u_C = torch.tanh(u_C * inner) if inner else u_C
        else:
            log_C.fill_(ruled_out)
            u_C = torch.zeros_like(log_C)
        top_C.masked_fill_(log_C == ruled_out, ruled_out)  # if every word of this part is at -inf
        part_2C = lse_2C.clone()
        self.reduce_(top_C, dist.ReduceOp.MAX)
        below_C = (part_2C[0] - top_C).mul_(outer).add_(part_2C[1])
        sums_2C = torch.stack([below_C.exp(), torch.where(here_C, u_C, 0.0)])
        self.reduce_(sums_2C, dist.ReduceOp.SUM)
        log_C.copy_(sums_2C[0].log_())
        log_share_C = below_C.sub_(log_C)  # log of the probability of this rank's words
        lse_2C.masked_fill_(~keep_C, 0.0)
        lse_C = whole_lse(lse_2C, outer)
        loss = outer * (top_C - sums_2C[1]) + log_C + opts.z_loss * lse_C.square()
        loss_C.copy_(loss.masked_fill_(~keep_C, 0.0))
        if best_C is not None:
            self._best_(logits_Cv, keep_C, best_C, inner)
        if stats_3C is not None:
            self._stats_(log_share_C, keep_C, stats_3C, v)
        if grad:
            dloss_C = scale.expand_as(lse_C)
            rows_KC = loss_factors(dloss_C, lse_2C, outer, 0.0, opts.z_loss, self.size)
            self.chunk_bwd_(logits_Cv, labels_C, rows_KC, opts)

    def _best_(self, logits_Cv: Tensor, keep_C: Tensor, best_C: Tensor, inner: float) -> None:
        """The first word with the largest z, over all ranks.

        Logits that reach the cap are equal.
        """
        value_C = torch.full_like(best_C, float("-inf"), dtype=wide_dtype(logits_Cv.dtype))
        if logits_Cv.shape[1]:
            value_C.copy_(logits_Cv.gather(1, best_C.clamp(min=0).long().unsqueeze(1)).squeeze(1))
            value_C = torch.tanh(value_C * inner) if inner else value_C
        top_C = value_C.clone()
        self.reduce_(top_C, dist.ReduceOp.MAX)
        best_C.copy_(torch.where(value_C == top_C, best_C + self.start, self.size))
        self.reduce_(best_C, dist.ReduceOp.MIN)
        best_C.masked_fill_(~keep_C, -1)

    def _stats_(self, log_share_C: Tensor, keep_C: Tensor, stats_3C: Tensor, v: int) -> None:
        """Combines entropy, mean z and sum of squared probabilities of the ranks' words."""
        entropy_C, mean_C, square_C = stats_3C
        share_C = log_share_C.exp()
        if v:
            entropy_C.copy_(share_C * (entropy_C - log_share_C))
        mean_C *= v / self.size
        square_C *= share_C.square()
        for out_C in (entropy_C, square_C):
            out_C.masked_fill_(share_C == 0.0, 0.0)  # every word of this part is at -inf
        stats_3C.masked_fill_(~keep_C, 0.0)
        summed_3C = stats_3C.contiguous()
        self.reduce_(summed_3C, dist.ReduceOp.SUM)
        stats_3C.copy_(summed_3C)

    def chunk_bwd_(self, logits_Cv: Tensor, labels_C: Tensor, rows_KC: Tensor, opts) -> None:
        """`cross_entropy_chunk_bwd_` for this rank's part. rows_KC: of the whole vocabulary."""
        if not logits_Cv.shape[1]:
            return
        local_C, here_C = self._local(labels_C, opts.ignore_index)
        rows_KC = rows_KC.clone()
        rows_KC[2].masked_fill_(~here_C, 0.0)  # Y, where another rank has the label
        cross_entropy_chunk_bwd_(logits_Cv, local_C, rows_KC, IGNORED, opts.inner, opts.outer)
