"""Llama: transformers' classes with the fused parts mixed in, under the same names."""

from transformers.models.llama import modeling_llama as hf

from hfpatch import ops
from hfpatch.models import fused

PREFIX = "Llama"


class LlamaRMSNorm(fused.FusedRMSNorm, hf.LlamaRMSNorm):
    pass


class LlamaMLP(fused.FusedMLP, hf.LlamaMLP):
    pass


class LlamaAttention(fused.FusedAttention, hf.LlamaAttention):
    eager_attention = staticmethod(hf.eager_attention_forward)


class LlamaDecoderLayer(fused.TiledLayer, hf.LlamaDecoderLayer):
    def rotate(self, q, k, cos, sin):
        if isinstance(self.self_attn, fused.FusedAttention):
            return ops.rope(q, k, cos, sin)
        return hf.apply_rotary_pos_emb(q, k, cos, sin)


class LlamaModel(fused.FusedModel, hf.LlamaModel):
    pass


class LlamaForCausalLM(fused.FusedCausalLM, hf.LlamaForCausalLM):
    pass
