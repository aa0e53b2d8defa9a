"""The two directions of attention against the plain version, and the GPU backends' calls against
their schemas.
"""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hfpatch.attention import attention as A
from hfpatch.attention import backends as R
from tests.numerics import assert_close

CPU = torch.device("cpu")


def attention_ref(
    q_BTHE,
    k_BTKE,
    v_BTKE,
    *,
    scale: float,
    pattern: A.Pattern = A.CAUSAL,
    sinks_H=None,
):
    """Plain causal attention, in promote_types(q.dtype, float32): the oracle of the tests.

    sinks_H: one score per head, which enters the softmax but has no value (Xiao et al., 2023;
    gpt-oss). Returns out_BTHE, lse_BHT.
    """
    dtype = torch.promote_types(q_BTHE.dtype, torch.float32)
    B, T, H, E = q_BTHE.shape
    repeat = H // k_BTKE.shape[2]
    q = q_BTHE.to(dtype).transpose(1, 2)
    k, v = (x.to(dtype).transpose(1, 2).repeat_interleave(repeat, 1) for x in (k_BTKE, v_BTKE))
    scores = q @ k.transpose(-1, -2) * scale
    if pattern.softcap is not None:
        scores = pattern.softcap * torch.tanh(scores / pattern.softcap)
    scores = scores.masked_fill(~pattern.allowed(range(T), range(T), B, T, q.device), float("-inf"))
    lse = scores.logsumexp(-1)
    if sinks_H is not None:
        lse = torch.logaddexp(lse, sinks_H.to(dtype)[:, None])
    out = ((scores - lse[..., None]).exp() @ v).transpose(1, 2)
    if pattern.blind_BT is not None:
        out = out.masked_fill(pattern.blind_BT[:, :, None, None], 0)
    return out.to(q_BTHE.dtype), lse


def inputs(B, T, H, K, E, dtype, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [
        torch.randn(B, T, heads, E, generator=g, dtype=torch.float64).to(dtype)
        for heads in (H, K, K, H)
    ]


def reference(q, k, v, dout, scale, documents, dtype, sinks=None, **pattern):
    leaves = [
        x.detach().to(dtype).requires_grad_()
        for x in (q, k, v, *(() if sinks is None else (sinks,)))
    ]
    sinks = leaves[3] if sinks is not None else None
    out, lse = attention_ref(
        *leaves[:3], scale=scale, pattern=A.Pattern(documents, **pattern), sinks_H=sinks
    )
    return out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout.to(dtype))


def check(got, plain, exact, name, dtype, T, largest=None):
    if dtype != torch.float64:
        return assert_close(got, plain, exact, name, dtype=dtype, largest=largest)
    # float64 has no wider reference: a rounding for each of the T terms of a sum.
    assert (got - exact).abs().max() <= max(T, 16) * 2.0**-52 * max(
        1.0, exact.abs().max().item()
    ), name


# Grouped heads 1:1, 2:1 and 4:1; T odd, one, and past one block of the CPU kernel; heads as wide as
# GPUs take, and wider.
@pytest.mark.parametrize("B,T,H,K,E", [(2, 37, 4, 2, 16), (1, 1, 4, 4, 8), (1, 601, 4, 1, 32), (3,
                                                                                                64, 6, 3, 24),
                                       (1, 45, 2, 1, 256), (1, 45, 2, 1, 512)])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_both_directions(B, T, H, K, E, dtype):
    q, k, v, dout = inputs(B, T, H, K, E, dtype)
    scale = E**-0.5
    exact = reference(q, k, v, dout, scale, None, torch.float64)
    plain = reference(q, k, v, dout, scale, None, dtype)
    out, lse, state = A.attention_forward(q, k, v, scale=scale, backend="cpu")
    grads = A.attention_backward(dout, q, k, v, out, lse, state, scale=scale, backend="cpu")
    # dq and dk are sums of differences, which are 0 where a token sees itself alone. Their terms are
    # as large as dv.
    largest = max(x.abs().max().item() for x in exact[2:])
    for name, got, p, e in zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), plain, exact):
        check(got, p, e, name, dtype, T, largest if name in ("dq", "dk") else None)


