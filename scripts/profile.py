"""`hfpatch profile` for one implementation under an engine (DDP, FSDP2, DeepSpeed), each rank
recording its own step.

    accelerate launch --config_file fsdp_configs/fsdp2.yaml scripts/profile.py --model llama-3.1-8b
        --seq-len 32768 \\ --impl hfpatch --out runs/profile-fsdp2

Options as `hfpatch profile`'s, with one --impl and one --seq-len. Run it again with another --impl
and the same --out: the report then compares them. The report is of rank 0; the peaks of all ranks
are in its notes.
"""

import os
import shlex
import sys
from argparse import RawDescriptionHelpFormatter
from pathlib import Path

# This file has the name of a standard module, which cProfile imports: its own folder must not be
#     searched for it.
sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

import torch  # noqa: E402
from accelerate import Accelerator  # noqa: E402

from hfpatch.cli import profile as command  # noqa: E402
from hfpatch.cli.failures import Parser, guarded  # noqa: E402
from hfpatch.lab.profile import step  # noqa: E402
from hfpatch.lab.profile.options import Options, check_together  # noqa: E402
from hfpatch.lab.profile.run import read, write  # noqa: E402
from hfpatch.lab.profile.timeline import IMPLEMENTATIONS, size  # noqa: E402
from hfpatch.planner.limits import check_ranges, parse_lengths  # noqa: E402


def main(argv=None) -> int:
    return guarded(_main, sys.argv[1:] if argv is None else argv)


def _main(argv) -> int:
    parser = Parser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    command.add_step(parser)
    command.add_run(parser)
    args = parser.parse_args(argv)
    check_ranges(vars(args))
    lengths = parse_lengths(args.seq_len)
    if len(lengths) > 1 or "," in args.impl or args.simulate:
        parser.error(
            "expected one --impl and one --seq-len a launch, and real steps; launch again with "
            "the same --out"
        )
    asked = command.options(args)
    check_together([args.impl], asked["checkpointing"], asked["gradient_checkpointing"])
    folder = Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    accelerator = Accelerator(cpu=args.device == "cpu")
    options = Options(
        model=args.model,
        impl=args.impl,
        seq_len=lengths[0],
        folder=str(folder),
        **asked | {"device": accelerator.device.type},
    )
    run = record(accelerator, options)
    if accelerator.is_main_process:
        earlier = read(folder) if (folder / "results.json").is_file() else []
        runs = sorted(
            [*(r for r in earlier if r.key != run.key), run],
            key=lambda r: (r.seq_len, IMPLEMENTATIONS.index(r.impl)),
        )
        write(
            folder,
            runs,
            command="accelerate launch " + shlex.join(["scripts/profile.py", *sys.argv[1:]]),
        )
        print(
            f"{run.impl}: peak {size(run.peak_bytes)} in the {run.peak_phase}"
            + (f"; {run.error}" if run.error else "")
        )
        print(f"report: {folder / 'report.md'}")
    return 0


def record(accelerator: Accelerator, options: Options):
    """One Run of this rank, the model patched before the engine wraps it."""
    model = step.build_model(options)
    applied = step.become(
        model, options.impl, options.gradient_checkpointing, options.checkpointing
    )
    vocab_size = model.config.vocab_size
    optimizer = step.make_optimizer(model.parameters(), options.optimizer)
    plugin = accelerator.state.deepspeed_plugin
    if plugin is not None:
        # Left to a data loader, which a profile does not have.
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
    run.setup["engine"] = (
        f"{accelerator.distributed_type.value.lower()}, {accelerator.num_processes} ranks"
    )
    run.applied = applied
    if run.error is None and accelerator.num_processes > 1:
        peaks = accelerator.gather(
            torch.tensor([run.peak_bytes], device=accelerator.device)
        ).tolist()
        run.notes.append("peak by rank: " + ", ".join(size(peak) for peak in peaks))
    return run


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # gloo's teardown aborts now and then at exit; everything is written by now.
    os._exit(code)
