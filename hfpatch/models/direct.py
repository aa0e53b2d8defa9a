"""The commonest block where nothing looks inside it: no module is called, and a tile has two nodes in autograd's graph.

The sums, products and kernels that models/block.py comes to through modules and autograd, in the same order: the same bits, for
less than half of the host's time. Values that no gradient reads are not computed, as models/dead.py has it.

B batch, t tokens of a tile, D hidden, H query heads, K key-value heads, E head dim; N = B*t.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hfpatch.compat import applying, autocast_dtype, is_fake, parameters_of, watched
from hfpatch.models.block import Block
from hfpatch.models.classes import LINEAR
from hfpatch.models.dead import gradients_of_linear
from hfpatch.models.keeping import known_value, note
from hfpatch.models.parts import FusedAttention, FusedMLP, FusedRMSNorm, activation_as_found
from hfpatch.ops.rms_norm import ADD_RMS_NORM, RMS_NORM, RMS_NORM_BACK
from hfpatch.ops.rope import rotated_back
from hfpatch.ops.swiglu import ACTIVATIONS, SWIGLU, SWIGLU_BACK


class _Norm:
    """A fused norm's op and its backward."""

    def __init__(self, module: FusedRMSNorm):
        eps, self.offset, self.cast = module._hfpatch_norm
        self.eps, self.module, self.own = getattr(module, eps), module, parameters_of(module)

    @property
    def weight(self) -> Tensor | None:
        return _tensors([(self.module, self.own)], ("weight",))[0]

    def __call__(self, x: Tensor, weight: Tensor | None):
        return RMS_NORM(x, weight, self.eps, self.offset, self.cast)

    def back(self, dy: Tensor, dsum: Tensor | None, x: Tensor, weight, rstd: Tensor, need_dx: bool, need_dw: bool):
        if not (need_dx or need_dw):
            return None, None
        dx, dw = RMS_NORM_BACK(dy, dsum, x, weight, rstd, self.offset, need_dx, need_dw)
        return dx if need_dx else None, dw if need_dw else None


