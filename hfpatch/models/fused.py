"""What the fused classes of every family share: norm, MLP, head, embedding, attention call, layer, model, loss.

A family's file (llama.py) mixes these into thin subclasses of transformers' own classes, of the same names. A module gets its
fused class by `module.__class__ = ...`, so parameters, hooks and state_dict keys stay as they were. Projections, norms and the
MLP are called as modules, never read by `.weight`: LoRA layers, quantised ones and the engines' gathering hooks live there.
"""

import inspect
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import _CAN_RECORD_REGISTRY, ALL_ATTENTION_FUNCTIONS

from hfpatch import ops
from hfpatch.checkpoint.device import ToHost
from hfpatch.checkpoint.layer import tiled_layer
from hfpatch.checkpoint.whole import offloaded_checkpoint
from hfpatch.models.documents import find_documents
from hfpatch.models.parallel import (
    refuse_packed_shards,
    refuse_training_over_a_device_map,
    replaced_attention,
    weights_move,
)
from hfpatch.ops.attention import supported
from hfpatch.ops.embedding import embedding

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
EVAL_LOGITS_BYTES = 2 << 30  # eval_logits="auto" builds logits up to this size beside a loss
# Up to 5.3 a cache took keyword extras in a dict; later versions take none.
_CACHE_EXTRAS = "cache_kwargs" in inspect.signature(Cache.update).parameters

_CAPTURING = "transformers.utils.output_capturing"

# Compiled graphs break here on purpose: the layer is one autograd function that runs nested graphs.
_tiled_layer = torch._dynamo.disable(tiled_layer)
_find_documents = torch._dynamo.disable(find_documents)


class FusedRMSNorm:
    """Adds the one-pass residual form to a norm of transformers."""

    def forward(self, hidden_states: Tensor, residual: Tensor | None = None):
        if residual is None:
            return ops.rms_norm(hidden_states, self.weight, self.variance_epsilon)
        return ops.add_rms_norm(hidden_states, residual, self.weight, self.variance_epsilon)


class FusedMLP:
    def forward(self, x: Tensor) -> Tensor:
        activation = ACTIVATIONS[self.config.hidden_act]
        return self.down_proj(ops.swiglu(self.gate_proj(x), self.up_proj(x), activation=activation))


class Embedding(nn.Embedding):
    """nn.Embedding with the sliced backward."""

    def forward(self, input: Tensor) -> Tensor:
        plain = self.max_norm is None and not self.scale_grad_by_freq and not self.sparse
        if plain and torch.is_grad_enabled() and self.weight.requires_grad and not torch.compiler.is_compiling():
            return embedding(input, self.weight, self.padding_idx)
        return super().forward(input)


class Linear(nn.Linear):
    """The head. Called with labels it returns the loss: the engines' hooks around the call gather its weight."""

    def forward(self, input: Tensor, labels: Tensor | None = None, **options):
        if labels is None:
            return F.linear(input, self.weight, self.bias)
        return ops.linear_cross_entropy(input, self.weight, labels, bias=self.bias, **options)


# The class name is what wrap policies, quantisers and PEFT read.
HEAD, EMBEDDING = Linear, Embedding


