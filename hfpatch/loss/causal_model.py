"""The loss of any causal language model from its hidden states, without logits.

The model's own forward runs. Its call of the head returns lazy logits (logits.py). Its call of the
loss function calls the head once, with the fused loss as the head's `forward` (head.py), so engine
hooks around that call gather the weight.
"""

import warnings
import weakref
from dataclasses import fields
from functools import cache, partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.utils import ModelOutput

from hfpatch.budget.policy import LOSS_WORKSPACE
from hfpatch.compat import (
    cache_name,
    context_parallel,
    modules_of,
    own_loss,
    set_own_loss,
    values_for_now,
)
from hfpatch.context.classes import KeepsSignature, is_watched
from hfpatch.context.current import Labelled, asks_for, current, having
from hfpatch.layer.traits import runtimes_in
from hfpatch.loss.head import WHOLE, why_whole_logits
from hfpatch.loss.log_probs import TrlHead, log_probs, why_theirs
from hfpatch.loss.logits import USED, Head, Logits
from hfpatch.report import say
from hfpatch.store.device import on_host

_NONE = (
    "outputs.logits is None, as the loss was computed without logits; "
    "hfpatch.apply(model, logits=True) returns them."
)
_say_once = cache(say)
# In evaluation, logits="auto" returns logits with the loss where all copies of them together stay
# below this.
EVAL_LOGITS_BYTES = 2 << 30
BYTES_OF_A_LOGIT = 10  # 16 bits, a float32 copy by transformers and one by its loss


def _labelled(target, ignore: int, kwargs, watched: bool) -> Labelled:
    """The labels of a forward, and the tokens whose outputs its loss does not read: neither the
    token nor the next one has a label. watched: other code may read their outputs."""
    idle_BT = current.labelled.idle_BT
    mask = kwargs.get("attention_mask")
    # A mask of another length is cut or filled to the tokens' (decoder/batch.py).
    by_rows = isinstance(mask, Tensor) and mask.dim() == 2 and len(mask) == len(target)
    if by_rows and target.dim() == 2:
        labelled = target != ignore
        idle_BT = ~(labelled | nn.functional.pad(labelled[:, 1:], (0, 1)))
    return Labelled(target, idle_BT, watched)


def _pooled(model, kwargs) -> Labelled | None:
    """The tokens that transformers' classifier of rows leaves unread: all but the last one of each
    row that is not the padding's id. None for other models."""
    ids = kwargs.get("input_ids")
    classifies = type(model)._hfpatch_code is GenericForSequenceClassification.forward
    if not classifies or not isinstance(ids, Tensor):
        return None
    at_T = torch.arange(ids.shape[-1], device=ids.device)
    last_B = ((ids != model.config.get_text_config().pad_token_id) * at_T).argmax(-1)
    idle_BT = at_T != last_B[..., None]
    return current.labelled._replace(idle_BT=idle_BT, watched=is_watched(model, kwargs))


def _as_called(model, kwargs, **outer) -> dict:
    """The caller's arguments for the decoder: positions, whether the caller passed neither a cache
    nor use_cache, and labels, unless the fused loss has noted them.

    Some families drop the positions (Mamba, Bloom); some create a cache in between (Idefics).
    """
    uncached = kwargs.get(cache_name(kwargs)) is None and kwargs.get("use_cache") is None
    outer["uncached"] = current.outer.uncached or uncached
    if kwargs.get("position_ids") is not None:
        outer["positions"] = kwargs["position_ids"]
    target = kwargs.get("labels")
    mask = kwargs.get("attention_mask")
    labelled = _pooled(model, kwargs)
    if labelled is None:
        labelled = current.labelled
        if labelled.labels is None and isinstance(target, Tensor):
            labelled = _labelled(target, kwargs.get("ignore_index", -100), kwargs, watched=True)
    if kwargs.get("start_positions") is not None and isinstance(mask, Tensor):
        # An answer competes with all tokens.
        labelled = current.labelled._replace(idle_BT=torch.zeros_like(mask).bool(), watched=True)
    return {"outer": current.outer._replace(**outer), "labelled": labelled}


class TellsPositions(KeepsSignature):
    """For models that keep their own loss: hands positions and labels on to the decoder, which
    isolates packed documents, and computes padding that the loss reads as transformers does."""

    def _hfpatch_forward(self, kwargs):
        return self._hfpatch_stock(kwargs)

    def _hfpatch_stock(self, kwargs, **outer):
        if torch.compiler.is_compiling():
            return super().forward(**kwargs)
        with having(**_as_called(self, kwargs, **outer)):
            return super().forward(**kwargs)


