"""Any decoder layer, tile by tile: its own forward is asked for the part before its attention and for the part after it.

Nothing here knows a family. `Ask` is what checkpoint/layer.py is given; `TiledLayer` is mixed over a layer's class.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers.cache_utils import Cache

from hfpatch.checkpoint.layer import tiled_layer
from hfpatch.checkpoint.whole import offloaded_checkpoint
from hfpatch.compat import collected_now, collecting
from hfpatch.models.answers import Answers, rope_of
from hfpatch.models.asking import Answering, Asked, Noting, Stopped, asking, here, our_attention
from hfpatch.models.dead import without_values
from hfpatch.models.masks import Batch
from hfpatch.models.parts import FusedAttention, FusedRMSNorm, rotation
from hfpatch.ops.attention import Pattern, supported

_CAPTURING = "transformers.utils.output_capturing"
ASKED_TOKENS = 12  # of a batch, where a layer is asked at its first call
_RECORDED_INSIDE = ("router_logits",)  # recorded per token by modules behind the attention


@dataclass(frozen=True)
class _Call:
    """What one call of attention was asked for."""

    scale: float
    pattern: Pattern
    sinks_H: Tensor | None


# --- the arguments of a layer, cut along tokens -------------------------------------------------------------------------


def _token_axis(x, B: int, T: int) -> int | None:
    """The axis of an argument that counts tokens: [B, T, ...] first, then [..., T, E], then [..., T]."""
    if not isinstance(x, Tensor) or x.dim() == 0 or T not in x.shape:
        return None
    if x.dim() > 1 and x.shape[0] in (1, B) and x.shape[1] == T:
        return 1
    for axis in (-2, -1, 0, 1):
        if x.dim() >= abs(axis) and axis < x.dim() and x.shape[axis] == T:
            return axis % x.dim()
    return next(i for i, n in enumerate(x.shape) if n == T)


class Arguments:
    """Positional and keyword arguments beside the hidden states; `tile` cuts those that have a token axis."""

    def __init__(self, args, kwargs, B: int, T: int):
        self.leaves, self.spec = pytree.tree_flatten((args, kwargs))
        self.axes = [_token_axis(x, B, T) for x in self.leaves]
        self.kwargs, self.T = kwargs, T

    def tile(self, a: int, b: int):
        """(args, kwargs) of tokens a to b."""
        if (a, b) == (0, self.T):
            return pytree.tree_unflatten(self.leaves, self.spec)
        leaves = [x if axis is None else x.narrow(axis, a, b - a) for x, axis in zip(self.leaves, self.axes)]
        return pytree.tree_unflatten(leaves, self.spec)


# --- asking -------------------------------------------------------------------------------------------------------------


@dataclass
class Ask:
    """`pre` and `post` of one call of a layer, for tiles of its tokens.

    asked: what each attention call asked for, as of the last `pre`; returns_tuple: whether the layer returns its output alone or
    as the first of a tuple; records: what transformers records inside the layer besides (router logits), by key.
    """

    layer: nn.Module
    arguments: Arguments
    answers: Answers
    configs: tuple
    batch: object
    forward: object = None  # the layer's own, where it is not a TiledLayer yet
    asked: list[_Call] = field(default_factory=list)
    returns_tuple: bool = False
    records: tuple[str, ...] = ()
    recorded: list = field(default_factory=list)  # (key, dimensions) of each of them

    def _forward(self, x_BtD: Tensor, a: int, b: int):
        args, kwargs = self.arguments.tile(a, b)
        with our_attention(self.configs, self.batch):
            return (self.forward or self.layer.stock_forward)(x_BtD, *args, **kwargs)

    def pre(self, x_BtD: Tensor, a: int, b: int, dead: bool = False) -> list[Tensor]:
        """q [B, t, H, E], k [B, t, K, E], v [B, t, K, E_v] of each attention call.

        dead: the values of Answers.dead_pre are not computed. RuntimeError where the layer does not reach its attention.
        """
        with without_values(self.layer, self.answers.dead_pre if dead else (), device=x_BtD.device.type):
            if self.answers.block:
                return self._block_pre(x_BtD, a, b)
            note = Noting(len(self.answers.attention))
            try:
                with asking(note):
                    self._forward(x_BtD, a, b)
            except Stopped:
                pass
            else:
                raise RuntimeError(
                    f"hfpatch: expected {type(self.layer).__name__} to call attention {note.n_calls} times, "
                    f"{len(note.calls)} came; use apply(model, checkpointing='off')."
                )
        self.asked = [_Call(c.scale, c.pattern(), c.sinks_H) for c in note.calls]
        return [x.transpose(1, 2) for c in note.calls for x in (c.q_BHTE, c.k_BKTE, c.v_BKTE)]

    def post(self, x_BtD: Tensor, outs_BtHE: list[Tensor], a: int, b: int, dead: bool = False) -> list[Tensor]:
        """The layer's output for a tile of its input and of the attention outputs [B, t, H, E_v], one a call.

        Behind it what was recorded on the way, each as [B, t, ...].
        """
        found = {key: [] for key in self.records}
        idle = self.answers.dead_post if dead else ()
        with without_values(self.layer, idle, device=x_BtD.device.type), collecting(found):
            if self.answers.block:
                y = self._block_post(x_BtD, outs_BtHE[0])
            else:
                with asking(Answering(outs_BtHE)):
                    y = self._forward(x_BtD, a, b)
        self.returns_tuple = isinstance(y, tuple)
        self.recorded = [(key, x.dim()) for key, xs in found.items() for x in xs]
        extras = [self._by_rows(x, x_BtD) for xs in found.values() for x in xs]
        return [y[0] if self.returns_tuple else y, *extras]

    @staticmethod
    def _by_rows(recorded: Tensor, x_BtD: Tensor) -> Tensor:
        """Recorded over flattened tokens [B*t, ...] or not: [B, t, ...]."""
        B, t = x_BtD.shape[:2]
        return (
            recorded.unflatten(0, (B, t)) if recorded.shape[0] == B * t and recorded.shape[:2] != (B, t) else recorded
        )

    def hand_on(self, extras: list[Tensor], into: dict) -> None:
        """Adds what was recorded, joined along tokens, to transformers' lists, in the shape it had."""
        for (key, dims), x in zip(self.recorded, extras):
            into[key].append(x.flatten(0, 1) if x.dim() > dims else x)

    # The commonest block (norm, attention, norm, MLP, nothing beside) without what lies around it, and with the residual
    # added in the second norm's pass: the same modules called in the same order, bit for bit what the layer answers.

    def _block_pre(self, x_BtD: Tensor, a: int, b: int) -> list[Tensor]:
        attn = self.layer.self_attn
        h = self.layer.input_layernorm(x_BtD)
        shape = (*h.shape[:-1], -1, attn.head_dim)
        q, k, v = (p(h).view(shape) for p in (attn.q_proj, attn.k_proj, attn.v_proj))
        if hasattr(attn, "q_norm"):
            q, k = attn.q_norm(q), attn.k_norm(k)
        cos, sin = self.arguments.kwargs["position_embeddings"]
        rotate = rotation(attn._hfpatch_base) if isinstance(attn, FusedAttention) else rope_of(attn)
        q, k = rotate(q.transpose(1, 2), k.transpose(1, 2), cos[:, a:b], sin[:, a:b])
        mask = self.arguments.kwargs.get("attention_mask")
        pattern = Pattern() if mask is None else mask.pattern()
        self.asked = [_Call(attn.scaling, pattern, None)]
        return [q.transpose(1, 2), k.transpose(1, 2), v]

    def _block_post(self, x_BtD: Tensor, out_BtHE: Tensor) -> Tensor:
        layer = self.layer
        h, norm = layer.self_attn.o_proj(out_BtHE.flatten(2)), layer.post_attention_layernorm
        if isinstance(norm, FusedRMSNorm) and "forward" not in vars(
            norm
        ):  # use_kernels sets one whenever train() or eval() is called
            normed, total = norm(h, residual=x_BtD)
        else:
            total = x_BtD + h
            normed = norm(total)
        return total + layer.mlp(normed)


