"""What torch's own fake tensors lack."""

from contextlib import contextmanager

import torch


@contextmanager
def shapes_of_out_dtype():
    """A context in which fake tensors support addmm with out_dtype into a given tensor.

    torch 2.11 decomposes it with the dtype in beta's place.
    """
    from torch._decomp import meta_table
    from torch._subclasses.fake_impls import op_implementations_dict as fakes

    op = torch.ops.aten.addmm.dtype_out
    if op in meta_table or op in fakes:
        yield
        return
    # An entry in the first table prevents the decomposition; the second table gives the result.
    meta_table[op], fakes[op] = None, lambda mode, func, *args, out, **kwargs: out
    try:
        yield
    finally:
        del meta_table[op], fakes[op]
