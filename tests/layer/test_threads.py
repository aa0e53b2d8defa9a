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

HOST = {"offload": "host", "tile": 8, "plain": 0}
WAYS = {
    "tiled": hfpatch.Checkpointing(**HOST, keep="attention"),
    "kept": hfpatch.Checkpointing(**HOST, keep="gate_up"),
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


@pytest.fixture
def restless(monkeypatch):
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("backward", ["together", "each its own"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
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


def test_models_of_one_config_take_turns(restless):
    """The config names hfpatch's attention while one of them runs, and the user's own afterwards."""
    stock = small_model("llama")
    models = [type(stock)(stock.config) for _ in range(2)]
    for model in models:
        hfpatch.apply(model, checkpointing=WAYS["tiled"])
    in_threads(lambda i: [loss_of(models[i], i).backward() for _ in range(4)], together=True)
    assert stock.config._attn_implementation == "eager"


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
