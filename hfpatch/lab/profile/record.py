"""Records a step with torch.profiler: markers around modules and phases, and its events by thread.
(owners.py makes allocations of them.)

The profiler's event tree holds every allocation and free of PyTorch's allocators, CPU or CUDA.
Hooks put a marker around each module's call, so the innermost marker around an allocation names its
module. The backward calls no module. There the autograd node's sequence number leads to the
operator of the forward that made the node.
"""

import bisect
import contextlib
import threading
from collections import defaultdict

import torch
from torch.profiler import record_function

from hfpatch.lab.watch import module_calls

MODULE, PHASE = "hfpatch.module ", "hfpatch.phase "


def phase(name: str):
    """Marks a part of the step: with phase("forward"): ..."""
    return record_function(PHASE + name)


@contextlib.contextmanager
def module_markers(model: torch.nn.Module):
    """A context that marks every module's call with its name, and collects the addresses of decoder
    layers' inputs: yields {data_ptr: ("checkpoints", layer's name)}.
    """
    opened = threading.local()
    names = {id(module): name for name, module in model.named_modules()}
    layers = {id(module) for name, module in model.named_modules() if is_layer(name, module)}
    inputs: dict = {}

    def before(module, args):
        if id(module) not in names:
            return
        if id(module) in layers and args and isinstance(args[0], torch.Tensor):
            inputs[args[0].untyped_storage().data_ptr()] = ("checkpoints", names[id(module)])
        mark = record_function(MODULE + names[id(module)])
        mark.__enter__()
        opened.__dict__.setdefault("marks", []).append(mark)

    def after(module):
        if id(module) in names:
            opened.marks.pop().__exit__(None, None, None)

    with module_calls(before, after):
        yield inputs


def is_layer(name: str, module) -> bool:
    """Whether this is a decoder layer, wrapped or patched: a numbered module with an attention and
    an MLP.
    """
    return (
        name.rpartition(".")[2].isdigit()
        and hasattr(module, "self_attn")
        and hasattr(module, "mlp")
    )


class Spans:
    """Properly nested (start, end, name) of one thread. at(t): the innermost name at t, or None."""

    def __init__(self, spans):
        edges = []
        for start, end, name in spans:
            # At one instant an end comes before a start. Of two starts the longer span is outside.
            edges.append((start, 1, -end, name))
            edges.append((end, 0, 0, name))
        edges.sort(key=lambda e: e[:3])
        self.times, self.names, stack = [], [], []
        for at, opens, _, name in edges:
            if opens:
                stack.append(name)
            elif name in stack:
                del stack[len(stack) - 1 - stack[::-1].index(name)]
            self.times.append(at)
            self.names.append(stack[-1] if stack else None)

    def at(self, t):
        i = bisect.bisect_right(self.times, t) - 1
        return self.names[i] if i >= 0 else None


class Events:
    """The profiler's tree, flattened: allocations in order of time, and operators by thread."""

    def __init__(self, profiler: torch.profiler.profile):
        self.allocations, self.ops, self.phases = [], defaultdict(list), []
        self.first_call: dict[str, int] = {}  # of each module
        marks = defaultdict(list)
        stack = list(profiler.profiler.kineto_results.experimental_event_tree())
        while stack:
            node = stack.pop()
            stack.extend(node.children)
            kind, fields = node.typed[0].name, node.typed[1]
            if kind == "Allocation":
                self.allocations.append(node)
            elif kind == "TorchOp":
                start = node.start_time_ns
                when = start, start + node.duration_time_ns, node.start_tid
                if node.name.startswith(MODULE):
                    name = node.name[len(MODULE) :]
                    self.first_call[name] = min(start, self.first_call.get(name, start))
                    marks[node.start_tid].append((start, when[1], name))
                elif node.name.startswith(PHASE):
                    self.phases.append((node.name[len(PHASE) :], *when))
                elif fields.sequence_number >= 0 and not is_backward(node):
                    self.ops[node.start_tid, fields.sequence_number].append(node)
        self.allocations.sort(key=lambda n: n.start_time_ns)
        for found in self.ops.values():
            found.sort(key=lambda n: n.start_time_ns)
        # By time, not by the tree: a marker outlasts the Python frame of the hook that opens it.
        self.spans = {tid: Spans(found) for tid, found in marks.items()}
        self.phases.sort(key=lambda p: p[1])
        self.main_tid = next((tid for name, _, _, tid in self.phases if name == "forward"), None)

    def forward_of(self, node):
        """The operator of the forward that made the autograd node around this event; None outside
        of a backward.
        """
        around = [n for n in above(node) if n.typed[0].name == "TorchOp" and is_backward(n)]
        if not around:
            return None
        # A backward inside a backward (a tiled layer's own) runs and counts on its own thread.
        inner = around[0]
        outermost = around[-1].start_time_ns
        nested = any(
            n.start_time_ns < inner.start_time_ns and not _same_node(n, inner) for n in around
        )
        tid = node.start_tid if nested else self.main_tid
        found = self.ops.get((tid, inner.typed[1].sequence_number), [])
        limit = inner.start_time_ns if nested or tid == node.start_tid else outermost
        made = [op for op in found if op.start_time_ns < limit]
        return made[-1] if made else None

    def phase_at(self, t) -> str:
        """The phase at t, "" for none."""
        return next((name for name, start, end, _ in self.phases if start <= t <= end), "")

    def module_at(self, node) -> str | None:
        """The module whose forward or backward this event belongs to, None without one."""
        spans = self.spans.get(node.start_tid)
        called = None if spans is None else spans.at(node.start_time_ns)
        if called is not None:
            return called
        forward = self.forward_of(node)
        return self.module_at(forward) if forward is not None else None


def above(node):
    """The events around this one, the innermost first."""
    while (node := node.parent) is not None:
        yield node


def is_backward(node) -> bool:
    return (
        node.name.startswith("autograd::engine::evaluate_function")
        or node.typed[1].scope.name == "BACKWARD_FUNCTION"
    )


def _same_node(a, b) -> bool:
    return a.typed[1].sequence_number == b.typed[1].sequence_number