@pytest.mark.parametrize(
    "documents", [None, A.Documents((0, 9, 20), torch.tensor([0, 9, 20], dtype=torch.int32))]
)
def test_heads_whose_columns_lie_apart(documents):
    """As rotations of two columns leave them (gpt-oss): torch's kernel for CPUs reads on, beyond
    the tensor, and says nothing.
    """
    tensors = inputs(1, 20, 4, 2, 16, torch.float64)
    pattern, results = A.Pattern(documents), []
    for q, k, v, dout in (
        tensors,
        [x.transpose(1, 3).contiguous().transpose(1, 3) for x in tensors],
    ):
        out, lse, state = A.attention_forward(q, k, v, scale=0.25, pattern=pattern, backend="cpu")
        grads = A.attention_backward(
            dout, q, k, v, out, lse, state, scale=0.25, pattern=pattern, backend="cpu"
        )
        results.append((out, lse, *grads))
    for ours, side_by_side in zip(*results):
        assert torch.equal(ours, side_by_side)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_documents(dtype):
    q, k, v, dout = inputs(2, 20, 4, 2, 16, dtype)
    documents = A.Documents(
        (0, 3, 4, 20, 33, 40), torch.tensor([0, 3, 4, 20, 33, 40], dtype=torch.int32)
    )
    assert documents.longest == 16
    exact = reference(q, k, v, dout, 0.25, documents, torch.float64)
    plain = reference(q, k, v, dout, 0.25, documents, dtype)
    out, lse, state = A.attention_forward(
        q, k, v, scale=0.25, pattern=A.Pattern(documents), backend="cpu"
    )
    grads = A.attention_backward(
        dout, q, k, v, out, lse, state, scale=0.25, pattern=A.Pattern(documents), backend="cpu"
    )
    lse = lse.view(4, 2, 20).transpose(0, 1)
    for name, got, p, e in zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), plain, exact):
        check(got, p, e, name, dtype, 20)


def _blind():
    blind = torch.zeros(2, 45, dtype=torch.bool)
    blind[0, :3], blind[1] = True, True  # padding before a row, and a row of nothing else
    return blind


# Each alone and all together; the window ends within a block and crosses documents; v narrower and
# wider than q.
@pytest.mark.parametrize("E_v", [16, 8, 24])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("names", ["", "window", "softcap", "documents", "blind_BT",
                                   "documents window softcap blind_BT"])  # fmt: skip
@pytest.mark.parametrize("sinks", [False, True])
def test_patterns(names, dtype, E_v, sinks, monkeypatch):
    # 7 queries a block
    monkeypatch.setattr("hfpatch.attention.blocks.BLOCK_BYTES", 8 * 2 * 4 * 45 * 7)
    q, k, v, dout = inputs(2, 45, 4, 2, 16, dtype)
    v, dout = (
        torch.nn.functional.pad(x[..., :E_v], (0, max(0, E_v - 16)), value=0.5) for x in (v, dout)
    )
    bounds = (0, 3, 4, 45, 60, 90)
    every = {"documents": A.Documents(bounds, torch.tensor(bounds, dtype=torch.int32)), "window": 9,
             "softcap": 2.0,
             "blind_BT": _blind()}  # fmt: skip
    pattern = {name: every[name] for name in names.split()}
    documents = pattern.pop("documents", None)
    sink = torch.linspace(-2, 2, 4, dtype=torch.float64).to(dtype) if sinks else None
    exact = reference(q, k, v, dout, 0.25, documents, torch.float64, sink, **pattern)
    plain = reference(q, k, v, dout, 0.25, documents, dtype, sink, **pattern)
    if sinks:
        # What reaches the sink's gradient is the attention output as it is kept, in the working
        # dtype.
        products = (dout.float() * plain[0].float()).sum(-1).transpose(1, 2)
        plain = (
            *plain[:-1],
            -(torch.exp(sink.float()[:, None] - plain[1]) * products).sum((0, 2)).to(dtype),
        )
    asked = {
        "scale": 0.25,
        "pattern": A.Pattern(documents, **pattern),
        "sinks_H": sink,
        "backend": "cpu",
    }
    out, lse, state = A.attention_forward(q, k, v, **asked)
    grads = A.attention_backward(dout, q, k, v, out, lse, state, **asked)
    assert [g.dtype for g in grads] == [dtype] * len(grads)
    lse = A._per_head(lse, 2, 45)
    for name, got, p, e in zip(
        ("out", "lse", "dq", "dk", "dv", "dsink"), (out, lse, *grads), plain, exact
    ):
        check(got, p, e, name, dtype, 45)


