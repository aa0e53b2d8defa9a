"""Trains a causal language model: `hfpatch train --model M --data D`, or under `accelerate launch -m`.

    hfpatch train --preset llama-tiny --train_tokenizer 512 --data docs/ --output_dir runs/docs
    hfpatch train config.yaml --learning_rate 1e-5
    accelerate launch --num_processes 8 -m hfpatch train config.yaml --engine zero3

In a checkout `scripts/train.py` is the same.

Flags are those of transformers' TrainingArguments and of hfpatch/training/arguments.py (`--help`). Exit codes: 0 done,
143 and 130 stopped by SIGTERM and by Ctrl-C (with a checkpoint where training had begun), 2 bad input, refused before
long work, 1 a failure of the machine such as a full disk.
"""

import logging
import os
import sys
import time

from hfpatch.commands.failures import guarded
from hfpatch.memory.limits import environment_number

ENDED = (0, 130, 143)  # finished, or stopped with a checkpoint: by all ranks together


def main(argv=None) -> int:
    """One run of argv (sys.argv[1:] by default). Returns the exit code; bad input is one sentence on stderr.

    Where a launcher started several processes, one that ended well does not return: it leaves here.
    """
    code = guarded(train, sys.argv[1:] if argv is None else argv, piped=False)
    if sys.stdout:
        sys.stdout.flush()
    sys.stderr.flush()
    if code in ENDED and environment_number("WORLD_SIZE", 1) > 1:
        os._exit(code)  # gloo's own teardown aborts about one run in ten; everything is saved by now
    return code


def train(argv) -> int:
    """Parse, refuse what cannot work, load, train, evaluate, save."""
    logging.getLogger("torchao").setLevel(logging.ERROR)  # its optional libraries are none of the user's business
    from hfpatch.training import arguments, checks
    from hfpatch.training.stop import StopCleanly

    checks.environment()
    stop = StopCleanly()  # first, for it notes who launched this process
    model_args, data_args, args = arguments.parse(argv)
    checks.flags(model_args, data_args, args)
    stop.time_limit = args.time_limit * 60
    checkpoint, aside = checks.agreed(args, lambda: checks.begin(args.output_dir, args.resume_from_checkpoint))

    from transformers import EarlyStoppingCallback

    from hfpatch.memory.locks import left_builds
    from hfpatch.training import folders, placement, prepare, trainer
    from hfpatch.training.callback import Callback
    from hfpatch.training.dataset import Collator, show

    def say(line):
        if args.process_index == 0:
            print(line, flush=True)

    config = prepare.load_config(model_args)
    checks.length(data_args.seq_length, config)
    if args.deepspeed:
        checks.sharing(model_args.sp_size, config)
    source = prepare.source(data_args.data, data_args, digest=not data_args.streaming, say=say)
    with args.main_process_first(desc="tokenizing"):
        tokenizer = prepare.load_tokenizer(model_args, data_args, source)
        prepare.fit_vocabulary(config, tokenizer, fresh=bool(model_args.train_tokenizer))
        data_seed = args.seed if args.data_seed is None else args.data_seed
        data = prepare.load_datasets(data_args, source, tokenizer, config, seed=data_seed, say=say)
    for line in data.summaries:
        say(f"hfpatch: {line}")
    pad_id, shares = prepare.pad_id(config, tokenizer), model_args.sp_size > 1
    collator = Collator(pad_id=pad_id, multiple=data_args.pad_multiple, positions=shares)
    for lock in left_builds() if args.deepspeed or os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true" else ():
        say(
            f"hfpatch: {lock} is left from a build that was killed; if this run stands still, stop it and remove that file."
        )
    if data_args.show_batch:
        rows = [row for _, row in zip(range(data_args.show_batch), data.train)]
        say(show(rows, tokenizer))
        return 0
    checks.memory_of(config, model_args, data_args, args)
    record = checks.run_record(config, model_args, data_args, args, data.fingerprint)
    differs = checkpoint and checks.checkpoint_matches(checkpoint, record)
    with checks.writing_to(args, aside) as moved:
        if moved:
            say(f"hfpatch: {', '.join(moved)} set aside in {args.output_dir}/{folders.ASIDE}.")
        if args.resume_from_checkpoint:
            say(f"hfpatch: resuming from {checkpoint}." if checkpoint else "hfpatch: no checkpoint was finished before; "
                "starting from the first step.")  # fmt: skip
        if differs:
            say(f"hfpatch: {differs}")
        model = prepare.load_model(model_args, config, args.seed)
        columns = Callback(apply=arguments.apply_options(model_args), attention_share=data.attention_share)
        placed = placement.trainer_arguments(model, args, model_args.placement) if model_args.placement else {}
        callbacks = [columns, stop]
        if args.early_stopping_patience:
            callbacks.append(EarlyStoppingCallback(args.early_stopping_patience, args.early_stopping_delta))
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
            **placed,
        )
        checks.engine_is_on(args, run.accelerator, checkpoint)
        begin = time.monotonic()
        result = run.train(resume_from_checkpoint=checkpoint)
        if stop.code:
            say(f"hfpatch: {stop.reason} at step {run.state.global_step}: a checkpoint is saved; go on with "
                "--resume_from_checkpoint True.")  # fmt: skip
            return stop.code
        run.save_model()  # before the evaluation, which takes long and may be stopped
        if data.evaluation is not None:
            say(f"hfpatch: {held_out(run)}")
        run.save_state()
        if args.push_to_hub:
            run.push_to_hub()
    say(f"hfpatch: {run.state.global_step} steps, total training time {clock(result.metrics['train_runtime'])} "
        f"(with evaluation {clock(time.monotonic() - begin)}); the model is in {args.output_dir}")  # fmt: skip
    return 0


def held_out(run) -> str:
    """The held-out loss before training (with --eval_on_start) and after, in nats a token and, of text, a byte."""
    evaluated = [entry for entry in run.state.log_history if "eval_loss" in entry]
    before = evaluated[0] if evaluated and evaluated[0]["step"] == 0 else None
    current = evaluated and evaluated[-1]["step"] == run.state.global_step and not run.args.load_best_model_at_end
    after = evaluated[-1] if current else run.evaluate()
    words = []
    for name, unit in (("eval_loss", "a token"), ("eval_nats_per_byte", "a byte")):
        if name in after:
            was = f"{before[name]:.3f} before, " if before else ""
            words.append(f"{was}{after[name]:.3f} after, in nats {unit}")
    return "held-out loss " + "; ".join(words)


def clock(seconds: float) -> str:
    """Seconds as h:mm:ss."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
