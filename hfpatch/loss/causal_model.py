"""The loss of any causal language model from its hidden states, without logits.

The model's own forward runs. Where it calls its head, it gets lazy logits (logits.py). Where it
calls its loss function, the head is called once, with the fused loss as its `forward` (head.py), so
the hooks of engines around that call gather the weight.
"""

import math
import sys
import warnings
import weakref
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast

from hfpatch import ops
from hfpatch.budget.policy import LOSS_WORKSPACE
from hfpatch.compat import (
    caller_reads_logits,
    context_parallel,
    forward_hooks,
    hooks_on_all,
    modules_in,
    modules_of,
    own_loss,
    set_own_loss,
    step_under_ulysses,
    watched_by_user,
)
from hfpatch.context.classes import KeepsSignature, as_made, is_mixed, whose
from hfpatch.context.current import asks_for_hidden_states, current, having
from hfpatch.context.ranks import items_of_a_mean_over_rows, sequence_now
from hfpatch.context.router_balance import counted, once
from hfpatch.loss.head import reads_logits, through, why_not_fused
from hfpatch.loss.log_probs import TrlHead, log_probs, why_theirs
from hfpatch.loss.logits import Head, Logits
from hfpatch.loss.shared_rows import evaluated_by_ranks, unlabelled
from hfpatch.parts.parts import FusedRMSNorm
from hfpatch.store.device import ToHost, beside

_WHOLE = (
    "the loss runs through whole logits, as {}; leave lm_head a plain Linear and the loss "
    "transformers' own for a fused one."
)
_NOT_ITS_LOSS = (
    "expected the model's own loss under {} parallelism, {} came, which transformers {} there; "
    "take it away, or share no rows "
    "({}_size=1)."
)
_LABELS_TAKEN_OUT = (
    "compute_loss_func or label smoothing",
    "gives labels that end with each GPU's part",
)
# logits="auto" returns, in evaluation, logits beside a loss where all their copies together stay
# below this.
EVAL_LOGITS_BYTES = 2 << 30
BYTES_OF_A_LOGIT = 10  # 16 bits, a float32 copy by transformers and one by its loss


def not_its_own_loss(model: nn.Module) -> str | None:
    """None where the model's loss is transformers' causal one, else a phrase that names it."""
    own = own_loss(model)
    if own is not None:
        return None if own is ForCausalLMLoss else "the model has a loss function of its own"
    kind = getattr(model, "loss_type", None)
    if LOSS_MAPPING.get(kind or "ForCausalLM", ForCausalLMLoss) is not ForCausalLMLoss:
        return f"its loss is {kind}"
    return None


def _told(kwargs):
    """A context that hands the causal model's positions and its lack of a cache to the decoder.

    Some families drop the positions (Mamba, Bloom); some create a cache in between (Idefics).
    """
    given = kwargs.get("position_ids")
    uncached = (
        current.uncached
        or kwargs.get("past_key_values") is None
        and kwargs.get("use_cache") is None
    )
    return having(positions=current.positions if given is None else given, uncached=uncached)


class TellsPositions(KeepsSignature):
    """For causal models that keep their own loss: passes positions on, so packed documents stay
    apart."""

    def _hfpatch_forward(self, args, kwargs):
        kwargs |= zip(self._hfpatch_positional, args)
        if torch.compiler.is_compiling():
            return super().forward(**kwargs)
        with _told(kwargs):
            return super().forward(**kwargs)


