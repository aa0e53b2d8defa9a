"""How linear_cross_entropy behaves under autograd, torch.compile, opcheck and wrong arguments."""

import itertools

import pytest
import torch

from hfpatch.ops.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_ref
from tests.numerics import assert_close
from tests.ops.oracle import opcheck
from tests.ops.test_linear_cross_entropy import (
    DEVICE,
    MANY_CHUNKS,
    ONE_CHUNK,
    OPTIONS,
    exact,
    make,
)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("workspace", [ONE_CHUNK, 3_000], ids=["one chunk", "many chunks"])
def test_gradcheck(name, workspace):
    *inputs, labels = make((2, 6, 4), 7, torch.float64)
    assert torch.autograd.gradcheck(
        lambda h, w, b: linear_cross_entropy(
            h, w, labels, bias=b, workspace_bytes=workspace, **OPTIONS[name]
        ),
        inputs,
    )


# Frozen hidden with a training head (Liger gives no dW there), frozen head, frozen everything: each
# of the eight.
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("which", list(itertools.product([False, True], repeat=3)), ids=str)
def test_any_subset_requires_grad(which, reduction):
    *inputs, labels = make((2, 20, 8), 11, torch.float32)
    for tensor, wanted in zip(inputs, which):
        tensor.requires_grad_(wanted)
    ours = linear_cross_entropy(
        *inputs[:2], labels, bias=inputs[2], reduction=reduction, workspace_bytes=MANY_CHUNKS
    ).sum()
    assert ours.requires_grad == any(which)
    if any(which):
        full = exact(inputs)
        best = linear_cross_entropy_ref(*full[:2], labels, bias=full[2], reduction=reduction).sum()
        usual = linear_cross_entropy_ref(
            *inputs[:2], labels, bias=inputs[2], reduction=reduction
        ).sum()
        ours.backward()
        got = [None if t.grad is None else t.grad.clone() for t in inputs]
        for t in inputs:
            t.grad = None
        usual.backward()
        best.backward()
        for g, tensor, truth, wanted in zip(got, inputs, full, which):
            assert (g is not None) == wanted
            if wanted:
                assert_close(g, tensor.grad, truth.grad)


@pytest.mark.parametrize("options", [{}, {"reduction": "none"}], ids=str)
def test_second_backward_under_retain_graph(options):
    """The gradients kept from the forward are not scaled twice, whatever the upstream, whichever
    the last backward.
    """
    *leaves, labels = make((2, 20, 8), 11, torch.float32)
    inputs = [leaves[0] * 1.0, *leaves[1:]]
    loss = linear_cross_entropy(*inputs[:2], labels, bias=inputs[2], **options).sum()
    first = torch.autograd.grad(loss * 3.0, leaves, retain_graph=True)
    second = torch.autograd.grad(loss * 3.0, leaves, retain_graph=True)
    kept = [g.clone() for g in first]
    last = torch.autograd.grad(loss, leaves)
    for a, b, c, was in zip(first, second, last, kept):
        assert torch.equal(a, b) and torch.equal(a, was)
        torch.testing.assert_close(c * 3.0, a)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_hidden_states_keep_their_values(reduction):
    """Whoever else holds them reads them after the loss: a value head, a hook on the head."""
    hidden, weight, _, labels = make((1, 8, 4), 7, torch.float32)
    given = hidden * 1.0
    loss = linear_cross_entropy(given, weight, labels, reduction=reduction)
    loss.sum().backward()
    assert torch.equal(given, hidden)


def test_non_contiguous_inputs():
    hidden, weight, _, labels = make((2, 9, 8), 11, torch.float32)
    loss = linear_cross_entropy(
        hidden.transpose(0, 1), weight.t().contiguous().t(), labels.t(), workspace_bytes=MANY_CHUNKS
    )
    got = torch.autograd.grad(loss, (hidden, weight))
    expected = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels), (hidden, weight))
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(
        linear_cross_entropy(hidden[:, ::2], weight, labels[:, ::2], reduction="none"),
        linear_cross_entropy(hidden, weight, labels, reduction="none")[:, ::2],
    )


