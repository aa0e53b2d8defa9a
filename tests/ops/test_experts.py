"""Experts against float64: every gradient, with tokens and weights as routers give them and not."""

import pytest
import torch
from numerics import assert_close
from oracle import DEVICE, FP64, INTERPRET, randn

from hfpatch.ops import experts as op
from hfpatch.ops.experts import CLAMPED, Layout, experts, experts_ref

SILU = Layout("silu")
OSS = Layout(CLAMPED, 1.702, 1.5, interleaved=True, transposed=True)
E, D, F, N, K = 5, 16, 24, 11, 2
# The interpreter multiplies bfloat16 as if it were integers.
HALF = torch.float16 if INTERPRET else torch.bfloat16


def routes(kind: str) -> torch.Tensor:
    """[N, K] ids. spread: an expert has no token; one: all tokens go to the same; no token: none
    came; other rank: some go to experts that are not here."""
    g = torch.Generator().manual_seed(3)
    ids = torch.stack([torch.randperm(E - 1, generator=g)[:K] for _ in range(N)])
    if kind == "one":
        ids = torch.tensor([[2, 4]]).repeat(N, 1)
    elif kind == "no token":
        ids = ids[:0]
    elif kind == "other rank":
        ids[::3, 1] = E
        ids[1] = E
    return ids.to(DEVICE)


def given(layout: Layout, dtype, bias: bool) -> dict:
    one, two = (E, D, 2 * F), (E, F, D)
    if not layout.transposed:
        one, two = (E, 2 * F, D), (E, D, F)
    made = {"x": (N, D), "w": (N, K), "w1": one, "w2": two}
    made |= {"b1": (E, 2 * F), "b2": (E, D)} if bias else {}
    # scale 2 reaches the clamps
    return {
        n: randn(*shape, dtype=dtype, seed=i, scale=2.0 if n == "x" else 0.5).requires_grad_()
        for i, (n, shape) in enumerate(made.items())
    }


def gradients(run, values: dict, ids, layout) -> dict:
    more = {n: v for n, v in values.items() if n not in ("x", "w", "w1", "w2")}
    y = run(values["x"], ids, values["w"], values["w1"], values["w2"], layout=layout, **more)
    dy = randn(*y.shape, dtype=y.dtype, seed=9)
    return {"y": y.detach()} | dict(zip(values, torch.autograd.grad(y, list(values.values()), dy)))


def doubled(values: dict) -> dict:
    return {n: v.detach().double().requires_grad_() for n, v in values.items()}


@pytest.mark.parametrize("kind", ["spread", "one", "no token", "other rank"])
@pytest.mark.parametrize("layout, bias", [(SILU, False), (OSS, True), (Layout("gelu_tanh"), False)])
@pytest.mark.parametrize("dtype", [torch.float32, HALF, FP64])
def test_values_and_every_gradient(dtype, layout, bias, kind):
    values, ids = given(layout, dtype, bias), routes(kind)
    values |= {n: values[n].detach()[: len(ids)].requires_grad_() for n in ("x", "w")}
    exact = gradients(experts_ref, doubled(values), ids, layout)
    plain, got = (
        gradients(experts_ref, values, ids, layout),
        gradients(experts, values, ids, layout),
    )
    for name in exact:
        if dtype == FP64:
            torch.testing.assert_close(got[name], exact[name], rtol=1e-12, atol=1e-12)
        else:
            assert_close(got[name], plain[name], exact[name], name)


@pytest.mark.parametrize("layout", [SILU, OSS])
def test_adapters_are_those_of_the_adapted_weight(layout):
    values, ids = given(layout, FP64, False), routes("spread")
    r = 8
    factors = [randn(*shape, dtype=FP64, seed=20 + i).requires_grad_() for i, shape in
               enumerate([(E, r, D), (E, 2 * F, r), (E, r, F), (E, D, r)])]  # fmt: skip

    def adapted(x, ids, w, w1, w2, *, layout):
        deltas = (factors[1] @ factors[0], factors[3] @ factors[2])
        turned = [d.transpose(1, 2) if layout.transposed else d for d in deltas]
        return experts_ref(x, ids, w, w1 + turned[0], w2 + turned[1], layout=layout)

    def beside(*args, layout):
        return experts(*args, layout=layout, first=factors[:2], second=factors[2:])

    found = []
    for run in (beside, adapted):
        y = run(*(values[n] if n != "ids" else ids for n in ("x", "ids", "w", "w1", "w2")),
                layout=layout)  # fmt: skip
        wanted = [*values.values(), *factors]
        found.append([y, *torch.autograd.grad(y, wanted, randn(N, D, dtype=FP64, seed=9))])
    for a, b in zip(*found):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [HALF, torch.float32])
