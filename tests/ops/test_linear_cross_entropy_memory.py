"""What linear_cross_entropy allocates, on real and on fake tensors, and how exact dW stays over
many chunks.
"""

import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hfpatch.lab.compat import for_now
from hfpatch.ops import _wide_sums
from hfpatch.ops._library import INTERPRET
from hfpatch.ops.linear_cross_entropy import linear_cross_entropy
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


def test_fake_tensors_can_take_the_route_of_cuda():
    with FakeTensorMode(), for_now(_wide_sums, AS_CUDA=True), shapes_of_out_dtype():
        peak, _ = stage(*SHAPE, workspace_bytes=WORKSPACE)
    hidden, dw32, _ = bytes_of(*SHAPE)
    assert hidden + dw32 < peak <= hidden + WORKSPACE + dw32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_one_chunk_or_frozen_weight_needs_no_float32_sum(dtype):
    tokens, hidden_size, vocab_size = 128, 256, 2048
    logits, dw = tokens * vocab_size * dtype.itemsize, vocab_size * hidden_size * dtype.itemsize
    dx = tokens * hidden_size * dtype.itemsize
    slack = 64 * tokens + 4 * (1 << 10)
    with FakeTensorMode(), for_now(_wide_sums, AS_CUDA=True), shapes_of_out_dtype():
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