class FusedCausalLM(TellsPositions):
    """Swapped in for a causal language model's class.

    Attributes:
        _hfpatch_head_name: the attribute that holds the head.
        _hfpatch_logits: "auto", True or False.
        _hfpatch_trl: the TrlHead of the trainer's own head, or None.
        _hfpatch_report: the Report of `apply`, or None.
        _hfpatch_options: the options that `apply` got.
        _hfpatch_holder: path of the inner model that holds the head, for a model that computes only
            the loss (Llama 4 with images).
    """

    # Defaults for an instance that apply() has not seen: it behaves as transformers' class.
    _hfpatch_head_name = _hfpatch_report = _hfpatch_trl = None
    _hfpatch_holder = ""
    _hfpatch_logits = "auto"

    def __setstate__(self, state):
        super().__setstate__(state)
        for runtime in runtimes_in(self):
            runtime.owner = weakref.ref(self)

    @property
    def loss_function(self):
        if current.target and current.target[0] is self:
            return self._hfpatch_loss
        stock = type(self)._hfpatch_base.loss_function is PreTrainedModel.loss_function
        if torch.compiler.is_compiling() and stock:  # dynamo cannot trace it behind this property
            return own_loss(self) or LOSS_MAPPING.get(
                getattr(self, "loss_type", None), ForCausalLMLoss
            )
        return super().loss_function

    @loss_function.setter
    def loss_function(self, value):
        set_own_loss(self, value)

    def __setattr__(self, name, value):
        """TRL's trainers assign `model.forward = ...`, a forward with TRL's own fused head. Such an
        assignment is caught: the model keeps this class's forward, which returns the same fields,
        and only notes what TRL asked for. Every other assignment is made.
        """
        head = TrlHead.of(value) if name == "forward" else None
        if head is None:  # also TRL's, if its closure has other names
            return super().__setattr__(name, value)
        vars(self)["_hfpatch_trl"] = head

    def _hfpatch_head(self) -> nn.Module:
        return modules_of(self.get_submodule(self._hfpatch_holder))[self._hfpatch_head_name]

    def _hfpatch_stock(self, kwargs):
        embeds = None if asks_for("output_hidden_states", self, kwargs) else self
        return super()._hfpatch_stock(kwargs, causal=True, embeds=embeds)

    def _hfpatch_forward(self, kwargs):
        if self._hfpatch_head_name is None:
            return super().forward(**kwargs)
        labels = kwargs.get("labels")
        # The outputs of TRL's head.
        if self._hfpatch_trl is not None and kwargs.pop("fused_lm_head", False):
            return self._hfpatch_log_probs(kwargs)
        if labels is not None and self._loss_is_fused(labels, kwargs):
            return self._hfpatch_fused(labels, kwargs)
        elsewhere = labels is None and "shift_labels" in kwargs and self.training
        if elsewhere and not torch.compiler.is_compiling() and context_parallel():
            self._tell(
                "context parallelism needs the model's own loss, got compute_loss_func or label "
                "smoothing, whose labels end with each GPU's part. Leave it out, or set cp_size=1."
            )
        return self._hfpatch_stock(kwargs)

    # Dynamo cannot trace lazy logits: the graph breaks here and resumes inside, at the backbone.
    @partial(torch.compiler.disable, recursive=False)
    def _hfpatch_fused(self, labels, kwargs):
        """The forward with the fused loss.

        Within it, a stand-in for the head lies in the holder's `__dict__`, where attribute access
        finds it before the module of that name, and `loss_function` is `_hfpatch_loss`.
        """
        kwargs.pop("skip_logits", None)
        target = kwargs.get("shift_labels")
        if target is None:
            target = labels
        ignore = kwargs.get("ignore_index", -100)
        # On a CPU the op counts the labels itself.
        count = on_host((target != ignore).sum()) if target.is_cuda else None
        holder = vars(self.get_submodule(self._hfpatch_holder))
        head = Head(self._hfpatch_head())
        with (
            values_for_now([(holder, self._hfpatch_head_name, head)]),
            having(target=(self, target, ignore, count)),
            self._read_where_labelled(target, ignore, kwargs),
        ):
            out = self._hfpatch_stock(kwargs)
        return _answered(out)

    @torch.compiler.disable
    def _read_where_labelled(self, target, ignore: int, kwargs):
        """A context that holds the labels, and the tokens whose outputs are unread.

        A token's output is unread if neither the token nor the next one has a label.
        """
        return having(labelled=_labelled(target, ignore, kwargs, is_watched(self, kwargs)))

    def _hfpatch_log_probs(self, kwargs):
        """The outputs of TRL's fused head, from our op where both compute the same."""
        head = self._hfpatch_head()
        trl = self._hfpatch_trl
        reason = why_theirs(trl, head)
        if reason is not None:
            self._tell(
                f"TRL's own fused head runs, as {reason}; leave lm_head a plain Linear to have "
                "hfpatch's."
            )
            return trl.theirs(fused_lm_head=True, **kwargs)
        return log_probs(self, head, trl, kwargs)

    @torch.compiler.disable
    def _hfpatch_loss(
        self,
        logits,
        labels,
        vocab_size,
        num_items_in_batch=None,
        ignore_index=-100,
        shift_labels=None,
        **kwargs,
    ):
        """ForCausalLMLoss of these arguments: what the class's forward passes decides."""
        aligned = labels if shift_labels is None else shift_labels
        if not isinstance(logits, Logits):
            self._tell(WHOLE.format(USED))
        elif logits.takes(aligned, vocab_size, shifts=shift_labels is None):
            _, target, ignored, count = current.target
            counted = count is not None and aligned is target and ignore_index == ignored
            loss = logits.cross_entropy(
                aligned.to(logits.device).reshape(logits.shape[:-1]),
                shift=shift_labels is None,
                ignore_index=ignore_index,
                num_items=num_items_in_batch,
                num_valid=int(count) if counted else None,
                workspace_bytes=LOSS_WORKSPACE,
            )
            return as_stock(loss)
        return ForCausalLMLoss(
            logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs
        )

    def _loss_is_fused(self, labels, kwargs) -> bool:
        """Whether a forward with these labels computes the loss without logits.

        It does if the loss is transformers' own, the head can be called with the fused loss as its
        forward, and the caller gets no logits.
        """
        keep = kwargs.get("logits_to_keep", 0)
        if not isinstance(keep, int) or keep != 0:
            return False
        reason = why_whole_logits(self, self._hfpatch_head())
        if reason is not None:
            self._tell(WHOLE.format(reason))
            return False
        if kwargs.get("skip_logits"):
            return True
        if self._hfpatch_logits != "auto":
            return not self._hfpatch_logits
        # In evaluation small logits are returned.
        columns = self.config.get_text_config().vocab_size
        return self.training or labels.numel() * columns * BYTES_OF_A_LOGIT > EVAL_LOGITS_BYTES

    def _tell(self, words: str) -> None:
        """Warns, and adds a line to the report, once per message."""
        if words not in vars(self).setdefault("_hfpatch_warned", set()):
            self._hfpatch_warned.add(words)
            if self._hfpatch_report is not None:
                self._hfpatch_report.notes.append(words)
            warnings.warn(f"hfpatch: {words}", stacklevel=5)


