"""Lazy logits: the head's output while a model computes a loss.

The stand-in records a scale, a soft cap and a cut of the vocabulary. Any other use computes the
real logits.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from hfpatch import ops
from hfpatch.compat import pytree
from hfpatch.context.current import current
from hfpatch.loss.head import has_rows_of_it, linear_of, rows_of, through


@dataclass(eq=False)
class Logits:
    """hidden @ head.T, not computed: inner * logits, or outer * tanh(inner * logits), [..., V].

    words: V where only the first V rows of the head are used; None means all rows. Operations other
    than scaling, capping and cutting compute the real logits.
    """

    owner: nn.Module  # the causal model that has the head
    hidden: Tensor
    inner: float = 1.0
    outer: float | None = None
    words: int | None = None

    @property
    def shape(self) -> torch.Size:
        words = rows_of(self.owner._hfpatch_head()) if self.words is None else self.words
        return torch.Size((*self.hidden.shape[:-1], words))

    def _scaled(self, factor):
        if isinstance(factor, bool) or not isinstance(factor, (int, float)):
            return self.real() * factor
        if self.outer is None:
            return replace(self, inner=self.inner * factor)
        return replace(self, outer=self.outer * factor)

    def __mul__(self, factor):
        return self._scaled(factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor):
        if isinstance(divisor, (int, float)) and divisor:
            return self._scaled(1 / divisor)
        return self.real() / divisor

    def tanh(self):
        return replace(self, outer=1.0) if self.outer is None else self.real().tanh()

    def float(self):
        return self  # the loss is computed in float32 for any dtype of the logits

    def contiguous(self):
        return self

    def real(self) -> Tensor:
        """The logits, computed as the model would have computed them."""
        z = self.owner._hfpatch_head()(self.hidden)
        z = z if self.words is None else z[..., : self.words]
        z = z * self.inner if self.inner != 1 else z
        return z if self.outer is None else self.outer * torch.tanh(z)

    def cross_entropy(self, labels, **options) -> Tensor:
        """The loss, computed inside one call of the head."""
        if self.outer is not None:
            options["softcap"] = self.outer
        scale, hidden = self.inner * (self.outer or 1.0), self.hidden
        if scale != 1:
            options["inplace_hidden"] = False
            hidden = hidden * scale
        loss = ops.linear_cross_entropy
        if self.words is not None:
            loss = partial(_loss_over, self.words)
        return through(self.owner._hfpatch_head(), loss, hidden, labels, **options)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.real(), name)

    def __getitem__(self, index):
        last = isinstance(index, tuple) and len(index) == 2 and index[0] is Ellipsis
        words = index[1] if last else None
        if isinstance(words, slice) and words.start is None and words.step is None:
            # cuts off a padded vocabulary
            if words.stop is None or words.stop >= self.shape[-1]:
                return self
            if words.stop > 0 and not has_rows_of_it(linear_of(self.owner._hfpatch_head())):
                return replace(self, words=words.stop)
        return self.real()[index]

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.tanh and len(args) == 1 and not kwargs:
            return args[0].tanh()
        args, kwargs = pytree().tree_map(
            lambda x: x.real() if isinstance(x, Logits) else x, (args, kwargs or {})
        )
        return function(*args, **kwargs)


def _loss_over(words: int, hidden, weight, labels, bias: Tensor | None = None, **options) -> Tensor:
    """The loss over the first `words` rows of the head."""
    bias = None if bias is None else bias[:words]
    return ops.linear_cross_entropy(hidden, weight[:words], labels, bias=bias, **options)


@dataclass(eq=False)
class Head:
    """Replaces a model's head for one forward. A call returns Logits; attributes are the head's."""

    _head: nn.Module

    @torch.compiler.disable
    def __call__(self, hidden: Tensor) -> "Logits | Tensor":
        # None in a call from another thread.
        owner = None if current.target is None else current.target[0]
        asked = owner is not None and owner._hfpatch_head() is self._head
        return Logits(owner, hidden) if asked else self._head(hidden)

    def __getattr__(self, name):
        return getattr(self._head, name)
