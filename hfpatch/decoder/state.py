"""Buffers and zero weights of a layer while it is probed."""

from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hfpatch.compat import (
    buffers_of,
    hooked_by_forward,
    is_sharded_by_zero3,
    parameters_of,
    version,
)

_WIDE = torch.float64, torch.float32, torch.bfloat16, torch.float16


def _is_zero(p: Tensor | None) -> bool:
    here = (
        type(p) is nn.Parameter
        and p.dtype in _WIDE
        and not p.is_meta
        and not is_sharded_by_zero3(p)
    )
    return here and not p.detach().any()


@contextmanager
def state_apart(layer: nn.Module):
    """A context in which modules with buffers are in training mode and write to copies of the
    buffers, and zero weights have random values.

    A weight that starts at zero (a gate, an adapter's last matrix) would hide its input. Yields a
    function that returns the names of the buffers that were written to.
    """
    own = [
        (name, m, m.training, dict(buffers_of(m)))
        for name, m in layer.named_modules()
        if buffers_of(m)
    ]
    zeros = [(m, n, p) for m in layer.modules() for n, p in parameters_of(m).items() if _is_zero(p)]
    with torch.inference_mode(False):  # inference tensors do not count writes
        others = [nn.Parameter(torch.randn_like(p) / 8, p.requires_grad) for *_, p in zeros]
        copied = [
            {n: b if b is None else b.detach().clone() for n, b in buffers.items()}
            for *_, buffers in own
        ]
    for (_, module, _, _), copies in zip(own, copied):
        buffers_of(module).update(copies)
        module.training = True
    hooked = [hooked_by_forward(*row) for row in zeros]
    for (module, name, _), table, other in zip(zeros, hooked, others):
        parameters_of(module)[name] = other
        if table is not None:
            table[name] = other

    def written():
        for (name, module, _, _), copies in zip(own, copied):
            for n, b in copies.items():
                if buffers_of(module).get(n) is not b or b is not None and version(b):
                    yield f"{name}.{n}".lstrip(".")

    try:
        yield written
    finally:
        for (module, name, parameter), table in zip(zeros, hooked):
            parameters_of(module)[name] = parameter
            if table is not None:
                table[name] = parameter
        for _, module, training, buffers in own:
            buffers_of(module).update(buffers)
            module.training = training
