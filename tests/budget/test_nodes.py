"""The memory node of a GPU, read from files as Linux writes them, and a thread that runs beside
it.
"""

import os
from types import SimpleNamespace

import pytest

from hfpatch.budget.nodes import gpu_node, node_cpus, running_on

GPU = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xC1, pci_device_id=0)


def machine(root, node: str, cpulists: dict[int, str]):
    folder = root / "sys/bus/pci/devices/0000:c1:00.0"
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text(node + "\n")
    for n, cpus in cpulists.items():
        there = root / f"sys/devices/system/node/node{n}"
        there.mkdir(parents=True)
        (there / "cpulist").write_text(cpus + "\n")
    return str(root)


@pytest.mark.parametrize(
    "node, cpulists, found",
    [
        ("1", {0: "0-1,4-5", 1: "2-3,6-7"}, (1, {2, 3, 6, 7})),
        ("0", {0: "0", 1: "1"}, (0, {0})),
        ("0", {0: "0-63"}, None),  # one node: nothing to choose
        ("-1", {0: "0-1", 1: "2-3"}, None),  # a virtual machine does not tell
        ("1", {0: "0-1", 1: ""}, None),  # memory without CPUs
    ],
)
def test_node_of_a_gpu(node, cpulists, found, tmp_path):
    root = machine(tmp_path, node, cpulists)
    assert gpu_node(GPU, root) == found == node_cpus(0, 0xC1, 0, root)


def test_where_nothing_is_told(tmp_path):
    assert gpu_node(GPU, str(tmp_path)) is None
    assert gpu_node(SimpleNamespace(), machine(tmp_path, "0", {0: "0", 1: "1"})) is None


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux alone")
def test_a_thread_runs_there_and_comes_back(monkeypatch):
    before = os.sched_getaffinity(0)
    one = {min(before)}
    with running_on(one | {1 << 15}):
        assert os.sched_getaffinity(0) == one
    with running_on({1 << 15}), running_on(set()):  # a container that may not run there
        assert os.sched_getaffinity(0) == before
    with pytest.raises(ZeroDivisionError), running_on(one):
        1 / 0  # noqa: B018
    assert os.sched_getaffinity(0) == before

    def forbidden(*_):
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", forbidden)
    with running_on(one):
        assert os.sched_getaffinity(0) == before
