"""TRL's fused head through ops.linear_log_prob: `model(..., labels=, fused_lm_head=True)`.

TRL's SFT, DPO, KTO, GRPO and RLOO trainers set `model.forward` to a function that runs the backbone
and reads the head's weight. A patched model runs our op inside a call of the head, and returns the
same fields with the same meaning.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hfpatch import ops
from hfpatch.compat import autocast, autocast_dtype, trl_fused_head
from hfpatch.loss.head import through, why_not_fused
from hfpatch.store.device import on_host

_FIELDS = {
    "log_probs": "log_prob",
    "entropy": "entropy",
    "log_sum_sq_probs": "sum_sq_prob",
    "mean_logits": "mean_logit",
    "is_top1": "is_top1",
}


@dataclass(frozen=True)
class TrlHead:
    """The arguments of TRL's add_fused_lm_head.

    theirs: the bound forward that TRL made. output: the class that this forward returns.
    """

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
        settings = trl_fused_head(forward)
        return None if settings is None else cls(forward, *settings)


def why_theirs(trl: TrlHead, head: nn.Module) -> str | None:
    """Why TRL's own head must run, or None where our op computes the same."""
    if not 0.0 < trl.scale < float("inf"):
        return f"its logits are multiplied by {trl.scale}"
    # With cast_lm_head_to_fp32 GRPO sets a forward on the head; TRL's fused head does not call it.
    return why_not_fused(head, pass_forward=trl.in_float32)


def _score(hidden: Tensor, weight: Tensor, labels: Tensor, *, bias, in_float32: bool, **options):
    """linear_log_prob, computed in the dtype of TRL's matmul."""
    device = hidden.device.type
    with autocast(device, None if in_float32 else autocast_dtype(device)):
        if in_float32:
            hidden = hidden.float()
        if autocast_dtype(device) is None:
            weight = weight.to(hidden.dtype)
            bias = bias.to(hidden.dtype) if bias is not None else None
        return ops.linear_log_prob(hidden, weight, labels, bias=bias, **options)


def log_probs(model: nn.Module, head: nn.Module, trl: TrlHead, kwargs: dict):
    """TRL's FusedCausalLMOutput for one call with fused_lm_head=True.

    Args:
        model: the patched causal model.
        head: its head.
        trl: the arguments of the trainer's add_fused_lm_head.
        kwargs: the other arguments of the call.

    Returns:
        An instance of trl.output. Each field is [B, T - 1], or [B, T] for shift_labels.
    """
    # [Step 1] Read the labels. On a GPU they are counted here, before the layers run, as the CPU
    # waits for the count.
    labels = kwargs.pop("labels", None)
    target = kwargs.pop("shift_labels", None)
    num_items = kwargs.pop("num_items_in_batch", None)
    first = 0
    if target is None:
        target = labels
        first = 1  # the op shifts
    count = None
    if target.is_cuda and not torch.compiler.is_compiling():
        count = on_host((target[..., first:] != -100).sum())
    # [Step 2] Run the layers.
    kwargs["use_cache"] = False
    if getattr(trl.text_config, "output_router_logits", False):
        kwargs.setdefault("output_router_logits", True)
    with model._read_where_labelled(target, -100, kwargs):
        out = getattr(model, trl.backbone)(**kwargs)
    # [Step 3] Run our op inside a call of the head.
    hidden = out.last_hidden_state  # [B, T, D]
    target = target.to(hidden.device)
    mask = target[..., first:] != -100  # [B, T - 1], or [B, T] for shift_labels
    names = [n for n in _FIELDS if n in ("log_probs", *trl.outputs)]
    scored = through(
        head, _score, hidden, target, in_float32=trl.in_float32, temperature=trl.temperature,
        scale=trl.scale, softcap=trl.softcap, outputs=tuple(_FIELDS[n] for n in names),
        shift=first == 1, num_valid=None if count is None else int(count),
    )  # fmt: skip
    # [Step 4] Turn the op's outputs into TRL's fields.
    fields = {}
    for name in names:
        x = getattr(scored, _FIELDS[name])[..., : mask.shape[-1]]
        if name != "is_top1":
            x = x.float()  # as TRL does, also for float64 models
        if name == "log_sum_sq_probs":
            x = x.detach().log().masked_fill(~mask, 0.0)
        fields[name] = x.detach() if name == "mean_logits" else x
    # [Step 5] Compute the loss, and the balancing loss of experts if it is asked for.
    if num_items is None:
        num_items = mask.sum().clamp(min=1)
    loss = -fields["log_probs"].sum() / num_items
    aux_loss = None
    if kwargs.get("output_router_logits"):
        visible = kwargs.get("attention_mask")
        aux_loss = _balance(model, trl.text_config, out.router_logits, visible)
        loss = loss + getattr(trl.text_config, "router_aux_loss_coef", 0.0) * aux_loss
    return trl.output(loss=loss, label_mask=mask, aux_loss=aux_loss, **fields)


def _balance(model: nn.Module, config, router_logits, attention_mask) -> Tensor:
    """The load-balancing loss. The number of experts is on the model or on its config."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    number, used = (
        getattr(model, name, None) or getattr(config, name)
        for name in ("num_experts", "num_experts_per_tok")
    )
    return load_balancing_loss_func(router_logits, number, used, attention_mask)
