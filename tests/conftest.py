"""Shared test settings: uninitialised memory is NaN, so that reading what nothing wrote cannot
pass.
"""

import gc
import re
import tempfile
from pathlib import Path

import pytest
import torch
import torch.utils._device

from hfpatch.planner import remembered

remembered.FOLDER = Path(tempfile.mkdtemp())  # plans of these tests are not the user's

# `with torch.device("meta")` looks up constructors in a set made at its first use: it must not hold
# the wrappers below.
torch.utils._device._device_constructors()


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="also run the long grids")
    parser.addoption("--docs", action="store_true", help="also run all commands of the site")


GRIDS = re.compile(r"tests/(ops|kernels|layer|decoder|loss|faults|budget|test_traps_\w+)\b")
ROWS = 3  # of a grid in these places; --all and a GPU run all


def function(item) -> str:
    return item.nodeid.partition("[")[0]


def thinned(items, chosen: set[str]) -> list:
    """The tests, of a grid of many rows the first, the last and some between.

    chosen: functions of whose rows some are marked long, so that the others were chosen.
    """
    grids: dict = {}
    for item in items:
        grids.setdefault(function(item), []).append(item)
    kept = []
    for name, grid in grids.items():
        last = len(grid) - 1
        if last >= ROWS and name not in chosen and GRIDS.match(name):
            grid = [grid[i * last // (ROWS - 1)] for i in range(ROWS)]
        kept += grid
    return kept


@pytest.hookimpl(trylast=True)  # behind -k
def pytest_collection_modifyitems(config, items):
    left = [
        mark for mark, flag in (("long", "--all"), ("docs", "--docs")) if not config.getoption(flag)
    ]
    out = [i for i in items if any(i.get_closest_marker(mark) for mark in left)]
    config.hook.pytest_deselected(items=out)
    chosen = {function(item) for item in out}
    items[:] = [i for i in items if not any(i.get_closest_marker(mark) for mark in left)]
    if not torch.cuda.is_available():
        items[:] = items if config.getoption("--all") else thinned(items, chosen)
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def set_aside() -> None:
    """Leaves all that is alive out of later collections. The modules of this stack are 700,000
    objects, which a collection takes half a second to go through, and every Trainer asks for several.
    """
    gc.collect()
    gc.freeze()


def pytest_collection_finish():
    set_aside()


@pytest.hookimpl(trylast=True)  # behind the ends of fixtures
def pytest_runtest_teardown(item, nextitem):
    """Modules that the tests of a file were the first to import are set aside too."""
    if nextitem is None or nextitem.path != item.path:
        set_aside()


def pytest_unconfigure():
    gc.unfreeze()  # Python ends what is alive in the order of its collector


@pytest.fixture(autouse=True, scope="module")
def no_process_group_is_left():
    """A Trainer or an engine that ran in this process may leave its group, and the next one's
    init_process_group would fail."""
    yield
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def nan_filled_empty():
    """torch.empty and its relatives return NaN-filled floating tensors under test (as
    flash-linear-attention does).
    """
    from hfpatch.lab.device import nan_in_new_memory

    with nan_in_new_memory():
        yield


@pytest.fixture
def exact_loss(monkeypatch):
    """float64 models keep a float64 loss, which transformers' would round to float32."""
    monkeypatch.setattr("hfpatch.loss.causal_model.as_stock", lambda loss: loss)
