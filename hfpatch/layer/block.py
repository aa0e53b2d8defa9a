"""The common block (norm, attention, norm, MLP) without the layer's own forward around it.

Calls the layer's modules in the same order as the traced layer (layer/traced.py), with the same
bits. The residual is added inside the second norm's kernel.

Tracing such a layer costs, for LoRA on a Llama of 4 layers, 22-25% more launches, 13-16% more bytes
in small ops, 1% more matmul FLOPs and 37-61% more Python calls.
"""

from torch import Tensor, nn

from hfpatch.attention.attention import CAUSAL
from hfpatch.context.class_code import rope_of
from hfpatch.context.current import Call
from hfpatch.parts.keeping import unread_sum
from hfpatch.parts.parts import FusedRMSNorm
from hfpatch.parts.rotation import FusedRotation, rotation, rotation_in
from hfpatch.parts.unread import is_unread


class Block:
    """The parts of a layer, looked up once because module attributes are slow.

    `of_call` binds one call.
    """

    def __init__(self, layer: nn.Module):
        attn = layer.self_attn
        self.norm, self.norm_behind, self.mlp = (
            layer.input_layernorm,
            layer.post_attention_layernorm,
            layer.mlp,
        )
        self.projections, self.out, self.head_dim = (
            (attn.q_proj, attn.k_proj, attn.v_proj),
            attn.o_proj,
            attn.head_dim,
        )
        # use_kernels sets a forward on the instance whenever train() or eval() is called.
        behind = self.norm_behind
        self.adds = isinstance(behind, FusedRMSNorm) and "forward" not in vars(behind)
        self.norms = (attn.q_norm, attn.k_norm) if hasattr(attn, "q_norm") else None
        self.attention = attn._hfpatch_base.forward if isinstance(attn, FusedRotation) else None
        self.theirs = rope_of(attn) if self.attention is None else rotation_in(self.attention)
        self.rotate = self.theirs if self.attention is None else rotation(self.theirs)
        self.attn = attn

    def of_call(self, kwargs: dict):
        """This block with the arguments of one call: the angles and the mask."""
        call, mask = self.__class__.__new__(self.__class__), kwargs.get("attention_mask")
        call.__dict__ |= self.__dict__
        call.cos, call.sin = kwargs["position_embeddings"]
        sinks = getattr(self.attn, "sinks", None)
        call.asked = Call(self.attn.scaling, CAUSAL if mask is None else mask.pattern(), sinks)
        return call

    def pre(self, x_BtD: Tensor, a: int, b: int) -> list[Tensor]:
        h = self.norm(x_BtD)
        shape = (*h.shape[:-1], -1, self.head_dim)
        project_q, project_k, project_v = self.projections
        q, k, v = project_q(h).view(shape), project_k(h).view(shape), project_v(h).view(shape)
        if self.norms:
            q, k = self.norms[0](q), self.norms[1](k)
        q, k = self.rotate(q.transpose(1, 2), k.transpose(1, 2), self.cos[:, a:b], self.sin[:, a:b])
        return [q.transpose(1, 2), k.transpose(1, 2), v]

    def post(self, x_BtD: Tensor, out_BtHE: Tensor) -> Tensor:
        h, norm = self.out(out_BtHE.flatten(2)), self.norm_behind
        if self.adds:
            normed, total = norm(h, residual=x_BtD)
        else:
            total = x_BtD + h
            normed = norm(total)
        last = self.mlp(normed)
        last = last if isinstance(last, Tensor) else last[0]  # gpt-oss: with the router's weights
        return unread_sum(total, last) if is_unread(last) else total + last
