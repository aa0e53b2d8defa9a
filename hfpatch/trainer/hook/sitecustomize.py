"""Python imports this file at the start of every process of `hfpatch run`.

The folder is first on their PYTHONPATH. The file imports no library: it waits until the process
imports transformers' Trainer or accelerate's Accelerator, and hands the module to
hfpatch.trainer.watch. A process that imports neither pays for this file alone.
"""

import os
import sys

FOLDER = os.path.dirname(os.path.abspath(__file__))
WATCHED = ("transformers.trainer", "accelerate.accelerator")


class Watch:
    """A finder of sys.meta_path that calls `then` with each watched module right after it ran."""

    def __init__(self, watched, then):
        self.watched = watched
        self.then = then

    def find_spec(self, name, path=None, target=None):
        """The other finders' spec of a watched module, with a changed loader; None for others."""
        if name not in self.watched:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        for finder in others:
            find = getattr(finder, "find_spec", None)  # some of old packages have none
            spec = find and find(name, path, target)
            if spec is not None:
                break
        else:
            return None
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            self.then(module)

        spec.loader.exec_module = exec_module
        return spec


def _patch(module) -> None:
    try:
        from hfpatch.trainer import watch
    except ModuleNotFoundError as error:
        if error.name != "hfpatch":
            raise
        # The run has hfpatch from a checkout's folder, which goes last: there it hides nothing.
        sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(FOLDER))))
        from hfpatch.trainer import watch
    watch.loaded(module)


def _hand_on() -> None:
    """Runs the sitecustomize that this file hides, if there is one."""
    sys.path[:] = [place for place in sys.path if os.path.abspath(place) != FOLDER]
    ours = sys.modules.pop(__name__)
    try:
        import sitecustomize  # noqa: F401
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        sys.modules[__name__] = ours


if __name__ == "sitecustomize":
    # A launcher may copy PYTHONPATH alone to another machine, where there is no run.
    if "HFPATCH_RUN" in os.environ:
        sys.meta_path.insert(0, Watch(WATCHED, _patch))
    _hand_on()