class FusedCausalLM(KeepsSignature):
    """Swapped in for a causal language model's class.

    Attributes:
        _hfpatch_head_name: the attribute that holds the head.
        _hfpatch_logits: "auto", True or False.
        _hfpatch_norm_path: path of the norm before the head, or None.
        _hfpatch_trl: the TrlHead that a trainer asked for, or None.
        _hfpatch_beside: `apply` with this model's options, for another model.
        _hfpatch_holder: path of the inner model that has the head, where this model computes only
            the loss (Llama 4 with images).
    """

    # Defaults for an instance that apply() has not seen: it behaves as transformers' class.
    _hfpatch_head_name = _hfpatch_norm_path = _hfpatch_trl = None
    _hfpatch_holder = ""
    _hfpatch_logits = "auto"

    def __setstate__(self, state):
        super().__setstate__(state)
        for session in {vars(m).get("_hfpatch_session") for m in self.modules()} - {None}:
            session.owner = weakref.ref(self)

    @property
    def loss_function(self):
        if current.target is not None and current.target[0] is self:
            return self._hfpatch_loss
        if torch.compiler.is_compiling():  # dynamo cannot trace a property behind a property
            own = own_loss(self)
            return (
                LOSS_MAPPING.get(getattr(self, "loss_type", None), ForCausalLMLoss)
                if own is None
                else own
            )
        return super().loss_function

    @loss_function.setter
    def loss_function(self, value):
        set_own_loss(self, value)

    def __setattr__(self, name, value):
        head = TrlHead.of(value) if name == "forward" else None
        if head is None:
            if name == "forward" and whose(value).startswith("trl."):
                self._tell(
                    "TRL's own head runs, as this TRL sets it otherwise than 1.16; "
                    "fused_lm_head=True is not hfpatch's."
                )
            return super().__setattr__(name, value)
        # This class's forward does what TRL's would. A reference model in the same trainer must
        # give equal log-probabilities for equal weights, so it is patched too.
        vars(self)["_hfpatch_trl"] = head
        reference = getattr(sys._getframe(2).f_locals.get("self"), "ref_model", None)
        if isinstance(reference, nn.Module) and not any(map(is_mixed, reference.modules())):
            try:
                self._hfpatch_beside(reference)
            except ValueError as error:
                warnings.warn(
                    f"hfpatch: the reference model stays as it is ({error})", stacklevel=4
                )

    def _hfpatch_head(self) -> nn.Module:
        return modules_of(self.get_submodule(self._hfpatch_holder))[self._hfpatch_head_name]

    def _hfpatch_stock(self, kwargs):
        if torch.compiler.is_compiling():
            return super().forward(**kwargs)
        embeds = None if asks_for_hidden_states(self, kwargs) else self
        with having(causal=True, embeds=embeds), _told(kwargs):
            out = super().forward(**kwargs)
        if getattr(out, "aux_loss", None) is not None:
            out["aux_loss"] = once(out.aux_loss)
        return out

    def _hfpatch_forward(self, args, kwargs):
        kwargs |= zip(self._hfpatch_positional, args)
        if self._hfpatch_head_name is None:
            return super().forward(**kwargs)
        labels, scores = (
            kwargs.get("labels"),
            self._hfpatch_trl is not None and kwargs.pop("fused_lm_head", False),
        )
        if labels is not None and not torch.compiler.is_compiling():
            alone = not self.training and not torch.is_grad_enabled()
            if alone and (out := evaluated_by_ranks(self, kwargs, scores)) is not None:
                return out
            # In evaluation an outer caller may have set the count already.
            if self.training or current.balance is None:
                with counted(self._count_as_one_process(kwargs)):
                    return self._with_labels(labels, scores, kwargs)
        elif labels is None and "shift_labels" in kwargs and self.training and context_parallel():
            self._tell(_NOT_ITS_LOSS.format("context", *_LABELS_TAKEN_OUT, "cp"))
        elif labels is None and not (
            self.training
            or torch.is_grad_enabled()
            or "past_key_values" in kwargs
            or torch.compiler.is_compiling()
        ):
            unlabelled(self, kwargs)
        return self._with_labels(labels, scores, kwargs)

    def _with_labels(self, labels, scores: bool, kwargs):
        """The forward, with labels or without. scores: compute the outputs of TRL's head."""
        if scores:
            return self._hfpatch_log_probs(kwargs)
        if (
            labels is None
            or not self._fused_loss_serves(kwargs)
            or self._wants_logits(labels, kwargs)
        ):
            return self._hfpatch_stock(kwargs)
        if torch.compiler.is_compiling():
            return self._compiled(kwargs) if _plain_head(self) else self._hfpatch_stock(kwargs)
        return_dict = kwargs.pop("return_dict", None)
        kwargs.pop("skip_logits", None)
        shifted, ignore = kwargs.get("shift_labels"), kwargs.get("ignore_index", -100)
        target = labels if shifted is None else shifted
        first = 1 if shifted is None else 0
        count = ToHost(lambda target: (target[..., first:] != ignore).sum(), target)
        with self._stand_in((self, target, shifted is None, count)):
            with self._read_where_labelled(target, first, ignore, kwargs):
                out = self._hfpatch_stock({**kwargs, "return_dict": True})
        if return_dict is None:
            return_dict = getattr(self.config, "return_dict", True)
        if isinstance(out.get("logits"), Logits):
            # Rebuilt without the stand-in: an output object keeps no None.
            out = type(out)(**{n: v for n, v in out.items() if n != "logits"})
        return out if return_dict else out.to_tuple()

    def _count_as_one_process(self, kwargs) -> float:
        """Makes the loss under Ulysses a mean over the step's tokens, as in one process.

        transformers' Trainer passes no num_items_in_batch there and averages over rows. Returns how
        many times this rank's loss contains the losses beside its tokens'
        (context/router_balance.py: counted).
        """
        if kwargs.get("num_items_in_batch") is not None:
            return 0
        step = step_under_ulysses()
        if step is None:
            return 1
        batches, trainer = step
        ignored = [
            n
            for n in ("compute_loss_func", "label_smoother")
            if getattr(trainer, n, None) is not None
        ]
        if ignored:
            self._tell(_NOT_ITS_LOSS.format("sequence", ignored[0], "leaves out", "sp"))
        sequence = sequence_now(self.config.get_text_config(), True)
        if sequence is not None and batches and all("shift_labels" in batch for batch in batches):
            kwargs["num_items_in_batch"], rows = items_of_a_mean_over_rows(
                sequence,
                kwargs["shift_labels"],
                batches,
                trainer.args,
                kwargs.get("ignore_index", -100),
            )
            return rows
        self._tell(
            "expected the batches of Trainer's step under sequence parallelism, none were found: "
            "its loss stays the mean over "
            "rows, not tokens, which differs where rows have different numbers of labels; train "
            "with `hfpatch train`."
        )
        return 1

    @contextmanager
    def _stand_in(self, target: tuple):
        """Within, the forward finds a stand-in for the head in its holder's own table, before the
        module of that name, and asks for the loss of `target`.
        """
        holder, name = vars(self.get_submodule(self._hfpatch_holder)), self._hfpatch_head_name
        before = holder.get(name)  # of the forward in whose midst a hook has this one run
        try:
            holder[name] = Head(self._hfpatch_head())
            with having(target=target):
                yield
        finally:
            holder[name] = before
            if before is None:
                del holder[name]

    def _hfpatch_tokens_watched(self) -> bool:
        """Whether a hook of the user's is given what a token is made of behind its embedding."""
        inside = [m for m in modules_in(self)[1:] if not isinstance(m, nn.Embedding)]
        return bool(hooks_on_all()) or watched_by_user(inside) is not None

    def _read_where_labelled(self, target, first: int, ignore: int, kwargs):
        """A context that tells the layers the labels, and which tokens' outputs are unread.

        Unread are tokens with no label behind them, unless a hook or the caller reads all of them.
        """
        idle_BT = current.idle_BT
        asked = kwargs.get("attention_mask") is None or asks_for_hidden_states(self, kwargs)
        if not asked and (torch.compiler.is_compiling() or not self._hfpatch_tokens_watched()):

            def unread(target):
                return [~nn.functional.pad(target[..., first:] != ignore, (0, first))]

            # The host waits for this when it looks for documents; it must not wait for the previous
            # step too.
            (idle_BT,) = unread(target) if torch.compiler.is_compiling() else beside(unread, target)
        return having(labels=target, idle_BT=idle_BT)

    def _hfpatch_log_probs(self, kwargs):
        """The outputs of TRL's fused head, from our op where it computes the same."""
        head, asked = self._hfpatch_head(), self._hfpatch_trl
        reason = why_theirs(asked, head)
        if reason is not None:
            self._tell(
                f"TRL's own fused head runs, as {reason}; leave lm_head a plain Linear to have "
                "hfpatch's."
            )
            return asked.theirs(fused_lm_head=True, **kwargs)
        return log_probs(self, head, asked, kwargs)

    def _compiled(self, kwargs):
        """The forward with labels under torch.compile, for models whose head's output is the
        logits.

        Lazy logits cannot be traced, so the backbone is called here. The loss runs outside the
        graph.
        """
        labels, shifted = kwargs.pop("labels"), kwargs.pop("shift_labels", None)
        options = {n: kwargs.pop(n) for n in ("num_items_in_batch", "ignore_index") if n in kwargs}
        return_dict = kwargs.pop("return_dict", None)
        for name in ("skip_logits", "logits_to_keep"):
            kwargs.pop(name, None)
        out = self.get_submodule(self._hfpatch_norm_path.rpartition(".")[0])(
            **kwargs, return_dict=True
        )
        hidden = out.last_hidden_state
        loss = through(
            self._hfpatch_head(),
            ops.linear_cross_entropy,
            hidden,
            (labels if shifted is None else shifted).to(hidden.device),
            shift=shifted is None,
            ignore_index=options.get("ignore_index", -100),
            num_items=options.get("num_items_in_batch"),
        )
        made = CausalLMOutputWithPast(
            loss=as_stock(loss),
            past_key_values=out.past_key_values,
            hidden_states=out.hidden_states,
            attentions=out.attentions,
        )
        if return_dict is None:
            return_dict = getattr(self.config, "return_dict", True)
        return made if return_dict else made.to_tuple()

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
        if not isinstance(logits, Logits):
            self._tell(_WHOLE.format("transformers' forward used the logits before its loss"))
            return ForCausalLMLoss(
                logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs
            )
        _, target, shift, count = current.target
        valid = count.number()
        loss = logits.cross_entropy(
            target.to(logits.hidden.device),
            shift=shift,
            ignore_index=ignore_index,
            num_items=num_items_in_batch,
            num_valid=valid if target.device.type == "cuda" else None,
            inplace_hidden=self._hidden_is_ours(kwargs),
            workspace_bytes=self._workspace(),
        )
        if valid == 0 and num_items_in_batch is None:
            loss = loss + math.nan  # the mean over no token, as in transformers
        return as_stock(loss)

    def _workspace(self) -> int:
        """Bytes the loss may use beyond its gradients, from the policy of the model's layers."""
        path = self._hfpatch_norm_path
        stack = None if path is None else self.get_submodule(path.rpartition(".")[0])
        session = getattr(stack, "_hfpatch_session", None)
        return LOSS_WORKSPACE if session is None else session.loss_bytes

    def _hidden_is_ours(self, kwargs) -> bool:
        """Whether no one else can hold the normed hidden states, so their gradient may overwrite
        them."""
        path = self._hfpatch_norm_path
        if path is None or asks_for_hidden_states(self, kwargs):
            return False
        names = path.split(".")
        around = [self.get_submodule(".".join(names[:i])) for i in range(1, len(names) + 1)]
        return isinstance(around[-1], FusedRMSNorm) and all(
            as_made(m) and not forward_hooks(m) for m in around
        )

    def _fused_loss_serves(self, kwargs) -> bool:
        keep = kwargs.get("logits_to_keep", 0)
        if not isinstance(keep, int) or keep != 0:
            return False
        head = self._hfpatch_head()
        reason = not_its_own_loss(self) or why_not_fused(head) or reads_logits(head)
        if reason is None:
            return True
        self._tell(_WHOLE.format(reason))
        return False

    def _tell(self, words: str) -> None:
        """Warns once per message."""
        if words not in vars(self).setdefault("_hfpatch_told", set()):
            self._hfpatch_told.add(words)
            warnings.warn(f"hfpatch: {words}", stacklevel=5)

    def _wants_logits(self, labels, kwargs) -> bool:
        """Whether a forward with labels returns logits: as set, else in small evaluations and for
        callers known to read them."""
        if kwargs.get("skip_logits"):
            return False
        if self._hfpatch_logits != "auto":
            return bool(self._hfpatch_logits)
        if (
            kwargs.get("inputs_embeds") is not None
            and not torch.compiler.is_compiling()
            and caller_reads_logits()
        ):
            return True
        columns = self.config.get_text_config().vocab_size
        return (
            not self.training and labels.numel() * columns * BYTES_OF_A_LOGIT <= EVAL_LOGITS_BYTES
        )


def _plain_head(model) -> bool:
    """Whether, by the config, the head's output is the logits and the loss is their cross-entropy
    alone."""
    config = model.config.get_text_config()
    scaled = ("final_logit_softcapping", "logits_scaling", "logit_scale", "output_router_logits")
    plain = not any(getattr(config, name, None) for name in scaled)
    return plain and model._hfpatch_norm_path is not None and len(modules_of(model)) == 2


def as_stock(loss: Tensor) -> Tensor:
    """float32, the dtype of transformers' loss for any model, float64 ones too."""
    return loss.float()
