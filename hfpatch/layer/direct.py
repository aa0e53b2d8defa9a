"""The common block with its derivatives written out: no module is called, and no graph is recorded.

It is layer/parts.py's LayerParts for blocks of plain weights, where nothing observes the modules
inside the layer. Runs the same matmuls, sums and kernels as layer/block.py does through modules and
autograd, in the same order. The bits are the same, for less than half of the host's time. Values
that no gradient reads are not computed (parts/unread.py).

B batch, t tokens of a tile, D hidden, F intermediate, H query heads, K key-value heads, E head dim;
N = B*t.
"""

from functools import partial
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F

from hfpatch.compat import autocast_dtype, is_fake, ops_are_seen, parameters_of, watched
from hfpatch.context.classes import LINEAR
from hfpatch.layer.arguments import takes_by_name
from hfpatch.layer.block import Block
from hfpatch.layer.parts import LayerParts
from hfpatch.ops._library import IMPLEMENTATIONS
from hfpatch.ops.rms_norm import ADD_RMS_NORM, RMS_NORM, RMS_NORM_BACK
from hfpatch.ops.rope import ROPE
from hfpatch.ops.swiglu import ACTIVATIONS, SWIGLU, SWIGLU_BACK
from hfpatch.parts.parts import FusedMLP, FusedRMSNorm, activation_as_found
from hfpatch.parts.rotation import FusedAttention, rotates_into_what_came


class _Ops(NamedTuple):
    rope: object
    norm: object
    add_norm: object
    norm_back: object
    swiglu: object
    swiglu_back: object


_SEEN = _Ops(ROPE, RMS_NORM, ADD_RMS_NORM, RMS_NORM_BACK, SWIGLU, SWIGLU_BACK)
# by ops_are_seen: else without the dispatcher, which costs a third of an op on few tokens
_OPS = {True: _SEEN, False: _Ops(*[IMPLEMENTATIONS[op] for op in _SEEN])}
_PLAIN = nn.Parameter, Tensor


class _Norm:
    """The settings of a fused norm, and its backward."""

    def __init__(self, module: FusedRMSNorm):
        self.eps, self.offset, self.cast = module._hfpatch_norm
        self.module, self.own = module, parameters_of(module)

    def read(self) -> tuple:
        """Weight and epsilon as they are now, offset and cast."""
        module, own = self.module, self.own
        weight = own["weight"] if "weight" in own else getattr(module, "weight", None)
        return weight, getattr(module, self.eps), self.offset, self.cast

    def back(
        self,
        op,
        dy: Tensor,
        dsum: Tensor | None,
        x: Tensor,
        weight,
        rstd: Tensor,
        need_dx: bool,
        sums,
    ):
        """Adds the weight's gradient to `sums`. Returns dx, or None if not needed."""
        need_dw = weight is not None and weight.requires_grad
        if not (need_dx or need_dw):
            return None
        dx, dw = op(dy, dsum, x, weight, rstd, self.offset, need_dx, need_dw)
        if need_dw:
            sums.add(weight, dw)
        return dx if need_dx else None


