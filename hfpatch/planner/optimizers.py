"""Bytes of optimizers' states, for `hfpatch plan --optimizer`: on one GPU with the weights, in the
weights' dtype.

An optimizer for matrices takes the Linear layers of the decoder's layers. Embedding, head, norms
and experts that are one parameter have AdamW's states, as the optimizers' authors do it. Standard
library only.
"""

from collections.abc import Callable, Iterator

from hfpatch.budget.adapters import layer_linears
from hfpatch.budget.shape import ModelShape

RANK = 128  # transformers' Trainer gives this rank to APOLLO and GaLore


def _matrices(shape: ModelShape) -> Iterator[tuple[int, int]]:
    """(columns in, columns out) of each Linear of each layer."""
    for layer in range(shape.num_layers):
        yield from layer_linears(shape, layer).values()


def _adamw(shape: ModelShape) -> int:
    return 2 * shape.parameters


def _muon(shape: ModelShape) -> int:
    """One momentum a matrix."""
    return _adamw(shape) - sum(n * m for n, m in _matrices(shape))


def _adafactor(shape: ModelShape) -> int:
    """A row and a column for each matrix, embedding and head too; one number for each other
    parameter."""
    tables = (shape.parameters - shape.body_parameters) // shape.embedding_parameters
    width = shape.hidden_size
    matrices = [*_matrices(shape), *[(width, shape.embedding_parameters // width)] * tables]
    return shape.parameters - sum(n * m - n - m for n, m in matrices)


def _low_rank(shape: ModelShape) -> int:
    """Adam's two moments of a matrix's projection, and the projection."""
    saved = sum(
        2 * n * m - min(RANK, n, m) * (2 * max(n, m) + min(n, m)) for n, m in _matrices(shape)
    )
    return _adamw(shape) - saved


# name -> (a function from a shape to the number of states, its title). LOMO steps inside backward.
OPTIMIZERS: dict[str, tuple[Callable[[ModelShape], int], str]] = {
    "adamw": (_adamw, "torch's AdamW"),
    "muon": (_muon, "torch's Muon, AdamW for the rest"),
    "apollo": (_low_rank, "APOLLO of rank 128"),
    "galore": (_low_rank, "GaLore of rank 128"),
    "schedule-free": (_adamw, "schedule-free AdamW"),
    "adafactor": (_adafactor, "Adafactor without a first moment"),
    "lomo": (lambda shape: 0, "LOMO, which steps inside backward"),
}


def state_numbers(optimizer: str, shape) -> int:
    """How many numbers the optimizer keeps. For a Counted, whose matrices are unknown, those of
    AdamW: an upper bound.
    """
    known = isinstance(shape, ModelShape) or optimizer == "lomo"
    return (OPTIMIZERS[optimizer][0] if known else _adamw)(shape)