class FusedAttention:
    """RoPE through the fused op; everything else as transformers does it."""

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (p(hidden_states).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = ops.rope(q, k, *position_embeddings)
        if past_key_values is not None:
            extras = ()
            if _CACHE_EXTRAS:
                cos, sin = position_embeddings
                extras = ({"sin": sin, "cos": cos, "cache_position": kwargs.get("cache_position")},)
            k, v = past_key_values.update(k, v, self.layer_idx, *extras)
        name = self.config._attn_implementation
        attend = self.eager_attention if name == "eager" else ALL_ATTENTION_FUNCTIONS[name]
        dropout = self.attention_dropout if self.training else 0.0
        out, weights = attend(self, q, k, v, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs)
        return self.o_proj(out.reshape(*shape[:-2], -1).contiguous()), weights


class TiledLayer:
    """A decoder layer that runs tile by tile where a gradient is to come, and as transformers' own elsewhere."""

    @property
    def _gradient_checkpointing_func(self):
        # transformers sets one whenever checkpointing is turned on; the session takes its place.
        return _run_directly

    @_gradient_checkpointing_func.setter
    def _gradient_checkpointing_func(self, function):
        vars(self)["_gradient_checkpointing_func"] = function  # theirs again after undo()

    @property
    def attention_scale(self) -> float:
        return self.self_attn.scaling

    def pre(self, x_BtD: Tensor, cos: Tensor, sin: Tensor):
        """q [B, t, H, E], k and v [B, t, K, E] of a tile, rotated."""
        attn = self.self_attn
        h = self.input_layernorm(x_BtD)
        shape = (*h.shape[:-1], -1, attn.head_dim)
        q, k, v = (p(h).view(shape) for p in (attn.q_proj, attn.k_proj, attn.v_proj))
        q, k = self.rotate(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        return q.transpose(1, 2), k.transpose(1, 2), v

    def post(self, x_BtD: Tensor, out_BtD: Tensor) -> Tensor:
        """The layer's output for a tile of its input and of the attention output."""
        h, norm = self.self_attn.o_proj(out_BtD), self.post_attention_layernorm
        if isinstance(norm, FusedRMSNorm):
            normed, total = norm(h, residual=x_BtD)
        else:
            total = x_BtD + h
            normed = norm(total)
        return total + self.mlp(normed)

    def why_not_tiled(self, like: Tensor, documents: bool = False) -> str | None:
        """None where this layer can run tile by tile now, else the reason. like: of the hidden states' dtype and device."""
        attn = self.self_attn
        if self.training and attn.attention_dropout:
            return "attention dropout"
        # transformers leaves its recording hooks behind once attentions were asked for; a tiled call records nothing.
        hooks = (h for h in attn._forward_hooks.values() if getattr(h, "__module__", None) != _CAPTURING)
        if any(hooks) or attn._forward_pre_hooks or hasattr(attn, "_hf_hook"):
            return "hooks on self_attn"
        if any(hasattr(module, "_hf_hook") for module in self.modules()) and weights_move(self):
            return "a device map"
        if replaced_attention(attn.config):
            return "an attention function from outside transformers (sequence parallelism)"
        device = like.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else like.dtype
        return supported(attn.head_dim, dtype, like.device, documents)

    def __call__(self, hidden_states, *args, **kwargs):
        if torch.is_grad_enabled() and not hidden_states.requires_grad and self._under_zero3:
            # DeepSpeed reduces a leaf module's gradients in its backward hook, which PyTorch runs before the module's
            # backward where no input wants a gradient (the first layer under LoRA).
            hidden_states = hidden_states.detach().requires_grad_(True)
        return super().__call__(hidden_states, *args, **kwargs)

    @property
    def _under_zero3(self) -> bool:
        return any(hasattr(p, "ds_id") for p in self.input_layernorm.parameters())

    def forward(
        self, hidden_states, attention_mask=None, position_ids=None, past_key_values=None, use_cache=False,
        position_embeddings=None, hfpatch_documents=None, **kwargs,
    ):  # fmt: skip
        session, x = self._hfpatch_session, hidden_states
        alone = past_key_values is None and not kwargs.get("output_attentions")
        masked = attention_mask is not None and hfpatch_documents is None
        reason = "an attention mask" if masked else self.why_not_tiled(x, hfpatch_documents is not None)
        if alone and reason is None:
            return _tiled_layer(session, self, x, *position_embeddings, hfpatch_documents)
        if hfpatch_documents is not None:
            raise ValueError(
                f"hfpatch: expected a layer that isolates packed documents, found {reason or 'a KV cache'}; "
                "turn that off, or pass one document a row."
            )
        run = lambda h: super(TiledLayer, self).forward(  # noqa: E731
            h, attention_mask=attention_mask, position_ids=position_ids, past_key_values=past_key_values,
            use_cache=use_cache, position_embeddings=position_embeddings, **kwargs,
        )  # fmt: skip
        if alone and self.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return offloaded_checkpoint(session, run, x)
        return run(x)


def _run_directly(function, *args, **kwargs):
    return function(*args, **kwargs)


class FusedModel:
    """The decoder stack: decides once a step who sees whom, and holds no layer's input longer than the layer needs it."""

    def __init_subclass__(cls):
        # What output_hidden_states and output_attentions record is looked up by the class's full name.
        dict.__setitem__(_CAN_RECORD_REGISTRY, str(cls), cls._can_record_outputs)

    def forward(
        self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None,
        use_cache=None, **kwargs,
    ):  # fmt: skip
        stock = lambda mask=attention_mask, **more: super(FusedModel, self).forward(  # noqa: E731
            input_ids=input_ids, attention_mask=mask, position_ids=position_ids,
            past_key_values=past_key_values, inputs_embeds=inputs_embeds, use_cache=use_cache, **kwargs, **more,
        )  # fmt: skip
        if (input_ids is None) == (inputs_embeds is None):
            return stock()
        if weights_move(self):
            refuse_training_over_a_device_map(self.training and torch.is_grad_enabled())
            return stock()
        given = inputs_embeds if input_ids is None else input_ids
        if use_cache is None and past_key_values is None:
            training = self.training and torch.is_grad_enabled()
            packed = attention_mask is None or attention_mask.dim() == 2
            use_cache = bool(self.config.use_cache) and not training
            if use_cache and packed and self._is_packed(given, attention_mask, position_ids):
                use_cache = False
        if past_key_values is not None or use_cache:
            self._refuse_packed_cache(given, attention_mask, position_ids)
            return stock()
        if attention_mask is not None and attention_mask.dim() != 2:
            return stock()
        for name in ("output_attentions", "output_hidden_states"):
            if kwargs.get(name) is None:
                kwargs[name] = getattr(self.config, name, False)
        B, T = given.shape[:2]
        documents, cu_seq_lens = None, kwargs.get("cu_seq_lens_q")
        if attention_mask is not None or position_ids is not None or cu_seq_lens is not None:
            documents = _find_documents(B, T, given.device, attention_mask, position_ids, cu_seq_lens)
        like = self.embed_tokens.weight if inputs_embeds is None else inputs_embeds
        refuse_packed_shards(self.config, documents, position_ids)
        session = getattr(self, "_hfpatch_session", None)
        tiled = (
            session is not None
            and not kwargs["output_attentions"]
            and self.layers[0].why_not_tiled(like, documents is not None) is None
        )
        wants = kwargs["output_attentions"] or kwargs["output_hidden_states"]
        if wants or not tiled and (documents is not None or self.config._attn_implementation != "sdpa"):
            mask = self._mask_for_stock(attention_mask, position_ids, documents, cu_seq_lens, like.dtype, B, T)
            return stock(mask, **({"hfpatch_documents": documents} if tiled else {}))

        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            position_ids = torch.arange(T, device=x.device).unsqueeze(0)
        return_dict = kwargs.get("return_dict")
        if return_dict is None:
            return_dict = getattr(self.config, "return_dict", True)
        kwargs = {
            n: v for n, v in kwargs.items() if n not in ("return_dict", "output_attentions", "output_hidden_states")
        }
        positions = self.rotary_emb(x, position_ids=position_ids)
        if tiled:
            kwargs["hfpatch_documents"] = documents
        for layer in self.layers[: self.config.num_hidden_layers]:
            x = layer(
                x, attention_mask=None, position_ids=position_ids, past_key_values=None, use_cache=False,
                position_embeddings=positions, **kwargs,
            )  # fmt: skip
        out = BaseModelOutputWithPast(last_hidden_state=self.norm(x), past_key_values=None)
        return out if return_dict else out.to_tuple()

    @staticmethod
    def _padded(attention_mask) -> bool:
        return not bool(ToHost(lambda mask: mask.bool().all(), attention_mask).get())

    def _mask_for_stock(self, attention_mask, position_ids, documents, cu_seq_lens, dtype, B: int, T: int):
        """What makes transformers' own layers see the same documents: None, the padding, or, where it knows none, [T, T]."""
        if documents is None:
            return None
        padded = attention_mask is not None and self._padded(attention_mask)
        if padded and position_ids is None:
            return attention_mask
        if not padded and cu_seq_lens is None:
            return None  # position_ids alone: transformers isolates by them
        implementation = self.config._attn_implementation
        if implementation not in ("sdpa", "eager"):
            return attention_mask
        index_N = torch.arange(B * T, device=documents.cu_seqlens.device)
        document_BT = torch.bucketize(index_N, documents.cu_seqlens[1:], right=True).view(B, T)
        causal_TT = torch.ones(T, T, dtype=torch.bool, device=index_N.device).tril()
        allowed = (causal_TT & (document_BT[:, :, None] == document_BT[:, None, :]))[:, None]
        if implementation == "sdpa":
            return allowed
        return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill(
            ~allowed, torch.finfo(dtype).min
        )

    @staticmethod
    def _is_packed(given, attention_mask, position_ids) -> bool:
        """Whether position_ids restart (padding aside)."""
        if position_ids is None or position_ids.shape[-1] < 2 or torch.compiler.is_compiling():
            return False
        if attention_mask is not None and (attention_mask.dim() != 2 or FusedModel._padded(attention_mask)):
            return False
        return find_documents(*given.shape[:2], given.device, None, position_ids) is not None

    @staticmethod
    def _refuse_packed_cache(given, attention_mask, position_ids):
        """transformers lets packed documents see each other where a cache or an all-ones mask comes with them."""
        if FusedModel._is_packed(given, attention_mask, position_ids):
            raise ValueError(
                "hfpatch: expected one document a row where a KV cache is kept, position_ids that restart came; "
                "pass use_cache=False, which isolates the documents."
            )


def fuse(module: nn.Module, theirs: type, ours: type) -> None:
    """Gives `ours` to a module of class `theirs`, or to those that PEFT's modules_to_save wrapper holds."""
    copies = getattr(module, "modules_to_save", None)
    inside = [module.original_module, *copies.values()] if isinstance(copies, nn.ModuleDict) else [module]
    for inner in inside:
        if type(inner) is theirs and not runs_its_own_way(inner):
            inner.__class__ = ours


def runs_its_own_way(module: nn.Module) -> bool:
    """Whether another library has given this instance a forward or sharded weights, as tensor parallelism does."""
    return "forward" in vars(module) or hasattr(module.weight, "placements")


def is_fused_head(head: nn.Module) -> bool:
    """Whether calling `head` with labels gives the fused loss (also through PEFT's modules_to_save wrapper)."""
    copies = getattr(head, "modules_to_save", None)
    if isinstance(copies, nn.ModuleDict):
        active = getattr(head, "active_adapter", None)
        active = active[0] if isinstance(active, (list, tuple)) and active else active
        disabled = getattr(head, "disable_adapters", False) or active not in copies
        return isinstance(head.original_module if disabled else copies[active], Linear)
    return isinstance(head, Linear)


class FusedCausalLM:
    """The loss from hidden states, without logits. `_hfpatch_eval_logits`: "auto", True or False."""

    def forward(
        self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None,
        labels=None, use_cache=None, logits_to_keep=0, **kwargs,
    ):  # fmt: skip
        def stock():
            return super(FusedCausalLM, self).forward(
                input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids,
                past_key_values=past_key_values, inputs_embeds=inputs_embeds, labels=labels, use_cache=use_cache,
                logits_to_keep=logits_to_keep, **kwargs,
            )  # fmt: skip

        fuse(self.lm_head, nn.Linear, HEAD)  # resize_token_embeddings and PEFT make new ones
        if labels is not None and use_cache is None and past_key_values is None:
            use_cache = False
        if labels is None or not self._fused_loss_serves(logits_to_keep) or self._wants_logits(labels, kwargs):
            return stock()
        return_dict = kwargs.pop("return_dict", None)
        kwargs.pop("skip_logits", None)
        loss_options = {n: kwargs.pop(n) for n in ("num_items_in_batch", "ignore_index", "shift_labels") if n in kwargs}
        ignore = loss_options.get("ignore_index", -100)
        shifted = loss_options.get("shift_labels")
        target = labels if shifted is None else shifted
        count = None
        if target.device.type == "cuda" and not torch.compiler.is_compiling():
            first = 1 if shifted is None else 0
            count = ToHost(lambda labels: (labels[..., first:] != ignore).sum(), target)
        outputs = self.model(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids,
            past_key_values=past_key_values, inputs_embeds=inputs_embeds, use_cache=use_cache, return_dict=True, **kwargs,
        )  # fmt: skip
        loss = self.lm_head(
            outputs.last_hidden_state,
            labels=target.to(outputs.last_hidden_state.device),
            shift=shifted is None,
            ignore_index=ignore,
            num_items=loss_options.get("num_items_in_batch"),
            num_valid=None if count is None else int(count.get()),
            inplace_hidden=self._hidden_is_ours(outputs),
        )
        out = CausalLMOutputWithPast(
            loss=loss,
            logits=None,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
        if return_dict is None:
            return_dict = getattr(self.config, "return_dict", True)
        return out if return_dict else out.to_tuple()

    def _hidden_is_ours(self, outputs) -> bool:
        """Whether nobody else can hold the normed hidden states, so that their gradient may be written over them."""
        norm = self.model.norm
        seen = self.model._forward_hooks or norm._forward_hooks or outputs.hidden_states is not None
        return isinstance(norm, FusedRMSNorm) and not seen

    def _fused_loss_serves(self, logits_to_keep) -> bool:
        if not isinstance(logits_to_keep, int) or logits_to_keep != 0:
            return False
        if getattr(self.loss_function, "__name__", "") != "ForCausalLMLoss":
            return False
        if is_fused_head(self.lm_head):
            return True
        head = type(self.lm_head)
        if not getattr(self, "_hfpatch_head_told", False):
            self._hfpatch_head_told = True
            warnings.warn(
                f"hfpatch: the loss runs through whole logits, as lm_head is a {head.__module__}.{head.__name__}; "
                "leave lm_head a plain Linear to have the fused loss.",
                stacklevel=3,
            )
        return False

    def _wants_logits(self, labels, kwargs) -> bool:
        """In evaluation, beside a loss: as asked, else where they are small."""
        if self.training or kwargs.get("skip_logits"):
            return False
        setting = self._hfpatch_eval_logits
        if setting != "auto":
            return bool(setting)
        return labels.numel() * self.config.vocab_size * 4 <= EVAL_LOGITS_BYTES
