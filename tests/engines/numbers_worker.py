"""Ranks that share each row: which group numbers travel over, and that the gradients are right."""

import contextlib
import sys
from collections import Counter
from pathlib import Path
from unittest import mock

import common
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import tiny

import hfpatch
from hfpatch.context.ranks import sequence_of, sharded
from hfpatch.trainer.shared_rows import of_all_ranks

NAMES = "all_gather", "all_reduce", "all_gather_object", "broadcast_object_list"
LENGTHS = 24, 16, 22, 20  # tokens of a row of two documents


def row(tokens: int) -> dict:
    ids = tiny.ids(1, tokens)
    positions = torch.cat([torch.arange(9), torch.arange(tokens - 9)])[None]
    labels = torch.nn.functional.pad(ids, (0, 1), value=-100)[:, 1:].contiguous()
    labels[0, 8] = -100
    return {"input_ids": ids, "position_ids": positions, "shift_labels": labels, "labels": ids}


@contextlib.contextmanager
def noted(found: Counter, group):
    """Counts collectives that the package itself asks for, and those of them in this group."""

    def noting(name, run):
        def call(*args, group=None, **known):
            if sys._getframe(1).f_globals["__name__"].startswith("hfpatch"):
                found[name] += 1
                found["with the layers"] += group in (None, layers)
            return run(*args, group=group, **known)

        return mock.patch.object(dist, name, call)

    layers = group
    with contextlib.ExitStack() as stack:
        for name in NAMES:
            stack.enter_context(noting(name, getattr(dist, name)))
        yield


def main(folder: str) -> None:
    common.quiet()
    dist.init_process_group("gloo")
    layers, rank, size = dist.new_group(range(2)), dist.get_rank(), dist.get_world_size()
    stock = tiny.exact(tiny.llama(num_hidden_layers=2, head_dim=8))
    ours = tiny.exact(tiny.llama(num_hidden_layers=2, head_dim=8))
    hfpatch.apply(ours, checkpointing="host")
    found, errors = Counter(), []
    for tokens in LENGTHS:
        whole, t = row(tokens), tokens // size
        items = (whole["shift_labels"] != -100).sum()
        stock(**whole, num_items_in_batch=items, use_cache=False).loss.backward()
        mine = {n: x[:, rank * t : (rank + 1) * t].contiguous() for n, x in whole.items()}
        with noted(found, layers), sharded(sequence_of(layers)):
            ours(**mine, num_items_in_batch=items, use_cache=False).loss.backward()
        for a, b in zip(ours.parameters(), stock.parameters()):
            dist.all_reduce(a.grad)
            errors.append(((a.grad - b.grad).abs().max() / b.grad.abs().max()).item())
            a.grad = b.grad = None
    sequence = sequence_of(layers)
    with noted(found, layers):
        batches = of_all_ranks(sequence, {"labels": torch.tensor([rank])})
    ranks = [batch["labels"].item() for batch in batches]
    common.report(folder, found=found, worst=max(errors), ranks=ranks)


if __name__ == "__main__":
    main(*sys.argv[1:])
