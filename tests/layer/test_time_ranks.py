"""A mixer whose rows' tokens lie on several ranks (layer/time_ranks.py): threads stand for ranks.
Whole models on gloo are in tests/engines/test_hybrids_on_ranks.py.
"""

import copy
import queue
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import families
import pytest
import tiny
import torch
from numerics import lifted

from hfpatch.decoder.find import find_decoder
from hfpatch.decoder.probe import ask
from hfpatch.decoder.time_probe import _call_of, ask_in_time
from hfpatch.layer.time_ranks import RankTiles
from hfpatch.layer.time_tiles import TimeTiles, cut_document
from hfpatch.parallel.exchange import RowRanks
from hfpatch.store.transfers import Transfers

pytestmark = tiny.not_before_transformers((5, 16), "hands mixers their states by other ways")
T = 528  # tiles of 64, on four ranks two and a rest


class Post(RowRanks):
    """One of the ranks, whose letters wait in queues."""

    def __init__(self, rank: int, size: int, zigzag: bool, boxes: dict, sent: list):
        self.rank, self.size, self.zigzag, self.boxes, self.sent = rank, size, zigzag, boxes, sent

    def send(self, x, rank):
        self.sent.append(x.numel())
        self.boxes[self.rank, rank].put(x.detach().clone())

    def receive(self, into, rank):
        return into.copy_(self.boxes[rank, self.rank].get(timeout=60))


@pytest.fixture(scope="module", params=["qwen3_5_text", "nemotron_h", "lfm2", "kimi_linear"])
def mixer(request):
    """A call of the family's mixer, the width of its input, and the argument of its states."""
    model = families.small_model(request.param)
    decoder = find_decoder(model)
    for layer in decoder.layers:
        traits = ask_in_time(decoder.stack, layer, ask(decoder.stack, layer))
        if traits.timed:
            break
    (name, argument), *_ = traits.timed
    with lifted():
        call, x = _call_of(decoder.stack, layer, traits, name, T)
    return call, x.shape[2], argument


def run(mixer, time, x, dout) -> tuple:
    """Output, the input's gradient and the weights'."""
    mixer = replace(mixer, module=copy.deepcopy(mixer.module), time=time, B=len(x))
    dx = torch.empty_like(x)
    with torch.no_grad():
        out = mixer.forward(x)
        mixer.backward(x, dout, dx)
    return out, dx, [p.grad for p in mixer.module.parameters() if p.grad is not None]


@pytest.mark.parametrize("bounds, zigzag, size", tiny.covering(
    [None, (0, 1, 70, 131, 132, 133, 264, 397, 528, 528 + 263, 2 * 528)], [False, True], [2, 4],
))  # fmt: skip
def test_ranks_are_one_process(mixer, bounds, zigzag, size):
    """Documents cut anywhere: on a border between ranks, a token before it and behind it."""
    call, width, argument = mixer
    call = replace(call, bounds=bounds)
    torch.manual_seed(0)
    x, dout = (torch.randn(2, T, width, dtype=torch.float64) for _ in range(2))
    place, boxes, sent = (argument, 128, Transfers(x.device, "gpu")), defaultdict(queue.Queue), []
    ranks = [Post(p, size, zigzag, boxes, sent) for p in range(size)]
    with lifted():
        out, dx, grads = run(call, TimeTiles(*place), x, dout)
        parts = [ranks[0].dealt(whole).contiguous() for whole in (x, dout)]
        with ThreadPoolExecutor(size) as pool:
            on = lambda p: run(call, RankTiles(ranks[p], *place), parts[0][p], parts[1][p])  # noqa: E731
            found = list(pool.map(on, range(size)))
    assert_close(ranks[0].in_order(torch.stack([out for out, *_ in found])), out)
    assert_close(ranks[0].in_order(torch.stack([dx for _, dx, _ in found])), dx)
    for n, grad in enumerate(grads):
        assert_close(sum(g[n] for *_, g in found), grad)
    assert not any(box.qsize() for box in boxes.values()) and sent


def assert_close(got, wanted) -> None:
    error = ((got - wanted).norm() / wanted.norm().clamp_min(1e-3)).item()
    assert error <= 1e-12


def test_tiles_are_cut_from_a_documents_start():
    """Behind a border the first tile ends where a chunk of the document does, unless it would be a
    single token.
    """
    assert cut_document(0, 200, 64) == [(0, 64), (64, 128), (128, 192), (192, 200)]
    assert cut_document(0, 100, 64, 10) == [(0, 54), (54, 100)]
    assert cut_document(0, 100, 64, 63) == [(0, 65), (65, 100)]
    assert cut_document(0, 55, 64, 10) == [(0, 55)]
    assert cut_document(0, 1, 64, 10) == [(0, 1)]
