"""Trainer's auto_find_batch_size: batches too large for a layer end in out of memory, smaller ones
train as without hfpatch.
"""

import gc
import signal
import threading

import pytest
import tiny
import torch
from accelerate.state import AcceleratorState
from transformers import Trainer, TrainingArguments

import hfpatch
from hfpatch.trainer.stop import StopCleanly
from tests.faults.test_exceptions import assert_nothing_held, open_files

LIMIT = 5  # rows that a layer has memory for
STEPS = 2


def planted(module, args, out):
    if len(out) > LIMIT:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def trained(model, folder, pass_of):
    """Weights after a run that begins with 8 rows; layer 1 runs out of memory in forward, or in the
    recompute of backward.
    """
    mlp, passes, hooks = model.model.layers[1].mlp, [], []

    def hook(module, args, out):
        if pass_of == "forward" or torch._C._current_graph_task_id() != -1:
            passes.append(len(out))
            planted(module, args, out)

    handle = mlp.register_forward_hook(tiny.OfAnEngine(hook))
    arguments = TrainingArguments(
        output_dir=str(folder), auto_find_batch_size=True, per_device_train_batch_size=8,
        max_steps=STEPS, use_cpu=True,
        report_to="none", disable_tqdm=True, save_strategy="no", optim="sgd", learning_rate=0.05,
        seed=3, logging_steps=1,
    )  # fmt: skip
    ids = tiny.ids(40)
    rows, before = (
        [{"input_ids": row, "labels": row} for row in ids],
        signal.getsignal(signal.SIGTERM),
    )
    trainer = Trainer(
        model, arguments, train_dataset=rows, callbacks=[hfpatch.Callback(), StopCleanly()]
    )
    model.register_forward_pre_hook(lambda *_: hooks.append(len(model._forward_pre_hooks)))
    try:
        trainer.train()
    finally:
        handle.remove()
        AcceleratorState._reset_state(reset_partial_state=True)
    assert set(hooks) == {2}, "ours beside the callback's, which began twice"
    assert len(model._forward_pre_hooks) == 1 and signal.getsignal(signal.SIGTERM) is before
    assert passes[0] == 8 and passes[-1] <= LIMIT and trainer.state.global_step == STEPS
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("where, tier", [("forward", "host"), ("backward", "disk")])
def test_auto_find_batch_size(where, tier, tmp_path):
    ours = tiny.llama(dtype=torch.float64)
    stock = tiny.exact(ours)
    start = {name: p.detach().clone() for name, p in stock.named_parameters()}
    hfpatch.apply(
        ours,
        checkpointing=hfpatch.Checkpointing(
            offload=str(tmp_path / "d") if tier == "disk" else tier, tile=8
        ),
    )
    threads, files = threading.active_count(), open_files()
    got, wanted = trained(ours, tmp_path, where), trained(stock, tmp_path, "forward")
    for name, value in wanted.items():
        moved = (value - start[name]).abs().max()
        assert moved > 0 and (got[name] - value).abs().max() <= 1e4 * 2.0**-52 * moved, name
    gc.collect()
    assert_nothing_held(ours)
    pool = ours.model._hfpatch.runtime.transfers.pool
    largest = LIMIT * tiny.TOKENS * 64 * 8
    # input and attention output of two layers; on the host also a gradient that waits
    assert pool.bytes_held <= (5 if tier == "host" else 4) * 2 * largest
    assert threading.active_count() <= threads + 8 * (
        tier == "disk"
    ) and open_files() <= files + 4 * (tier == "disk")
