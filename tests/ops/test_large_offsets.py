"""Row offsets past 2^31 elements, on views whose rows lie far apart in memory that is never touched
between them.

600,000 rows of 4096 are 2.46e9 elements; four rows 8e8 elements apart reach as far, in five pages
of memory. The same file runs the plain version, the kernels under the interpreter, and on a GPU is
not needed: scripts/gpu has real tensors of that size.
"""

import mmap

import pytest
import torch

from hfpatch import ops
from hfpatch.attention.heads import groups_of

APART = 800_000_001  # odd, and 3 of them pass 2^31


def far_apart(values: torch.Tensor) -> torch.Tensor:
    """values [N, D] as rows APART elements apart, in an anonymous mapping whose untouched pages
    take no memory.
    """
    N, D = values.shape
    memory = mmap.mmap(-1, ((N - 1) * APART + D) * values.element_size())
    view = torch.frombuffer(memory, dtype=values.dtype).as_strided((N, D), (APART, 1))
    return view.copy_(values)


def both(function, *inputs):
    """Results and gradients of function on inputs near and far apart."""
    results = []
    for place in (lambda x: x.clone(), far_apart):
        leaves = [
            place(x).requires_grad_() if x.dim() == 2 else x.clone().requires_grad_()
            for x in inputs
        ]
        out = function(*leaves)
        outs = out if isinstance(out, tuple) else (out,)
        grads = torch.autograd.grad(outs, leaves, [torch.ones_like(o) for o in outs])
        results.append([*outs, *grads])
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_past_two_to_the_31(dtype):
    generator = torch.Generator().manual_seed(0)
    x, y, w = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((4, 40), (4, 40), (40,))
    )
    angle_1TD = torch.linspace(0, 3, 4)[None, :, None].expand(1, 4, 40)
    cases = {
        "rms_norm": both(lambda x, w: ops.rms_norm(x, w), x, w),
        "swiglu": both(lambda x, y: ops.swiglu(x, y), x, y),
        "rope": both(
            lambda x: ops.rope(*[x[None, None]] * 2, angle_1TD.cos(), angle_1TD.sin())[0], x
        ),
    }
    for name, (near, far) in cases.items():
        for a, b in zip(near, far):
            # To a rounding: vector units take a row in other pieces where it starts elsewhere.
            same = (a - b).abs().max() <= 2 * torch.finfo(dtype).eps * a.abs().max()
            assert same, f"{name}: a far row is read or written at another place"


def test_queries_of_a_group_of_heads():
    """Four million tokens of a Llama's KV head, and no token more."""
    longest = torch.empty(1, 1 << 22, 32, 128, device="meta")
    assert len(groups_of(longest, 8, all_heads=True)) == 8
    with pytest.raises(ValueError, match=r"2\^31 elements, got"):
        groups_of(longest.new_empty(1, (1 << 22) + 1, 32, 128), 8, all_heads=True)
