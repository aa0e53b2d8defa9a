"""The error that `verify`, `prove` and the tests allow."""


def allowed_error(lost: float, step: float) -> float:
    """Twice the sum of what plain PyTorch loses in the same dtype and of one rounding step."""
    return 2.0 * (lost + step)