def test_flash_attention_3_takes_what_fa2_takes(monkeypatch):
    """Its functions under the names of the operators; without its package the backend says that it
    cannot run.
    """
    q, k, v, dout = inputs(1, 37, 4, 2, 16, torch.bfloat16)
    with pytest.raises(ImportError, match="flash_attn_interface"):
        A.attention_forward(q, k, v, scale=0.25, backend="fa3")
    called = []

    def forward(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
        called.append((q.shape, dropout_p, is_causal, scale))
        out, lse, state = R._cpu_forward(q, k, v, scale)
        return out, lse, None, None, 0, 0, None, None, None

    def backward(
        dout,
        q,
        k,
        v,
        out,
        lse,
        cum_q,
        cum_k,
        max_q,
        max_k,
        dropout_p,
        is_causal,
        seed,
        offset,
        *,
        scale=None,
    ):
        called.append((cum_q, cum_k, max_q, max_k, dropout_p, is_causal, scale))
        return R._cpu_backward(dout, q, k, v, out, lse, (), scale)

    from torch.nn.attention import _fa3

    monkeypatch.setattr(_fa3, "_fa3_import_module", lambda path: called.append(path))
    monkeypatch.setattr(
        _fa3, "_fa3_scaled_dot_product_flash_attention_forward_impl_default", forward
    )
    monkeypatch.setattr(_fa3, "_fa3_scaled_dot_product_flash_attention_backward_impl", backward)
    results = []
    for backend in ("fa3", "cpu"):
        monkeypatch.setattr(A, "no_kernel_takes", lambda *_: False)
        out, lse, state = A.attention_forward(q, k, v, scale=0.25, backend=backend)
        results.append(
            (
                out,
                *A.attention_backward(dout, q, k, v, out, lse, state, scale=0.25, backend=backend),
            )
        )
    assert all(torch.equal(a, b) for a, b in zip(*results))
    assert called[1::2] == [
        ((1, 4, 37, 16), 0.0, True, 0.25),
        (None, None, 37, 37, 0.0, True, 0.25),
    ]


# Sinks read and write lse, which each has in a shape of its own.
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("backend", ["flash", "cudnn", "efficient"])
def test_gpu_backends_call_their_ops_by_schema(backend, sinks):
    """On meta tensors: the arguments fit, and the gradients have the shapes of their inputs."""
    dtype = torch.float32 if backend == "efficient" else torch.bfloat16
    q, k, v, dout = (
        x.to("meta") for x in inputs(2, 37, 4, 4 if backend == "cudnn" else 2, 16, dtype)
    )
    asked = {
        "scale": 0.25,
        "backend": backend,
        "sinks_H": torch.empty(4, device="meta") if sinks else None,
    }
    out, lse, state = A.attention_forward(q, k, v, **asked)
    assert out.shape == q.shape and A._per_head(lse, 2, 37).shape == (2, 4, 37)
    grads = A.attention_backward(dout, q, k, v, out, lse, state, **asked)
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape, *[(4,)] * sinks]


