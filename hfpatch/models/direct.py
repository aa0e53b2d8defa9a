"""The commonest block where nothing looks inside it: no module is called, and backward has no graph.

The sums, products and kernels that models/block.py comes to through modules and autograd, in the same order: the same bits, for
less than half of the host's time. Values that no gradient reads are not computed, as models/dead.py has it.

B batch, t tokens of a tile, D hidden, F intermediate, H query heads, K key-value heads, E head dim; N = B*t.
"""

from torch import Tensor, nn
from torch.nn import functional as F

from hfpatch.compat import autocast_dtype, is_fake, parameters_of, watched
from hfpatch.models.block import Block
from hfpatch.models.classes import CALL, LINEAR
from hfpatch.models.parts import FusedAttention, FusedMLP, FusedRMSNorm, activation_as_found
from hfpatch.ops.rms_norm import ADD_RMS_NORM, RMS_NORM, RMS_NORM_BACK
from hfpatch.ops.rope import rotated_back
from hfpatch.ops.swiglu import ACTIVATIONS, SWIGLU, SWIGLU_BACK


class _Norm:
    """A fused norm's op and its backward."""

    def __init__(self, module: FusedRMSNorm):
        eps, self.offset, self.cast = module._hfpatch_norm
        self.eps, self.at = getattr(module, eps), [(module, parameters_of(module))]

    @property
    def weight(self) -> Tensor | None:
        return _tensors(self.at, ("weight",))[0]

    def __call__(self, x: Tensor, weight: Tensor | None):
        return RMS_NORM(x, weight, self.eps, self.offset, self.cast)

    def back(self, dy: Tensor, dsum: Tensor | None, x: Tensor, weight, rstd: Tensor, need_dx: bool, sums):
        """dx, None where not needed."""
        need_dw = weight is not None and weight.requires_grad
        if not (need_dx or need_dw):
            return None
        dx, dw = RMS_NORM_BACK(dy, dsum, x, weight, rstd, self.offset, need_dx, need_dw)
        if need_dw:
            sums.add(weight, dw)
        return dx if need_dx else None


