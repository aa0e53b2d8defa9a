"""Costs of operations on a CUDA device beyond their outputs: scratch memory in kernels, and FLOPs.

Sources: PyTorch's csrc of 2.9 to 2.13, aten/src/ATen/native/transformers/cuda (flash attention
backward: the fp32 dq accumulator, softmax_d, dk, dv of every query head, and copies of out and its
gradient where these are not contiguous; efficient attention's: the same accumulator, in
mem_eff_attention/kernel_backward.h, and delta) and native/cuda/Embedding.cu (fp32 partial sums).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from hfpatch.budget.cuts import attended
from hfpatch.lab.compat import schema_of
from hfpatch.ops.experts import EXPERT_PRODUCT, EXPERT_SUMS

aten = torch.ops.aten


class Work(NamedTuple):
    """What an operation's kernel does. Layouts of arguments determine it.

    Attributes:
        products: FLOPs of matmuls.
        attention: ("forward" | "backward", FLOPs), or None.
        scratch, moved: bytes that it allocates meanwhile, and that it reads and writes.
        seconds: of a GPU, without those of `moved`; 0 if unknown.
    """

    products: int
    attention: tuple | None
    scratch: int
    moved: int
    seconds: float = 0.0


def _ops(*names) -> set:
    return {getattr(aten, name).default for name in names if hasattr(aten, name)}


# The op and the position of q in its arguments.
ATTENTION_FORWARD = {op: 0 for op in _ops(
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_efficient_attention",
    "_flash_attention_forward",
)}  # fmt: skip
ATTENTION_BACKWARD = {op: 1 for op in _ops(
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_scaled_dot_product_cudnn_attention_backward",
    "_scaled_dot_product_efficient_attention_backward", "_flash_attention_backward",
)}  # fmt: skip
ATTENTION = ATTENTION_FORWARD | ATTENTION_BACKWARD
# q is [N, H, E], k [N, K, E]
_ROWS_FIRST = _ops("_flash_attention_forward", "_flash_attention_backward")
_ANY_STRIDES = _ops(
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_scaled_dot_product_cudnn_attention_backward",
    "_scaled_dot_product_efficient_attention_backward",
)
GROUPED = {getattr(aten, name) for name in ("_grouped_mm",) if hasattr(aten, name)}


def _argument(func, args, kwargs, name, default=None):
    for position, argument in enumerate(schema_of(func).arguments):
        if argument.name == name and position < len(args):
            return args[position]
        if argument.name == name:
            return kwargs.get(name, argument.default_value)
    return default


def sizes(func, q: Tensor, k: Tensor) -> tuple[int, ...]:
    """(batch, query heads, KV heads, queries, keys, head dim)."""
    if func not in _ROWS_FIRST:
        batch, heads, rows, width = q.shape
        return batch, heads, k.shape[1], rows, k.shape[2], width
    rows, heads, width = q.shape[-3:]
    columns, kv_heads, _ = k.shape[-3:]
    return q.shape[0] if q.dim() == 4 else 1, heads, kv_heads, rows, columns, width


def window(func, args, kwargs) -> int | None:
    """Keys to the left of a query that an attention operation sees; None for all."""
    left = _argument(func, args, kwargs, "window_size_left")
    return None if left is None or left < 0 else left


def attention(func, args, kwargs):
    """("forward" | "backward", FLOPs) of an attention operation; else None. Half of the square
    counts when causal, a band of it under a window.

    Forward is two T x T matmuls a head (4 T T E FLOPs), backward five of them.
    """
    position = ATTENTION.get(func)
    if position is None:
        return None
    batch, heads, _, rows, columns, width = sizes(func, args[position], args[position + 1])
    flops = 4 * batch * heads * rows * columns * width
    left = window(func, args, kwargs)
    if left is not None and left < columns - 1:
        flops = 4 * batch * heads * width * int(attended(rows, left + 1))
    elif _argument(func, args, kwargs, "is_causal", False):
        flops //= 2
    if func in ATTENTION_BACKWARD:
        return "backward", flops * 5 // 2
    return "forward", flops


_ADDING = (aten.addmm, aten.baddbmm, aten.addmm_, aten.baddbmm_)


def matmul_shape(func, args) -> tuple[int, float, float, float] | None:
    """(count, rows, inner, columns) of a product: mm, addmm, bmm, baddbmm, integer and grouped
    ones, with out= or a dtype too. None for other operations. Groups count as equal in size.
    """
    packet = func.overloadpacket
    if func is EXPERT_SUMS:
        _, a, b, offs = args[:4]
        return len(offs), a.shape[1], len(a) / len(offs), b.shape[1]
    if func is EXPERT_PRODUCT:
        x, w = args[:2]
        return len(w), len(x) / len(w), x.shape[1], w.shape[2]
    if packet in _ADDING:
        args = args[1:]
    elif packet not in (aten.mm, aten.bmm, aten._int_mm, *GROUPED):
        return None
    a, b = args[:2]
    rows, inner = a.shape[-2:]
    columns = b.shape[-1]
    if packet not in GROUPED or a.dim() == b.dim() == 3:
        return a.shape[0] if a.dim() == 3 else 1, rows, inner, columns
    if a.dim() == b.dim() == 2:  # a weight's gradient: each group sums over its part
        groups = args[2].shape[0] if len(args) > 2 else 1
        return groups, rows, inner / groups, columns
    # Each group has its own rows of a, and its own matrix.
    return len(b), rows / len(b), inner, columns


def matmul_flops(func, args) -> int:
    """FLOPs of the products that matmul_shape knows; 0 for other operations."""
    shape = matmul_shape(func, args)
    return round(2 * math.prod(shape)) if shape else 0


# Operations that write their argument or a tensor like it, and do not read it.
_WRITE_ALONE = (
    "copy_",
    "zero_",
    "fill_",
    "zeros_like",
    "ones_like",
    "full_like",
    "new_zeros",
    "new_ones",
    "new_full",
)
_MOVE_NOTHING = ("empty_like", "new_empty", "new_empty_strided", "resize_", "set_")


def bytes_of(tensor: Tensor) -> int:
    """Bytes that an operation reads or writes of a tensor. Expanded dimensions count once."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride()):
        count *= size if stride else min(size, 1)
    return count * tensor.element_size()


