"""What every op's test does: one call against HF's formula in the working dtype and the plain
version in float64.
"""

import warnings

import torch
from numerics import assert_close

from hfpatch.ops._library import INTERPRET

# The plain version on a CPU; the kernel where there is a GPU, or under TRITON_INTERPRET=1.
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRET else "cpu"
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def randn(*shape, dtype=FP32, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=generator) * scale).to(DEVICE, dtype)


def as_tuple(x):
    return x if isinstance(x, tuple) else (x,)


def check(op, stock, exact, inputs, *, view=lambda *x: x, needs=None, retain=False):
    """Outputs and gradients of op(*inputs) within the budget that stock(*inputs) and exact(*float64
    inputs) give.

    inputs: leaf tensors; view: what is done to them before the call (transposes, slices), autograd
    included; needs: which inputs require grad (all by default); retain: run backward twice and
    compare the second.
    """
    needs = needs or [True] * len(inputs)

    def run(function, dtype=None, twice=False):
        leaves = [
            x.detach().to(dtype or x.dtype).clone().requires_grad_(n) for x, n in zip(inputs, needs)
        ]
        outs = as_tuple(function(*view(*leaves)))
        # Upstream gradients are drawn once, in the dtypes of the first run, and only cast in the
        # others.
        first = run.first = run.first or [o.dtype for o in outs]
        ups = [
            randn(*o.shape, dtype=FP64, seed=7 + i).to(d).to(o.dtype)
            for i, (o, d) in enumerate(zip(outs, first))
        ]
        pairs = [(o, u) for o, u in zip(outs, ups) if o.requires_grad]
        wanted = [x for x in leaves if x.requires_grad]
        grads = ()
        if wanted:
            carrying, ups = zip(*pairs)
            if twice:
                torch.autograd.grad(carrying, wanted, ups, retain_graph=True)
            grads = torch.autograd.grad(carrying, wanted, ups)
        return [o.detach() for o in outs], list(grads), [o.requires_grad for o in outs]

    run.first = None
    stock_outs, stock_grads, stock_flags = run(stock)
    outs, grads, flags = run(op, twice=retain)
    exact_outs, exact_grads, _ = run(exact, FP64)
    assert flags == stock_flags, "which outputs carry a gradient"
    for i, (got, plain, true) in enumerate(zip(outs, stock_outs, exact_outs, strict=True)):
        assert got.dtype == plain.dtype, f"output {i}: {got.dtype}, stock gives {plain.dtype}"
        assert_close(got, plain, true, f"output {i}")
    for i, (got, plain, true) in enumerate(zip(grads, stock_grads, exact_grads, strict=True)):
        assert got.dtype == plain.dtype
        assert_close(got, plain, true, f"gradient {i}")


def opcheck(name, *args):
    """torch.library.opcheck of hfpatch::<name>: schema, autograd registration, fake, and AOT
    tracing.
    """
    with warnings.catch_warnings():
        # torch 2.15 reads it itself while it traces.
        warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor that is not a leaf")
        torch.library.opcheck(getattr(torch.ops.hfpatch, name).default, args)
