"""Several threads that train one model: each layer, forward or backward, is one thread's at a
time.
"""

import queue
import sys
import threading

import pytest
import tiny
import torch
from families import small_model

import hfpatch
from hfpatch.compat import models as compat

RECORDS = pytest.mark.skipif(
    compat._collector() is None,
    reason=(
        "transformers 5.0 puts recording forwards into a model's modules for a call: stock's own "
        "threads meet in them"
    ),
)
HOST = {"offload": "host", "tile": 8, "plain": 0}
WAYS = {
    "tiled": hfpatch.Checkpointing(**HOST, keep=()),
    "kept": hfpatch.Checkpointing(**HOST, keep=("gate_up",)),
    "segments": hfpatch.Checkpointing(**HOST, every=2),
    "off": "off",
}


def in_threads(run, together: bool) -> list:
    """What run(0) and run(1) give, each in a thread of its own; together: at once, else one behind
    the other.
    """
    found = [None, None]

    def one(i):
        try:
            found[i] = run(i)
        except Exception as error:
            found[i] = error

    threads = [threading.Thread(target=one, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
        if not together:
            thread.join()
    for thread in threads:
        thread.join()
    for result in found:
        if isinstance(result, Exception):
            raise result
    return found


def loss_of(model, i: int) -> torch.Tensor:
    ids = torch.randint(3, 60, (2, 24 - i), generator=torch.Generator().manual_seed(i))
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def wanted_of(stock) -> dict:
    stock.zero_grad()
    for i in range(2):
        loss_of(stock, i).backward()
    return tiny.gradients(stock)


def assert_close(model, wanted: dict) -> None:
    for name, grad in tiny.gradients(model).items():  # norms and rotation are in float32 in stock
        assert (grad - wanted[name]).norm() <= 1e-5 * wanted[name].norm(), name


@pytest.mark.parametrize("way", WAYS)
def test_graphs_that_two_threads_made_in_one_backward(way):
    """Each thread numbers its calls from the start, and by these numbers backward takes the layers
    of the two graphs in turn.
    """
    stock = small_model("llama")
    ours = tiny.patched(stock, checkpointing=WAYS[way])
    for i in range(2):  # what is found out at a first call counts there too
        loss_of(ours, i)

    def run(i):
        # one number more: its layers come first
        _ = torch.ones((), requires_grad=True) * 1 if i else None
        return loss_of(ours, i)

    sum(in_threads(run, together=False)).backward()
    assert_close(ours, wanted_of(stock))


@pytest.fixture
def restless(monkeypatch):
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("backward", ["together", "each its own"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3_moe", marks=RECORDS)])
def test_two_threads_train_one_model(family, way, backward, restless):
    """Written out (Llama), and with modules that are called: one thread's gradients, blocks and
    stand-ins are no other's.
    """
    stock = small_model(family)
    ours, wanted = tiny.patched(stock, checkpointing=WAYS[way]), wanted_of(stock)
    for _ in range(3):
        ours.zero_grad()
        if backward == "together":
            sum(in_threads(lambda i: loss_of(ours, i), together=True)).backward()
        else:
            in_threads(lambda i: loss_of(ours, i).backward(), together=True)
        assert_close(ours, wanted)


@RECORDS
@pytest.mark.parametrize("way", WAYS)
def test_a_model_is_evaluated_while_another_thread_trains_it(way, restless):
    """What a backward has under way is no leftover of one that was cut short."""
    stock = small_model("qwen3_moe")
    ours, wanted, done, losses = (
        tiny.patched(stock, checkpointing=WAYS[way]),
        wanted_of(stock),
        threading.Event(),
        [],
    )
    with torch.no_grad():
        expected = loss_of(stock, 0)

    def evaluate():
        with torch.no_grad():
            while not done.is_set():
                losses.append(loss_of(ours, 0))

    def train():
        try:
            for _ in range(4):
                ours.zero_grad()
                for i in range(2):
                    loss_of(ours, i).backward()
                assert_close(ours, wanted)
        finally:
            done.set()

    in_threads(lambda i: evaluate() if i else train(), together=True)
    assert losses and all((loss - expected).abs() <= 1e-5 * expected for loss in losses)


class Baton:
    """Has two threads run numbered steps in the order of their numbers."""

    def __init__(self):
        self.now, self.changed = 0, threading.Condition()

    def run(self, number: int, step):
        with self.changed:
            assert self.changed.wait_for(lambda: self.now == number, timeout=60)
        try:
            return step()
        finally:
            with self.changed:
                self.now += 1
                self.changed.notify_all()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3_moe", marks=RECORDS)])
def test_backwards_in_crossed_order(family, way):
    """Forward of one, forward of the other; backward of the first, which is not the last to have
    run.
    """
    stock = small_model(family)
    ours, wanted, baton = tiny.patched(stock, checkpointing=WAYS[way]), wanted_of(stock), Baton()

    def run(i):
        loss = baton.run(i, lambda: loss_of(ours, i))
        baton.run(2 + i, loss.backward)

    for _ in range(2):
        baton.now = 0
        ours.zero_grad()
        in_threads(run, together=True)
        assert_close(ours, wanted)


@pytest.mark.parametrize("way", WAYS)
def test_a_forward_without_a_backward_leaves_nothing(way):
    """One thread's loss is dropped between another's forward and backward."""
    stock = small_model("llama")
    ours, wanted, baton = tiny.patched(stock, checkpointing=WAYS[way]), wanted_of(stock), Baton()

    def run(i):
        if i:
            baton.run(1, lambda: loss_of(ours, 1) and None)
            baton.run(3, lambda: loss_of(ours, 1).backward())
        else:
            loss = baton.run(0, lambda: loss_of(ours, 0))
            baton.run(2, loss.backward)

    in_threads(run, together=True)
    assert_close(ours, wanted)


@pytest.mark.parametrize("way", WAYS)
def test_generation_from_a_streamers_thread(way):
    """As a chat page does it: a thread generates and fills a streamer, the main thread reads."""
    stock = small_model("llama")
    stock.generation_config.eos_token_id = None
    ours, wanted = tiny.patched(stock, checkpointing=WAYS[way]), wanted_of(stock)
    ids = torch.randint(3, 60, (1, 9), generator=torch.Generator().manual_seed(3))
    more = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    tokens = queue.Queue()

    class Streamer:
        def put(self, value):
            tokens.put(value)

        def end(self):
            tokens.put(None)

    loss = loss_of(ours, 0)
    thread = threading.Thread(target=lambda: ours.generate(ids, streamer=Streamer(), **more))
    thread.start()
    loss_of(ours, 1).backward()  # a step meanwhile
    got = list(iter(lambda: tokens.get(timeout=60), None))
    thread.join()
    loss.backward()
    assert torch.equal(torch.cat([x.flatten() for x in got]), stock.generate(ids, **more)[0])
    assert_close(ours, wanted)
