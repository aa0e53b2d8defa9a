"""What comes in the midst of a forward or a backward: Ctrl-C, a signal's handler or a hook that runs a model, a fork."""

import contextlib
import os
import signal
import sys
import threading
import warnings

import pytest
import tiny
import torch
import transformers.models.qwen3_next.modeling_qwen3_next as scans

import hfpatch
from hfpatch.compat import plain_scans
from hfpatch.models import asking
from hfpatch.models.classes import forwards_for_now
from hfpatch.models.loss import _InPlaceOf

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


# --- Ctrl-C ---------------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("kind", ["attention", "forwards", "head", "scans"])
def test_what_stands_somewhere_for_a_moment_is_gone_wherever_ctrl_c_comes(kind):
    model = tiny.llama()
    config, layers, holder = model.config, list(model.model.layers), {}
    make = {
        "attention": lambda: asking.our_attention((config, layers[0].self_attn.config), object()),
        "forwards": lambda: forwards_for_now([(layer, lambda x: x) for layer in layers]),
        "head": lambda: _InPlaceOf(holder, "lm_head", model.lm_head),
        "scans": plain_scans,
    }[kind]

    def stands() -> tuple:
        forwards = tuple("forward" in vars(layer) for layer in layers)
        found = tuple(vars(scans).get(n) for n in ("chunk_gated_delta_rule", "causal_conv1d_fn"))
        return config._attn_implementation, asking.here.batch, len(asking._entered), forwards, dict(holder), *found

    before, kind = stands(), type(make())
    with At(0, kind.enter, kind.leave) as lines, make():
        pass
    step = max(1, lines.count // 40)
    assert stands() == before and lines.count > 4
    for nth in range(1, lines.count + 1, step):
        with contextlib.suppress(KeyboardInterrupt), At(nth, kind.enter, kind.leave) as at, make():
            pass
        assert at.count >= nth and stands() == before, nth


def test_ctrl_c_while_a_thread_is_told_of_its_labels():
    kind = asking.having.__wrapped__
    for nth in range(1, 8):
        with contextlib.suppress(KeyboardInterrupt), At(nth, kind), asking.having(labels=1, target=2, idle_BT=3):
            pass
        assert (asking.here.labels, asking.here.target, asking.here.idle_BT) == (None, None, None), nth


@pytest.mark.parametrize("way", WAYS)
def test_ctrl_c_while_configs_are_named(way, monkeypatch):
    """At any of the moments at which a step gives a config our attention's name, or its own back."""
    ours, count, name = tiny.patched(tiny.llama(), checkpointing=WAYS[way]), [0, 0], asking.name_attention
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
        assert asking.here.batch is None and not asking._entered and ours.config._attn_implementation == "sdpa", nth
    count[:] = [0, 0]
    assert_same(gradients_of(ours), wanted)


# --- models that run in the midst of it -----------------------------------------------------------------------------------


def evaluated(model) -> list:
    """What a forward without labels gives, one with them, and four tokens after a prompt."""
    ids, was = tiny.ids(seed=5), model.training
    model.eval()
    with torch.no_grad():
        found = [model(input_ids=ids, use_cache=False).logits + 0, model(input_ids=ids, labels=ids).loss]
        mask = torch.ones(2, 6, dtype=torch.long)
        found.append(model.generate(ids[:, :6], attention_mask=mask, max_new_tokens=4, do_sample=False))
    model.train(was)
    return found


@pytest.mark.parametrize("place", ["layers.0", "layers.1.mlp", "embed_tokens"])
@pytest.mark.parametrize("way", WAYS)
def test_a_hook_evaluates_its_own_model(way, place):
    stock = tiny.llama()
    ours, wanted, busy, found = tiny.patched(stock, checkpointing=WAYS[way]), evaluated(stock), [], []

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


def test_a_handler_that_runs_a_model_while_a_config_is_named_waits_for_nobody(monkeypatch):
    """As a signal's would, in the midst of what a lock guards: its own thread has it."""
    stock = tiny.llama()
    ours, wanted, found, name = tiny.patched(stock), evaluated(stock), [], asking.name_attention
    plain = gradients_of(ours)

    def interrupted(*args):
        monkeypatch.setattr(asking, "name_attention", name)
        found.append(evaluated(ours))
        return name(*args)

    monkeypatch.setattr(asking, "name_attention", interrupted)
    got = []
    thread = threading.Thread(target=lambda: got.append(gradients_of(ours)), daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "waits for ever"
    for a, b in zip(found[0], wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert_same(got[0], plain)
    assert not asking._entered and ours.config._attn_implementation == "sdpa"


def test_a_model_in_the_midst_of_a_tile_is_refused():
    ours = tiny.patched(tiny.llama())
    with asking.asking(object()), pytest.raises(RuntimeError, match="set a flag"):
        ours(tiny.ids())
    assert asking.here.role is None


# --- forks ----------------------------------------------------------------------------------------------------------------


def in_a_child(run) -> int:
    """Status of a forked process that runs this and has half a minute."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12, where there are other threads
        pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(30)
        status = 1
        try:
            torch.set_num_threads(1)  # OpenMP's others are the parent's: a stock model would wait for them too
            run()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_forked_process_waits_for_no_thread_of_its_parent(tier, tmp_path):
    """Neither for one in the midst of a layer, or of naming our attention, nor for those that write a disk's files."""
    where = str(tmp_path) if tier == "disk" else tier
    ours = tiny.patched(tiny.llama(), checkpointing=hfpatch.Checkpointing(offload=where, tile=8, plain=0))
    wanted = gradients_of(ours)
    held, done = threading.Event(), threading.Event()

    def holds():
        with ours.model._hfpatch_session.turn, asking.LOCK:
            held.set()
            done.wait()

    thread = threading.Thread(target=holds)
    thread.start()
    held.wait()
    try:
        assert in_a_child(lambda: assert_same(gradients_of(ours), wanted)) == 0
    finally:
        done.set()
        thread.join()
    assert_same(gradients_of(ours), wanted)
