"""What comes in the midst of a forward or a backward: Ctrl-C, a signal's handler or a hook that
runs a model.
"""

import contextlib
import sys

import pytest
import tiny
import torch

import hfpatch
from hfpatch.compat.modules import put
from hfpatch.context import current as asking

WAYS = {
    "host": hfpatch.Checkpointing(offload="host", tile=8, plain=0),
    "segments": hfpatch.Checkpointing(offload="host", tile=8, plain=0, every=2),
    "off": "off",
}


def gradients_of(model) -> dict:
    model.zero_grad()
    model(**tiny.labelled(), use_cache=False).loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters()}


def assert_same(got: dict, wanted: dict) -> None:
    for name, gradient in wanted.items():
        assert torch.equal(got[name], gradient), name


# --- Ctrl-C ---------------------------------------------------------------------------------------


class At:
    """An exception at the nth line that runs in one of these functions."""

    def __init__(self, nth: int, *functions):
        self.nth, self.codes, self.count = nth, {f.__code__ for f in functions}, 0

    def _trace(self, frame, event, arg):
        if frame.f_code not in self.codes:
            return None
        if event == "line":
            self.count += 1
            if self.count == self.nth:
                raise KeyboardInterrupt
        return self._trace

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *exc):
        sys.settrace(self.before)


def test_ctrl_c_while_a_thread_is_told_of_its_labels():
    kind = asking.having.__wrapped__
    for nth in range(1, 6):  # up to the yield
        with (
            contextlib.suppress(KeyboardInterrupt),
            At(nth, kind),
            asking.having(labels=1, target=2, unread=3),
        ):
            pass
        assert (asking.current.labels, asking.current.target, asking.current.unread) == (
            None,
            None,
            (None, False),
        ), nth


@pytest.mark.parametrize("way", WAYS)
def test_ctrl_c_while_configs_are_named(way, monkeypatch):
    """At any of the moments at which a step gives a config our attention's name, or its own
    back.
    """
    ours, count, name = (
        tiny.patched(tiny.llama(), checkpointing=WAYS[way]),
        [0, 0],
        asking.name_attention,
    )
    wanted = gradients_of(ours)

    def counting(*args):
        count[0] += 1
        if count[0] == count[1]:
            raise KeyboardInterrupt
        return name(*args)

    monkeypatch.setattr(asking, "name_attention", counting)
    gradients_of(ours)
    for nth in range(1, count[0] + 1, max(1, count[0] // 8)):
        count[:] = [0, nth]
        with contextlib.suppress(KeyboardInterrupt):
            gradients_of(ours)
        assert (
            asking.current.batch is None
            and not asking._entered
            and ours.config._attn_implementation == "sdpa"
        ), nth
    count[:] = [0, 0]
    assert_same(gradients_of(ours), wanted)


@pytest.mark.parametrize("way", WAYS)
def test_ctrl_c_while_forwards_are_put_back(way):
    """A forward that computes nothing, left on a Linear, would make every later step wrong."""
    ours = tiny.patched(tiny.llama(), checkpointing=WAYS[way])
    wanted, lines = gradients_of(ours), At(0, put)
    with lines:
        gradients_of(ours)
    for nth in range(1, lines.count + 1, max(1, lines.count // 24)):
        with contextlib.suppress(KeyboardInterrupt), At(nth, put):
            gradients_of(ours)
        assert_same(gradients_of(ours), wanted)


# --- models that run in the midst of it -----------------------------------------------------------


@pytest.mark.parametrize("place", ["layers.0", "layers.1.mlp", "embed_tokens"])
@pytest.mark.parametrize("way", WAYS)
def test_a_hook_that_runs_its_own_model_is_refused(way, place):
    ours = tiny.patched(tiny.llama(), checkpointing=WAYS[way])
    wanted = gradients_of(ours)
    handle = ours.model.get_submodule(place).register_forward_hook(lambda *_: ours(tiny.ids()))
    with pytest.raises(RuntimeError, match="Set a flag there"):
        gradients_of(ours)
    handle.remove()
    assert_same(gradients_of(ours), wanted)


def test_a_model_in_the_midst_of_a_tile_is_refused():
    ours = tiny.patched(tiny.llama())
    with asking.asking(object()), pytest.raises(RuntimeError, match="Set a flag"):
        ours(tiny.ids())
    assert asking.current.role is None
