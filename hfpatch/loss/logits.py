"""Lazy logits: the head's output while a model computes a loss.

They know the hidden states they would be computed from. A scale, a soft cap, a cut of the
vocabulary and any choice of tokens are recorded; the loss function reads what was recorded. Any
other use computes the real logits.
"""

import operator
from functools import partial

import torch
from torch import Tensor, nn

from hfpatch import ops
from hfpatch.compat import (
    as_plain_tensor,
    autocast,
    autocast_dtype,
    autograd_mode,
    pytree,
    without_memory,
)
from hfpatch.context.current import current
from hfpatch.loss.head import WHOLE, rows_of, through

USED = "the model's forward does more with logits than hand its lm_head's to the loss"


class Logits(Tensor):
    """steps(hidden @ head.T) [..., V], not computed: inner * logits, or outer * tanh(inner * logits).

    A tensor without memory, so that code which asks for its class, shape or dtype gets the answer.

    Attributes:
        owner: the causal model that has the head.
        hidden: [..., D].
        cast: the dtype of autocast at the head's call, or None.
        inner, outer: the scale and, with a soft cap, the scale of the cap.
        words: V if only the first V rows of the head are used; None for all rows.
        steps: what the model did with the head's output, for `real`.
        computed: the real logits, once something used them.
    """

    @staticmethod
    def __new__(cls, owner, hidden, cast, dtype=None, inner=1.0, outer=None, words=None, steps=()):
        shape = (*hidden.shape[:-1], words or rows_of(owner._hfpatch_head()))
        self = without_memory(
            cls,
            shape,
            dtype=dtype or cast or hidden.dtype,
            device=hidden.device,
            requires_grad=torch.is_grad_enabled(),
        )
        attributes = {"owner": owner, "hidden": hidden, "cast": cast, "inner": inner,
                      "outer": outer, "words": words, "steps": steps, "computed": None}  # fmt: skip
        vars(self).update(attributes)
        if torch.is_grad_enabled():
            with as_plain_tensor():
                self.register_hook(_no_gradient)
        return self

    def but(self, step=None, **changes) -> "Logits":
        """Logits with these attributes, and one step more."""
        names = ("owner", "hidden", "cast", "inner", "outer", "words", "steps")
        now = {name: vars(self)[name] for name in names}
        now |= {"dtype": self.dtype} | changes
        if step is not None:
            now["steps"] = (*self.steps, step)
        return Logits(**now)

    def real(self) -> Tensor:
        """The logits as the model would have computed them, and in-place operations changed
        them."""
        if self.computed is None:
            self.owner._tell(WHOLE.format(USED))
            with (
                torch.inference_mode(False),
                torch.set_grad_enabled(self.requires_grad),
                autocast(self.device.type, self.cast),
            ):
                z = self.owner._hfpatch_head()(self.hidden)
                for step in self.steps:
                    z = step(z)
            self.computed = z
        return self.computed

    def takes(self, labels, vocab_size: int, shifts: bool) -> bool:
        """Whether `cross_entropy` computes transformers' loss of these labels. shifts: the loss
        moves the labels by one."""
        if self.computed is not None or vocab_size != self.shape[-1]:
            return False
        if not isinstance(labels, Tensor) or labels.dtype not in (torch.int64, torch.int32):
            return False
        rows = self.shape[:-1]
        return labels.shape == rows if shifts else labels.numel() == rows.numel()

    def cross_entropy(self, labels, **options) -> Tensor:
        """The loss, computed inside one call of the head."""
        head = self.owner._hfpatch_head()
        options["softcap"] = self.outer
        loss = partial(_loss_over, self.words, self.inner * (self.outer or 1.0))
        with autocast(self.device.type, self.cast):
            return through(head, loss, self.hidden, labels, **options)

    @classmethod
    @torch.compiler.disable  # dynamo cannot trace tensors without memory
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = function.__name__
        if name == "__get__":  # of an attribute
            name = function.__self__.__name__
        if name in _OF_ITS_SHAPE:
            with as_plain_tensor():
                return function(*args, **kwargs)
        z = args[0] if args else None
        arity, record = _RECORDED.get(name, (0, None))
        # An autograd function runs without gradients, and has a backward of its own.
        if (
            arity == len(args)
            and not kwargs
            and type(z) is Logits
            and z.computed is None
            and z.requires_grad == torch.is_grad_enabled()
        ):
            recorded = record(*args)
            if recorded is not None:
                return recorded
        args, kwargs = pytree.tree_map(
            lambda x: x.real() if isinstance(x, Logits) else x, (args, kwargs)
        )
        return function(*args, **kwargs)

    # torch asks for it; only code that torch's functions do not reach comes here.
    __torch_dispatch__ = __torch_function__


