"""linear_log_prob: every output and every gradient against float64, as its sibling's tests do.

Runs three ways: plain torch on a CPU, the kernel under TRITON_INTERPRET=1, the kernel on a GPU.
"""

import pytest
import tiny
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hfpatch.lab.compat import for_now
from hfpatch.ops import _wide_sums
from hfpatch.ops._library import INTERPRET
from hfpatch.ops.linear_cross_entropy import (
    LinearLogProbOutput,
    linear_log_prob,
    linear_log_prob_ref,
)
from tests.ops.fakes import shapes_of_out_dtype
from tests.ops.test_linear_cross_entropy import (
    DTYPES,
    MANY_CHUNKS,
    ONE_CHUNK,
    exact,
    make,
    near,
    plain,
)
from tests.ops.test_linear_cross_entropy_memory import PeakBytes

NAMES = LinearLogProbOutput._fields
FLOATS = NAMES[:-1]
OPTIONS = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "all": {"temperature": 1.3, "scale": 0.6, "softcap": 3.0, "shift": True},
}


def check(inputs, labels, options, wanted=NAMES, **only_ours):
    """The wanted outputs, and the gradients of all of them at once under a random upstream gradient
    per token.
    """
    ups = {
        n: torch.randn(labels.shape, generator=torch.Generator().manual_seed(i))
        for i, n in enumerate(FLOATS)
    }
    runs, results = [], []
    for op, tensors, extra in (
        (linear_log_prob, inputs, {"outputs": wanted, **only_ours}),
        (linear_log_prob_ref, plain(inputs), {}),
        (linear_log_prob_ref, exact(inputs), {}),
    ):
        out = op(*tensors[:2], labels, bias=tensors[2], **options, **extra)
        results.append(out)
        chosen = {n: getattr(out, n) for n in FLOATS if n in wanted}
        total = sum((t * ups[n].to(t)).sum() for n, t in chosen.items())
        runs.append({n: t.detach() for n, t in chosen.items()})
        runs[-1] |= zip(("dX", "dW", "dbias"), torch.autograd.grad(total, tensors))
    dtype = inputs[0].dtype
    for what, got in runs[0].items():
        assert got.dtype == runs[1][what].dtype or dtype == torch.float64
        near(got, runs[1][what], runs[2][what], what, dtype if what[0] == "d" else got.dtype)
    for name in NAMES:
        assert (getattr(results[0], name) is None) == (name not in wanted)
    if "is_top1" in wanted:
        assert torch.equal(results[0].is_top1, results[1].is_top1)


# 33 tokens and 101 words: nothing divides anything; MANY_CHUNKS leaves chunks of some ten rows, the
#     last one short.
@pytest.mark.parametrize(
    "name, dtype, workspace",
    tiny.covering([*OPTIONS], DTYPES, [ONE_CHUNK, MANY_CHUNKS]),
    ids=str,
)
def test_values_and_gradients(name, dtype, workspace):
    *inputs, labels = make((2, 33, 24), 101, dtype)
    check(inputs, labels, OPTIONS[name], workspace_bytes=workspace)


@pytest.mark.parametrize("wanted", NAMES[:-1])
def test_each_output_alone(wanted):
    *inputs, labels = make((2, 33, 24), 101, torch.float32)
    check(inputs, labels, OPTIONS["all"], (wanted,))


# Where logits are large, one rounding of lse or z is many roundings of a probability that is nearly
# 1.
PEAKED = [{}, {"temperature": 0.07}, {"softcap": 30.0}, {"softcap": 50.0, "scale": 0.37}]


@pytest.mark.parametrize(
    "wanted, options, dtype", tiny.covering(NAMES[:-1], PEAKED, DTYPES[1:]), ids=str
)
def test_peaked(wanted, options, dtype):
    *inputs, labels = make((2, 33, 24), 101, dtype)
    with torch.no_grad():
        inputs[1].mul_(5 if "temperature" in options else 40)
    check(inputs, labels, options, (wanted,), workspace_bytes=MANY_CHUNKS)


def test_words_ruled_out_have_no_entropy_and_no_gradient():
    """A bias of -inf: probability 0, and 0 * -inf is not NaN."""
    *inputs, labels = make((1, 12, 8), 9, torch.float32, ignored=0.0)
    labels %= 5
    with torch.no_grad():
        inputs[2][5:] = -torch.inf
    out = linear_log_prob(
        *inputs[:2], labels, bias=inputs[2], outputs=("log_prob", "entropy", "sum_sq_prob")
    )
    grads = torch.autograd.grad(
        out.log_prob.sum() + out.entropy.sum() + out.sum_sq_prob.sum(), inputs
    )
    short = [inputs[0], *(t[:5] for t in inputs[1:])]
    same = linear_log_prob(
        *short[:2], labels, bias=short[2], outputs=("log_prob", "entropy", "sum_sq_prob")
    )
    torch.testing.assert_close(out[:2], same[:2])
    assert all(g.isfinite().all() for g in grads) and not grads[1][5:].any()


def test_ignored_tokens_cost_no_matmul_and_are_zero(monkeypatch):
    hidden, weight, bias, labels = make((3, 64, 8), 9, torch.float32, ignored=0.7)
    rows, real = [], torch.addmm
    monkeypatch.setattr(
        torch, "addmm", lambda b, x, w, **k: (rows.append(x.shape[0]), real(b, x, w, **k))[1]
    )
    valid = int((labels != -100).sum())
    out = linear_log_prob(hidden, weight, labels, bias=bias, outputs=NAMES, num_valid=valid)
    torch.autograd.grad(out.entropy.sum(), hidden)
    assert rows == [valid, valid], "once in the forward, once in the backward"
    assert all(not t[labels == -100].any() for t in out)


def test_second_backward_and_second_derivative():
    *inputs, labels = make((1, 12, 8), 11, torch.float32)
    loss = linear_log_prob(*inputs[:2], labels, bias=inputs[2]).log_prob.exp().sum()
    first, second = (torch.autograd.grad(loss, inputs, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))
    with pytest.raises(RuntimeError, match="hfpatch: linear_log_prob has no second derivative"):
        torch.autograd.grad(loss, inputs[0], create_graph=True)


@pytest.mark.parametrize("outputs", [("log_prob",), NAMES])
@pytest.mark.skipif(INTERPRET, reason="of the loop, not of the kernel")
def test_stays_within_its_budget(outputs):
    """The workspace in the forward; in the backward the workspace, dX and one float32 dW, as the
    loss op takes.
    """
    tokens, hidden_size, vocab_size, workspace = 4096, 512, 16032, 8 << 20
    with FakeTensorMode(), for_now(_wide_sums, AS_CUDA=True), shapes_of_out_dtype():
        hidden = torch.randn(1, tokens, hidden_size, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.randn(vocab_size, hidden_size, dtype=torch.bfloat16, requires_grad=True)
        labels = torch.zeros(1, tokens, dtype=torch.int64)
        with PeakBytes() as follow:
            out = linear_log_prob(
                hidden, weight, labels, outputs=outputs, workspace_bytes=workspace, num_valid=tokens
            )
            assert follow.peak <= workspace and follow.now <= 64 * tokens
            sum(t.sum() for t in out[:5] if t is not None).backward()
    assert (
        follow.peak
        <= workspace + tokens * hidden_size * 2 + vocab_size * hidden_size * 4 + 64 * tokens
    )
