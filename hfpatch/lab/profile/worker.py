"""One implementation in one process: `python -m hfpatch.lab.profile.worker '{"model": ..., "impl":
...}' result.json`.

Each has its own process, because patched modules, a warm allocator or cached memory would change
the next figure. The result is a Run, or a sentence: the implementation cannot run here.
"""

import json
import logging
import sys


def main(argv) -> int:
    from hfpatch.lab.profile.options import Options

    logging.disable(logging.WARNING)  # of other libraries, on their own optional parts
    options = Options(**json.loads(argv[0]))

    def progress(text: str) -> None:
        print(f"hfpatch: {options.impl}, {options.seq_len:,} tokens: {text}", file=sys.stderr)

    try:
        found = vars(_run(options, progress))
    except ValueError as error:
        found = str(error)
        if not found.startswith("hfpatch:"):
            raise
    with open(argv[1], "w") as file:
        json.dump(found, file)
    return 0


def _run(options, progress):
    import torch

    from hfpatch.lab.profile import simulated, step

    used = None
    if options.simulate:
        dtype = torch.bfloat16 if options.dtype == "auto" else options.torch_dtype
        run = step.new_run(options, "fake tensors", dtype, "simulated")
    else:
        run, used = step.measure_steps(options, progress)
    if options.impl == "liger" and not options.simulate:  # its kernels know no fake tensors
        run.peak_bytes = run.memory.get("allocated_peak_bytes", 0)
        return run
    progress("following the step on fake tensors")
    return simulated.follow(run, options, used)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