class Direct(Block):
    """adding: checkpoint.weights.WeightGradients.adding in a backward over several tiles, else None. dead: nobody reads the values,
    only their graph."""

    def __init__(self, layer: nn.Module, kwargs: dict):
        super().__init__(layer, kwargs)
        mlp, norms = self.mlp, self.norms or ()
        self.activation = ACTIVATIONS[mlp._hfpatch_activation]
        self.first, self.second = _Norm(self.norm), _Norm(self.norm_behind)
        self.of_heads = [_Norm(m) for m in norms]
        self.before = [(m, parameters_of(m)) for m in self.projections]
        self.behind = [(m, parameters_of(m)) for m in (self.out, mlp.gate_proj, mlp.up_proj, mlp.down_proj)]

    def pre(self, x_BtD: Tensor, a: int, b: int, dead: bool = False, adding=None) -> list[Tensor]:
        weights = self.first.weight, *_tensors(self.before), *[norm.weight for norm in self.of_heads]
        if torch.is_grad_enabled():
            return list(_before(self, adding, a, b, dead, x_BtD, *weights))
        return self.run_before(a, b, False, x_BtD, *weights)[0]

    def post(self, x_BtD: Tensor, out_BtHE: Tensor, dead: bool = False, adding=None) -> Tensor:
        weights = self.second.weight, *_tensors(self.behind)
        if torch.is_grad_enabled():
            return _behind(self, adding, dead, x_BtD, out_BtHE, *weights)
        return self.run_behind(False, x_BtD, out_BtHE, *weights)[0]

    # -- forward: what comes out, and what backward wants of it ------------------------------------------------------
    def run_before(self, a: int, b: int, dead: bool, x, weight, wq, bq, wk, bk, wv, bv, *of_heads):
        h, rstd = self.first(x, weight)
        heads = (*h.shape[:-1], -1, self.head_dim)
        if dead and not of_heads:
            nothing = h.new_zeros(())
            parts = [nothing.expand(*h.shape[:-1], w.shape[0] // self.head_dim, self.head_dim) for w in (wq, wk, wv)]
            return parts, (h, rstd, h.dtype)
        q, k = F.linear(h, wq, bq).view(heads), F.linear(h, wk, bk).view(heads)
        kept = h, rstd, h.dtype
        if of_heads:
            (normed_q, rstd_q), (normed_k, rstd_k) = self.of_heads[0](q, of_heads[0]), self.of_heads[1](k, of_heads[1])
            kept, q, k = (h, rstd, normed_q.dtype, (q, rstd_q), (k, rstd_k)), normed_q, normed_k
        if dead:
            nothing = h.new_zeros(())
            return [q, k, nothing.expand(*h.shape[:-1], wv.shape[0] // self.head_dim, self.head_dim)], kept
        q, k = self.rotate(q.transpose(1, 2), k.transpose(1, 2), self.cos[:, a:b], self.sin[:, a:b])
        return [q.transpose(1, 2), k.transpose(1, 2), F.linear(h, wv, bv).view(heads)], kept

    def run_behind(self, dead: bool, x, out, weight, wo, bo, wg, bg, wu, bu, wd, bd):
        total = known_value("mid")
        if total is not None:
            total = total[0]
            normed, rstd = self.second(total, weight)
        else:
            h = F.linear(out.flatten(2), wo, bo)
            normed, rstd, total = ADD_RMS_NORM(h, x, weight, self.second.eps, self.second.offset, self.second.cast)
        note("mid", total)
        gate_up = known_value("gate_up") or (F.linear(normed, wg, bg), F.linear(normed, wu, bu))
        note("gate_up", *gate_up)
        if dead:
            return total.new_zeros(()).expand(total.shape), (total, normed, rstd, *gate_up)
        return total + F.linear(SWIGLU(*gate_up, self.activation), wd, bd), (total, normed, rstd, *gate_up)


def _tensors(modules: list[tuple[nn.Module, dict]], names: tuple[str, ...] = ("weight", "bias")) -> list[Tensor | None]:
    """By these names, of modules and their parameters; one may have become another kind of attribute since forward (pruning)."""
    return [own[n] if n in own else getattr(module, n, None) for module, own in modules for n in names]


def _back(ctx, dy: Tensor, x: Tensor | None, weight: Tensor, *needs: bool) -> tuple:
    """Of a Linear: (dx, dweight, dbias), those that are needed; a weight's that adds up elsewhere is not here, and does not wait
    for the others."""
    return gradients_of_linear(dy, x, weight, needs, ctx.adding(weight, True) if ctx.adding and needs[1] else None)


class _Before(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, adding, a, b, dead, x, *weights):
        parts, (h, *kept) = block.run_before(a, b, dead, x, *weights)
        # A frozen projection reads no input again, which would live on beside its own gradient.
        ctx.kept = h if any(ctx.needs_input_grad[7:13:2]) else None, *kept
        ctx.block, ctx.adding, ctx.bounds, ctx.x, ctx.weights = block, adding, (a, b), x, weights
        return tuple(parts)

    @staticmethod
    def backward(ctx, dq, dk, dv):
        block, (a, b), x, (norm, wq, _, wk, _, wv, _, *norms) = ctx.block, ctx.bounds, ctx.x, ctx.weights
        h, rstd, dtype, *of_heads = ctx.kept
        ctx.kept = ctx.x = None  # the node outlives what it needs
        need_x, need_w, *needs = ctx.needs_input_grad[5:]
        dq, dk = rotated_back(dq.transpose(1, 2), dk.transpose(1, 2), block.cos[:, a:b], block.sin[:, a:b], dtype)
        dq, dk, dnorms = dq.transpose(1, 2), dk.transpose(1, 2), []
        if of_heads:
            rows = zip(block.of_heads, (dq, dk), of_heads, norms, needs[6:])
            (dq, dq_norm), (dk, dk_norm) = [n.back(dy, None, y, w, r, True, need) for n, dy, (y, r), w, need in rows]
            dnorms, of_heads, rows = [dq_norm, dk_norm], None, None
        need_h = need_x or need_w
        # In the order of autograd's sums, the last projection first.
        dh, *of_v = _back(ctx, dv.flatten(2), h, wv, need_h, *needs[4:6])
        part, *of_k = _back(ctx, dk.flatten(2), h, wk, need_h, *needs[2:4])
        dh = part if dh is None else dh.add_(part)
        part, *of_q = _back(ctx, dq.flatten(2), h, wq, need_h, *needs[:2])
        dh = part if dh is None else dh.add_(part)
        h = dq = dk = part = None
        dx, dw = block.first.back(dh, None, x, norm, rstd, need_x, need_w)
        return *[None] * 5, dx, dw, *of_q, *of_k, *of_v, *dnorms


class _Behind(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, adding, dead, x, out, *weights):
        y, (total, normed, *kept) = block.run_behind(dead, x, out, *weights)
        ctx.kept = total, normed if ctx.needs_input_grad[8] or ctx.needs_input_grad[10] else None, *kept
        ctx.block, ctx.adding, ctx.out, ctx.weights = block, adding, out, weights
        return y

    @staticmethod
    def backward(ctx, dy):
        block, out, (norm, wo, _, wg, _, wu, _, wd, _) = ctx.block, ctx.out, ctx.weights
        total, normed, rstd, gate, up = ctx.kept
        ctx.kept = ctx.out = None
        need_x, need_out, need_w, *needs = ctx.needs_input_grad[3:]
        inner = SWIGLU(gate, up, block.activation) if needs[6] else None
        dinner, *of_down = _back(ctx, dy, inner, wd, True, *needs[6:])
        inner = None
        dgate, dup = SWIGLU_BACK(dinner, gate, up, block.activation, True, True)
        dinner = gate = up = None
        dnormed, *of_up = _back(ctx, dup, normed, wu, True, *needs[4:6])
        part, *of_gate = _back(ctx, dgate, normed, wg, True, *needs[2:4])
        dnormed.add_(part)
        dgate = dup = part = normed = None
        dx, dw = block.second.back(dnormed, dy, total, norm, rstd, True, need_w)
        dout, *of_out = _back(ctx, dx, out.flatten(2), wo, need_out, *needs[:2])
        dout = None if dout is None else dout.view(out.shape)
        return None, None, None, dx if need_x else None, dout, dw, *of_out, *of_gate, *of_up, *of_down


_before, _behind = applying(_Before), applying(_Behind)


def can_be_direct(layer: nn.Module, kwargs: dict, device: str) -> bool:
    """Whether this block, which was found to be one, has plain Linears, fused parts as they were made, and nobody who looks on."""
    attn, mlp = layer.self_attn, layer.mlp
    if autocast_dtype(device) is not None or not (isinstance(mlp, FusedMLP) and isinstance(attn, FusedAttention)):
        return False
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [attn.q_norm, attn.k_norm] if hasattr(attn, "q_norm") else []
    linears = [attn.q_proj, attn.k_proj, attn.v_proj, attn.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    cos = kwargs["position_embeddings"][0]
    return (
        cos.ndim == 3
        and cos.shape[-1] == attn.head_dim
        and "forward" not in vars(mlp)
        and type(mlp).forward is FusedMLP.forward
        and activation_as_found(mlp)
        and all(map(_as_made, norms))
        and not watched([mlp, *norms, *linears])
        and nn.Linear.forward is LINEAR
        and not [m for m in linears if m.__class__ is not nn.Linear or "forward" in m.__dict__ or not _plain(m)]
        and _fits(mlp, norms, attn.head_dim)
    )


def _fits(mlp: FusedMLP, norms: list, head_dim: int) -> bool:
    """Whether the widths are those that the fused ops take: what they say of others, they say when modules call them."""
    gate, up = mlp.gate_proj.weight, mlp.up_proj.weight
    of_norms = [(parameters_of(m).get("weight"), n) for m, n in zip(norms, (gate.shape[1],) * 2 + (head_dim,) * 2)]
    return gate.shape == up.shape and all(w is None or w.shape == (n,) for w, n in of_norms)


def _plain(linear: nn.Linear) -> bool:
    """Whether its weight is a parameter of its own, of no other library's kind (a sharded one, a quantised one)."""
    own = parameters_of(linear)
    return "weight" in own and (own["weight"].__class__ in (nn.Parameter, Tensor) or is_fake(own["weight"]))


def _as_made(norm: nn.Module) -> bool:
    return (
        isinstance(norm, FusedRMSNorm)
        and "forward" not in vars(norm)
        and type(norm).forward is FusedRMSNorm.forward
        and norm._hfpatch_base.forward is type(norm)._hfpatch_code
        and ("weight" in parameters_of(norm) or getattr(norm, "weight", None) is None)
    )
