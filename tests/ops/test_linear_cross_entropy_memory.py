"""What linear_cross_entropy allocates, on real and on fake tensors, and how exact dW stays over
many chunks.
"""

import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hfpatch.budget.cuts import chunk_bounds
from hfpatch.ops._library import INTERPRET
from hfpatch.ops._wide_sums import as_on_cuda
from hfpatch.ops.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_ref
from tests.ops.fakes import shapes_of_out_dtype

pytestmark = pytest.mark.skipif(
    INTERPRET,
    reason=(
        "tests of the loop, not of the kernel; Triton's interpreter keeps its arguments and "
        "truncates bf16"
    ),
)


class PeakBytes(TorchDispatchMode):
    """Bytes of all storages alive that were made inside, now and at most; works on real and on fake
    tensors.
    """

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.alive = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {
            id(t.untyped_storage())
            for t in tree_leaves((args, kwargs))
            if isinstance(t, torch.Tensor)
        }
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if id(storage) not in known and id(storage) not in self.alive:
                    self._born(storage)
        return out

    def _born(self, storage):
        key, nbytes = id(storage), storage.nbytes()
        self.now += nbytes
        self.peak = max(self.peak, self.now)

        def died(_):
            self.now -= nbytes
            del self.alive[key]

        self.alive[key] = weakref.ref(storage, died)


def stage(
    tokens,
    hidden_size,
    vocab_size,
    dtype=torch.bfloat16,
    *,
    frozen=(),
    backward=True,
    ignored=0,
    **options,
):
    """Runs forward and backward of the loss stage; returns (peak bytes beyond hidden and weight,
    after forward).
    """
    leaf = torch.randn(1, tokens, hidden_size, dtype=dtype, requires_grad="hidden" not in frozen)
    weight = torch.randn(vocab_size, hidden_size, dtype=dtype, requires_grad="weight" not in frozen)
    labels = torch.randint(0, vocab_size, (1, tokens))
    labels[:, :ignored] = -100
    hidden = leaf * 1.0 if leaf.requires_grad else leaf
    with PeakBytes() as follow:
        loss = linear_cross_entropy(hidden, weight, labels, **options)
        after = follow.now
        if backward and loss.requires_grad:
            hidden = None
            loss.backward()
    return follow.peak, after


# Llama's proportions at 1/8 of each size: 32,768 tokens, D 4096, V 128,256, 512 MiB shrink to 4096,
# 512, 16032, 8 MiB.
SHAPE, WORKSPACE = (4096, 512, 16032), 8 << 20


def bytes_of(tokens, hidden_size, vocab_size):
    return tokens * hidden_size * 2, vocab_size * hidden_size * 4, vocab_size * hidden_size * 2


@pytest.mark.parametrize("ignored", [0, 1000])
def test_loss_stage_stays_within_its_budget(ignored):
    """hidden + dX + workspace + one (float32) dW."""
    hidden, dw32, dw16 = bytes_of(*SHAPE)
    with FakeTensorMode():
        kwargs = {"workspace_bytes": WORKSPACE, "ignored": ignored, "num_valid": SHAPE[0] - ignored}
        peak, after = stage(*SHAPE, **kwargs)
    assert peak <= hidden + WORKSPACE + dw32
    # Between forward and backward only what the gradients need: the float32 sum is gone.
    assert after <= hidden + dw16 + 64 * SHAPE[0]


def test_real_and_fake_runs_allocate_the_same():
    real = stage(512, 64, 1003, workspace_bytes=1 << 18)
    with FakeTensorMode():
        fake = stage(512, 64, 1003, workspace_bytes=1 << 18)
        assert stage(512, 64, 1003, workspace_bytes=1 << 18) == fake
    # The real run looks at its labels (a count, a range check): a few bytes a token, long gone at
    # the peak.
    assert fake[0] == pytest.approx(real[0], rel=0.01) and fake[1] == real[1]


