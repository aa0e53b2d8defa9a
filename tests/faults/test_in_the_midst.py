"""What comes in the midst of a forward or a backward: Ctrl-C, a signal's handler or a hook that
runs a model, a fork.
"""

import contextlib
import sys

import pytest
import tiny
import torch

import hfpatch
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
            asking.having(labels=1, target=2, idle_BT=3),
        ):
            pass
        assert (asking.current.labels, asking.current.target, asking.current.idle_BT) == (
            None,
            None,
            None,
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


# --- models that run in the midst of it -----------------------------------------------------------


def evaluated(model) -> list:
    """What a forward without labels gives, one with them, and four tokens after a prompt."""
    ids, was = tiny.ids(seed=5), model.training
    model.eval()
    with torch.no_grad():
        found = [
            model(input_ids=ids, use_cache=False).logits + 0,
            model(input_ids=ids, labels=ids).loss,
        ]
        mask = torch.ones(2, 6, dtype=torch.long)
        found.append(
            model.generate(ids[:, :6], attention_mask=mask, max_new_tokens=4, do_sample=False)
        )
    model.train(was)
    return found


@pytest.mark.parametrize("place", ["layers.0", "layers.1.mlp", "embed_tokens"])
@pytest.mark.parametrize("way", WAYS)
def test_a_hook_evaluates_its_own_model(way, place):
    stock = tiny.llama()
    ours, wanted, busy, found = (
        tiny.patched(stock, checkpointing=WAYS[way]),
        evaluated(stock),
        [],
        [],
    )

    def hook(*_):
        if not busy and not found:
            busy.append(0)
            found.append(evaluated(ours))
            busy.clear()

    plain = gradients_of(ours)
    handle = ours.model.get_submodule(place).register_forward_hook(hook)
    got = gradients_of(ours)
    handle.remove()
    for a, b in zip(found[0], wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    for name, gradient in plain.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-5, atol=1e-6)


def test_a_model_in_the_midst_of_a_tile_is_refused():
    ours = tiny.patched(tiny.llama())
    with asking.asking(object()), pytest.raises(RuntimeError, match="set a flag"):
        ours(tiny.ids())
    assert asking.current.role is None
