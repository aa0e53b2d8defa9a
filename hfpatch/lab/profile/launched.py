"""`accelerate launch -m hfpatch profile ...`: one run on every rank of an engine."""

import sys

import torch
from accelerate import Accelerator

from hfpatch.lab.profile import step
from hfpatch.lab.profile.options import Options
from hfpatch.lab.profile.timeline import Run, size


def record(accelerator: Accelerator, options: Options) -> Run:
    """This rank's run. The model is patched before the engine wraps it."""
    model = step.build_model(options)
    applied = step.become(
        model, options.impl, options.gradient_checkpointing, options.checkpointing
    )
    vocab_size = model.config.vocab_size
    optimizer = step.make_optimizer(model.parameters(), options.optimizer)
    plugin = accelerator.state.deepspeed_plugin
    if plugin is not None:
        # A data loader would give it, which a profile does not have.
        plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = options.batch
    if optimizer is None:
        model = accelerator.prepare(model)
    else:
        model, optimizer = accelerator.prepare(model, optimizer)
    batch = step.make_batch(vocab_size, options, accelerator.device)

    def progress(text):
        if accelerator.is_main_process:
            print(f"{options.impl}: {text}", file=sys.stderr, flush=True)

    run = step.record_run(
        model, optimizer, batch, options,
        backward=accelerator.backward, progress=progress, main=accelerator.is_main_process,
    )  # fmt: skip
    engine = accelerator.distributed_type.value.lower()
    run.setup["engine"] = f"{engine}, {accelerator.num_processes} ranks"
    run.applied = applied
    if run.error is None and accelerator.num_processes > 1:
        peak = torch.tensor([run.peak_bytes], device=accelerator.device)
        peaks = accelerator.gather(peak).tolist()
        run.notes.append("peak by rank: " + ", ".join(size(peak) for peak in peaks))
    return run
