"""One implementation in one process: `python -m hfpatch.lab.profile.worker '{"model": ..., "impl":
...}' result.json`.

Each has its own process, because patched modules, a warm allocator or cached memory would change
the next figure. Lines on stdout that start with PROGRESS are for the caller's progress bar. Exit
code 2: the implementation cannot run here.
"""

import json
import sys

PROGRESS = "hfpatch-progress "


def main(argv) -> int:
    from hfpatch.lab.profile import step
    from hfpatch.lab.profile.options import Options

    options = Options(**json.loads(argv[0]))

    def progress(text):
        print(PROGRESS + text, flush=True)

    try:
        progress("building the model")
        run = _run(step, options, progress)
    except ValueError as error:
        if not str(error).startswith("hfpatch:"):
            raise
        print(error, file=sys.stderr)
        return 2
    with open(argv[1], "w") as file:
        json.dump(vars(run), file)
    return 0


def _run(step, options, progress):
    from hfpatch.lab.device import is_out_of_memory
    from hfpatch.lab.profile.timeline import Run

    if options.simulate:
        from hfpatch.lab.profile.simulated import simulated_run

        progress("simulating")
        return simulated_run(options)
    try:
        model = step.build_model(options)
        applied = step.become(
            model, options.impl, options.gradient_checkpointing, options.checkpointing
        )
        optimizer = step.make_optimizer(model.parameters(), options.optimizer)
        batch = step.make_batch(model.config.vocab_size, options, next(model.parameters()).device)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        text = f"out of memory while the model was built: {str(error).strip().splitlines()[0]}"
        return Run(impl=options.impl, seq_len=options.seq_len, batch=options.batch, error=text)
    run = step.record_run(model, optimizer, batch, options, progress=progress)
    run.applied = applied
    return run


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