class Direct(Block):
    """sums: checkpoint.weights.WeightGradients, which takes what weights get. What forward keeps for a backward is a list, which
    that backward empties: it frees each value behind its last use."""

    def __init__(self, layer: nn.Module, kwargs: dict):
        super().__init__(layer, kwargs)
        mlp, norms = self.mlp, self.norms or ()
        self.activation = ACTIVATIONS[mlp._hfpatch_activation]
        self.first, self.second = _Norm(self.norm), _Norm(self.norm_behind)
        self.of_heads = [_Norm(m) for m in norms]
        self.before = [(m, parameters_of(m)) for m in self.projections]
        self.behind = [(m, parameters_of(m)) for m in (self.out, mlp.gate_proj, mlp.up_proj, mlp.down_proj)]
        self.angles: dict = {}  # of each tile

    def _angles(self, a: int, b: int) -> tuple[Tensor, Tensor]:
        if (a, b) not in self.angles:
            whole = (a, b) == (0, self.cos.shape[1])
            self.angles[a, b] = (self.cos, self.sin) if whole else (self.cos[:, a:b], self.sin[:, a:b])
        return self.angles[a, b]

    def pre(self, x_BtD: Tensor, a: int, b: int, kept: list | None = None, dead: bool = False) -> list[Tensor]:
        """q [B, t, H, E], k and v [B, t, K, E]. kept: takes what `pre_back` wants; dead: nobody reads q, k, v: there are none."""
        wq, bq, wk, bk, wv, bv = _tensors(self.before)
        h, rstd = self.first(x_BtD, self.first.weight)
        B, t, D = h.shape
        h_ND, of_heads, q_dtype = h.view(B * t, D), [], h.dtype
        if not dead or self.of_heads:
            q, k = [F.linear(h_ND, w, b).view(B, t, -1, self.head_dim) for w, b in ((wq, bq), (wk, bk))]
            if self.of_heads:
                of_heads = [(x, *norm(x, norm.weight)) for norm, x in zip(self.of_heads, (q, k))]
                (_, q, _), (_, k, _) = of_heads
                of_heads, q_dtype = [(x, rstd) for x, _, rstd in of_heads], q.dtype
        if kept is not None:
            # A frozen projection reads no input again, which would live on beside its own gradient.
            read = wq.requires_grad or wk.requires_grad or wv.requires_grad
            kept += h_ND if read else None, rstd, q_dtype, of_heads
        if dead:
            return []
        q, k = self.rotate(q.transpose(1, 2), k.transpose(1, 2), *self._angles(a, b))
        return [q.transpose(1, 2), k.transpose(1, 2), F.linear(h_ND, wv, bv).view(B, t, -1, self.head_dim)]

    def pre_back(self, x_BtD: Tensor, a: int, b: int, kept: list, dparts: list[Tensor], need_x: bool, sums):
        """dx, None where not needed, from the gradients of q, k, v."""
        (h_ND, rstd, dtype, of_heads), (dq, dk, dv) = kept, dparts
        kept.clear()
        (wq, bq, wk, bk, wv, bv), norm = _tensors(self.before), self.first.weight
        dq, dk = rotated_back(dq.transpose(1, 2), dk.transpose(1, 2), *self._angles(a, b), dtype)
        dq, dk = dq.transpose(1, 2), dk.transpose(1, 2)
        if of_heads:
            rows = zip(self.of_heads, (dq, dk), of_heads)
            dq, dk = [n.back(dy, None, x, n.weight, r, True, sums) for n, dy, (x, r) in rows]
            of_heads = rows = None
        need_h, N = need_x or (norm is not None and norm.requires_grad), x_BtD.shape[0] * x_BtD.shape[1]
        # In the order of autograd's sums, the last projection first.
        dh = _back(sums, dv.reshape(N, -1), h_ND, wv, bv, need_h)
        for dy, weight, bias in ((dk, wk, bk), (dq, wq, bq)):
            part = _back(sums, dy.reshape(N, -1), h_ND, weight, bias, need_h)
            dh = dh.add_(part) if need_h else None
        h_ND = dq = dk = dy = part = None
        return self.first.back(dh.view(x_BtD.shape), None, x_BtD, norm, rstd, need_x, sums) if need_h else None

    def _inside(self, x: Tensor, out_BtHE: Tensor, known: dict) -> tuple[Tensor, ...]:
        """The sum after attention and what it is normed to, [N, D], rstd; gate and up, [N, F]."""
        (wo, bo, wg, bg, wu, bu, _, _), weight = _tensors(self.behind), self.second.weight
        if "mid" in known:
            total = known["mid"][0]
            normed, rstd = self.second(total, weight)
        else:
            B, t, H, E = out_BtHE.shape
            h, second = F.linear(out_BtHE.reshape(B * t, H * E), wo, bo).view(B, t, -1), self.second
            normed, rstd, total = ADD_RMS_NORM(h, x, weight, second.eps, second.offset, second.cast)
            h = None
        normed = normed.flatten(0, 1)
        if "gate_up" in known:
            gate, up = [y.flatten(0, 1) for y in known["gate_up"]]
        else:
            gate, up = F.linear(normed, wg, bg), F.linear(normed, wu, bu)
        return total, normed, rstd, gate, up

    def post(self, x_BtD: Tensor, out_BtHE: Tensor, noted: dict | None = None) -> Tensor:
        """The layer's output. noted: takes the values whose names it has, [B, t, ...] each."""
        total, _, _, gate, up = self._inside(x_BtD, out_BtHE, {})
        found = {"mid": (total,), "gate_up": (gate, up)} if noted else {}
        for name in found.keys() & noted if noted else ():
            noted[name] = tuple(y.view(*total.shape[:2], -1) for y in found[name])
        found, (weight, bias) = None, _tensors(self.behind[3:])
        return total + F.linear(SWIGLU(gate, up, self.activation), weight, bias).view(total.shape)

    def post_back(self, x_BtD: Tensor, out_BtHE: Tensor, dy_BtD: Tensor, known: dict, sums) -> tuple[Tensor, Tensor]:
        """dx [B, t, D] and dout [B, t, H, E]. known: values that were noted, in the place of what makes them."""
        (wo, bo, wg, bg, wu, bu, wd, bd), weight = _tensors(self.behind), self.second.weight
        total, normed, rstd, gate, up = self._inside(x_BtD, out_BtHE, known)
        known.clear()
        if not (wg.requires_grad or wu.requires_grad):
            normed = None  # as above
        inner = SWIGLU(gate, up, self.activation) if wd.requires_grad else None
        dinner = _back(sums, dy_BtD.reshape(-1, dy_BtD.shape[-1]), inner, wd, bd)
        inner = None
        dgate, dup = SWIGLU_BACK(dinner, gate, up, self.activation, True, True)
        dinner = gate = up = None
        dnormed = _back(sums, dup, normed, wu, bu)
        dnormed.add_(_back(sums, dgate, normed, wg, bg))
        dgate = dup = normed = None
        dx = self.second.back(dnormed.view(dy_BtD.shape), dy_BtD, total, weight, rstd, True, sums)
        dnormed, N = None, dx.shape[0] * dx.shape[1]
        dout = _back(sums, dx.view(N, -1), out_BtHE.reshape(N, -1) if wo.requires_grad else None, wo, bo)
        return dx, dout.view(out_BtHE.shape)