def on_cuda(tokens, dtype=torch.bfloat16, batch=1, width=16):
    return SimpleNamespace(
        device=torch.device("cuda", 1), dtype=dtype, shape=(batch, tokens, 4, width)
    )


@pytest.fixture
def card(monkeypatch):
    """card(capability): cuda:1 is such a GPU, in a process that ran attention at no length yet."""

    def make(capability):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92000)
        monkeypatch.setattr(R, "lengths_met", set())

    monkeypatch.delenv("HFPATCH_ATTENTION", raising=False)
    return make


@pytest.mark.parametrize("capability, name", [
    ((8, 0), "flash"), ((8, 9), "flash"), ((9, 0), "cudnn"), ((10, 0), "cudnn"), ((12, 0), "flash"),
])  # fmt: skip
def test_a_card_has_its_kernel(capability, name, card, monkeypatch):
    card(capability)
    assert [A.pick(on_cuda(n)) for n in (200, 200, 200_000)] == 3 * [name]
    assert A.pick(on_cuda(200, width=256)) == "flash"
    assert A.pick(on_cuda(1)) == "flash"  # cuDNN takes no single token
    assert A.pick(on_cuda(200, torch.float32)) == "efficient"
    assert A.pick(on_cuda(200, torch.float64)) == "blocks"  # plain torch: no kernel takes it
    assert A.pick(torch.zeros(1, 200, 4, 16)) == "cpu"
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert A.pick(on_cuda(200)) == "flash"


def test_a_process_of_many_lengths_takes_a_kernel_without_plans(card):
    card((9, 0))
    lengths = [1000, 1001, 5000, 1002]
    for n in [*lengths, *lengths]:  # layer after layer, step after step
        assert A.pick(on_cuda(n)) == "cudnn"
    for n in (777, *lengths, *range(2000, 3000)):
        assert A.pick(on_cuda(n)) == "flash"


def test_the_user_names_a_kernel(card, monkeypatch):
    card((8, 0))
    monkeypatch.setenv("HFPATCH_ATTENTION", "cudnn")
    assert {A.pick(on_cuda(n)) for n in range(200, 300)} == {"cudnn"}
    assert A.pick(on_cuda(1)) == "flash"
    monkeypatch.setenv("HFPATCH_ATTENTION", "cpu")  # on a GPU no name of a kernel
    with pytest.raises(ValueError, match="must be one of flash, .*efficient, got 'cpu"):
        A.pick(on_cuda(200))


def test_widened_heads_go_to_fa2():
    q = torch.empty(1, 256, 4, 128, dtype=torch.bfloat16, device="meta")
    wide = q.new_empty(1, 256, 4, 136)
    for backend in ("cudnn", "fa3"):
        assert A._chosen(q, wide, A.CAUSAL, backend) == "flash"
        assert A._chosen(q, q[..., :64], A.CAUSAL, backend) == backend  # zeros behind v's columns


def test_backend_of_each_device():
    for head_dim, blocks in ((128, False), (256, False), (260, True), (512, False)):
        assert A.no_kernel_takes(head_dim, torch.bfloat16, A.CAUSAL) is blocks
    packed = A.Pattern(A.Documents((0, 1), None))
    for pattern in (packed, A.Pattern(window=4), A.Pattern(softcap=30.0)):
        assert A.no_kernel_takes(128, torch.float32, pattern)
    assert A.no_kernel_takes(256, torch.bfloat16, A.Pattern(softcap=30.0))
    assert not A.no_kernel_takes(128, torch.bfloat16, packed)


