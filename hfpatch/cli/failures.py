"""Failures of a command that are not bugs: one sentence and a non-zero exit. `--debug` shows the
traceback.

An error that no row below describes is a bug, and always shows its traceback.
"""

import argparse
import errno
import json
import pickle
import re
import sys
import traceback
import zipfile
from itertools import pairwise

from hfpatch.budget.limits import did_you_mean
from hfpatch.cli.quiet import quiet
from hfpatch.planner.limits import plainly
from hfpatch.trainer.run_file import FLAGS

BAD_INPUT = 2
MACHINE = 1
INTERRUPTED = 130

_FULL = "the disk is full{at}. Free some room, or write elsewhere"
_NO_RIGHT = "no permission{at}. Check its owner and mode, or write elsewhere"
_READ_ONLY = "the disk is read-only{at}. See how it is mounted, or write elsewhere"
_NO_FOLDER = "a file is where a folder must be{at}. Name another path"
_MEMORY = (
    "the memory ran out{why}. Ask `hfpatch plan` what fits, and take a shorter length, a smaller "
    "batch or model; on a GPU, PYTORCH_ALLOC_CONF=expandable_segments:True avoids fragments"
)
_FILES = "too many files are open. Raise the limit (ulimit -n) or use fewer workers"
_BROKEN = "a file is broken or cut{at}{why}. Write or download it again"
# errno: (exit code, sentence)
_SYSTEM = {
    errno.ENOSPC: (MACHINE, _FULL), errno.EDQUOT: (MACHINE, _FULL), errno.EFBIG: (MACHINE, _FULL),
    errno.EACCES: (BAD_INPUT, _NO_RIGHT), errno.EPERM: (BAD_INPUT, _NO_RIGHT),
    errno.EROFS: (MACHINE, _READ_ONLY),
    errno.ENOENT: (BAD_INPUT, "there is no such file or folder{at}. Check the path"),
    errno.ENOTDIR: (BAD_INPUT, _NO_FOLDER), errno.EEXIST: (BAD_INPUT, _NO_FOLDER),
    errno.EISDIR: (BAD_INPUT, "a folder is where a file must be{at}. Name a file"),
    errno.ENAMETOOLONG: (BAD_INPUT, "a name is too long{at}. Shorten it"),
    errno.ENOMEM: (MACHINE, _MEMORY), errno.EMFILE: (MACHINE, _FILES),
    errno.ENFILE: (MACHINE, _FILES),
    errno.EIO: (MACHINE, "reading or writing failed{at}. Check the disk"),
    errno.EADDRINUSE: (MACHINE, "the port is in use{at}. Choose another, as with MASTER_PORT"),
    errno.EPIPE: (MACHINE, "what read the output is gone. Write it to a file, as with > run.log"),
}  # fmt: skip
# Errors that libraries raise as RuntimeError and the like, recognized by words of the message. Disk
# comes before memory, and both before broken files: earlier messages contain words of later rows.
_WORDS = (
    (r"no space left|os error (28|27|122)|disk quota|file write failed|failed writing file|unexpected pos", MACHINE, _FULL),
    (r"out of memory|not enough memory|can.?t allocate|cannot allocate|unable to allocate|bad_alloc", MACHINE, _MEMORY),
    (r"read-only file system|os error 30", MACHINE, _READ_ONLY),
    (r"too many open files", MACHINE, _FILES),
    (r"permission denied|os error 13", BAD_INPUT, _NO_RIGHT),
    (r"name or service not known|name resolution|network is unreachable|connection refused", MACHINE,
     "the network or a server cannot be reached{why}. Check the connection"),
    (r"eaddrinuse|address already in use", MACHINE, _SYSTEM[errno.EADDRINUSE][1]),
    (r"failed reading zip|failed finding central|invalid magic number|pytorchstreamreader|corrupt|deserializ|"
     r"unpickl|incomplete metadata|invalid ?header|header ?too ?large|metadataincomplete",
     BAD_INPUT, _BROKEN),
)  # fmt: skip
# An error of a data loader's worker has its traceback in the message.
_IN_WORKER = re.compile(r"^Caught \w+ in \w+ worker process .*(?=hfpatch: )")
_LONG = re.compile(r"(\S{200})\S{100,}")
_SECRET = re.compile(r"\bhf_\w{6,}")


