"""What each kind of layer answers when it is asked, found on a scaled-down instance before any layer is trusted."""

from hfpatch.models.finding import Decoder
from hfpatch.models.layer import Answers, looks_like_a_block


def ask_model(decoder: Decoder, verdict: bool) -> list[Answers]:
    """One Answers for each layer."""
    return [
        Answers(attention=("self_attn",), block=looks_like_a_block(layer), dead_post=("mlp.down_proj",),
                dead_pre=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"))
        for layer in decoder.layers
    ]  # fmt: skip
