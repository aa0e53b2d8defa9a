"""Float32 sums of products of 16-bit matrices, accumulated inside the matmul where the device can.

The products are then neither rounded nor written to memory before they are added.

M, N rows and columns of a sum; K the dimension that a matmul sums over.
"""

import torch
from torch import Tensor

from hfpatch.compat import is_fake

# Simulations of a GPU set it: fake CPU tensors then take the code path of CUDA tensors, with its
# allocations.
AS_CUDA = False


def on_cuda(x: Tensor) -> bool:
    """Whether x is on a GPU, or is a fake tensor that represents one (AS_CUDA)."""
    return x.is_cuda or (AS_CUDA and is_fake(x))


def sums_in_matmul(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether `add_product` supports matmuls of this dtype on x's device: cuBLAS does."""
    return dtype in (torch.bfloat16, torch.float16) and on_cuda(x) and torch.version.hip is None


def add_product(out_MN: Tensor, a_MK: Tensor, b_KN: Tensor, first: bool) -> None:
    """Adds a_MK @ b_KN to the sum out_MN, of their dtype or (see sums_in_matmul) float32; `first`
    overwrites the sum instead."""
    same = out_MN.dtype == a_MK.dtype
    aten = torch.ops.aten
    if first and same:
        torch.mm(a_MK, b_KN, out=out_MN)
    elif same:
        out_MN.addmm_(a_MK, b_KN)
    elif first:
        aten.mm.dtype_out(a_MK, b_KN, out_MN.dtype, out=out_MN)
    else:
        aten.addmm.dtype_out(out_MN, a_MK, b_KN, out_MN.dtype, out=out_MN)