def _no_gradient(grad):
    raise RuntimeError(
        "hfpatch: an autograd function that the model's forward calls sends a gradient to logits "
        "that were not computed. Call hfpatch.apply(model, logits=True)."
    )


# --- what is recorded: each returns Logits, or None where the real ones are needed ----------------


def _scaled(z: Logits, factor, step):
    if type(factor) not in (int, float) or not factor:
        return None
    name = "inner" if z.outer is None else "outer"
    return z.but(lambda z: step(z, factor), **{name: step(getattr(z, name), factor)})


def _indexed(z: Logits, index):
    """A choice of tokens, of the vocabulary's first words, or of both."""
    # [Step 1] Read the parts of the index. A list, or anything else that is not known here, needs
    # the real logits.
    index = index if isinstance(index, tuple) else (index,)
    used = 0  # the dimensions that the index names
    whole = False  # whether it has an ellipsis
    for k in index:
        if k is ...:
            whole = True
        elif isinstance(k, Tensor):
            used += k.dim() if k.dtype == torch.bool else 1
        elif type(k) in (int, slice):
            used += 1
        elif k is not None:
            return None
    # [Step 2] Without the vocabulary's dimension, the index chooses tokens: it applies to the
    # hidden states.
    last = index[-1] if index else ...
    if last is ... or not whole and used < z.dim():  # not the vocabulary's
        return z.but(hidden=z.hidden[index])
    # [Step 3] Of the vocabulary, take the first words only. Any other choice needs the real logits.
    if not isinstance(last, slice):
        return None
    start, words, step = last.indices(z.shape[-1])
    if start != 0 or step != 1 or words == 0:
        return None
    hidden = z.hidden[(*index[:-1], slice(None))]
    if words == z.shape[-1]:
        return z.but(hidden=hidden)
    return z.but(lambda z: z[..., :words], hidden=hidden, words=words)


# name of torch's function -> (number of its arguments, what records it). The loss is computed in
# float32 for logits of any dtype.
_RECORDED = {
    "mul": (2, partial(_scaled, step=operator.mul)),
    "div": (2, partial(_scaled, step=operator.truediv)),
    "tanh": (1, lambda z: z.but(torch.tanh, outer=1.0) if z.outer is None else None),
    "float": (1, lambda z: z.but(Tensor.float, dtype=torch.float32)),
    "contiguous": (1, lambda z: z),
    "__getitem__": (2, _indexed),
}
_OF_ITS_SHAPE = {
    "shape", "dtype", "device", "ndim", "requires_grad", "layout", "is_cuda", "size", "dim",
    "numel", "__len__", "is_floating_point",
}  # fmt: skip


def _loss_over(words, scale, hidden, weight, labels, bias: Tensor | None = None, **options):
    """The loss over the first `words` rows of the head, or over all of them, of scaled logits."""
    if scale != 1:  # here: the head's own hooks see the hidden states as they are
        hidden = hidden * scale
    if words is not None:
        weight = weight[:words]
        bias = None if bias is None else bias[:words]
    return ops.linear_cross_entropy(hidden, weight, labels, bias=bias, **options)


class Head:
    """Replaces a model's head for one forward. A call returns Logits; attributes are the head's.

    A call in another mode of autograd than the forward's (no_grad, a checkpoint) returns real ones.
    """

    @torch.compiler.disable  # dynamo cannot trace autograd's mode
    def __init__(self, head: nn.Module):
        self._head = head
        self._mode = autograd_mode()

    @torch.compiler.disable
    def __call__(self, *args, **kwargs):
        # None in a call from another thread.
        owner = current.target and current.target[0]
        stock = kwargs or len(args) != 1 or autograd_mode() != self._mode
        if owner is None or owner._hfpatch_head() is not self._head or stock:
            return self._head(*args, **kwargs)
        return Logits(owner, *args, autocast_dtype(args[0].device.type))

    def __getattr__(self, name):
        return getattr(self._head, name)
