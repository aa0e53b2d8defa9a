"""Ranks that share each sequence, of which the last goes wrong in the middle of a step, or all run
until they are told to stop.
"""

import os
import sys
from pathlib import Path

import common
import tiny
import torch
import torch.distributed as dist

from hfpatch.context.ranks import sequence_of, sharded
from hfpatch.parallel import exchange

T = 24
ERRORS = {
    "error": RuntimeError("a kernel failed"),
    "memory": torch.OutOfMemoryError("no memory on this rank"),
}


def main(kind: str, folder: str) -> None:
    common.quiet()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = tiny.patched(tiny.llama(num_hidden_layers=2))
    ids, t = tiny.ids(1, T), T // ranks

    def step(mine=slice(rank * t, (rank + 1) * t)):
        given = {"input_ids": ids[:, mine], "position_ids": torch.arange(T)[None, mine]}
        with sharded(sequence_of(dist.group.WORLD)):
            model(**given, labels=given["input_ids"], use_cache=False).loss.backward()

    step()
    (Path(folder) / f"rank{rank}.ready").write_text(str(os.getpid()))
    if kind in ERRORS and rank == ranks - 1:
        backward, calls = exchange.attention_backward, []

        def failing(*args, **known):
            calls.append(1)
            # in the middle of a backward, whose next exchange the others wait for
            if len(calls) == 2:
                raise ERRORS[kind]
            return backward(*args, **known)

        exchange.attention_backward = failing
    if kind == "lengths" and rank == ranks - 1:
        step(slice(rank * t, (rank + 1) * t - 2))
    while True:
        step()


if __name__ == "__main__":
    main(*sys.argv[1:])
