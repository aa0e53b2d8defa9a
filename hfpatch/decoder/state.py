"""Buffers and zero weights of a small instance's layer while it is probed."""

from contextlib import contextmanager

import torch
from torch import nn

from hfpatch.compat import buffers_of, parameters_of, version


@contextmanager
def state_apart(layer: nn.Module):
    """A context in which modules with buffers write to copies of the buffers, and zero weights have
    random values.

    A weight that starts at zero (a gate, an adapter's last matrix) would hide its input. Yields a
    function that returns the names of the buffers that were written to.
    """
    own = [(name, buffers_of(m)) for name, m in layer.named_modules()]
    before = [dict(buffers) for _, buffers in own]
    zeros = [
        (parameters_of(m), n, p)
        for m in layer.modules()
        for n, p in parameters_of(m).items()
        if p is not None and p.is_floating_point() and not p.detach().any()
    ]
    copied = [
        {n: b if b is None else b.detach().clone() for n, b in buffers.items()}
        for buffers in before
    ]
    for (_, buffers), copies in zip(own, copied):
        buffers.update(copies)
    for parameters, name, p in zeros:
        parameters[name] = nn.Parameter(torch.randn_like(p) / 8, p.requires_grad)

    def written():
        for (name, buffers), copies in zip(own, copied):
            for n, b in copies.items():
                if buffers.get(n) is not b or b is not None and version(b):
                    yield f"{name}.{n}".lstrip(".")

    try:
        yield written
    finally:
        for parameters, name, p in zeros:
            parameters[name] = p
        for (_, buffers), held in zip(own, before):
            buffers.update(held)
