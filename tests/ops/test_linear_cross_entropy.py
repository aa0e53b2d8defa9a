"""Values and gradients of linear_cross_entropy against float64, every option, every dtype, one
chunk and many.

Runs three ways: plain torch on a CPU, the kernel under TRITON_INTERPRET=1, the kernel on a GPU.
"""

import pytest
import tiny
import torch
import torch.nn.functional as F

from hfpatch.ops._linear_ce_chunk import scale_
from hfpatch.ops.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_ref
from tests.numerics import assert_close, budget

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
ONE_CHUNK, MANY_CHUNKS = 512 << 20, 11_000

ALL = {"label_smoothing": 0.1, "softcap": 5.0, "z_loss": 0.01, "shift": True}
OPTIONS = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "num_items": {"num_items": 5},
    "smoothing": {"label_smoothing": 0.2},
    "softcap": {"softcap": 3.0},
    "z_loss": {"z_loss": 0.03},
    "shift": {"shift": True},
    "all": {"num_items": 11, **ALL},
    "all, mean": ALL,
    "all, none": {"reduction": "none", **ALL},
}


def make(shape, vocab_size, dtype, ignored=0.4, seed=0):
    """hidden, weight, bias (leaves, in dtype) and labels, about `ignored` of them -100."""
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*shape, generator=g)
    weight = torch.randn(vocab_size, shape[-1], generator=g) / shape[-1] ** 0.5
    bias = torch.randn(vocab_size, generator=g)
    labels = torch.randint(0, vocab_size, shape[:-1], generator=g)
    labels[torch.rand(shape[:-1], generator=g) < ignored] = -100
    return *(t.to(DEVICE, dtype).requires_grad_() for t in (hidden, weight, bias)), labels.to(
        DEVICE
    )


def plain(tensors):
    """Leaves for the plain run. float64 has no finer oracle: its plain run is float32, see
    `near`.
    """
    return [
        (t.detach().float() if t.dtype == torch.float64 else t.detach()).requires_grad_()
        for t in tensors
    ]


def near(got, usual, best, what, dtype):
    """assert_close in the working dtype; in float64, within the float32 budget scaled by the ratio
    of the steps.
    """
    if dtype != torch.float64:
        return assert_close(got, usual, best, what, dtype)
    allowed = (
        budget(usual, best, torch.float32) * torch.finfo(dtype).eps / torch.finfo(torch.float32).eps
    )
    error = (got - best).abs().max().item() if best.numel() else 0.0
    assert got.shape == best.shape and got.dtype == dtype
    assert error <= allowed, f"{what}: error {error:.3e} exceeds the budget {allowed:.3e}"


def exact(tensors):
    return [t.detach().double().requires_grad_() for t in tensors]


def check(inputs, labels, options, seed=1, **only_ours):
    """Loss and gradients of ours within the budget that the reference in the working dtype and in
    float64 gives.
    """
    runs = []
    for op, tensors, extra in (
        (linear_cross_entropy, inputs, only_ours),
        (linear_cross_entropy_ref, plain(inputs), {}),
        (linear_cross_entropy_ref, exact(inputs), {}),
    ):
        loss = op(
            *tensors[:2], labels, bias=tensors[2] if len(tensors) > 2 else None, **options, **extra
        )
        upstream = torch.randn(loss.shape, generator=torch.Generator().manual_seed(seed)).to(loss)
        runs.append([loss.detach(), *torch.autograd.grad(loss, tensors, upstream)])
    dtype = inputs[0].dtype
    for what, got, usual, best in zip(("loss", "dX", "dW", "dbias"), *runs):
        assert got.dtype == usual.dtype or dtype == torch.float64, (
            f"{what}: {got.dtype}, expected {usual.dtype}"
        )
        near(got, usual, best, what, got.dtype if what == "loss" else dtype)


