"""Answers for the few places where a program asks the device for values, which are garbage there.

Only copies of up to 1 MiB and small fills are really made on the dry device. Kernels compute
nothing, so a comparison on it answers whatever its memory held. Two places of hfpatch act on such
answers; here they get true ones, from the values that were copied to the device.
"""

import functools

import torch


def on_host(x):
    """x with the bytes that were copied to the device; a view stays a view."""
    if x is None or not x.is_cuda:
        return x
    bytes_ = x.untyped_storage().cpu()
    empty = torch.empty(0, dtype=x.dtype, device="cpu")
    return empty.set_(bytes_, x.storage_offset(), x.shape, x.stride())


def documents_are_true() -> None:
    """Documents and padding of a batch are found on the host."""
    from hfpatch.context import documents

    real = documents._on_host

    def known(*given):
        found = real(*given)  # the copy to the host that a GPU makes
        if found is None:
            return None
        mask, positions, idle_BT = map(on_host, given)
        if idle_BT is not None:
            idle_BT = ~mask.bool()  # computed on the device from labels
        return mask, positions, idle_BT

    documents._on_host = known


def labels_are_counted() -> None:
    """The loss runs over as many tokens as the batch has labels. Of garbage it would run over none."""
    from hfpatch import ops

    def counted(op, hidden, weight, labels, *, num_valid=None, **options):
        if num_valid is not None:
            num_valid = int((on_host(labels) != options.get("ignore_index", -100)).sum())
        return op(hidden, weight, labels, num_valid=num_valid, **options)

    for name in ("linear_cross_entropy", "linear_log_prob"):
        setattr(ops, name, functools.partial(counted, getattr(ops, name)))


def masks_are_full() -> None:
    """A boolean mask on the device selects everything: the number of its elements is known then."""
    get, put = torch.Tensor.__getitem__, torch.Tensor.__setitem__

    def is_mask(index) -> bool:
        tensor = isinstance(index, torch.Tensor) and index.is_cuda
        return tensor and index.dtype == torch.bool and index.dim() > 0

    def getitem(self, index):
        if is_mask(index):
            return self.reshape(-1, *self.shape[index.dim() :]).clone()
        return get(self, index)

    def setitem(self, index, value):
        return None if is_mask(index) else put(self, index, value)

    torch.Tensor.__getitem__, torch.Tensor.__setitem__ = getitem, setitem


def answer_truly() -> None:
    documents_are_true()
    labels_are_counted()
    masks_are_full()
