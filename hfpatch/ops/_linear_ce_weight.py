"""The gradient of a head's weight, summed over chunks of tokens.

With one chunk, and logits of the weight's dtype, it is one matmul. Otherwise it is a float32 sum,
rounded once at the end. On CUDA the matmul adds to the sum in its epilogue; elsewhere the operands are
upcast a slice at a time. For a weight in half precision the sum is two slabs of half the vocabulary
each. The first slab
has the bytes of the rounded dW, so rounded rows overwrite float32 rows that were already read, and
the second slab is freed. The sum and the rounded dW never exist side by side. The second slab
starts at a multiple of 8 columns of the logits, because cuBLAS' fast kernels need pointers of whole
16 bytes. For a bf16 dW, drawn with 4 rows a slab (s0 is row 0 of the sum, w0 of the rounded dW):

    first slab  | s0 s0 | s1 s1 | s2 s2 | s3 s3 |    second slab  | s4 s4 | s5 s5 | s6 s6 | s7 s7 |
    finish      | w0 w1 | w2 w3 | s2 s2 | s3 s3 |    in order: each s is read before it is overwritten
    dW          | w0 w1 | w2 w3 | w4 w5 | w6 w7 |    then freed

C rows of one chunk, R rows of one slab, D hidden, V vocabulary.
"""

import torch
from torch import Tensor

from hfpatch.ops._library import wide_dtype
from hfpatch.ops._wide_sums import add_product, sums_in_matmul


class WeightGrad:
    """dW = sum over chunks of d_logits^T hidden."""

    def __init__(self, weight_VD: Tensor, dtype: torch.dtype, chunks: int, scratch_bytes: int):
        self.weight = weight_VD
        self.scratch_bytes = scratch_bytes
        self.empty = True
        vocab_size, hidden_size = weight_VD.shape
        sum_dtype = wide_dtype(dtype)
        sizes = [vocab_size]
        if chunks == 1 and weight_VD.dtype == dtype:
            sum_dtype = dtype
        elif weight_VD.dtype != sum_dtype:
            first = min(vocab_size, -(-vocab_size // 16) * 8)
            sizes = [first, vocab_size - first]
        self.sizes = sizes
        self.slabs = [weight_VD.new_empty(n, hidden_size, dtype=sum_dtype) for n in sizes]

    def add(self, d_logits_CV: Tensor, hidden_CD: Tensor) -> None:
        """Adds one chunk's part."""
        slices = d_logits_CV.split(self.sizes, dim=1)
        for out_RD, d_logits_CR in zip(self.slabs, slices):
            if not out_RD.numel():
                continue
            if out_RD.dtype == d_logits_CR.dtype or sums_in_matmul(out_RD, d_logits_CR.dtype):
                add_product(out_RD, d_logits_CR.t(), hidden_CD, self.empty)
                continue
            # Elsewhere both operands are upcast, as many rows at a time as the scratch holds.
            wide_CD = hidden_CD.to(out_RD.dtype)
            row_bytes = out_RD.element_size() * max(1, d_logits_CR.shape[0])
            rows = max(1, self.scratch_bytes // row_bytes)
            for part_RD, d_CR in zip(out_RD.split(rows), d_logits_CR.split(rows, dim=1)):
                add_product(part_RD, d_CR.to(out_RD.dtype).t(), wide_CD, self.empty)
        self.empty = False

    def finish(self) -> Tensor:
        """dW [V, D]. Call once, after the logits buffer was freed."""
        if self.empty:
            return torch.zeros_like(self.weight, memory_format=torch.contiguous_format)
        first_RD, *others = self.slabs
        if not others:
            return first_RD
        dtype = self.weight.dtype
        first, hidden_size = first_RD.shape
        out_VD = first_RD.view(dtype).view(-1)[: self.weight.numel()].view(self.weight.shape)
        step = max(1, self.scratch_bytes // max(1, hidden_size * dtype.itemsize))
        # Row r lands on float32 row r / 2, which was read before.
        for out_RD, sum_RD in zip(out_VD[:first].split(step), first_RD.split(step)):
            out_RD.copy_(sum_RD.to(dtype))
        out_VD[first:] = others[0]
        return out_VD.detach()  # no view, so autograd adds a tied embedding's gradient in place