# 33 tokens and 101 words: nothing divides anything. 10 to 20 rows fit MANY_CHUNKS: several chunks,
#     the last short.
@pytest.mark.parametrize(
    "name, dtype, workspace",
    tiny.covering([*OPTIONS], DTYPES, [ONE_CHUNK, MANY_CHUNKS]),
    ids=str,
)
def test_values_and_gradients(name, dtype, workspace):
    *inputs, labels = make((2, 33, 24), 101, dtype)
    check(inputs, labels, OPTIONS[name], workspace_bytes=workspace)


# Every branch of the block loop: part of a block, a full block, one lane more than a block; then
#     Llama's vocabulary.
@pytest.mark.parametrize(
    "vocab_size, name, dtype",
    tiny.covering([7, 128, 8193, 128256], ["mean", "all"], DTYPES[1:]),
    ids=str,
)
def test_blocks_of_words(vocab_size, name, dtype):
    *inputs, labels = make((1, 5, 8), vocab_size, dtype)
    check(inputs, labels, OPTIONS[name])


# A model that is sure of its words, and right: logits about 100, losses far below one rounding step
#     of their lse.
@pytest.mark.parametrize("dtype", DTYPES[1:3], ids=str)
@pytest.mark.parametrize("name", ["mean", "none"])
def test_peaked(name, dtype):
    *inputs, labels = make((2, 33, 24), 101, dtype)
    with torch.no_grad():
        inputs[1].mul_(50)
        best = F.linear(*inputs).argmax(-1)
    check(
        inputs,
        best.where(labels != -100, labels),
        OPTIONS[name],
        workspace_bytes=MANY_CHUNKS,
    )