@pytest.mark.parametrize("ends", [[300, 301, 301, 557], [0, 0, 0, 1], [0, 0, 0, 0]])
def test_products_by_expert(ends, dtype, transposed):
    """Experts with several blocks of rows, with one row, with none; odd widths; rows behind the
    last expert's are another rank's."""
    I, O, offs = 72, 133, torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    x = randn(ends[-1] + 5, I, dtype=dtype)
    w = randn(4, O, I, dtype=dtype, seed=1).transpose(1, 2)
    if transposed:
        w = w.contiguous()
    got = op.product(x, w, offs)[: ends[-1]]
    exact, plain = (
        torch.cat([x[a:b].to(d) @ w[e].to(d) for e, (a, b) in enumerate(zip([0, *ends], ends))])
        for d in (FP64, dtype)
    )
    assert_close(got, plain, exact, "rows")


@pytest.mark.parametrize("dtype", [HALF, torch.float16, torch.float32])
def test_sums_of_products_by_expert(dtype):
    """Over two tiles, in float32: of an expert with many rows, with one, with none."""
    M, N, offs = 40, 24, torch.tensor([70, 71, 71], dtype=torch.int32, device=DEVICE)
    a, b = randn(71, M, dtype=dtype), randn(71, N, dtype=dtype, seed=1)
    out = torch.full((3, M, N), torch.nan, device=DEVICE)
    for first in (True, False):
        op.EXPERT_SUMS(out, a, b, offs, first)
    exact = 2 * op.products(a.double(), b.double(), offs)
    once = op.products(a, b, offs)
    assert once.dtype == dtype and (once[2] == 0).all()
    plain = torch.stack([a[i:j].t() @ b[i:j] for i, j in ((0, 70), (70, 71), (71, 71))])
    assert_close(once, plain, exact / 2, "once")
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", ["spread", "no token", "other rank"])
@pytest.mark.parametrize("layout, bias", [(SILU, False), (OSS, True)])
def test_nothing_relies_on_what_a_grouped_product_leaves_unwritten(layout, bias, kind, monkeypatch):
    """torch's kernel for B200 leaves the product of an expert without rows, and rows behind the
    last expert's, as they were."""

    def stand_in(a, b, offs):
        ends = offs.tolist()
        parts = list(enumerate(zip([0, *ends], ends)))
        if b.dim() == 3:
            out = a.new_full((len(a), b.shape[2]), torch.nan)
            for e, (i, j) in parts:
                out[i:j] = a[i:j] @ b[e]
            return out
        out = a.new_full((len(ends), len(a), b.shape[1]), torch.nan)
        for e, (i, j) in parts:
            if i < j:
                out[e] = a[:, i:j] @ b[i:j]
        return out

    values, ids = given(layout, HALF, bias), routes(kind)
    values |= {n: values[n].detach()[: len(ids)].requires_grad_() for n in ("x", "w")}
    exact = gradients(experts_ref, doubled(values), ids, layout)
    plain = gradients(experts_ref, values, ids, layout)
    calls = []
    monkeypatch.setattr(op, "_major", lambda x: 10)
    monkeypatch.setattr(op, "grouped_mm", lambda *x, **y: calls.append(1) or stand_in(*x, **y))
    got = gradients(experts, values, ids, layout)
    assert calls or INTERPRET
    for name in exact:
        assert_close(got[name], plain[name], exact[name], name)


def test_experts_of_several_shapes_are_refused():
    values, ids = given(SILU, FP64, False), routes("spread")
    given_to = lambda **new: experts(ids_NK=ids, layout=SILU, **(arguments | new))  # noqa: E731
    arguments = {"x_ND": values["x"], "w_NK": values["w"], "w1": values["w1"], "w2": values["w2"]}
    for name, other in (("w2", values["w2"][:-1]), ("w2", values["w2"][:, :, 1:]),
                        ("x_ND", values["x"][:, 1:])):  # fmt: skip
        with pytest.raises(ValueError, match="hfpatch: experts: experts must have one shape, w1"):
            given_to(**{name: other})
