"""A mixture of experts: each token runs through the gated MLPs that its router chose, and their
weighted outputs are summed.

Legend: N tokens, K experts a token, S = N*K routed rows sorted by their expert, E experts, D
hidden, F intermediate, r rank of an adapter. offs_E: the end of each expert's rows.

    a = act(x W1^T + b1) * w        y = sum over K of (a W2^T + w b2)
The routing weight comes before W2: its gradient is then <act, da>, so the backward needs no output
of W2. b2 is added as a product of the routing weights [N, E] with b2 [E, D].

A row whose expert is E or more belongs to another rank (expert parallelism). It is sorted behind
offs_E[-1], where grouped matmuls write nothing, and `inverse_NK` has -1 for it.
"""

from collections import namedtuple
from dataclasses import dataclass

import torch
from torch import Tensor

from hfpatch.compat import grouped_mm, is_fake
from hfpatch.ops._library import define, refuse, wide_dtype
from hfpatch.ops._wide_sums import add_product
from hfpatch.ops.swiglu import _act, _dgate

CLAMPED = "clamped"  # gpt-oss: (up + 1) * gate * sigmoid(alpha * gate), both clamped


@dataclass(frozen=True)
class Layout:
    """The memory layout of experts, and their activation.

    activation: one of swiglu.ACTIVATIONS' values, or CLAMPED with alpha and limit. interleaved:
    gate and up alternate in the columns of W1. transposed: weights are [E, in, out], else [E, out,
    in].
    """

    activation: str
    alpha: float = 0.0
    limit: float = 0.0
    interleaved: bool = False
    transposed: bool = False

    @property
    def kind(self) -> tuple:
        """The last arguments of EXPERT_ACT."""
        return self.activation, self.alpha, self.limit, self.interleaved

    def views(self, w1: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
        """The weights as [E, out, in]."""
        if self.transposed:
            return w1.transpose(1, 2), w2.transpose(1, 2)
        return w1, w2


def _major(x: Tensor) -> int:
    """The first number of the GPU's compute capability: 0 on a CPU, an H100's for fake tensors."""
    if is_fake(x):
        return 9
    return torch.cuda.get_device_capability(x.device)[0] if x.is_cuda else 0


def _grouped(a: Tensor, b: Tensor, offs_E: Tensor) -> Tensor | None:
    """torch's grouped matmul, where it is a kernel: for bfloat16 on sm_90 and sm_100. None
    elsewhere: it would copy offs to the host in each product and start one matmul per expert.

    On sm_100 it leaves the gradient of an expert without rows unwritten, so it does not run there
    for gradients of weights (https://github.com/pytorch/pytorch/issues/172439).
    """
    majors = (9, 10) if b.dim() == 3 else (9,)
    if a.dtype != torch.bfloat16 or _major(a) not in majors:
        return None
    for x in (a, b):  # of the strides one is 1, the others and the address are whole 16 bytes
        inner, *outer = sorted(x.stride())
        if inner != 1 or any(n * x.element_size() % 16 for n in (x.storage_offset(), *outer)):
            return None
    return grouped_mm(a, b, offs=offs_E)


def _parts(offs_E: Tensor):
    """(expert, first row, end of rows) of each expert. Waits for the device. None in simulations."""
    ends = [] if is_fake(offs_E) else offs_E.tolist()
    return zip(range(len(ends)), [0, *ends], ends)


def product(x_SI: Tensor, w_EIO: Tensor, offs_E: Tensor) -> Tensor:
    """[S, O]: each row times its expert's matrix."""
    y_SO = _grouped(x_SI, w_EIO, offs_E)
    return EXPERT_PRODUCT(x_SI, w_EIO, offs_E) if y_SO is None else y_SO


def products(a_SM: Tensor, b_SN: Tensor, offs_E: Tensor) -> Tensor:
    """[E, M, N]: a^T b over the rows of each expert, zero for an expert without rows."""
    out_EMN = _grouped(a_SM.t(), b_SN, offs_E)
    if out_EMN is None:
        out_EMN = a_SM.new_empty(len(offs_E), a_SM.shape[1], b_SN.shape[1])
        EXPERT_SUMS(out_EMN, a_SM, b_SN, offs_E, True)
    return out_EMN


def _expert_product(x_SI, w_EIO, offs_E):
    y_SO = x_SI.new_zeros(x_SI.shape[0], w_EIO.shape[2])
    for e, a, b in _parts(offs_E):
        torch.mm(x_SI[a:b], w_EIO[e], out=y_SO[a:b])
    return y_SO


def _product_fake(x, w, offs):
    return x.new_empty(x.shape[0], w.shape[2])


# Each row of x [S, I] times its expert's matrix of w [E, I, O]. Rows behind offs[-1] stay unset.
EXPERT_PRODUCT = define(
    "expert_product(Tensor x, Tensor w, Tensor offs) -> Tensor",
    _expert_product,
    "experts.expert_product",
    _product_fake,
)


def _expert_sums(out, a_SM, b_SN, offs_E, first):
    for e, a, b in _parts(offs_E):
        a_MR = a_SM[a:b].t().to(out.dtype)
        b_RN = b_SN[a:b].to(out.dtype)
        add_product(out[e], a_MR, b_RN, first)


# Adds a^T b over each expert's rows to out [E, M, N], which is float32 if there are several calls;
# `first` overwrites it instead.
EXPERT_SUMS = define(
    "expert_sums(Tensor(a!) out, Tensor a, Tensor b, Tensor offs, bool first) -> ()",
    _expert_sums,
    "experts.expert_sums",
)


# --- gate, activation and routing weight in one pass ----------------------------------------------


def _gate_up(gu, bias, ids, interleaved):
    """(gate, up), each [S, F] in the wide dtype, with the bias of each row's expert added."""
    gu = gu.to(wide_dtype(gu.dtype))
    if bias is not None:
        gu = gu + bias.to(gu.dtype)[ids.clamp(max=bias.shape[0] - 1)]
    if interleaved:
        return gu[:, ::2], gu[:, 1::2]
    return gu.chunk(2, dim=-1)


def _acted(gate, up, activation, alpha, limit):
    if activation != CLAMPED:
        return _act(gate, activation) * up
    gate = gate.clamp(max=limit)
    up = up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


def _expert_act(gu, w, bias, ids, activation, alpha, limit, interleaved):
    gate, up = _gate_up(gu, bias, ids, interleaved)
    act = _acted(gate, up, activation, alpha, limit)  # [S, F]
    return (act * w.to(gate.dtype)[:, None]).to(gu.dtype)


def _act_fake(gu, w, *_):
    return gu.new_empty(gu.shape[0], gu.shape[1] // 2)


EXPERT_ACT = define(
    "expert_act(Tensor gu, Tensor w, Tensor? bias, Tensor ids, str activation, float alpha, "
    "float limit, bool interleaved) -> Tensor",
    _expert_act,
    "experts.expert_act",
    _act_fake,
)


def _expert_act_bwd(da, gu, w, bias, ids, activation, alpha, limit, interleaved, need_a):
    gate, up = _gate_up(gu, bias, ids, interleaved)
    da = da.to(gate.dtype)
    w_S1 = w.to(gate.dtype)[:, None]
    act = _acted(gate, up, activation, alpha, limit)
    dw = (act * da).sum(-1)  # [S]
    dact = da * w_S1
    if activation != CLAMPED:
        dgate = _dgate(dact * up, gate, activation)
        dup = dact * _act(gate, activation)
    else:
        low = gate.clamp(max=limit)
        mid = up.clamp(-limit, limit)
        s = torch.sigmoid(alpha * low)
        dgate = dact * (mid + 1) * (s + alpha * low * s * (1 - s)) * (gate <= limit)
        dup = dact * low * s * (up.abs() <= limit)
    a = (act * w_S1).to(gu.dtype) if need_a else gu.new_empty(0)
    if interleaved:
        dgu = torch.stack((dgate, dup), -1).flatten(1)
    else:
        dgu = torch.cat((dgate, dup), -1)
    return dgu.to(gu.dtype), a, dw


def _act_bwd_fake(da, gu, *rest):
    a = da.new_empty(da.shape if rest[-1] else 0)
    return torch.empty_like(gu), a, da.new_empty(da.shape[0], dtype=wide_dtype(gu.dtype))


# dgu [S, 2F], the activation times w [S, F] if need_a, and dw [S] in the wide dtype.
EXPERT_ACT_BACK = define(
    "expert_act_bwd(Tensor da, Tensor gu, Tensor w, Tensor? bias, Tensor ids, str activation, "
    "float alpha, float limit, bool interleaved, bool need_a) -> (Tensor, Tensor, Tensor)",
    _expert_act_bwd,
    "experts.expert_act_bwd",
    _act_bwd_fake,
)


def _expert_combine(z, inverse):
    y = z.new_zeros(inverse.shape[0], z.shape[1], dtype=wide_dtype(z.dtype))
    for at in inverse.unbind(1):
        y += torch.where(at[:, None] < 0, 0, z[at.clamp(min=0)])
    return y.to(z.dtype)


def _combine_fake(z, inverse):
    return z.new_empty(inverse.shape[0], z.shape[1])


# The sum [N, D] of each token's rows of z [S, D], in float32 and rounded once.
EXPERT_COMBINE = define(
    "expert_combine(Tensor z, Tensor inverse) -> Tensor",
    _expert_combine,
    "experts.expert_combine",
    _combine_fake,
)


def _sorted(ids_NK: Tensor, experts: int) -> tuple:
    """(ids_S, perm_S, inverse_NK, offs_E) of rows sorted by expert."""
    ids_S, perm_S = torch.sort(ids_NK.flatten(), stable=True)
    inverse = torch.empty_like(perm_S)
    inverse[perm_S] = torch.arange(len(perm_S), device=perm_S.device)
    inverse = torch.where(ids_NK < experts, inverse.view_as(ids_NK), -1)
    each = torch.arange(experts, device=ids_S.device, dtype=ids_S.dtype)
    return ids_S, perm_S, inverse, torch.searchsorted(ids_S, each, right=True).int()


def _routed(ids_NK: Tensor, w_NK: Tensor, b2_ED: Tensor) -> Tensor:
    """The routing weights as a matrix [N, E]."""
    E = b2_ED.shape[0]
    columns = (E // 8 + 1) * 8  # one more than E for other ranks' experts; rows of whole 16 bytes
    weights_NC = b2_ED.new_zeros(len(ids_NK), columns)
    weights_NC.scatter_(1, ids_NK.clamp(max=E), w_NK.to(b2_ED.dtype))
    return weights_NC[:, :E]


def _up(x, w_EOI, A, B, offs):
    """x W^T + x A^T B^T, and x A^T; both [S, ...]. Without an adapter A is None."""
    y = product(x, w_EOI.transpose(1, 2), offs)
    if A is None:
        return y, None
    low = product(x, A.transpose(1, 2), offs)
    return y.add_(product(low, B.transpose(1, 2), offs)), low


def _down(dy, w_EOI, A, B, offs):
    """The gradients of x, and of x A^T with an adapter."""
    dx = product(dy, w_EOI, offs)
    if A is None:
        return dx, None
    dlow = product(dy, B, offs)
    return dx.add_(product(dlow, A, offs)), dlow


# Which tensor arguments of _Experts need a gradient.
_Needs = namedtuple("_Needs", "x w ids w1 w2 b1 b2 a1 z1 a2 z2")


class _Experts(torch.autograd.Function):
    """See `experts`."""

    @staticmethod
    def forward(ctx, x, w, ids, w1, w2, b1, b2, a1, z1, a2, z2, layout, adds, value):
        ids_S, perm, inverse, offs = _sorted(ids, w1.shape[0])
        # In 32 bits: a kernel would load one 16-bit weight at a time.
        w_S = w.flatten()[perm].to(wide_dtype(w.dtype))
        token = perm // ids.shape[1]
        one, two = layout.views(w1, w2)
        xs = x[token]  # [S, D]
        gu, low = _up(xs, one, a1, z1, offs)  # [S, 2F], [S, r]
        ctx.layout = layout
        ctx.adds = adds
        need = _Needs(*ctx.needs_input_grad[:11])
        keep_x = need.w1 or need.a1 or need.z1
        ctx.save_for_backward(
            w, ids, ids_S, w_S, token, inverse, offs, xs if keep_x else None, gu, low,
            w1, w2, b1, b2, a1, z1, a2, z2,
        )  # fmt: skip
        if value is not None:
            return x.new_full((x.shape[1],), value).expand(x.shape)
        del xs
        a = EXPERT_ACT(gu, w_S, b1, ids_S, *layout.kind)  # [S, F]
        del gu
        y, _ = _up(a, two, a2, z2, offs)
        y = EXPERT_COMBINE(y, inverse)
        return y if b2 is None else y.addmm_(_routed(ids, w, b2), b2)

    @staticmethod
    def backward(ctx, dy):
        w, ids, ids_S, w_S, token, inverse, offs, xs, gu, low1, *weights = ctx.saved_tensors
        w1, w2, b1, b2, a1, z1, a2, z2 = weights
        need = _Needs(*ctx.needs_input_grad[:11])
        train1 = need.a1 or need.z1
        train2 = need.a2 or need.z2
        layout = ctx.layout
        one, two = layout.views(w1, w2)
        dx = dw = dw1 = dw2 = db1 = db2 = da1 = dz1 = da2 = dz2 = None
        # [Step 1] Go through W2 to the activation.
        dys = dy[token]  # [S, D]
        da, dlow = _down(dys, two, a2, z2, offs)  # [S, F], [S, r]
        dgu, a, dw_S = EXPERT_ACT_BACK(da, gu, w_S, b1, ids_S, *layout.kind, need.w2 or train2)
        del da, gu
        # [Step 2] Compute the gradients of W2 and its adapter.
        if need.w2:
            dw2 = _weight_gradient(layout, dys, a, offs, ctx.adds[1])
        if train2:
            da2 = products(dlow, a, offs)
            dz2 = products(dys, product(a, a2.transpose(1, 2), offs), offs)
        del dys, a
        # [Step 3] Compute those of W1, its bias and its adapter, and of x.
        if need.w1:
            dw1 = _weight_gradient(layout, dgu, xs, offs, ctx.adds[0])
        if need.b1:
            # The sum of each expert's rows as a matmul, because that runs in groups.
            db1 = products(dgu, dgu.new_ones(len(dgu), 8), offs)[:, :, 0]
        if need.x or train1:
            dxs, dlow = _down(dgu, one, a1, z1, offs)  # [S, D], [S, r]
            dx = EXPERT_COMBINE(dxs, inverse) if need.x else None
        if train1:
            da1 = products(dlow, xs, offs)
            dz1 = products(dgu, low1, offs)
        # [Step 4] Compute those of the routing weights and of the bias of W2.
        if need.w:
            dw = torch.where(inverse < 0, 0, dw_S[inverse.clamp(min=0)])
            if b2 is not None:
                dR = (dy @ b2.t()).gather(1, ids.clamp(max=b2.shape[0] - 1))  # [N, K]
                dw += torch.where(inverse < 0, 0, dR.to(dw.dtype))
            dw = dw.to(w.dtype)
        if need.b2:
            db2 = _routed(ids, w, b2).t() @ dy
        return dx, dw, None, dw1, dw2, db1, db2, da1, dz1, da2, dz2, None, None, None


def _weight_gradient(layout: Layout, dy, x, offs, add):
    """The gradient in the weight's layout; None if `add` received it."""
    pair = (x, dy) if layout.transposed else (dy, x)
    return products(*pair, offs) if add is None else add(*pair, offs)


def experts(
    x_ND: Tensor, ids_NK: Tensor, w_NK: Tensor, w1: Tensor, w2: Tensor, *, layout: Layout,
    b1: Tensor | None = None, b2: Tensor | None = None, first: tuple = (None, None),
    second: tuple = (None, None), adds: tuple = (None, None), value: float | None = None,
) -> Tensor:  # fmt: skip
    """[N, D], of x's dtype. It has one derivative.

    Args:
        x_ND, w1, w2, b1, b2: of one dtype; w1 [E, 2F, D], w2 [E, D, F], or as the layout says.
        ids_NK, w_NK: the experts of each token, all different, and their routing weights.
        first, second: adapters of w1 and w2, A [E, r, in] and B [E, out, r], scaled; of x's dtype.
        adds: for w1 and w2, a function that receives (a_SM, b_SN, offs_E) in place of a returned
            gradient a^T b, or None.
        value: return this constant in place of values that are unread; gradients stay the same.

    Raises:
        ValueError: the weights' shapes do not fit each other or x.
    """
    one, two = layout.views(w1, w2)
    E, rows, D = one.shape
    refuse("experts", (
        two.shape != (E, D, rows // 2) or x_ND.shape[1] != D,
        "experts must have one shape, w1 [E,2F,D] and w2 [E,D,F] for x [N,D], got {}, {} and {}. "
        "Give all of them as many columns", tuple(one.shape), tuple(two.shape), tuple(x_ND.shape),
    ))  # fmt: skip
    return _Experts.apply(x_ND, w_NK, ids_NK, w1, w2, b1, b2, *first, *second, layout, adds, value)


def experts_ref(x_ND, ids_NK, w_NK, w1, w2, *, layout, b1=None, b2=None) -> Tensor:
    """experts in plain torch, expert by expert, with any number of derivatives."""
    y = torch.zeros_like(x_ND)
    one, two = layout.views(w1, w2)
    for e in range(len(w1)):
        token, k = torch.where(ids_NK == e)
        gu = x_ND[token] @ one[e].t() + (0 if b1 is None else b1[e])
        gate, up = _gate_up(gu, None, None, layout.interleaved)
        a = _acted(gate, up, layout.activation, layout.alpha, layout.limit).to(gu.dtype)
        out = a @ two[e].t() + (0 if b2 is None else b2[e])
        out = out * w_NK[token, k, None]
        y = y.index_add(0, token, out.to(y.dtype))
    return y