# --- the layer ----------------------------------------------------------------------------------------------------------


def _run_directly(function, *args, **kwargs):
    return function(*args, **kwargs)


class TiledLayer:
    """Mixed over a decoder layer's class: tile by tile where that is exact, else whole with its input offloaded.

    `_hfpatch_session`: the model's checkpoint.session.Session; `_hfpatch_answers`: its kind's Answers, None where it is to be
    asked at its first call, by `_hfpatch_asks` (models.probe.ask_layer).
    """

    @property
    def _gradient_checkpointing_func(self):
        # transformers sets one whenever checkpointing is turned on; the session takes its place.
        return _run_directly

    @_gradient_checkpointing_func.setter
    def _gradient_checkpointing_func(self, function):
        vars(self)["_gradient_checkpointing_func"] = function  # theirs again after undo()

    def stock_forward(self, *args, **kwargs):
        """The layer as transformers has it."""
        return super().forward(*args, **kwargs)

    def why_not_tiled(self, x: Tensor, mask) -> str | None:
        """None where this layer can run tile by tile now, else the reason."""
        answers = self._hfpatch_answers
        if answers.reason:
            return answers.reason
        attentions = [self.get_submodule(name) for name in answers.attention]
        for attn in attentions:
            kind = getattr(attn, "_hfpatch_base", type(attn))
            if kind.__module__.partition(".")[0] != self._hfpatch_base.__module__.partition(".")[0]:
                return f"a {kind.__module__}.{kind.__name__} around its attention"
            if self.training and (getattr(attn, "attention_dropout", 0.0) or 0.0):
                return "attention dropout"
        for name in {n for path in answers.attention for n in _ancestors(path)}:
            if _has_hooks(self.get_submodule(name)):
                return f"hooks on {name}"
        if mask is not None:
            for attn in attentions:
                reason = Asked(attn, x[:, :, None], x[:, :, None], x[:, :, None], mask, 1.0).why_not_tiled()
                if reason:
                    return reason
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        pattern = Pattern() if mask is None else mask.pattern()
        heads = [getattr(attn, "head_dim", 0) or 0 for attn in attentions]
        return supported(max(heads, default=0), dtype, x.device, pattern)

    def __call__(self, hidden_states, *args, **kwargs):
        if torch.is_grad_enabled() and not hidden_states.requires_grad and self._under_zero3:
            # DeepSpeed reduces a leaf module's gradients in its backward hook, which PyTorch runs before the module's
            # backward where no input wants a gradient (the first layer under LoRA).
            hidden_states = hidden_states.detach().requires_grad_(True)
        return super().__call__(hidden_states, *args, **kwargs)

    @property
    def _under_zero3(self) -> bool:
        return any(hasattr(p, "ds_id") for p in self.parameters())

    def forward(self, hidden_states, *args, **kwargs):
        x, session, batch = hidden_states, self._hfpatch_session, here.batch
        if torch.compiler.is_compiling() or here.role is not None:
            return super().forward(x, *args, **kwargs)
        cache = _cache_of(args, kwargs)
        if batch is None and not here.declined and kwargs.get("attention_mask") is None and x.dim() == 3:
            # Called by hand: without a mask these take every row for one causal sequence.
            known = {c._attn_implementation for c in self._hfpatch_configs}
            batch = Batch(*x.shape[:2], x.device) if known <= {"sdpa", "flash_attention_2"} else None
        if batch is not None and cache is None and x.dim() == 3 and not batch.weights:
            mask = kwargs.get("attention_mask")
            if self._hfpatch_answers is None:
                n = min(x.shape[1], ASKED_TOKENS)
                few_args, few_kwargs = Arguments(args, kwargs, *x.shape[:2]).tile(0, n)
                with collecting(
                    {}
                ):  # what the layer records while it is asked (router logits) is no part of this forward
                    self._hfpatch_answers = self._hfpatch_asks(
                        self, self.stock_forward, x[:, :n], few_args, few_kwargs, self._hfpatch_configs, batch
                    )
            if self.why_not_tiled(x, mask) is None:
                arguments = Arguments(args, kwargs, *x.shape[:2])
                lists = collected_now()
                records = tuple(key for key in lists if key in _RECORDED_INSIDE)
                ask = Ask(self, arguments, self._hfpatch_answers, self._hfpatch_configs, batch, records=records)
                y, *extras = tiled_layer(session, ask, x)
                ask.hand_on(extras, lists)
                return (y,) if ask.returns_tuple else y
        if not (self.training and torch.is_grad_enabled()) or kwargs.get("output_attentions"):
            return super().forward(x, *args, **kwargs)
        if cache is not None:
            if cache.get_seq_length():
                return super().forward(x, *args, **kwargs)
            # Models make an empty cache in training too; running a layer again would write its keys twice.
            args = [None if isinstance(a, Cache) else a for a in args]
            kwargs = {n: None if isinstance(a, Cache) else a for n, a in kwargs.items()}
        if kwargs.get("use_cache"):
            kwargs["use_cache"] = False

        def run(h):
            # Again in backward, when the model's forward has long gone.
            with our_attention(self._hfpatch_configs if batch is not None else (), batch):
                return super(TiledLayer, self).forward(h, *args, **kwargs)

        return offloaded_checkpoint(session, run, x)


def _ancestors(path: str) -> list[str]:
    """a.b.c -> a, a.b, a.b.c"""
    parts = path.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _has_hooks(module: nn.Module) -> bool:
    """Whether somebody watches this module, transformers' own recorders (which a tiled call serves otherwise) left out."""
    forward = (h for h in module._forward_hooks.values() if getattr(h, "__module__", None) != _CAPTURING)
    others = module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return any(forward) or bool(others) or hasattr(module, "_hf_hook")


def _cache_of(args, kwargs):
    return next((a for a in (*args, *kwargs.values()) if isinstance(a, Cache)), None)
