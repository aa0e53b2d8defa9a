"""After a step that was cut short the next one is exact, bit for bit, and nothing that the dead one
held is lost.
"""

import contextlib
import dis
import gc
import os
import sys
import threading
from pathlib import Path

import pytest
import torch
from tiny import OfAnEngine, gradients

import hfpatch
from hfpatch.store import disk
from tests.layer.deep import tiny_llama, tokens

CODE = tuple(
    str(Path(hfpatch.__file__).parent / name) for name in ("layer", "store", "context", "compat")
)
# tile, keep, every: several tiles or one, attention saved or run again, segments
WAYS = {
    "tiles": (8, "attention", 1),
    "one": (4096, "attention", 1),
    "every 2": (8, "input", 2),
    "every 3": (4096, "input", 3),
}


def patched(tier, way, directory, **changes):
    tile, keep, every = WAYS[way]
    model = tiny_llama(**changes)
    where = str(directory) if tier == "disk" else tier
    hfpatch.apply(
        model,
        checkpointing=hfpatch.Checkpointing(offload=where, tile=tile, keep=keep, every=every),
    )
    return model


def step(model, T=11):
    """Every gradient of one step."""
    model.zero_grad()
    ids = tokens(2, T)
    model(ids, labels=ids).loss.backward()
    return gradients(model)


def assert_same(got, expected):
    for name, gradient in expected.items():
        assert torch.equal(got[name], gradient), name


def assert_nothing_held(model):
    for queue in model.model._hfpatch.runtime.queues.values():
        assert not queue.pending and not queue.under_way and not queue.transfers.unsettled
        pool, tier = queue.transfers.pool, queue.transfers.disk
        if tier is not None:  # what goes to the files and comes from them
            assert len(tier.writing) <= disk.UNDER_WAY and len(tier.landing) <= disk.UNDER_WAY
            tier.close()
        assert pool.bytes_held == pool.bytes_free


class Interrupt:
    """Ctrl-C at the nth line that runs in hfpatch/layer/ or store/ (counts them where nth is
    None).
    """

    def __init__(self, nth=None):
        self.nth, self.count, self.where = nth, 0, None

    def _call(self, frame, event, arg):
        code = frame.f_code
        if not code.co_filename.startswith(CODE):
            return None
        callers = frame
        for _ in range(4):
            if callers is not None and callers.f_code.co_name == "__del__":
                return None  # Python swallows it there
            callers = callers and callers.f_back
        return self._line

    def _line(self, frame, event, arg):
        if event == "line":
            self.count += 1
            # Where a handler begins no signal arrives, and Python's state of exceptions would stay.
            begins = self.count == self.nth and (
                frame.f_code.co_code[frame.f_lasti] == dis.opmap.get("PUSH_EXC_INFO")
            )
            self.nth = self.nth and self.nth + begins
            if self.count == self.nth:
                self.where = f"{frame.f_code.co_name}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self._line

    def __enter__(self):
        self.before, self.unraisable = sys.gettrace(), sys.unraisablehook
        sys.unraisablehook = self._swallowed
        sys.settrace(self._call)
        return self

    def _swallowed(self, what):
        """Python goes on where a weak reference's callback raised."""
        if what.exc_type is not KeyboardInterrupt:
            self.unraisable(what)

    def __exit__(self, *exc):
        sys.settrace(self.before)
        sys.unraisablehook = self.unraisable
        torch.set_grad_enabled(
            True
        )  # raised by a tracer where `with torch.no_grad()` ends, it passes __exit__ by; no signal does


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(disk, "PIECE", 2048)


def interrupt_everywhere(tier, way, directory, every_nth, first=1):
    model = patched(tier, way, directory)
    expected = {n: g.clone() for n, g in step(model).items()}
    transfers = model.model._hfpatch.runtime.transfers
    held = transfers.pool.bytes_held
    with Interrupt() as lines:
        step(model)
    assert lines.count > 300
    for nth in range(first, lines.count, every_nth):
        with contextlib.suppress(KeyboardInterrupt), Interrupt(nth) as stop:
            step(model)
        try:
            assert_same(step(model), expected)
        except BaseException as error:
            raise AssertionError(f"after Ctrl-C in {stop.where}") from error
    gc.collect()
    assert_nothing_held(model)
    # A disk's tier takes host memory for what is under way, which a step cut short may multiply.
    assert transfers.pool.bytes_held <= (4 if tier == "disk" else 1) * held


