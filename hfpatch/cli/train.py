"""Trains a causal language model: `hfpatch train --model M --data D`, or `accelerate launch -m`.

    hfpatch train --model llama-tiny --train_tokenizer 512 --data docs/ --output_dir runs/docs
    hfpatch train config.yaml --learning_rate 1e-5
    accelerate launch --num_processes 8 -m hfpatch train config.yaml --placement zero3

In a checkout `scripts/train.py` is the same.

Flags are those of hfpatch/trainer/flags.py (`--help`) and of transformers' TrainingArguments
(`--help-all`). Exit codes: 0 done; 143 and 130 stopped by SIGTERM and by Ctrl-C (with a checkpoint if training had
begun); 2 bad input, refused before long work; 1 a failure of the machine such as a full disk.
"""

import contextlib
import os
import sys
import time
from datetime import timedelta

from hfpatch.budget.free import expand_segments
from hfpatch.budget.limits import did_you_mean, environment_number
from hfpatch.cli import train_help
from hfpatch.cli.failures import guarded
from hfpatch.cli.quiet import progress
from hfpatch.planner.limits import check_ranges
from hfpatch.trainer import run_file

ENDED = (0, 130, 143)  # finished, or stopped with a checkpoint; all ranks end together


def main(argv=None) -> int:
    """Runs the command of argv (sys.argv[1:] by default). Returns the exit code.

    Bad input is one sentence on stderr. If a launcher started several processes, each one that
    ended well exits here and does not return.
    """
    code = guarded(train, sys.argv[1:] if argv is None else argv, piped=False)
    if sys.stdout:
        sys.stdout.flush()
    sys.stderr.flush()
    if code in ENDED and environment_number("WORLD_SIZE", 1) > 1:
        # Gloo's own teardown aborts about one run in ten; everything is saved by now.
        os._exit(code)
    return code


def train(argv) -> int:
    """Parses the arguments, refuses a run that cannot work, loads, trains, saves and evaluates."""
    expand_segments()
    if {"-h", "--help"} & {*argv}:
        print(train_help.text())
        return 0
    argv = ["--help" if word == "--help-all" else word for word in argv]
    given = [word.partition("=")[0] for word in argv]
    if not given or given[0].startswith("-") and "--help" not in given:
        for name, sentence in run_file.NEEDED.items():  # now: libraries load for seconds
            if not did_you_mean(f"--{name}", given):  # a misspelt one has its own sentence
                raise ValueError(f"hfpatch: {sentence}")
    elif not given[0].startswith("-") and "." in given[0]:
        run_file.read(run_file.find(argv[0]))  # raises for a file that is not there or is broken
    pairs = zip(argv, argv[1:])
    numbers = {f.lstrip("-"): int(w) for f, w in pairs if w.removeprefix("-").isdigit()}
    check_ranges(numbers, "_")
    from hfpatch.trainer import arguments, checks, footprint, loading, locks, runs, schedule
    from hfpatch.trainer import data as sources
    from hfpatch.trainer.stop import StopCleanly

    stop = StopCleanly()  # first, because it notes which process launched this one
    # DeepSpeed builds an extension here, and waits without a word for the lock of a killed build.
    with progress("starting the engine", not environment_number("RANK", 0)):
        model_args, data_args, args = arguments.parse(argv)
    checks.flags(model_args, data_args, args)
    stop.time_limit = args.time_limit * 60
    checkpoint = runs.begin(args.output_dir, args.resume_from_checkpoint)

    first = args.process_index == 0

    def say(line):
        if first:
            print(line, flush=True)

    config = loading.load_config(model_args)
    checks.length(data_args.seq_len, config)
    with progress("reading and tokenizing the data", first):
        tokenizer, data = sources.load_data(model_args, data_args, args, config, say=say)
    if data_args.show_batch:
        say(_shown(data.train, data_args.show_batch, tokenizer))
        return 0
    schedule.check(args, schedule.steps_of(args, data.train, model_args.sp_size), say)
    with progress("planning", first):
        planned = footprint.check(config, model_args, data_args, args, say)
    record = runs.record(config, model_args, data_args, args, data.fingerprint)
    if checkpoint:
        runs.expect_same(checkpoint, record)
    if args.resume_from_checkpoint:
        none = "no checkpoint was finished before; starting from the first step"
        say(f"hfpatch: {f'resuming from {checkpoint}' if checkpoint else none}.")
    with locks.alone_in(args.output_dir) if first else contextlib.nullcontext():
        run = _trainer(
            model_args, data_args, args, config, tokenizer, data, record, stop, say, planned
        )
        checks.engine_is_on(args, run.accelerator, checkpoint)
        return _fit(run, checkpoint, stop, say)


