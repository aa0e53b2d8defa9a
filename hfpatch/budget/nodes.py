"""The host's memory node that a GPU is attached to. Standard library only.

On hosts with several nodes a copy from the other socket's memory crosses the link between sockets.
Linux takes a page from the node of the thread that touches it first, so a thread on that node pins
the memory.
"""

import os
from contextlib import contextmanager
from pathlib import Path


def node_cpus(domain: int, bus: int, device: int, root: str = "/") -> tuple[int, set[int]] | None:
    """(memory node, its CPUs) of a PCI device; None with a single node, or if the system does not
    report it.

    Args:
        domain, bus, device: the numbers of its PCI address.
        root: the folder that contains /sys, for tests.
    """
    system = Path(root) / "sys"
    try:
        node = int(
            (
                system / f"bus/pci/devices/{domain:04x}:{bus:02x}:{device:02x}.0/numa_node"
            ).read_text()
        )
        several = len(list((system / "devices/system/node").glob("node[0-9]*"))) > 1
        text = (system / f"devices/system/node/node{node}/cpulist").read_text().strip()
        spans = [tuple(map(int, span.split("-"))) for span in text.split(",") if span]
    except (OSError, ValueError):  # a node of -1 has no folder
        return None
    cpus = {cpu for span in spans for cpu in range(span[0], span[-1] + 1)}
    return (node, cpus) if several and cpus else None


def gpu_node(properties, root: str = "/") -> tuple[int, set[int]] | None:
    """node_cpus of a GPU, from torch.cuda.get_device_properties."""
    numbers = [getattr(properties, f"pci_{name}_id", None) for name in ("domain", "bus", "device")]
    return None if None in numbers else node_cpus(*numbers, root)


@contextmanager
def running_on(cpus: set[int]):
    """A context in which this thread runs on those of `cpus` that it is allowed to use. Without any
    of them nothing changes.
    """
    before = os.sched_getaffinity(0) if cpus and hasattr(os, "sched_setaffinity") else set()
    if not before & cpus:
        yield
        return
    try:
        os.sched_setaffinity(0, before & cpus)
    except OSError:  # a sandbox may forbid it
        before = set()
    try:
        yield
    finally:
        if before:
            os.sched_setaffinity(0, before)