def _tensors(modules: list[tuple[nn.Module, dict]], names: tuple[str, ...] = ("weight", "bias")) -> list[Tensor | None]:
    """By these names, of modules and their parameters; one may have become another kind of attribute since forward (pruning)."""
    return [own[n] if n in own else getattr(module, n, None) for module, own in modules for n in names]


def _back(sums, dy_NO: Tensor, x_NI: Tensor | None, weight: Tensor, bias: Tensor | None, need_dx: bool = True):
    """dx of a Linear, None where not needed. x: where the weight is trained."""
    dx = None
    if need_dx:
        dx = dy_NO.mm(weight) if dy_NO.dtype is weight.dtype else dy_NO.to(weight.dtype).mm(weight).to(dy_NO.dtype)
    if weight.requires_grad:
        sums.add_product(weight, dy_NO, x_NI)
    if bias is not None and bias.requires_grad:
        sums.add(bias, dy_NO.sum(0))
    return dx


def can_be_direct(layer: nn.Module, kwargs: dict, device: str, looked) -> bool:
    """Whether this block, which was found to be one, has plain Linears, fused parts as they were made, and nobody who looks on.
    looked: takes, and gives, what hangs on what stands in its modules alone."""
    if autocast_dtype(device) is not None or watched(()) or nn.Linear.__call__ is not CALL:
        return False
    as_made = None if looked is None else looked.as_made
    if as_made is None:
        as_made = _all_as_made(layer)
        if looked is not None:
            looked.as_made = as_made
    cos = kwargs["position_embeddings"][0]
    if not (as_made and cos.ndim == 3):
        return False
    attn, mlp = layer.self_attn, layer.mlp
    norms, linears = _norms_and_linears(layer)
    return cos.shape[-1] == attn.head_dim and all(map(_plain, linears)) and _fits(mlp, norms, attn.head_dim)


def _norms_and_linears(layer: nn.Module) -> tuple[list, list]:
    attn, mlp = layer.self_attn, layer.mlp
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [attn.q_norm, attn.k_norm] if hasattr(attn, "q_norm") else []
    return norms, [attn.q_proj, attn.k_proj, attn.v_proj, attn.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj]


def _all_as_made(layer: nn.Module) -> bool:
    attn, mlp = layer.self_attn, layer.mlp
    if not (isinstance(mlp, FusedMLP) and isinstance(attn, FusedAttention)):
        return False
    norms, linears = _norms_and_linears(layer)
    return (
        "forward" not in vars(mlp)
        and type(mlp).forward is FusedMLP.forward
        and activation_as_found(mlp)
        and all(map(_as_made, norms))
        and not watched([mlp, *norms, *linears])
        and nn.Linear.forward is LINEAR
        and not [m for m in linears if m.__class__ is not nn.Linear or "forward" in m.__dict__]
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
