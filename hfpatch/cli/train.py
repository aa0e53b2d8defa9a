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
import itertools
import os
import signal
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
    # [Step 1] What needs no library, which load for many seconds.
    expand_segments()
    if {"-h", "--help"} & {*argv}:
        print(train_help.text())
        return 0
    argv = ["--help" if word == "--help-all" else word for word in argv]
    _refuse_early(argv)

    # [Step 2] The flags.
    from hfpatch.trainer import arguments, checks, footprint, loading, locks, runs, schedule
    from hfpatch.trainer import data as sources
    from hfpatch.trainer.dataset import show
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

    # [Step 3] The config and the data.
    config = loading.load_config(model_args)
    checks.length(data_args.seq_len, config)
    with progress("reading and tokenizing the data", first):
        tokenizer, data = sources.load_data(model_args, data_args, args, config, say=say)
    if data_args.show_batch:
        say(show([*itertools.islice(data.train, data_args.show_batch)], tokenizer))
        return 0

    # [Step 4] Does the run fit, train, and continue its checkpoint?
    schedule.check(args, schedule.steps_of(args, data.train, model_args.sp_size), say)
    with progress("planning", first):
        plan = footprint.check(config, model_args, data_args, args, say)
    record = runs.record(config, model_args, data_args, args, data.fingerprint)
    if checkpoint:
        runs.expect_same(checkpoint, record)
        say(f"hfpatch: resuming from {checkpoint}.")
    elif args.resume_from_checkpoint:
        say("hfpatch: no checkpoint was finished before; starting from the first step.")

    # [Step 5] The model, and training.
    with locks.alone_in(args.output_dir) if first else contextlib.nullcontext():
        model = loading.load_model(model_args, config, args.seed)
        loading.expect_saves(model, say)
        run = _trainer(model, model_args, data_args, args, tokenizer, data, plan, record, stop)
        checks.engine_is_on(args, run.accelerator, checkpoint)
        return _fit(run, checkpoint, stop, say)


def _refuse_early(argv) -> None:
    """ValueError for a run file that does not read, a number beyond its range, and without --model
    or --data, unless a file, --help or a misspelt flag is there."""
    numbers = {}
    for name, word in itertools.pairwise(argv):
        if word.removeprefix("-").isdecimal():
            numbers[name.lstrip("-")] = int(word)
    check_ranges(numbers, "_")
    given = [word.partition("=")[0] for word in argv]
    if given and not given[0].startswith("-"):
        run_file.read(run_file.find(argv[0]))
        return
    if "--help" in given:
        return
    for name, sentence in run_file.NEEDED.items():
        if not did_you_mean(f"--{name}", given):  # a misspelt one has its own sentence
            raise ValueError(f"hfpatch: {sentence}")


def _trainer(model, model_args, data_args, args, tokenizer, data, plan, record: dict, stop):
    """The Trainer of the run."""
    from transformers import EarlyStoppingCallback

    from hfpatch.trainer import arguments, placement, trainer
    from hfpatch.trainer import data as sources
    from hfpatch.trainer.callback import Callback
    from hfpatch.trainer.dataset import Collator

    # The callback applies hfpatch and logs speed and memory.
    callback = Callback(
        apply=arguments.apply_options(model_args), attention_share=data.attention_share, plan=plan
    )
    callbacks = [callback, stop]
    if args.early_stopping_patience:
        callbacks.append(
            EarlyStoppingCallback(args.early_stopping_patience, args.early_stopping_delta)
        )
    collator = Collator(
        pad_id=sources.pad_id(model.config, tokenizer),
        multiple=data_args.pad_multiple,
        positions=model_args.sp_size > 1,
    )
    run = trainer.Trainer(
        model=model,
        args=args,
        data_collator=collator,
        train_dataset=data.train,
        eval_dataset=data.evaluation,
        processing_class=tokenizer,
        callbacks=callbacks,
        bytes_per_token=data.bytes_per_token,
        record=record,
        **placement.trainer_arguments(model, args, model_args.placement),
    )
    callback.attach(run)
    return run


def _fit(run, checkpoint: str | None, stop, say) -> int:
    """Trains, saves and evaluates. Returns the exit code."""
    begin = time.monotonic()
    result = run.train(resume_from_checkpoint=checkpoint)
    done = run.state.global_step
    if stop.signal:
        reason = "Ctrl-C" if stop.signal == signal.SIGINT else "SIGTERM"
        say(
            f"hfpatch: {reason} at step {done}: a checkpoint is saved; go on with "
            "--resume_from_checkpoint True."
        )
        return 128 + stop.signal
    run.save_model()  # before the evaluation, which takes long and may be stopped
    if run.eval_dataset is not None:
        say(f"hfpatch: {held_out(run)}")
    run.save_state()
    if run.args.push_to_hub:
        run.push_to_hub()
    steps = f"{done} step{'s' * (done != 1)}"
    if stop.late:
        steps = (
            f"{done} of {run.state.max_steps} steps, stopped after {stop.time_limit / 60:g} "
            "minutes (--time_limit)"
        )
    trained = timedelta(seconds=round(result.metrics["train_runtime"]))
    elapsed = timedelta(seconds=round(time.monotonic() - begin))
    say(
        f"hfpatch: {steps}, total training time {trained} (with saving and evaluation "
        f"{elapsed}); the model is in {run.args.output_dir}"
    )
    return 0


def held_out(run) -> str:
    """The held-out loss after training, with --eval_on_start before it too, a token and a byte."""
    evaluated = [entry for entry in run.state.log_history if "eval_loss" in entry]
    before = evaluated[0] if evaluated and evaluated[0]["step"] == 0 else {}
    after = evaluated[-1] if evaluated else {}
    if after.get("step") != run.state.global_step or run.args.load_best_model_at_end:
        after = run.evaluate()
    words = []
    for name, unit in (("eval_loss", "a token"), ("eval_nats_per_byte", "a byte")):
        if name in before:
            words.append(f"{before[name]:.3f} before,")
        if name in after:
            words.append(f"{after[name]:.3f} after, in nats {unit};")
    return "held-out loss " + " ".join(words).removesuffix(";")
