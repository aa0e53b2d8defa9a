"""Products meet what cuBLAS' fast kernels need: pointers of whole 16 bytes and row strides that are
multiples of 8. Otherwise a product of 16-bit matrices runs at a fraction of its speed.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from hfpatch.lab.compat import for_now
from hfpatch.ops import _wide_sums
from hfpatch.ops.experts import CLAMPED, Layout, experts
from hfpatch.ops.linear_cross_entropy import linear_cross_entropy
from tests.ops.fakes import shapes_of_out_dtype

NAMES = ("mm", "addmm", "addmm_", "bmm", "_grouped_mm")
PRODUCTS = {getattr(torch.ops.aten, name) for name in NAMES}
VOCABULARIES = [100_278, 128_257, 128_258]  # Qwen, Llama with one token added, with two


class Operands(TorchDispatchMode):
    """Counts products, and collects the matrices of products that are not aligned."""

    def __init__(self):
        super().__init__()
        self.products, self.unaligned = 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in PRODUCTS:
            self.products += 1
            for x in (*args, *(kwargs or {}).values()):
                if isinstance(x, torch.Tensor) and x.dim() > 1 and not aligned(x):
                    self.unaligned.append((str(func), tuple(x.shape), x.stride()))
        return func(*args, **(kwargs or {}))


def aligned(x: torch.Tensor) -> bool:
    """An allocation is aligned, so the pointer is if the offset in it is."""
    if x.storage_offset() * x.element_size() % 16:
        return False
    outer = [stride for size, stride in zip(x.shape, x.stride()) if stride != 1 and size != 1]
    return all(stride % 8 == 0 for stride in outer)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_products_of_the_loss(vocab_size, bias):
    tokens, hidden_size = 1024, 64
    with FakeTensorMode(), for_now(_wide_sums, AS_CUDA=True), shapes_of_out_dtype():
        made = {"dtype": torch.bfloat16, "requires_grad": True}
        hidden = torch.randn(tokens, hidden_size, **made)
        weight = torch.randn(vocab_size, hidden_size, **made)
        bias_V = torch.randn(vocab_size, **made) if bias else None
        labels = torch.zeros(tokens, dtype=torch.int64)
        with Operands() as found:
            workspace = 300 * vocab_size * 2
            loss = linear_cross_entropy(
                hidden, weight, labels, bias=bias_V, num_valid=tokens, workspace_bytes=workspace
            )
            loss.backward()
    assert found.products == 4 * (tokens // 256)  # logits, two halves of dW, dX
    assert found.unaligned == []


def test_products_of_experts():
    """gpt-oss: biases, so the routing weights are a matrix with a column per expert."""
    tokens, hidden_size, width, number = 32, 16, 24, 8
    layout = Layout(CLAMPED, 1.702, 7.0, interleaved=True, transposed=True)
    with FakeTensorMode(), for_now(_wide_sums, AS_CUDA=True):
        made = {"dtype": torch.bfloat16, "requires_grad": True}
        x = torch.randn(tokens, hidden_size, **made)
        w = torch.rand(tokens, 2, **made)
        ids = torch.zeros(tokens, 2, dtype=torch.int64)
        w1 = torch.randn(number, hidden_size, 2 * width, **made)
        w2 = torch.randn(number, width, hidden_size, **made)
        b1, b2 = torch.randn(number, 2 * width, **made), torch.randn(number, hidden_size, **made)
        with Operands() as found:
            y = experts(x, ids, w, w1, w2, layout=layout, b1=b1, b2=b2)
            y.backward(torch.randn(tokens, hidden_size, dtype=torch.bfloat16))
    assert found.products == 10
    assert found.unaligned == []
