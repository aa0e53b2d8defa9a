"""Markers and owners on a model of three lines, where every owner is known."""

import pytest
import torch
from torch import nn

from hfpatch.lab.profile import owners, record

CPU = torch.profiler.ProfilerActivity.CPU


class Fails(nn.Module):
    def forward(self, x):
        raise RuntimeError("stop")


class Net(nn.Module):
    """first, then a module that raises and is forgiven, then second: what checkpointing's early
    stop looks like.
    """

    def __init__(self):
        super().__init__()
        self.first, self.fails, self.second = nn.Linear(64, 32), Fails(), nn.Linear(32, 128)

    def forward(self, x):
        x = self.first(x)
        try:
            self.fails(x)
        except RuntimeError:
            x = x + 1
        return self.second(x).sum()


@pytest.fixture(scope="module")
def owned():
    net = Net()
    x = torch.ones(256, 64)
    with record.module_markers(net):
        with torch.profiler.profile(
            activities=[CPU], profile_memory=True, acc_events=True
        ) as profiler:
            with record.phase("forward"):
                loss = net(x)
            with record.phase("backward"):
                loss.backward()
    events = record.Events(profiler)
    return owners.allocations(events, "cpu", [], [], head="second")


def of(blocks, nbytes, phase):
    return [b.module for b in blocks if b.bytes == nbytes and b.phase == phase]


def test_modules_in_forward_and_backward(owned):
    blocks, phases = owned
    assert [name for name, *_ in phases] == ["forward", "backward"]
    assert of(blocks, 256 * 128 * 4, "forward") == ["second"]
    assert of(blocks, 256 * 32 * 4, "forward") == ["first", ""], (
        "x + 1 is the model's own: what raised is shut"
    )
    assert of(blocks, 128 * 32 * 4, "backward") == ["second"], (
        "a weight gradient, by the sequence number"
    )
    assert of(blocks, 64 * 32 * 4, "backward") == ["first"]


def test_lives(owned):
    blocks, phases = owned
    [out] = [b for b in blocks if b.bytes == 256 * 128 * 4 and b.phase == "forward"]
    assert out.category == "loss" and out.died is not None and out.died <= phases[0][2], (
        "sum() keeps no input"
    )
    saved = [
        b for b in blocks if b.bytes == 256 * 32 * 4 and b.phase == "forward" and b.module == ""
    ]
    assert saved[0].died > phases[1][1], "the second layer keeps its input for the backward"
    gradients = [b for b in blocks if b.bytes == 64 * 32 * 4 and b.phase == "backward"]
    assert gradients[0].died is None


def test_spans_nest():
    spans = record.Spans([(0, 10, "a"), (2, 6, "b"), (6, 8, "c"), (0, 1, "d")])
    assert [spans.at(t) for t in (-1, 0.5, 1.5, 2, 5, 6, 8, 9, 10)] == [
        None,
        "d",
        "a",
        "b",
        "b",
        "c",
        "a",
        "a",
        None,
    ]


def test_an_address_used_again_is_not_the_checkpoint():
    class Node:
        start_time_ns = 50

    class Calls:
        def first_call(self, module):
            return 40

    living = {7: (Node(), 100, None), 8: (Node(), 100, None)}
    owners._mark(Calls(), living, {7: ("checkpoints", "model.layers.0"), 8: "gradients"})
    assert living[7][2] is None and living[8][2] == "gradients"