def test_opcheck_of_the_small_ops():
    def float32(*shape):
        return torch.rand(shape, device=DEVICE)

    labels = torch.tensor([1, -100], device=DEVICE)
    chunk = (float32(2, 5), labels, float32(7, 2), -100, 0.0, 1.0, float32(), 0.0, 0.0, True, True)
    opcheck("cross_entropy_chunk_", *chunk)
    again = (float32(2, 5), labels, float32(7, 2), -100, 0.0, 1.0)
    opcheck("cross_entropy_chunk_bwd_", *again)
    opcheck("scale_", float32(3), float32())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("case", ["mean", "all, none", "autocast"])
def test_runs_outside_a_compiled_graph(case):
    """What stands before and behind the loss is compiled; the loss gives what it gives in eager
    code.
    """
    *inputs, labels = make((2, 20, 8), 11, torch.float32)

    def step(hidden, weight, bias, labels):
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=case == "autocast"):
            options = OPTIONS.get(case, {})
            loss = linear_cross_entropy(hidden * 2.0, weight, labels, bias=bias, **options)
        return (loss * 3.0).sum()

    graphs = []
    compiled = torch.compile(step, backend=lambda graph, _: graphs.append(graph) or graph)(
        *inputs, labels
    )
    eager = step(*inputs, labels)
    traced = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    assert traced and not [target for target in traced if target.startswith("hfpatch.")]
    assert compiled.dtype == eager.dtype
    torch.testing.assert_close(compiled, eager)
    got, expected = (torch.autograd.grad(loss, inputs) for loss in (compiled, eager))
    torch.testing.assert_close(got, expected)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "change,message",
    [
        ({"labels": [[3, 11, 0]]}, "must lie in \\[0, 11\\) or be ignore_index=-100, got 11"),
        ({"labels": [[3, -1, 0]]}, "got -1"),
        ({"labels": [3, 1]}, "labels must have shape"),
        ({"labels": [[0.5, 0.5, 0.0]]}, "int64 or int32"),
        ({"weight": torch.zeros(11, 5)}, "hidden must be \\[..., D\\] and weight \\[V, D\\]"),
        ({"weight": torch.zeros(11, 4).bfloat16()}, "one dtype"),
        ({"bias": torch.zeros(3)}, "bias must have shape"),
        ({"reduction": "median"}, "reduction"),
        ({"reduction": "none", "num_items": 3}, "num_items"),
        ({"num_valid": -1}, "num_valid"),
        ({"label_smoothing": 1.5}, "label_smoothing"),
        ({"softcap": 0.0}, "softcap"),
        ({"z_loss": -1.0}, "z_loss"),
        ({"workspace_bytes": 100}, "workspace_bytes"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_wrong_arguments_are_named(change, message):
    call = {
        "hidden": torch.zeros(1, 3, 4),
        "weight": torch.zeros(11, 4),
        "labels": [[1, 2, 3]],
        **change,
    }
    call["labels"] = torch.tensor(call["labels"])
    with pytest.raises(ValueError, match=f"hfpatch: .*{message}"):
        linear_cross_entropy(call.pop("hidden"), call.pop("weight"), call.pop("labels"), **call)
    with pytest.raises(ValueError, match="scalar"):
        linear_cross_entropy(torch.zeros(4), torch.zeros(11, 4), torch.tensor(1), shift=True)


@pytest.mark.parametrize("ignore_index", [-100, 3])
def test_ignore_index_may_be_a_word(ignore_index):
    hidden, weight, _, labels = make((1, 30, 8), 11, torch.float32, ignored=0.0)
    labels[0, ::3] = ignore_index
    ours = linear_cross_entropy(hidden, weight, labels, ignore_index=ignore_index)
    torch.testing.assert_close(
        ours, linear_cross_entropy_ref(hidden, weight, labels, ignore_index=ignore_index)
    )
