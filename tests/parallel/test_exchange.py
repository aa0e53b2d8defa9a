"""Where tokens of shared rows lie; ranks are simulated."""

import pytest
import torch

from hfpatch.lab.simulate.sequence import LoneRank

pytestmark = pytest.mark.usefixtures("exact_loss")


@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("B", [1, 2])
def test_dealt_rows_come_together_in_order(B, zigzag):
    ranks = LoneRank(4)
    ranks.zigzag = zigzag
    rows = torch.arange(B * 16 * 3).view(B, 16, 3)
    parts = ranks.dealt(rows).contiguous()
    assert parts.shape == (4, B, 4, 3)
    assert torch.equal(ranks.in_order(parts), rows)
    first = torch.arange(4) if not zigzag else torch.tensor([0, 1, 14, 15])
    assert torch.equal(parts[0], rows[:, first])
    # One row of plain chunks is handed to the kernel as it came.
    shares = ranks.in_order(parts).data_ptr() == parts.data_ptr()
    assert shares is (B == 1 and not zigzag)