class Parser(argparse.ArgumentParser):
    """A parser that raises ValueError with one sentence for wrong arguments, for the handler below.

    Dashes or underscores join the words of a flag. The names of `hfpatch train` (run_file.FLAGS)
    are accepted too.
    """

    def __init__(self, **settings):
        super().__init__(**{"allow_abbrev": False, **settings})

    def parse_known_args(self, args=None, namespace=None):
        self.given = args
        # The groups' too. Help lists the first name only.
        actions = self._option_string_actions
        for key, flag in FLAGS.items():
            if flag in actions:
                actions.setdefault(f"--{key.replace('_', '-')}", actions[flag])
        for flag, action in list(actions.items()):
            actions.setdefault(flag[:2] + flag[2:].replace("-", "_"), action)
        return super().parse_known_args(args, namespace)

    def error(self, message):
        named = [a.option_strings[-1] for a in self._actions if a.option_strings]
        flags = [word.partition("=")[0] for word in self.given or () if word.startswith("--")]
        misspelt = [flag for flag in flags if flag not in self._option_string_actions]
        if misspelt and "are required" in message:
            message = f"unrecognized arguments: {misspelt[0]}"
        near = did_you_mean(misspelt[0], named) if misspelt else ""
        raise ValueError(f"hfpatch: {plainly(message)}{near} See {self.prog} --help.")


def guarded(command, argv, *, piped: bool = True) -> int:
    """Runs command(argv) and returns its exit code. A known failure is one sentence on stderr.

    A `--debug` without a word after it is removed from argv, and shows the traceback in place of
    the sentence. piped: a closed output pipe (`| head`) is not a failure. Exit codes of failures: 2
    bad input, 1 the machine (disk, memory), 130 Ctrl-C.
    """
    quiet()
    words = []
    for word, after in pairwise([*argv, None]):
        # TrainingArguments has a --debug of its own, which takes a word.
        if word != "--debug" or after == "underflow_overflow":
            words.append(word)
    debug = len(words) < len(argv)
    try:
        for word, after in pairwise([*words, None]):
            # argparse makes an empty list of --flag=--, and takes "" for the current folder
            if word.startswith("--") and (word.endswith(("=", "=--")) or after == ""):
                flag = word.partition("=")[0]
                raise ValueError(f"hfpatch: {flag} has no value. Write one, or leave it out.")
        return command(words)
    except KeyboardInterrupt as error:
        return say(error, "stopped by Ctrl-C", INTERRUPTED, debug)
    except Exception as error:
        if isinstance(error, BrokenPipeError):
            sys.stdout = None  # else Python complains at exit that it cannot flush
            if piped:
                return 0
        explanation = explain(error)
        if explanation is None:
            raise
        return say(error, *explanation, debug)


def say(error: BaseException, sentence: str, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
    else:
        sentence = _LONG.sub(r"\1...", _SECRET.sub("hf_...", sentence))
        print(f"hfpatch: {sentence}{'' if sentence.endswith('?') else '.'}", file=sys.stderr)
    return code


def explain(error: BaseException) -> tuple[str, int] | None:
    """The sentence (without "hfpatch: " and its full stop) and the exit code of a known failure;
    None for a bug.
    """
    text = _IN_WORKER.sub("", " ".join(str(error).split()))
    # hfpatch's own errors are sentences for the user already.
    if text.startswith("hfpatch:"):
        return text.removeprefix("hfpatch:").strip().removesuffix("."), BAD_INPUT
    if isinstance(error, OSError) and error.errno is not None:
        code, form = _SYSTEM.get(error.errno, (MACHINE, f"{error.strerror or text}{{at}}"))
        # hfpatch's own sentence names the place already
        if str(error.strerror).startswith("hfpatch: "):
            return error.strerror.removeprefix("hfpatch: "), code
        return form.format(at=f" at {error.filename}" if error.filename else "", why=""), code
    why = f" ({_cut(text)})" if text else ""
    if isinstance(error, MemoryError):
        return _MEMORY.format(why=why), MACHINE
    if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("hfpatch"):
        return f"the package {error.name} is missing. Run: pip install {error.name}", BAD_INPUT
    if isinstance(error, json.JSONDecodeError):
        return f"line {error.lineno} must be JSON ({error.msg}). Correct the file", BAD_INPUT
    if isinstance(error, UnicodeDecodeError):
        return f"a file must be UTF-8 text{why}. Convert it", BAD_INPUT
    if isinstance(error, ValueError) and text.startswith("embedded null"):
        return "a path holds a null character. Correct it", BAD_INPUT
    if isinstance(error, (pickle.UnpicklingError, EOFError, zipfile.BadZipFile)):
        return _BROKEN.format(at="", why=why), BAD_INPUT
    # Libraries raise these for many causes, and only the message tells which.
    if isinstance(error, (RuntimeError, OSError)) or type(error).__name__ in (
        "ConnectError",
        "SafetensorError",
        "OutOfMemoryError",
    ):
        for words, code, form in _WORDS:
            if re.search(words, text, re.IGNORECASE):
                return form.format(at="", why=why), code
    # transformers and the hub raise OSError for files that do not load
    if isinstance(error, OSError) and text:
        return _cut(text), BAD_INPUT
    return None


def _cut(text: str) -> str:
    """The first sentence of a library's message, at most 200 characters."""
    return re.split(r"(?<=\w\w)\. ", text)[0][:200].rstrip(". ")
