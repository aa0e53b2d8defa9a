"""Any other decoder: its layers stay transformers' own, each checkpointed whole with its input offloaded."""

from functools import cache

import torch
from transformers.cache_utils import Cache

from hfpatch.checkpoint.whole import offloaded_checkpoint


def _rebuild(base):
    """Makes an instance of the fallback class of `base` for pickle and copy to fill."""
    return whole_layer_class(base).__new__(whole_layer_class(base))


class WholeLayer:
    """Mixed over a decoder layer class of transformers."""

    _hfpatch_base: type

    @property
    def _gradient_checkpointing_func(self):
        return lambda function, *args, **kwargs: function(*args, **kwargs)

    @_gradient_checkpointing_func.setter
    def _gradient_checkpointing_func(self, function):
        vars(self)["_gradient_checkpointing_func"] = function  # theirs again after undo()

    def forward(self, hidden_states, *args, **kwargs):
        if not (self.training and torch.is_grad_enabled()) or torch.compiler.is_compiling():
            return super().forward(hidden_states, *args, **kwargs)
        caches = [a for a in (*args, *kwargs.values()) if isinstance(a, Cache)]
        if any(c.get_seq_length() for c in caches):
            return super().forward(hidden_states, *args, **kwargs)
        # Models make an empty cache in training too; running a layer again would write its keys twice.
        args = [None if isinstance(a, Cache) else a for a in args]
        kwargs = {n: None if isinstance(a, Cache) else a for n, a in kwargs.items()}
        if kwargs.get("use_cache"):
            kwargs["use_cache"] = False
        run = lambda h: super(WholeLayer, self).forward(h, *args, **kwargs)  # noqa: E731
        return offloaded_checkpoint(self._hfpatch_session, run, hidden_states)

    def __reduce_ex__(self, protocol):
        return _rebuild, (self._hfpatch_base,), self.__dict__


@cache
def whole_layer_class(base: type) -> type:
    """The class that modules of class `base` get; it has the same name."""
    return type(base.__name__, (WholeLayer, base), {"_hfpatch_base": base, "__module__": __name__})