class _Efficient:
    """torch's efficient attention as its kernel has it: no grouped heads, an lse of whole blocks of
    32 tokens.
    """

    def __init__(self, wrong: float = 1.0):
        self.wrong, self.columns = wrong, []

    def _plain(self, q, k, v, scale):
        T = q.shape[2]
        scores = (q @ k.transpose(2, 3) * scale).masked_fill(
            ~torch.ones(T, T, dtype=torch.bool).tril(), float("-inf")
        )
        return scores.softmax(-1) @ v, scores.logsumexp(-1)

    def _scaled_dot_product_efficient_attention(
        self, q, k, v, bias, with_lse, dropout, causal, *, scale
    ):
        assert q.shape[1] == k.shape[1] and with_lse and causal and not dropout
        self.columns.append(q.shape[3])
        out, lse = self._plain(q, k, v, scale)
        seed = torch.zeros((), dtype=torch.int64)
        return out, torch.nn.functional.pad(lse, (0, -q.shape[2] % 32)), seed, seed

    def _scaled_dot_product_efficient_attention_backward(
        self, dout, q, k, v, bias, out, lse, seed, offset, dropout, wanted, causal, *, scale
    ):
        assert lse.shape[2] % 32 == 0 and wanted == [True, True, True, False]
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            again = self._plain(*leaves, scale)[0]
        dq, dk, dv = torch.autograd.grad(again, leaves, dout)
        return dq * self.wrong, dk, dv, None


def test_heads_wider_than_others_take_go_through_the_efficient_kernel(monkeypatch):
    """Gemma 4's full attention has heads of 512 columns."""
    played = _Efficient()
    monkeypatch.setattr(R, "aten", played)
    monkeypatch.setattr(A, "HALF", (*A.HALF, torch.float64))
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(2, 40, h, 264, dtype=torch.float64) for h in (4, 2, 2, 4))
    documents = A.Pattern(
        A.Documents((0, 33, 34, 40, 80), torch.tensor([0, 33, 34, 40, 80], dtype=torch.int32))
    )
    for pattern in (A.CAUSAL, documents):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        wanted, _ = attention_ref(*leaves, scale=0.1, pattern=pattern)
        expected = torch.autograd.grad(wanted, leaves, dout)
        for backend in ("flash", "cudnn"):
            out, lse, state = A.attention_forward(
                q, k, v, scale=0.1, pattern=pattern, backend=backend
            )
            grads = A.attention_backward(
                dout, q, k, v, out, lse, state, scale=0.1, pattern=pattern, backend=backend
            )
            for got, value in zip((out, *grads), (wanted.detach(), *expected)):
                assert (got - value).norm() <= 1e-12 * value.norm()
    assert played.columns == 2 * [264] + 2 * 4 * [264]

    wide = SimpleNamespace(
        device=torch.device("cuda"), dtype=torch.bfloat16, shape=(1, 4096, 8, 512)
    )
    assert A.pick(wide) == "efficient"
    packed = A.Pattern(A.Documents((0, 1), None))
    for pattern, served in (
        (A.CAUSAL, True),
        (packed, True),
        (A.Pattern(window=4), False),
    ):
        assert A.no_kernel_takes(512, torch.bfloat16, pattern) is not served


@pytest.mark.parametrize("window", [16, 192])
def test_a_window_costs_a_window(window):
    """Twice the tokens, twice the products, forward and backward: of a block at most its own length
    and a window are keys.
    """

    def products(tokens):
        q, k = torch.randn(1, tokens, 2, 8), torch.randn(1, tokens, 1, 8)
        asked = {"scale": 1.0, "pattern": A.Pattern(window=window), "backend": "cpu"}
        with FlopCounterMode(display=False) as counted:
            out, lse, state = A.attention_forward(q, k, k, **asked)
            A.attention_backward(out, q, k, k, out, lse, state, **asked)
        return counted.get_total_flops()

    assert (
        products(1024) <= 2 * 1024 * (max(window, 128) + window) * 2 * 8 * 7
    )  # two forward, five backward
    assert products(2048) <= 2.2 * products(1024)
