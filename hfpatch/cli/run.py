"""Runs a training command unmodified, with `hfpatch.apply` on the model of each of its Trainers.

    hfpatch run train.py --lr 1e-5
    hfpatch run torchrun --nproc_per_node 8 train.py
    hfpatch run --checkpointing least --require trl sft --config sft.yaml

The command is a child process. It and all processes that it starts find `hfpatch/trainer/hook` on
their PYTHONPATH, so no launcher needs to know of hfpatch. Not reached: Python with -I, -E or -S,
actors of a Ray cluster that runs already, and processes on other machines.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

from hfpatch.budget.policy import parse_checkpointing
from hfpatch.cli.failures import BAD_INPUT, Parser
from hfpatch.cli.flags import add_checkpointing
from hfpatch.lab.children import ends_with
from hfpatch.trainer import marks

NOTHING_TRAINED = 3
# Options of hfpatch.apply that --no-NAME turns off -> what a model then has.
_PARTS = {
    "rope": "stock rotary embedding",
    "rms_norm": "RMSNorm as it is",
    "mlp": "MLP as it is",
    "loss": "stock head and loss",
}
_WORDS = {"auto": "auto", "true": True, "false": False}
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
_PASSED_ON = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]


def main(argv=None) -> int:
    """Runs the command of argv (sys.argv[1:] by default) to its end.

    Returns:
        The command's own exit code, also where a signal stopped it. 2 if there is no such command
        or an option is wrong. With --require, 3 if the command succeeded but none of its processes
        trained a patched model.
    """
    parser = _parser()
    try:
        args = parser.parse_args(sys.argv[1:] if argv is None else list(argv))
        command = _command(args)
        options = _options(args)
    except ValueError as error:
        print(f"{error} {parser.format_usage().strip()}", file=sys.stderr)
        return BAD_INPUT
    outer = marks.settings()  # `hfpatch run torchrun -m hfpatch run ...`: the outer keeps all marks
    # no outer folder on another machine, nor where this process outlives the outer run
    inside = bool(outer) and Path(outer["folder"]).is_dir()
    late = {"ignore_cleanup_errors": True}  # a process that outlives the run may leave a mark
    made = tempfile.TemporaryDirectory
    place = nullcontext(outer["folder"]) if inside else made(prefix="hfpatch-run-", **late)
    with place as folder:
        own = f"{marks.TRAINED}-{os.getpid()}"
        variables = marks.environment(folder, outer.get("options", {}) | options, own)
        code, stopped = _child(command, variables)
        trained = Path(folder, own).exists()
    if code or trained or stopped or (inside and not args.require):
        return _as_ended(code)
    if os.environ.get("RANK", "0") == "0":
        print(
            "hfpatch: nothing was patched: no process of this run trained a patched model with a "
            "Trainer or an accelerate loop. Call hfpatch.apply(model) in the script.",
            file=sys.stderr,
        )
    return NOTHING_TRAINED if args.require else 0


def _parser() -> Parser:
    usage = "hfpatch run [options] script.py | -m module | command [arguments ...]"
    parser = Parser(prog="hfpatch run", usage=usage, description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    add = parser.add_argument
    add_checkpointing(add)
    for name, said in _PARTS.items():
        flag = f"--no-{name.replace('_', '-')}"
        add(flag, dest=name, action="store_false", default=None, help=said)
    add("--logits", choices=list(_WORDS), help="whether forwards with labels return logits")
    add("--require", action="store_true", help="exit 3 if nothing trained with hfpatch")
    rest = {"nargs": argparse.REMAINDER}
    add("-m", dest="module", metavar="module", help="a module, as python -m takes it", **rest)
    add("command", help="a Python script, or a command: torchrun, accelerate, trl, ...", **rest)
    return parser


def _command(args) -> list[str]:
    """The command to start. Raises ValueError if there is none."""
    if args.module:
        return [sys.executable, "-m", *args.module]
    words = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not words:
        raise ValueError("hfpatch: a script, a module or a command is missing. Name one.")
    name = words[0]
    is_file = Path(name).is_file()
    if not is_file and shutil.which(name) is None:
        raise ValueError(f"hfpatch: there is no script or command {name}. Check its name.")
    if is_file and name.endswith(".py"):
        return [sys.executable, *words]
    return words


def _options(args) -> dict:
    """The given options, as marks.environment takes them. Raises ValueError for a wrong one."""
    options: dict = {name: False for name in _PARTS if getattr(args, name) is False}
    if args.logits:
        options["logits"] = _WORDS[args.logits]
    if args.checkpointing:
        parse_checkpointing(args.checkpointing)  # raises for a value out of range
        options["checkpointing"] = args.checkpointing
    return options


def _child(command: list[str], environment: dict[str, str]) -> tuple[int, bool]:
    """Runs the command with these environment variables, and passes signals on to it.

    Returns its exit code, -n if signal n ended it, and whether a signal arrived meanwhile.
    """
    # [Step 1] Note the handlers to restore at the end. A signal that this process ignores stays
    # ignored.
    variables = os.environ | environment
    before = {number: signal.getsignal(number) for number in _PASSED_ON}
    before = {n: handler for n, handler in before.items() if handler is not signal.SIG_IGN}  # nohup
    heard = []
    children = []

    def pass_on(number, frame):
        heard.append(number)
        for child in children:
            # In the foreground the terminal has sent Ctrl-C to the child too.
            if number != signal.SIGINT or not _in_foreground():
                child.send_signal(number)

    try:
        # [Step 2] Take over the signals before the child begins, so that none ends this process
        # alone.
        for number in before:
            signal.signal(number, pass_on)
        try:
            # [Step 3] Start the child.
            child = subprocess.Popen(command, env=variables, preexec_fn=ends_with(os.getpid()))
        except OSError as error:
            print(
                f"hfpatch: the system cannot start {command[0]} ({error.strerror}). Name its "
                f"interpreter, as in: hfpatch run bash {command[0]}",
                file=sys.stderr,
            )
            return BAD_INPUT, False
        # [Step 4] Pass on the signals that arrived while it started, then wait for it to exit.
        children.append(child)
        for number in heard:
            child.send_signal(number)
        return child.wait(), bool(heard)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _as_ended(code: int) -> int:
    """Returns the exit code. If a signal ended the child, it ends this process too."""
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def _in_foreground() -> bool:
    """Whether a terminal sends Ctrl-C to this process's group, and so to the child as well."""
    try:
        with open("/dev/tty") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main())
