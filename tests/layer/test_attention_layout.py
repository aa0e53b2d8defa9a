"""What attention's backward is handed: out and dout in one layout, whichever way a layer runs.

cuDNN's plans are cached by the strides of q, k and v alone in torch up to 2.13
(aten/native/cudnn/MHA.cpp), so the same strides must never come with two layouts of out or dout:
the plan of one would run on the other. Later versions expect q's layout in both.
"""

import dataclasses
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

import hfpatch
from hfpatch.attention import attention as A
from hfpatch.attention import backends as R
from hfpatch.attention import heads
from hfpatch.lab.simulate.sequence import LoneRank
from hfpatch.layer.runtime import LayerRuntime
from hfpatch.parallel import exchange
from tests.layer.deep import tiny_llama, tokens

pytestmark = pytest.mark.usefixtures("exact_loss")

# (settings, what the policy has besides) of every path; the same length throughout, so that strides
# meet.
PATHS = {
    "one tile": ({"offload": "gpu"}, {}),
    "one tile, from the host": ({"offload": "host", "keep": "gate_up"}, {}),
    "tiles": ({"offload": "host", "tile": 16}, {}),
    "attention again": ({"offload": "host", "tile": 16, "keep": "input"}, {}),
    "all heads at once": ({"offload": "host", "tile": 16}, {"aim": "fastest"}),
}
SIZES = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 2}


def strides(x: torch.Tensor) -> tuple:
    """Of the dimensions that have several places."""
    return tuple(stride if n > 1 else 0 for n, stride in zip(x.shape, x.stride()))


@pytest.fixture
def layouts(request, monkeypatch):
    """{shapes and strides of q, k, v: those of (out, dout)} that a backend's backward is called
    with; the CPU's computes it.
    """
    name, found = request.param, defaultdict(set)
    # its small instance is tried by the CPU's own kernels, and known from here on
    hfpatch.apply(tiny_llama(**SIZES))

    def backward(dout, q, k, v, out, *rest):
        found[tuple((x.shape, strides(x)) for x in (q, k, v))].add((strides(out), strides(dout)))
        return R._cpu_backward(dout, q, k, v, out, *rest)

    monkeypatch.setitem(A.BACKENDS, name, (R._cpu_forward, backward))
    monkeypatch.setattr(heads, "pick", lambda *_: name)
    yield found
    assert found
    for (q, *_), seen in found.items():
        assert len(seen) == 1, (q, seen)
        assert name != "cudnn" or seen == {(q[1], q[1])}


def run(path: str, monkeypatch, whole: bool = False, retain: bool = False) -> None:
    settings, more = PATHS[path]
    resolve = LayerRuntime._resolve
    with monkeypatch.context() as patch:
        patch.setattr(heads, "heads_per_group", lambda *sizes: 2)
        patch.setattr(LayerRuntime, "_resolve", lambda *a: dataclasses.replace(resolve(*a), **more))
        model = tiny_llama(**SIZES)
        settings = hfpatch.Checkpointing(**{"tile": 4096, **settings})
        hfpatch.apply(model, checkpointing=settings)
        if whole:
            for layer in model.model.layers:
                layer.self_attn.register_forward_hook(lambda *args: None)
        ids = tokens(2, 22)
        loss = model(ids, labels=ids).loss
        loss.backward(retain_graph=retain)
        if retain:
            loss.backward()


@pytest.mark.parametrize("layouts", ["cudnn", "flash"], indirect=True)
def test_one_layout_on_every_path(layouts, monkeypatch):
    for path in PATHS:
        run(path, monkeypatch, retain=path in ("one tile, from the host", "tiles"))
    run("tiles", monkeypatch, whole=True)


@pytest.mark.parametrize("layouts", ["cudnn", "flash", "fa3", "efficient"], indirect=True)
@pytest.mark.parametrize("zigzag", [False, True])
def test_one_layout_of_shared_rows(layouts, zigzag):
    ranks = LoneRank(2)
    ranks.zigzag = zigzag
    for H, K in ((8, 4), (8, 2), (8, 8)):
        q, k = torch.randn(2, 16, H, 16), torch.randn(2, 16, K, 16)
        attention = exchange.ExchangedAttention(ranks)
        asked = SimpleNamespace(scale=0.25, pattern=A.CAUSAL, sinks_H=None)
        outs, lses = attention.forward([asked], [], [q, k, k])
        attention.backward([q, k, k], [torch.randn_like(q)], iter(outs).__next__, lses, [None] * 3)


@pytest.mark.parametrize("layouts", ["cudnn", "flash", "fa3", "efficient"], indirect=True)
def test_one_layout_whatever_a_caller_hands_over(layouts):
    """The same q, k, v with out and dout of their own, cut out of whole heads, and one of each."""
    q, k = torch.randn(2, 22, 8, 16)[:, :, :4], torch.randn(2, 22, 4, 16)[:, :, :2]
    out, lse, state = A.attention_forward(q, k, k, scale=0.25, backend="cpu")
    own, cut = out.contiguous(), torch.randn(2, 22, 8, 16)[:, :, 4:].copy_(out)
    name = next(n for n in A.BACKENDS if A.BACKENDS[n][1].__module__ == __name__)
    found = [
        A.attention_backward(d, q, k, k, o, lse, state, scale=0.25, backend=name)
        for o in (own, cut)
        for d in (own, cut)
    ]
    for grads in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], grads))
