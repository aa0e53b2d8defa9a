"""The commonest block (norm, attention, norm, MLP, nothing beside) without what lies around it.

The same modules called in the same order, bit for bit what the layer answers when it is asked (models/ask.py), with the residual
added in the second norm's pass.
"""

from torch import Tensor, nn

from hfpatch.models.answers import rope_of
from hfpatch.models.asking import Call
from hfpatch.models.dead import is_dead
from hfpatch.models.keeping import known_sum, note, unread_sum
from hfpatch.models.parts import FusedAttention, FusedRMSNorm, rotation, rotation_in
from hfpatch.ops.attention import CAUSAL


class Block:
    """The parts of a layer: a module looks its own up slowly, and a layer has many tiles. `of_call` gives those of one call."""

    def __init__(self, layer: nn.Module):
        attn = layer.self_attn
        self.norm, self.norm_behind, self.mlp = layer.input_layernorm, layer.post_attention_layernorm, layer.mlp
        self.projections, self.out, self.head_dim = (attn.q_proj, attn.k_proj, attn.v_proj), attn.o_proj, attn.head_dim
        # use_kernels sets a forward whenever train() or eval() is called.
        behind = self.norm_behind
        self.adds = isinstance(behind, FusedRMSNorm) and "forward" not in vars(behind)
        self.norms = (attn.q_norm, attn.k_norm) if hasattr(attn, "q_norm") else None
        self.attention = attn._hfpatch_base.forward if isinstance(attn, FusedAttention) else None
        self.theirs = rope_of(attn) if self.attention is None else rotation_in(self.attention)
        self.rotate = self.theirs if self.attention is None else rotation(self.theirs)
        self.causal = Call(attn.scaling, CAUSAL, None)

    def rotates_as_then(self) -> bool:
        """Whether the fused attention's file has the rotation that it had: some replace it for the whole process."""
        return rotation_in(self.attention) is self.theirs

    def of_call(self, kwargs: dict):
        """The same with what a call is given beside its input."""
        call, mask = self.__class__.__new__(self.__class__), kwargs.get("attention_mask")
        call.__dict__ |= self.__dict__
        call.cos, call.sin = kwargs["position_embeddings"]
        call.asked = self.causal if mask is None else Call(self.causal.scale, mask.pattern(), None)
        return call

    def pre(self, x_BtD: Tensor, a: int, b: int) -> list[Tensor]:
        h = self.norm(x_BtD)
        shape = (*h.shape[:-1], -1, self.head_dim)
        q, k, v = [project(h).view(shape) for project in self.projections]
        if self.norms:
            q, k = self.norms[0](q), self.norms[1](k)
        q, k = self.rotate(q.transpose(1, 2), k.transpose(1, 2), self.cos[:, a:b], self.sin[:, a:b])
        return [q.transpose(1, 2), k.transpose(1, 2), v]

    def post(self, x_BtD: Tensor, out_BtHE: Tensor) -> Tensor:
        h, norm = self.out(out_BtHE.flatten(2)), self.norm_behind
        total = known_sum("mid", x_BtD, h)
        if total is None and self.adds:
            normed, total = norm(h, residual=x_BtD)
        else:
            total = x_BtD + h if total is None else total
            normed = norm(total)
        note("mid", total)
        last = self.mlp(normed)
        return unread_sum(total, last) if is_dead(last) else total + last
