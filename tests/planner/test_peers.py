"""What users have today, beside hfpatch: planned seconds by the counts in profiles/plan/peers.csv,
and the page's table of them.
"""

import importlib.util
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("peers", ROOT / "profiles/plan/peers.py")
peers = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(peers)
ours = cache(peers.ours)


@pytest.mark.parametrize("gpu", peers.GPUS)
def test_no_peer_that_fits_is_ahead_at_any_length(gpu):
    found = peers.counted()
    for tokens in peers.LENGTHS:
        fitting = {
            name: s
            for name in peers.PEERS
            if (s := peers.seconds(found[name, tokens], gpu)) is not None
        }
        assert ours(tokens, gpu).fits and ours(tokens, gpu).step_seconds <= min(fitting.values()), (
            tokens,
            fitting,
        )


def test_the_page_has_the_planned_seconds(monkeypatch):
    monkeypatch.setattr(peers, "ours", ours)
    page = (ROOT / "docs/benchmarks/index.md").read_text()
    for line in peers.table().splitlines():
        assert line in page, line
