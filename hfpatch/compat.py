"""Every private name of transformers that the patch needs: one function each, with what happens where the name is gone."""

import inspect


def record_outputs_like(made: type, base: type) -> None:
    """What output_hidden_states and its like record is looked up by the class's full name: `made` records what `base` does.

    Without the registry, recording is by attribute, which a subclass inherits.
    """
    try:
        from transformers.modeling_utils import _CAN_RECORD_REGISTRY
    except ImportError:
        return
    found = getattr(base, "_can_record_outputs", None)
    if found is not None:
        dict.__setitem__(_CAN_RECORD_REGISTRY, str(made), found)


def cache_takes_extras() -> bool:
    """Up to 5.3 a cache's update takes its keywords in a dict; later versions take none."""
    from transformers.cache_utils import Cache

    return "cache_kwargs" in inspect.signature(Cache.update).parameters