def test_fake_tensors_can_take_the_route_of_cuda():
    with FakeTensorMode(), as_on_cuda(), shapes_of_out_dtype():
        peak, _ = stage(*SHAPE, workspace_bytes=WORKSPACE)
    hidden, dw32, _ = bytes_of(*SHAPE)
    assert hidden + dw32 < peak <= hidden + WORKSPACE + dw32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_one_chunk_or_frozen_weight_needs_no_float32_sum(dtype):
    tokens, hidden_size, vocab_size = 128, 256, 2048
    logits, dw = tokens * vocab_size * dtype.itemsize, vocab_size * hidden_size * dtype.itemsize
    dx = tokens * hidden_size * dtype.itemsize
    slack = 64 * tokens + 4 * (1 << 10)
    with FakeTensorMode(), as_on_cuda(), shapes_of_out_dtype():
        peak, _ = stage(tokens, hidden_size, vocab_size, dtype)
        assert peak <= logits + dw + dx + slack
        peak, _ = stage(
            tokens, hidden_size, vocab_size, dtype, frozen=("weight",), workspace_bytes=1 << 17
        )
        assert peak <= (1 << 17) + dx + slack
        peak, _ = stage(
            tokens,
            hidden_size,
            vocab_size,
            dtype,
            frozen=("weight", "hidden"),
            workspace_bytes=1 << 17,
        )
        assert peak <= (1 << 17) + slack


def test_evaluation_computes_no_gradient():
    with torch.no_grad(), FakeTensorMode():
        peak, _ = stage(4096, 64, 1024, workspace_bytes=1 << 19)
    assert peak <= 1 << 19


def test_ends_without_a_look_at_the_device():
    """Under fake tensors a value read by the host raises: with num_valid given, nothing in the op
    reads one.
    """
    with FakeTensorMode():
        for reduction in ("mean", "none"):
            hidden = torch.randn(2, 64, 8, requires_grad=True)
            weight, labels = (
                torch.randn(11, 8, requires_grad=True),
                torch.zeros(2, 64, dtype=torch.int64),
            )
            items = torch.tensor(5) if reduction == "mean" else None
            linear_cross_entropy(
                hidden,
                weight,
                labels,
                num_valid=40,
                num_items=items,
                shift=True,
                reduction=reduction,
            ).sum().backward()
            assert hidden.grad.shape == hidden.shape and weight.grad.shape == weight.shape


def test_chunks_cost_no_more_for_one_token_more():
    row, workspace = 128256 * 2, 512 << 20
    sizes = [len(chunk_bounds(tokens, row, workspace)) for tokens in range(126_976, 135_169)]
    assert sizes == sorted(sizes)
    assert (
        len(chunk_bounds(131_073, row, workspace))
        == len(chunk_bounds(131_072, row, workspace))
        == 64
    )
    assert (
        len(chunk_bounds(2048, row, workspace)) == 1
        and len(chunk_bounds(4096, row, workspace)) == 2
    )


@pytest.mark.parametrize("tokens", [0, 1, 127, 128, 129, 1000, 4097])
@pytest.mark.parametrize("most", [1, 100, 128, 140, 300])
def test_chunks_cover_every_token_once_within_the_budget(tokens, most):
    bounds = chunk_bounds(tokens, 10, most * 10)
    assert [start for start, _ in bounds] == [0, *(end for _, end in bounds)][: len(bounds)]
    assert (bounds[-1][1] if bounds else 0) == tokens
    assert all(0 < end - start <= most for start, end in bounds)
    assert all((end - start) % 128 == 0 for start, end in bounds[:-1]) or most < 128


def test_dw_in_bf16_keeps_its_precision_over_32_chunks():
    """Relative error at most 2e-3, one rounding; a sum kept in bf16 over 32 chunks is off by 5e-3
    and more.
    """
    torch.manual_seed(0)
    tokens, hidden_size, vocab_size = 4096, 64, 250
    hidden = torch.randn(tokens, hidden_size).bfloat16()
    weight = (torch.randn(vocab_size, hidden_size) / 8).bfloat16().requires_grad_()
    labels = torch.randint(0, vocab_size, (tokens,))
    row = vocab_size * 2 + hidden_size * 4
    workspace = (128 * row + tokens * 48) * 16 // 15 + 512
    linear_cross_entropy(hidden, weight, labels, workspace_bytes=workspace).backward()
    best = weight.detach().double().requires_grad_()
    linear_cross_entropy_ref(hidden.double(), best, labels).backward()
    error = (weight.grad.double() - best.grad).norm() / best.grad.norm()
    assert error <= 2e-3, f"relative error {error:.2e}"
