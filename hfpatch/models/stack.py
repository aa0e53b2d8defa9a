"""The decoder stack of any family: its own forward, with attention and masks that are ours while it runs.

Decides once a step whether that can be, and who sees whom (models/documents.py).
"""

import torch
from torch import Tensor

from hfpatch.models.asking import here, our_attention
from hfpatch.models.classes import keeps_signature, positional
from hfpatch.models.documents import restarts
from hfpatch.models.masks import Batch
from hfpatch.models.parallel import refuse_packed_shards, replaced_attention

_KNOWN = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")


class OurAttention:
    """Mixed over the class of the module that holds the decoder layers. `_hfpatch_configs`: the configs that its modules read."""

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        keeps_signature(cls, OurAttention)

    def _hfpatch_stock(self, kwargs):
        return super().forward(**kwargs)

    def _hfpatch_forward(self, args, kwargs):
        kwargs |= zip(positional(self._hfpatch_base), args)
        if torch.compiler.is_compiling():
            # Tiled layers are autograd functions that run nested graphs: the stack runs outside the compiled graph.
            eager = self.training and torch.is_grad_enabled() and self._hfpatch_session is not None
            return _outside(self, kwargs) if eager else self._hfpatch_stock(kwargs)
        return self._hfpatch_run(kwargs)

    def _hfpatch_run(self, kwargs):
        batch = self._hfpatch_batch(kwargs)
        if batch is None:
            return self._hfpatch_stock(kwargs)
        if self._hfpatch_session is None and self.training and getattr(self, "gradient_checkpointing", False):
            # transformers' own checkpointing runs layers again when this forward, and our attention with it, has gone.
            rows = batch.rows()
            if rows.documents is not None and rows.hidden_BT is None and kwargs.get("position_ids") is not None:
                kwargs["attention_mask"] = None  # beside a mask it would not look for documents
            return self._hfpatch_stock(kwargs)
        if kwargs.get("attention_mask") is None:
            # transformers then looks for documents itself, waiting for the device; ours are found already.
            kwargs["attention_mask"] = torch.ones(batch.B, batch.T, dtype=torch.bool, device=batch.device)
        with our_attention(self._hfpatch_configs, batch):
            return self._hfpatch_stock(kwargs)

    def _hfpatch_batch(self, kwargs) -> Batch | None:
        """What the layers are to know of this batch; None where they run as transformers has them."""
        given = kwargs.get("inputs_embeds") if kwargs.get("input_ids") is None else kwargs["input_ids"]
        if not isinstance(given, Tensor) or given.dim() < 2:
            return None
        B, T = given.shape[:2]
        mask, cache, config = kwargs.get("attention_mask"), kwargs.get("past_key_values"), self.config
        positions, use_cache = kwargs.get("position_ids"), kwargs.get("use_cache")
        if isinstance(positions, Tensor) and positions.dim() == 3:
            positions = positions[0] if len(positions) == 4 else None  # text, then time, height and width
        rows_mask = mask if isinstance(mask, Tensor) and mask.shape == (B, T) else None
        packed = lambda: positions is not None and restarts(positions.expand(B, -1), rows_mask)  # noqa: E731
        if cache is None and use_cache is None:
            use_cache = bool(getattr(config, "use_cache", False)) and not (self.training and torch.is_grad_enabled())
            if use_cache and packed():
                use_cache = False
            kwargs["use_cache"] = use_cache  # models make a cache in training too, where nobody reads it
        if cache is not None or use_cache:
            if packed():
                raise ValueError(
                    "hfpatch: expected one document a row where a KV cache is kept, position_ids that restart came; "
                    "pass use_cache=False, which isolates the documents."
                )
            return None
        batch = Batch(B, T, given.device, rows_mask, positions, kwargs.get("cu_seq_lens_q"), here.idle_BT)
        if replaced_attention(config):
            refuse_packed_shards(config, batch.rows().documents, positions)
            return None
        asked = kwargs.get("output_attentions")
        attentions = getattr(config, "output_attentions", False) if asked is None else asked
        if attentions or mask is not None and rows_mask is None or config._attn_implementation not in _KNOWN:
            return None
        return batch if getattr(config, "is_causal", True) else None


_outside = torch._dynamo.disable(lambda stack, kwargs: stack._hfpatch_run(kwargs))