def _sum_bytes(func, args, kwargs) -> int:
    """Extra bytes of a matmul that adds to a sum: reading the sum, and its extra width.

    The baseline is a matmul that writes a gradient as wide as its inputs.
    """
    if func is EXPERT_SUMS:
        return bytes_of(args[0]) // 2 * (1 if args[4] else 3)
    out = kwargs.get("out")
    wider = 0 if out is None or "dtype" not in func.__name__ else bytes_of(out) // 2
    return wider + (bytes_of(args[0]) if func.overloadpacket in _ADDING else 0)


def moved_bytes(func, args, kwargs, inputs: list, outputs: list) -> int:
    """Bytes that an operation reads and writes. 0 for views and for attention and matmuls, whose
    time follows from their FLOPs; wide sums of matmuls count.
    """
    name = func.overloadpacket.__name__
    outputs = outputs or _written(func, args)
    if name in _MOVE_NOTHING or not outputs or not inputs:
        return 0
    if func in ATTENTION:
        return 0
    if matmul_flops(func, args):
        return _sum_bytes(func, args, kwargs)
    storages = {id(x.untyped_storage()) for x in inputs}
    if not schema_of(func).is_mutable and all(id(x.untyped_storage()) in storages for x in outputs):
        return 0
    if name == "copy_":
        inputs = inputs[1:]
    elif name in _WRITE_ALONE:
        inputs = []
    return sum(map(bytes_of, (*inputs, *outputs)))


def _written(func, args) -> list:
    """The tensors that an operation without outputs writes: an optimizer's lists.

    Gradients are left out. A fused optimizer writes them only if it scales them.
    """
    found = []
    for argument, value in zip(schema_of(func).arguments, args):
        written = argument.alias_info is not None and argument.alias_info.is_write
        if written and argument.name != "grads" and isinstance(value, (list, tuple)):
            found += value
    return found


def _copied(func, x: Tensor) -> int:
    """Bytes of the copy that flash attention's backward makes of out or of its gradient."""
    if func in _ANY_STRIDES:
        return 0
    return 0 if (x if func in _ROWS_FIRST else x.transpose(1, 2)).is_contiguous() else x.nbytes


def scratch_bytes(func, args) -> int:
    """Bytes that the operation's CUDA kernel allocates and frees inside, beyond its outputs."""
    if func in ATTENTION_BACKWARD:
        k = args[2]
        batch, heads, kv_heads, rows, columns, width = sizes(func, args[1], k)
        padded = -(-rows // 128) * 128
        dq_accumulator = 4 * batch * heads * padded * (-(-width // 32) * 32)
        softmax_d = 4 * batch * heads * padded
        expanded = 0
        if kv_heads != heads:
            expanded = 2 * batch * heads * columns * width * k.element_size()
        copies = _copied(func, args[0]) + _copied(func, args[4])
        return dq_accumulator + softmax_d + expanded + copies
    if func is aten.embedding_dense_backward.default:
        grad, indices, vocabulary = args[:3]
        count = indices.numel()
        if count <= 3072:
            return 0
        partials = (count // 10 + min(count, int(vocabulary))) * grad.shape[-1] * 4
        return partials + 4 * 8 * count  # sorted ids and positions, and the sort's own copies
    return 0
