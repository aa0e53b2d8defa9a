"""Where docs/reference/errors.md explains a message: one row an anchor."""

import re

PAGE = "docs/reference/errors.md"
OTHER = "any-other"
# anchor: words of its messages. The first row that a message fits counts.
ANCHORS = {
    "wrapped": r"expected a model before ",
    "liger": r"expected transformers' own modules, found Liger's",
    "no-decoder": r"expected a decoder with a list of layers",
    "host-memory": r"checkpoints need .* of host memory",
    "pin": r"expected to pin ",
    "second-backward": r"expected one backward through this graph",
    "weights-changed": r"expected the weights that forward used",
    "second-derivative": r"create_graph=True",
    "cache-and-packing": r"expected one document a row where a KV cache is kept",
    "whole-logits": r"the loss runs through whole logits|a gradient came for logits",
    "every-and-engines": r"every=.* runs several layers at once",
    "frozen-weights": r"expected layers that run tile by tile",
    "another-run": r"does not match this run|holds another run",
    "folder-taken": r"another run writes to ",
    "no-whole-checkpoint": r"expected a checkpoint (in|at) ",
    "machine": r"the disk is full|the memory ran out|a file is broken or cut",
    "config": r"expected the values of a .* ?config\.json",
    "unknown-model": r"expected a known model",
    "left-build": r"is left from a build",
}


def page_of(message: str) -> str:
    """The place on the page that explains this message; OTHER where it has none of its own."""
    found = (name for name, words in ANCHORS.items() if re.search(words, message))
    return f"{PAGE}#{next(found, OTHER)}"


def with_page(error: BaseException) -> None:
    """Adds a note to the error that names the page. Python before 3.11 has no notes."""
    if hasattr(error, "add_note"):
        error.add_note(f"More: {page_of(str(error))}")