# Tiny: one token, one word, one hidden; a 1-D hidden, a scalar label; two batch dimensions.
@pytest.mark.parametrize("dtype", DTYPES[1:3], ids=str)
@pytest.mark.parametrize(
    "shape,vocab_size", [((1, 1, 1), 1), ((1, 2, 3), 2), ((8,), 5), ((2, 2, 3, 8), 9)], ids=str
)
def test_tiny(shape, vocab_size, dtype):
    *inputs, labels = make(shape, vocab_size, dtype, ignored=0.0)
    check(inputs, labels, {})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scale_multiplies_in_float32(dtype):
    x = torch.randn(5000, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    for factor in (1.0, 1.0 / 3.0, 0.0):
        got, factor = (
            x.clone(),
            torch.tensor(factor, dtype=torch.promote_types(dtype, torch.float32), device=DEVICE),
        )
        scale_(got, factor)
        near(
            got,
            (x.float() * factor.float()).to(dtype),
            x.double() * factor.double(),
            "x * factor",
            dtype,
        )


@pytest.mark.parametrize("given", ["upper bound", "exact", "absent"])
def test_num_valid_drops_ignored_tokens(given, monkeypatch):
    *inputs, labels = make((2, 67, 24), 101, torch.float32)
    valid = int((labels[:, 1:] != -100).sum())
    num_valid = {"upper bound": valid + 9, "exact": valid, "absent": None}[given]
    usual = linear_cross_entropy_ref(*inputs[:2], labels, bias=inputs[2], shift=True)
    best_in = exact(inputs)
    best = linear_cross_entropy_ref(*best_in[:2], labels, bias=best_in[2], shift=True)
    rows, real = [], torch.addmm
    monkeypatch.setattr(
        torch, "addmm", lambda b, x, w, **k: (rows.append(x.shape[0]), real(b, x, w, **k))[1]
    )
    got = linear_cross_entropy(
        inputs[0] * 1,
        inputs[1],
        labels,
        bias=inputs[2],
        shift=True,
        num_valid=num_valid,
        workspace_bytes=MANY_CHUNKS,
    )
    if num_valid is not None or DEVICE == "cpu":
        assert sum(rows) == (num_valid or valid)
    for g, p, b in zip(
        *(torch.autograd.grad(*a) for a in ((got, inputs), (usual, inputs), (best, best_in)))
    ):
        assert_close(g, p, b)


def test_num_valid_too_small_raises():
    *inputs, labels = make((1, 64, 8), 9, torch.float32)
    if DEVICE == "cpu":
        with pytest.raises(ValueError, match="num_valid must be at least"):
            linear_cross_entropy(*inputs[:2], labels, num_valid=3)


@pytest.mark.parametrize("num_items", [None, 4, torch.tensor(4)])
@pytest.mark.parametrize("num_valid", [None, 0])
@pytest.mark.parametrize("tokens", [0, 6])
def test_no_valid_label(tokens, num_valid, num_items):
    """As in transformers: nan for a mean over nothing, 0 with num_items; the gradients are zeros
    and not nan.
    """
    *inputs, labels = make((1, tokens, 8), 9, torch.float32, ignored=2.0)
    loss = linear_cross_entropy(
        *inputs[:2], labels, bias=inputs[2], num_valid=num_valid, num_items=num_items
    )
    stock = F.cross_entropy(
        F.linear(*inputs).view(-1, 9), labels.view(-1), reduction="sum" if num_items else "mean"
    )
    assert torch.equal(loss, stock / (num_items or 1)) or (loss.isnan() and stock.isnan())
    for grad, tensor in zip(torch.autograd.grad(loss, inputs), inputs):
        assert torch.equal(grad, torch.zeros_like(tensor))


def test_shift_never_crosses_rows():
    """Two rows at once give what each gives alone: row 0 is never asked for the first token of row
    1.
    """
    hidden, weight, _, labels = make((2, 5, 8), 9, torch.float32, ignored=0.0)
    both = linear_cross_entropy(hidden, weight, labels, shift=True, reduction="none")
    for row in range(2):
        alone = linear_cross_entropy(hidden[row], weight, labels[row], shift=True, reduction="none")
        assert torch.equal(both[row], alone) and alone[-1] == 0.0


# Trainer(bf16=True) keeps fp32 weights and autocasts; the stock head and loss set dtype and value.
@pytest.mark.parametrize(
    "auto, hidden_dtype, workspace",
    tiny.covering(
        [torch.bfloat16, torch.float16],
        [torch.float32, torch.bfloat16],
        [ONE_CHUNK, MANY_CHUNKS],
    ),
    ids=str,
)
def test_autocast_gives_what_stock_gives(auto, hidden_dtype, workspace):
    *inputs, labels = make((2, 40, 16), 33, torch.float32)
    inputs[0] = inputs[0].detach().to(hidden_dtype).requires_grad_()
    best_in = exact(inputs)
    best = linear_cross_entropy_ref(*best_in[:2], labels, bias=best_in[2])
    losses = []
    for op in (linear_cross_entropy, linear_cross_entropy_ref):
        extra = {"workspace_bytes": workspace} if op is linear_cross_entropy else {}
        with torch.autocast(DEVICE, dtype=auto):
            out = op(*inputs[:2], labels, bias=inputs[2], **extra)
        losses.append(out)
    assert losses[0].dtype == losses[1].dtype == torch.float32
    assert_close(losses[0].detach(), losses[1].detach(), best.detach(), "loss")
    scale = 1024.0
    grads = [
        torch.autograd.grad(t * scale, i)
        for t, i in ((losses[0], inputs), (losses[1], inputs), (best, best_in))
    ]
    for what, got, plain, truth in zip(("dX", "dW", "dbias"), *grads):
        assert got.dtype == plain.dtype, what
        assert_close(got, plain, truth, what, auto)


def test_fp16_gradients_wait_for_the_grad_scaler():
    """One token in a million: its gradient vanishes in float16 unless the scaler's 65,536 is in it
    from the start.
    """
    hidden, weight, _, labels = make((1, 64, 4), 64, torch.float16, ignored=0.0)
    best_in, items = exact((hidden, weight)), {"num_items": 1 << 20}
    truth = torch.autograd.grad(linear_cross_entropy_ref(*best_in, labels, **items), best_in)
    ours = torch.autograd.grad(
        linear_cross_entropy(hidden, weight, labels, **items) * 65536.0, (hidden, weight)
    )
    stock = torch.autograd.grad(
        linear_cross_entropy_ref(hidden, weight, labels, **items) * 65536.0, (hidden, weight)
    )
    for got, plain, best in zip(ours, stock, truth):
        assert_close(got, plain, best * 65536.0)