class Direct(Block, LayerParts):
    """LayerParts of a block: both parts, and their backward functions.

    `weights` is a layer.weight_gradients.WeightGradients, which collects the weights' gradients. A
    forward appends what its backward needs to a list. The backward empties that list, so each value
    is freed after its last use.
    """

    by_hand, leaves, mixers, places, autocast, wanted = True, False, (), (), (None, True), ()
    layer = modules = condition = batch = traits = None  # of one call

    def __init__(self, layer: nn.Module):
        super().__init__(layer)
        mlp, norms = self.mlp, self.norms or ()
        self.as_given = rotates_into_what_came(self.theirs)
        self.activation = ACTIVATIONS[mlp._hfpatch_activation]
        self.first, self.second = _Norm(self.norm), _Norm(self.norm_behind)
        self.of_heads = [_Norm(m) for m in norms]
        self.linears_before = [(m, parameters_of(m)) for m in self.projections]
        self.linears_after = [
            (m, parameters_of(m)) for m in (self.out, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        ]

    def fits(self) -> bool:
        """Whether every weight is a plain tensor (not sharded, not quantised) of a width that the
        fused ops take.

        Otherwise the modules are called, and raise their own errors.
        """
        for _, own in (*self.linears_before, *self.linears_after):
            weight = own.get("weight")
            if weight.__class__ not in _PLAIN and not is_fake(weight):
                return False
        gate, up = (
            self.linears_after[1][1]["weight"].shape,
            self.linears_after[2][1]["weight"].shape,
        )
        widths = (gate[1], gate[1], self.head_dim, self.head_dim)
        for norm, width in zip((self.first, self.second, *self.of_heads), widths):
            weight = norm.own.get("weight")
            if weight is not None and weight.shape != (width,):
                return False
        return gate == up

    def before(
        self, x_BtD: Tensor, a: int, b: int, kept: list | None = None, unread: bool = False
    ) -> list[Tensor]:
        """q [B, t, H, E], k and v [B, t, K, E] of tokens a to b.

        kept: receives what `before_backward` needs. unread: q, k and v are unread; returns an empty
            list.
        """
        wq, bq, wk, bk, wv, bv = _tensors(self.linears_before)
        op = _OPS[ops_are_seen(x_BtD)]
        h, rstd = op.norm(x_BtD, *self.first.read())
        B, t, D = h.shape
        h_ND, of_heads, q_dtype = h.view(B * t, D), [], h.dtype
        if not unread or self.of_heads:
            q = F.linear(h_ND, wq, bq).view(B, t, -1, self.head_dim)
            k = F.linear(h_ND, wk, bk).view(B, t, -1, self.head_dim)
            if self.of_heads:
                of_heads = [
                    (x, *op.norm(x, *norm.read())) for norm, x in zip(self.of_heads, (q, k))
                ]
                (_, q, _), (_, k, _) = of_heads
                of_heads, q_dtype = [(x, rstd) for x, _, rstd in of_heads], q.dtype
        if kept is not None:
            # A frozen projection needs no input: keeping it would cost memory next to its own
            # gradient.
            read = wq.requires_grad or wk.requires_grad or wv.requires_grad
            kept += h_ND if read else None, rstd, q_dtype, of_heads
        if unread:
            return []
        q, k, angles = q.transpose(1, 2), k.transpose(1, 2), (self.cos, self.sin)
        if (a, b) != (0, self.cos.shape[1]):
            angles = self.cos[:, a:b], self.sin[:, a:b]
        self.angles[a, b] = angles  # a view costs the host as much as an op
        each = self.as_given and q.dtype is not k.dtype  # q and k each in its own dtype
        dtype = q.dtype if self.as_given else None
        q, k = self.rotate(q, k, *angles) if each else op.rope(q, k, *angles, False, dtype)
        return [
            q.transpose(1, 2),
            k.transpose(1, 2),
            F.linear(h_ND, wv, bv).view(B, t, -1, self.head_dim),
        ]

    def before_again(self, x_BtD, a: int, b: int, need_x: bool, weights, unread: bool) -> tuple:
        kept: list = []
        parts = self.before(x_BtD, a, b, kept, unread)
        return parts, partial(self.before_backward, x_BtD, a, b, kept, need_x, weights)

    def before_backward(
        self, x_BtD, a: int, b: int, kept: list, need_x: bool, weights, dparts, dsinks=None
    ) -> Tensor | None:
        """dx from the gradients of q, k and v; None if not needed. dsinks: a block has none."""
        (h_ND, rstd, dtype, of_heads), (dq, dk, dv) = kept, dparts
        kept.clear()
        (wq, bq, wk, bk, wv, bv), norm = _tensors(self.linears_before), self.first.read()[0]
        op = _OPS[ops_are_seen(x_BtD)]
        dq, dk = op.rope(dq.transpose(1, 2), dk.transpose(1, 2), *self.angles[a, b], True, dtype)
        dq, dk = dq.transpose(1, 2), dk.transpose(1, 2)
        if of_heads:
            rows = zip(self.of_heads, (dq, dk), of_heads)
            dq, dk = [
                n.back(op.norm_back, dy, None, x, n.read()[0], r, True, weights)
                for n, dy, (x, r) in rows
            ]
            of_heads = rows = None
        need_h, N = (
            need_x or (norm is not None and norm.requires_grad),
            x_BtD.shape[0] * x_BtD.shape[1],
        )
        # The last projection first, which is the order of autograd's sums.
        dh = _back(weights, dv.reshape(N, -1), h_ND, wv, bv, need_h)
        for dy, weight, bias in ((dk, wk, bk), (dq, wq, bq)):
            part = _back(weights, dy.reshape(N, -1), h_ND, weight, bias, need_h)
            dh = dh.add_(part) if need_h else None
        h_ND = dq = dk = dy = part = None
        return (
            self.first.back(
                op.norm_back, dh.view(x_BtD.shape), None, x_BtD, norm, rstd, need_x, weights
            )
            if need_h
            else None
        )

    def _inside(self, op: _Ops, x: Tensor, out_BtHE: Tensor, known: dict) -> tuple[Tensor, ...]:
        """The residual after attention, its norm [N, D], rstd, gate and up [N, F].

        known: kept values.
        """
        (wo, bo, wg, bg, wu, bu, _, _), norm = _tensors(self.linears_after), self.second.read()
        if "mid" in known:
            total = known["mid"][0]
            normed, rstd = op.norm(total, *norm)
        else:
            B, t, H, E = out_BtHE.shape
            h = F.linear(out_BtHE.reshape(B * t, H * E), wo, bo).view(B, t, -1)
            normed, rstd, total = op.add_norm(h, x, *norm)
            h = None
        normed = normed.flatten(0, 1)
        if "gate_up" in known:
            gate, up = [y.flatten(0, 1) for y in known["gate_up"]]
        else:
            gate, up = F.linear(normed, wg, bg), F.linear(normed, wu, bu)
        return total, normed, rstd, gate, up

    def after(
        self, x_BtD: Tensor, outs_BtHE: list[Tensor], a: int, b: int, noted: dict | None = None
    ) -> list[Tensor]:
        """The layer's output, alone in a list.

        noted: receives the values of the names that it has as keys, [B, t, ...].
        """
        op = _OPS[ops_are_seen(x_BtD)]
        total, _, _, gate, up = self._inside(op, x_BtD, outs_BtHE[0], {})
        found = {"mid": (total,), "gate_up": (gate, up)} if noted else {}
        for name in found.keys() & noted if noted else ():
            noted[name] = tuple(y.view(*total.shape[:2], -1) for y in found[name])
        found, (weight, bias) = None, _tensors(self.linears_after[3:])
        y_ND = F.linear(op.swiglu(gate, up, self.activation), weight, bias)
        return [total + y_ND.view(total.shape)]

    def after_backward(
        self, x_BtD, outs_BtHE: list[Tensor], a: int, b: int, dys, known: dict, need_x, weights
    ) -> tuple[Tensor, list[Tensor]]:
        """dx [B, t, D] or None if not needed, and dout [B, t, H, E]. known: kept values, which
        replace recomputed ones.
        """
        (dy_BtD,), (out_BtHE,) = dys, outs_BtHE
        (wo, bo, wg, bg, wu, bu, wd, bd), weight = (
            _tensors(self.linears_after),
            self.second.read()[0],
        )
        op = _OPS[ops_are_seen(dy_BtD)]
        total, normed, rstd, gate, up = self._inside(op, x_BtD, out_BtHE, known)
        known.clear()
        if not (wg.requires_grad or wu.requires_grad):
            normed = None  # a frozen projection needs no input
        inner = op.swiglu(gate, up, self.activation) if wd.requires_grad else None
        dinner = _back(weights, dy_BtD.reshape(-1, dy_BtD.shape[-1]), inner, wd, bd)
        inner = None
        dgate, dup = op.swiglu_back(dinner, gate, up, self.activation, True, True)
        dinner = gate = up = None
        dnormed = _back(weights, dup, normed, wu, bu)
        dnormed.add_(_back(weights, dgate, normed, wg, bg))
        dgate = dup = normed = None
        dx = self.second.back(
            op.norm_back, dnormed.view(dy_BtD.shape), dy_BtD, total, weight, rstd, True, weights
        )
        dnormed, N = None, dx.shape[0] * dx.shape[1]
        dout = _back(
            weights, dx.view(N, -1), out_BtHE.reshape(N, -1) if wo.requires_grad else None, wo, bo
        )
        return dx if need_x else None, [dout.view(out_BtHE.shape)]


def _tensors(modules: list[tuple[nn.Module, dict]]) -> list[Tensor | None]:
    """Weight and bias of each module. Pruning may have made a parameter a plain attribute."""
    found = []
    for module, own in modules:
        for name in ("weight", "bias"):
            found.append(own[name] if name in own else getattr(module, name, None))
    return found


def _back(
    sums,
    dy_NO: Tensor,
    x_NI: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    need_dx: bool = True,
):
    """dx of a Linear, None if not needed.

    Adds the weight's and the bias's gradient to `sums`. x_NI: None for a frozen weight.
    """
    dx = None
    if need_dx:
        dx = (
            dy_NO.mm(weight)
            if dy_NO.dtype is weight.dtype
            else dy_NO.to(weight.dtype).mm(weight).to(dy_NO.dtype)
        )
    if weight.requires_grad:
        sums.add_product(weight, dy_NO, x_NI)
    if bias is not None and bias.requires_grad:
        sums.add(bias, dy_NO.sum(0))
    return dx


def direct_of(layer: nn.Module, args, kwargs: dict, x: Tensor, condition) -> Direct | None:
    """A block's direct form for one call, or None if its modules must be called.

    It needs plain Linears, fused parts as `apply` made them, no hooks and no autocast.

    Args:
        layer: a layer whose traits say that it is a block.
        args, kwargs: the arguments of the call besides its hidden states.
        x: the layer's input [B, T, D].
        condition: layer.condition.Condition, which caches what depends on the layer's modules only.
    """
    if not condition.calls_as_made or autocast_dtype(x.device.type) is not None:
        return None
    found = condition.direct
    if found is None:
        found = condition.direct = Direct(layer) if _all_as_made(layer) else False
    if not takes_by_name(args, kwargs):
        return None
    cos, sin = kwargs["position_embeddings"]
    if not (found and found.fits()):
        return None
    B, T = x.shape[:2]
    rotated = cos.shape == sin.shape and cos.shape in (
        (1, T, found.head_dim),
        (B, T, found.head_dim),
    )
    if not rotated:
        return None
    call = found.of_call(kwargs)
    if call.asked.sinks_H is not None:  # their gradient is not written out
        return None
    call.layer, call.modules = layer, [layer, *condition.inside]
    call.condition, call.traits = condition, condition.traits
    call.angles, call.asked = {}, [call.asked]  # angles: of each tile, from its `before` on
    return call


def _all_as_made(layer: nn.Module) -> bool:
    attn, mlp = layer.self_attn, layer.mlp
    if not (isinstance(mlp, FusedMLP) and isinstance(attn, FusedAttention)):
        return False
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [attn.q_norm, attn.k_norm] if hasattr(attn, "q_norm") else []
    linears = [attn.q_proj, attn.k_proj, attn.v_proj, attn.o_proj]
    linears += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    return (
        "forward" not in vars(mlp)
        and type(mlp).forward is FusedMLP.forward
        and activation_as_found(mlp)
        and all(map(_as_made, norms))
        and not watched([mlp, *norms, *linears])
        and nn.Linear.forward is LINEAR
        and not [m for m in linears if m.__class__ is not nn.Linear or "forward" in m.__dict__]
    )


def _as_made(norm: nn.Module) -> bool:
    return (
        isinstance(norm, FusedRMSNorm)
        and "forward" not in vars(norm)
        and type(norm).forward is FusedRMSNorm.forward
        and norm._hfpatch_base.forward is type(norm)._hfpatch_code
        and ("weight" in parameters_of(norm) or getattr(norm, "weight", None) is None)
    )
