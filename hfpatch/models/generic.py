"""Any other decoder: its layers stay transformers' own, each checkpointed whole with its input offloaded."""

from functools import lru_cache

import torch

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
        run = lambda h: super(WholeLayer, self).forward(h, *args, **kwargs)  # noqa: E731
        cached = any(kwargs.get(n) is not None for n in ("past_key_values", "past_key_value", "layer_past"))
        if not (self.training and torch.is_grad_enabled()) or cached or torch.compiler.is_compiling():
            return run(hidden_states)
        return offloaded_checkpoint(self._hfpatch_engine, run, hidden_states)

    def __reduce_ex__(self, protocol):
        return _rebuild, (self._hfpatch_base,), self.__dict__


@lru_cache(maxsize=None)
def whole_layer_class(base: type) -> type:
    """The class that modules of class `base` get; it has the same name."""
    return type(base.__name__, (WholeLayer, base), {"_hfpatch_base": base, "__module__": __name__})
