"""The gradient of a head's weight, summed over chunks of tokens.

With one chunk of the weight's dtype, it is one matmul. Otherwise it is a float32 sum, rounded once
at the end. On CUDA the matmul adds to the sum in its epilogue; elsewhere the operands are
upcast a slice at a time. The sum is held as two slabs of half the vocabulary each. The first slab
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
from hfpatch.ops._wide_sums import into, sums_in_matmul


class WeightGrad:
    """dW = sum over chunks of d_logits^T hidden."""

    def __init__(self, weight_VD: Tensor, dtype: torch.dtype, chunks: int, scratch_bytes: int):
        self.weight = weight_VD
        self.scratch_bytes = scratch_bytes
        self.empty = True
        vocab_size, hidden_size = weight_VD.shape
        wide = wide_dtype(dtype)
        self.direct = weight_VD.dtype == wide or (chunks == 1 and weight_VD.dtype == dtype)
        first = vocab_size if self.direct else min(vocab_size, -(-vocab_size // 16) * 8)
        out_dtype = weight_VD.dtype if self.direct else wide
        first_RD = weight_VD.new_empty(first, hidden_size, dtype=out_dtype)
        self.slabs = [first_RD]
        if not self.direct:
            self.slabs.append(weight_VD.new_empty(vocab_size - first, hidden_size, dtype=out_dtype))

    def add(self, d_logits_CV: Tensor, hidden_CD: Tensor) -> None:
        """Adds one chunk's part."""
        stop = 0
        for out_RD in self.slabs:
            start = stop
            stop = stop + out_RD.shape[0]
            d_logits_CR = d_logits_CV[:, start:stop]
            if not out_RD.numel():
                continue
            if out_RD.dtype == d_logits_CR.dtype:
                if self.empty:
                    torch.mm(d_logits_CR.t(), hidden_CD, out=out_RD)
                else:
                    out_RD.addmm_(d_logits_CR.t(), hidden_CD)
            elif sums_in_matmul(out_RD, d_logits_CR.dtype):
                into(out_RD, d_logits_CR.t(), hidden_CD, self.empty)
            else:
                self._add_upcast(out_RD, d_logits_CR, hidden_CD)
        self.empty = False

    def _add_upcast(self, out_RD: Tensor, d_logits_CR: Tensor, hidden_CD: Tensor) -> None:
        """Adds with both operands in float32, as many rows at a time as the scratch holds."""
        hidden_CD = hidden_CD.to(out_RD.dtype)
        row_bytes = out_RD.element_size() * max(1, d_logits_CR.shape[0])
        rows = max(1, self.scratch_bytes // row_bytes)
        for start in range(0, out_RD.shape[0], rows):
            d_RC = d_logits_CR[:, start : start + rows].to(out_RD.dtype).t()
            part_RD = out_RD[start : start + rows]
            if self.empty:
                torch.mm(d_RC, hidden_CD, out=part_RD)
            else:
                part_RD.addmm_(d_RC, hidden_CD)

    def finish(self) -> Tensor:
        """dW [V, D]. Call once, after the logits buffer was freed."""
        if self.empty:
            return torch.zeros_like(self.weight, memory_format=torch.contiguous_format)
        if self.direct:
            return self.slabs.pop()
        first_RD, second_RD = self.slabs
        dtype = self.weight.dtype
        self.slabs = []
        vocab_size, hidden_size = self.weight.shape
        flat = first_RD.view(dtype).view(-1)[: vocab_size * hidden_size]
        out_VD = flat.view(vocab_size, hidden_size)
        step = max(1, self.scratch_bytes // max(1, hidden_size * dtype.itemsize))
        for start in range(0, first_RD.shape[0], step):
            rows = slice(start, min(start + step, first_RD.shape[0]))
            out_VD[rows] = first_RD[rows].to(dtype)  # row r lands on float32 row r/2, read before
        out_VD[first_RD.shape[0] :] = second_RD
        return out_VD
