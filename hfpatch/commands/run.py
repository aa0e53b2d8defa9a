"""`python -m hfpatch run script.py ...`: runs an unmodified Trainer script with `hfpatch.apply` on its model.

Under `accelerate launch -m hfpatch run script.py ...` the same. Every transformers Trainer that the script makes, TRL's
and other subclasses too, gets `hfpatch.Callback(apply=True)`, which patches the model on init, before an engine wraps
it.
"""

import functools
import importlib.util
import inspect
import runpy
import sys
from pathlib import Path

USAGE = "usage: hfpatch run [-m module | script.py] [arguments of the script ...]"


def patch_trainer():
    """Makes every later `transformers.Trainer` patch its model. Returns the list of the callbacks so added."""
    from transformers import Trainer

    from hfpatch.training.callback import Callback

    added, stock = [], Trainer.__init__

    @functools.wraps(stock)
    def init(self, *args, **kwargs):
        # TRL passes callbacks by keyword; a script may pass them by position (the ninth).
        position = list(inspect.signature(stock).parameters).index("callbacks") - 1
        args = list(args)
        given = args[position] if len(args) > position else kwargs.get("callbacks")
        given = list(given or [])
        if not any(isinstance(c, Callback) and c.apply for c in given):
            added.append(Callback(apply=True))
            given.append(added[-1])
        if len(args) > position:
            args[position] = given
        else:
            kwargs["callbacks"] = given
        stock(self, *args, **kwargs)

    Trainer.__init__ = init
    return added


def _runs(module: str) -> bool:
    """Whether python -m would find it: a module, or a package with a __main__."""
    try:
        found = importlib.util.find_spec(module)
        if found is not None and found.submodule_search_locations is not None:
            found = importlib.util.find_spec(f"{module}.__main__")
    except (ImportError, ValueError):  # of a parent; of a name such as ".x"
        return False
    return found is not None


def main(argv=None) -> int:
    """Runs the script of argv (sys.argv[1:] by default) as `__main__`. Returns 2 for bad arguments, 0 otherwise."""
    argv = list(sys.argv[1:] if argv is None else argv)
    module = argv[:1] == ["-m"]
    argv = argv[1:] if module else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE, file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    if not module and not Path(argv[0]).is_file():
        print(f"hfpatch: expected a script, there is no file {argv[0]}; {USAGE}", file=sys.stderr)
        return 2
    if module:
        sys.path.insert(0, "")
        if not _runs(argv[0]):
            print(f"hfpatch: expected a module that runs, {argv[0]} is none here; {USAGE}", file=sys.stderr)
            return 2
    added = patch_trainer()
    sys.argv = argv
    if module:
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(argv[0]).resolve().parent))
        runpy.run_path(argv[0], run_name="__main__")
    if not added:
        print("hfpatch: the script made no transformers Trainer, so nothing was patched; call hfpatch.apply(model).",
              file=sys.stderr)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
