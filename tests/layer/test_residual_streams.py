"""Hidden states of several streams a token as rows of one (layer/residual_streams.py). Models of
such: GLM-5-Next in test_time.py.
"""

import pytest
import torch

from hfpatch.layer.residual_streams import by_rows, joined, split, streams_of

B, T, S, D = 2, 5, 3, 4


@pytest.mark.parametrize("shape, streams", [
    ((B, T, D), None), ((S, B, T, D), (S, 0)), ((B, T, S, D), (S, 2)), ((S, T, B, D), None),
])  # fmt: skip
def test_rows_and_back(shape, streams):
    x = torch.randn(shape)
    assert streams_of(x, B, T) == streams
    rows = joined(x, streams)
    assert torch.equal(split(rows, streams), x)
    assert streams is None or rows.shape == (B, T, S * D)


@pytest.mark.parametrize("shape", [(S, B, T, D), (B, T, S, D)])
@pytest.mark.parametrize("more", [(), ("beside",)])
def test_a_layer_from_rows_to_rows(shape, more):
    x = torch.randn(shape)
    streams = streams_of(x, B, T)

    def forward(x):
        assert x.shape == shape and x.is_contiguous()
        return (2 * x, *more) if more else 2 * x

    y = by_rows(forward, streams)(joined(x, streams))
    rows, *beside = y if more else (y,)
    assert torch.equal(rows, joined(2 * x, streams)) and tuple(beside) == more
