"""Learning rate over steps, and which tensors decay. Standard library only."""

import math

_WRAPPERS = ("_fsdp_wrapped_module.", "_orig_mod.", "_checkpoint_wrapped_module.", "module.")


def cosine(step: int, *, warmup: int, total: int, floor: float = 0.0, restarts: int = 0) -> float:
    """The factor on the peak rate at a step: linear warm-up, then cosine arcs from 1 to `floor`, 1 + restarts of them.

    From `total` on it stays at the floor. transformers' schedules have the floor or the restarts, not both.
    """
    if step < warmup:
        return step / max(1, warmup)
    if step >= total:
        return floor
    progress = (step - warmup) / max(1, total - warmup) * (1 + restarts)
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * (progress % 1.0)))


def plain_name(name: str) -> str:
    """A parameter's name without what FSDP, DDP, compile and checkpoint wrappers put in it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def decayed(named_shapes) -> set[str]:
    """Names whose tensors have two dimensions or more: matrices decay, norms and biases do not."""
    return {plain_name(name) for name, shape in named_shapes if len(shape) >= 2}