# Lines are drawn evenly; more of them are the long test below.
@pytest.mark.parametrize(
    "tier, way",
    [
        ("host", "tiles"),
        *(
            pytest.param(*row, marks=pytest.mark.long)
            for row in (("gpu", "every 2"), ("disk", "tiles"), ("host", "every 2"))
        ),
    ],
)
def test_ctrl_c_at_any_line(tier, way, tmp_path):
    interrupt_everywhere(tier, way, tmp_path, every_nth=509, first=37)


@pytest.mark.long
@pytest.mark.parametrize("tier", ["gpu", "host", "disk"])
@pytest.mark.parametrize("way", WAYS)
def test_ctrl_c_at_many_lines(tier, way, tmp_path):
    interrupt_everywhere(tier, way, tmp_path, every_nth=13)


def open_files():
    return len(os.listdir("/proc/self/fd"))


def raise_in(module, nth):
    count = [0]

    def hook(*args):
        count[0] += 1
        if count[0] == nth:
            raise torch.OutOfMemoryError("planted")

    return module.register_forward_hook(OfAnEngine(hook))


# Out of memory in forward and in backward, in post and in pre, a hundred times; and no step between
# that clears up.
@pytest.mark.parametrize("tier, way", [
    ("host", "tiles"),
    *(pytest.param(t, w, marks=pytest.mark.long) for t in ("gpu", "host", "disk") for w in WAYS),
])  # fmt: skip
def test_a_hundred_exceptions_leak_nothing(tier, way, tmp_path):
    model = patched(tier, way, tmp_path)
    expected = {n: g.clone() for n, g in step(model).items()}
    pool = model.model._hfpatch.runtime.transfers.pool
    held, files, threads = pool.bytes_held, open_files(), threading.active_count()
    layer = model.model.layers[1]
    for i in range(100):
        handle = raise_in((layer.mlp, layer.self_attn.q_proj)[i % 2], i // 2 % 8 + 1)
        with contextlib.suppress(torch.OutOfMemoryError):
            step(model)
        handle.remove()
        if i == 50:
            assert_same(step(model), expected)
    assert_same(step(model), expected)
    assert_nothing_held(model)
    assert pool.bytes_held <= (1 + 3 * (tier == "disk")) * held
    assert open_files() <= files and threading.active_count() <= threads + 8 * (tier == "disk")


@pytest.mark.parametrize("tier, way", [("host", "tiles"), ("disk", "one"), ("host", "every 2")])
def test_partial_backward_then_a_whole_one(tier, way, tmp_path):
    model = patched(tier, way, tmp_path)
    expected = {n: g.clone() for n, g in step(model).items()}
    held = model.model._hfpatch.runtime.transfers.pool.bytes_held
    weight = model.model.layers[2].mlp.up_proj.weight
    for _ in range(20):
        hidden = model.model(tokens(2, 11)).last_hidden_state
        torch.autograd.grad(hidden.sum(), weight)
        del hidden
    assert_same(step(model), expected)
    assert_nothing_held(model)
    assert model.model._hfpatch.runtime.transfers.pool.bytes_held <= 4 * held


def test_a_retained_graph_survives_a_failed_backward():
    """The same graph again, after its backward raised half-way through a layer's tiles."""
    model = patched("host", "tiles", None)
    expected = {n: g.clone() for n, g in step(model).items()}
    model.zero_grad()
    ids, left = tokens(2, 11), [0]

    def hook(*args):
        left[0] -= 1
        if left[0] == 0:
            raise torch.OutOfMemoryError("planted")

    # Before the forward: of later ones backward knows nothing.
    model.model.layers[2].mlp.register_forward_hook(OfAnEngine(hook))
    loss = model(ids, labels=ids).loss
    for left[0] in (1, 2, 3):
        with pytest.raises(torch.OutOfMemoryError):
            loss.backward(retain_graph=True)
    model.zero_grad()
    loss.backward()
    assert_same(gradients(model), expected)


def test_a_smaller_batch_after_out_of_memory_has_the_dead_ones_blocks():
    """What accelerate's find_executable_batch_size does: the same model, fewer tokens, in the
    larger step's host memory.
    """
    fresh, model = patched("host", "tiles", None), patched("host", "tiles", None)
    handle = raise_in(model.model.layers[0].mlp, 14)  # in backward, the tiles of a layer under way
    with contextlib.suppress(torch.OutOfMemoryError):
        step(model, 44)
    handle.remove()
    pool = model.model._hfpatch.runtime.transfers.pool
    held = pool.bytes_held
    assert_same(step(model), step(fresh))
    assert pool.bytes_free == pool.bytes_held == held