def _trainer(
    model_args, data_args, args, config, tokenizer, data, record: dict, stop, say, planned
):
    """The Trainer of the run, with its model loaded."""
    from transformers import EarlyStoppingCallback

    from hfpatch.trainer import arguments, loading, placement, trainer
    from hfpatch.trainer import data as sources
    from hfpatch.trainer.callback import Callback
    from hfpatch.trainer.dataset import Collator

    model = loading.load_model(model_args, config, args.seed)
    loading.expect_saves(model, say)
    placed = placement.trainer_arguments(model, args, model_args.placement)
    # The callback applies hfpatch and logs speed and memory.
    callback = Callback(
        apply=arguments.apply_options(model_args), attention_share=data.attention_share,
        plan=planned,
    )  # fmt: skip
    callbacks = [callback, stop]
    if args.early_stopping_patience:
        callbacks.append(
            EarlyStoppingCallback(args.early_stopping_patience, args.early_stopping_delta)
        )
    pad_id, shares = sources.pad_id(config, tokenizer), model_args.sp_size > 1
    run = trainer.Trainer(
        model=model,
        args=args,
        data_collator=Collator(pad_id=pad_id, multiple=data_args.pad_multiple, positions=shares),
        train_dataset=data.train,
        eval_dataset=data.evaluation,
        processing_class=tokenizer,
        callbacks=callbacks,
        bytes_per_token=data.bytes_per_token,
        record=record,
        **placed,
    )
    callback.attach(run)
    return run


def _fit(run, checkpoint: str | None, stop, say) -> int:
    """Trains, saves and evaluates. Returns the exit code."""
    begin = time.monotonic()
    result = run.train(resume_from_checkpoint=checkpoint)
    if stop.code:
        say(
            f"hfpatch: {stop.reason} at step {run.state.global_step}: a checkpoint is saved; go on "
            "with --resume_from_checkpoint True."
        )
        return stop.code
    run.save_model()  # before the evaluation, which takes long and may be stopped
    if run.eval_dataset is not None:
        say(f"hfpatch: {held_out(run)}")
    run.save_state()
    if run.args.push_to_hub:
        run.push_to_hub()
    limit = f"{stop.time_limit / 60:g} minutes (--time_limit)"
    steps = f"{run.state.global_step} step{'s' * (run.state.global_step != 1)}"
    if stop.late:
        steps = f"{run.state.global_step} of {run.state.max_steps} steps, stopped after {limit}"
    trained = timedelta(seconds=round(result.metrics["train_runtime"]))
    elapsed = timedelta(seconds=round(time.monotonic() - begin))
    say(
        f"hfpatch: {steps}, total training time {trained} (with evaluation "
        f"{elapsed}); the model is in {run.args.output_dir}"
    )
    return 0


def _shown(rows, number: int, tokenizer) -> str:
    from hfpatch.trainer.dataset import show

    return show([row for _, row in zip(range(number), rows)], tokenizer)


def held_out(run) -> str:
    """The held-out loss after training, with --eval_on_start before it too, a token and a byte."""
    evaluated = [entry for entry in run.state.log_history if "eval_loss" in entry]
    before = evaluated[0] if evaluated and evaluated[0]["step"] == 0 else None
    current = (
        evaluated
        and evaluated[-1]["step"] == run.state.global_step
        and not run.args.load_best_model_at_end
    )
    after = evaluated[-1] if current else run.evaluate()
    words = []
    for name, unit in (("eval_loss", "a token"), ("eval_nats_per_byte", "a byte")):
        if name in after:
            was = f"{before[name]:.3f} before, " if before else ""
            words.append(f"{was}{after[name]:.3f} after, in nats {unit}")
    return "held-out loss " + "; ".join(words)
