"""`hfpatch run` in a process that trains: each Trainer patches its model, or training stops.

hook/sitecustomize.py calls `loaded` right after one of its modules ran, often in the middle of
another import. So this file imports hfpatch's own modules only where a Trainer is made or a model
is prepared.
"""

import functools
import inspect

from hfpatch.trainer import marks


def loaded(module) -> None:
    """Patches this module, `transformers.trainer` or `accelerate.accelerator`."""
    if hasattr(module, "Trainer"):
        _patch_trainer(module.Trainer)
    else:
        _patch_accelerator(module.Accelerator)


def _patch_trainer(cls) -> None:
    """Each later Trainer gets `hfpatch.Callback(apply=...)`, and refuses to train a stock model."""
    init = cls.__init__
    train = cls.train

    @functools.wraps(init)
    def patched_init(self, *args, **kwargs):
        given = inspect.signature(init).bind_partial(self, *args, **kwargs)
        named = given.arguments
        named["callbacks"] = _with_ours(named.get("callbacks"), named.get("model"))
        init(*given.args, **given.kwargs)
        for callback in self.callback_handler.callbacks:
            if hasattr(callback, "attach"):
                callback.attach(self)

    @functools.wraps(train)
    def patched_train(self, *args, **kwargs):
        if not _is_patched(self.model):
            # A subclass may leave out Trainer's __init__.
            for callback in getattr(getattr(self, "callback_handler", None), "callbacks", ()):
                if hasattr(callback, "_hfpatch_refused"):
                    raise callback._hfpatch_refused
            where = f"{type(self).__name__}.train()"
            raise _unpatched_error(self.model, where, "make the Trainer with it")
        marks.mark_trained()
        return train(self, *args, **kwargs)

    cls.__init__ = patched_init
    cls.train = patched_train


def _patch_accelerator(cls) -> None:
    """`prepare` refuses a stock decoder beside an optimizer: a training loop written by hand."""
    prepare = cls.prepare

    @functools.wraps(prepare)
    def patched_prepare(self, *args, **kwargs):
        # accelerate's DummyOptim stands for the optimizer of a DeepSpeed config.
        if any(hasattr(x, "param_groups") or type(x).__name__ == "DummyOptim" for x in args):
            for model in args:
                if _is_patched(model):
                    marks.mark_trained()
                elif _is_stock_decoder(model):
                    raise _unpatched_error(model, "Accelerator.prepare()", "prepare it")
        return prepare(self, *args, **kwargs)

    cls.prepare = patched_prepare


def _with_ours(callbacks, model) -> list:
    """The callbacks, and one that patches where neither they do nor the script did."""
    from hfpatch.trainer.callback import Callback

    callbacks = list(callbacks or [])
    patches = any(isinstance(c, Callback) and c.apply for c in callbacks)
    if not patches and not _is_patched(model):
        ours = Callback(apply=marks.settings().get("options", {}))
        ours.on_init_end = functools.partial(_patch, ours, ours.on_init_end)
        callbacks.append(ours)
    return callbacks


def _patch(ours, on_init_end, *args, **kwargs) -> None:
    """Patches the Trainer's model. A refusal waits for its `train`: it may evaluate alone."""
    if _is_patched(kwargs.get("model")):  # by model_init, with settings of its own
        ours.apply = False
    try:
        on_init_end(*args, **kwargs)
    except ValueError as error:
        ours._hfpatch_refused = error


def _is_patched(model) -> bool:
    from hfpatch.context.classes import is_patched

    return any(map(is_patched, getattr(model, "modules", tuple)()))


def _is_stock_decoder(model) -> bool:
    from hfpatch.decoder.find import find_decoder

    if not hasattr(model, "named_parameters"):
        return False
    trained = any(parameter.requires_grad for parameter in model.parameters())
    return trained and find_decoder(model) is not None


def _unpatched_error(model, where: str, then: str) -> ValueError:
    return ValueError(
        f"hfpatch: {where} got a stock {type(model).__name__} under `hfpatch run`. Call "
        f"hfpatch.apply(model) before you {then}."
    )
