"""TRL's fused head through ops.linear_log_prob: `model(..., labels=, fused_lm_head=True)` of SFT, DPO, KTO, GRPO and RLOO.

TRL sets `model.forward` to a function of its own that runs the backbone and reads the head's weight. A patched model does the same
with our op, by a call of the head, and gives back what TRL's would: same fields, same meaning.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hfpatch import ops
from hfpatch.checkpoint.device import ToHost
from hfpatch.compat import autocast, autocast_dtype, trl_fused_head
from hfpatch.models.balance import balance, once
from hfpatch.models.head import through, why_not_fused

_FIELDS = {"log_probs": "log_prob", "entropy": "entropy", "log_sum_sq_probs": "sum_sq_prob", "mean_logits": "mean_logit",
           "is_top1": "is_top1"}  # fmt: skip


@dataclass(frozen=True)
class TrlHead:
    """What add_fused_lm_head was asked for. theirs: the forward that it made, bound; output: the class of what that returns."""

    theirs: object
    output: type
    outputs: tuple[str, ...]
    temperature: float
    scale: float
    softcap: float | None
    in_float32: bool
    backbone: str
    text_config: object

    @classmethod
    def of(cls, forward) -> "TrlHead | None":
        found = trl_fused_head(forward)
        return None if found is None else cls(forward, *found)


def why_theirs(asked: TrlHead, head: nn.Module) -> str | None:
    """None where our op computes what TRL's head would, else the reason why not."""
    if not 0.0 < asked.scale < float("inf"):
        return f"its logits are multiplied by {asked.scale}"
    # With cast_lm_head_to_fp32 GRPO gives the head a forward of its own, which TRL's fused head passes by.
    return why_not_fused(head, pass_forward=asked.in_float32)


def _score(hidden: Tensor, weight: Tensor, labels: Tensor, *, bias, in_float32: bool, **options):
    """linear_log_prob in the dtype of TRL's products."""
    device = hidden.device.type
    with autocast(device, enabled=autocast_dtype(device) is not None and not in_float32):
        if in_float32:
            hidden = hidden.float()
        if autocast_dtype(device) is None:
            weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
        return ops.linear_log_prob(hidden, weight, labels, bias=bias, **options)


def log_probs(model: nn.Module, head: nn.Module, asked: TrlHead, kwargs: dict):
    """TRL's FusedCausalLMOutput of one call with fused_lm_head=True, whose other arguments are `kwargs`."""
    labels, shifted, num_items = (kwargs.pop(n, None) for n in ("labels", "shift_labels", "num_items_in_batch"))
    shift, target = shifted is None, labels if shifted is None else shifted
    first = int(shift)
    compiling = torch.compiler.is_compiling()
    count = None if compiling else ToHost(lambda target: (target[..., first:] != -100).sum(), target)
    kwargs["use_cache"] = False
    if getattr(asked.text_config, "output_router_logits", False):
        kwargs.setdefault("output_router_logits", True)
    with model._read_where_labelled(target, first, -100, kwargs):
        out = getattr(model, asked.backbone)(**kwargs)
    hidden = out.last_hidden_state
    target = target.to(hidden.device)
    mask = target[..., first:] != -100
    names = ("log_probs", *(n for n in _FIELDS if n in asked.outputs and n != "log_probs"))
    scored = through(
        head, _score, hidden, target, in_float32=asked.in_float32, temperature=asked.temperature, scale=asked.scale,
        softcap=asked.softcap, outputs=tuple(_FIELDS[n] for n in names), shift=shift,
        num_valid=count.number() if count is not None and target.device.type == "cuda" else None,
        inplace_hidden=model._hidden_is_ours(kwargs),
    )  # fmt: skip
    fields = {n: getattr(scored, _FIELDS[n])[..., : mask.shape[-1]] for n in names}
    fields |= {n: x.float() for n, x in fields.items() if n != "is_top1"}  # as TRL's, also of a float64 model
    if "log_sum_sq_probs" in fields:
        fields["log_sum_sq_probs"] = fields["log_sum_sq_probs"].detach().log().masked_fill(~mask, 0.0)
    if "mean_logits" in fields:
        fields["mean_logits"] = fields["mean_logits"].detach()
    loss = -fields["log_probs"].sum() / (mask.sum().clamp(min=1) if num_items is None else num_items)
    aux_loss = None
    if kwargs.get("output_router_logits"):
        aux_loss = _balance(model, asked.text_config, out.router_logits, kwargs.get("attention_mask"))
        loss = loss + getattr(asked.text_config, "router_aux_loss_coef", 0.0) * aux_loss
        aux_loss = once(aux_loss)
    return asked.output(loss=loss, label_mask=mask, aux_loss=aux_loss, **fields)


def _balance(model: nn.Module, config, router_logits, attention_mask) -> Tensor:
    """The load-balancing loss of experts, whose numbers stand on some models and in other models' configs."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    number, used = (getattr(model, n, None) or getattr(config, n) for n in ("num_experts", "num_experts_per_tok"))
    return balance(load_balancing_loss_func, router_logits, number, used, attention_mask)