def as_stock(loss: Tensor) -> Tensor:
    """The loss as float32, the dtype of transformers' loss for any model, float64 models too."""
    return loss.float()


@torch.compiler.disable
def _answered(out):
    """A forward's output without the logits that nothing computed."""
    value = lambda x: x.computed if isinstance(x, Logits) else x  # noqa: E731
    if type(out) is tuple:
        return tuple(map(value, out))
    if not isinstance(out, dict) or not any(isinstance(x, Logits) for x in out.values()):
        return out
    kind = _telling(type(out)) if isinstance(out, ModelOutput) else type(out)
    return kind(**{n: value(x) for n, x in out.items()})


@cache
def _telling(kind: type) -> type:
    """A class of outputs that says so when code reads `logits` and they are None.

    They stay None, as ms-swift asks `outputs.logits is not None`. They are no field of the
    dataclass, so copies that accelerate, FSDP and deepcopy make do not read them.
    """
    own = {
        "logits": property(_read_logits, lambda self, value: vars(self).update(logits=value)),
        "__dataclass_fields__": {f.name: f for f in fields(kind) if f.name != "logits"},
        "__reduce__": lambda self: kind(**self).__reduce__(),
    }
    return type(kind.__name__, (kind,), own)


def _read_logits(out):
    logits = vars(out).get("logits")
    return _say_once(_NONE) if logits is None else logits  # it returns None
