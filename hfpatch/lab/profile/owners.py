"""Makes allocations with owners of torch.profiler's events: module, phase, operator, Python line,
category.
"""

from hfpatch.lab.profile.record import Events, above, is_backward
from hfpatch.lab.profile.timeline import NOWHERE, Allocation

# Frames of plumbing, which say nothing about the owner of memory.
SKIPPED = (
    "torch/",
    "contextlib.py",
    "threading.py",
    "<",
    "functools.py",
    "accelerate/",
    "transformers/utils/",
)


def operator(node) -> str:
    """The innermost operator around an event, such as 'aten::mm'; '' for plain Python."""
    backward = ""
    for parent in above(node):
        if parent.typed[0].name == "TorchOp":
            if not is_backward(parent) and not parent.name.startswith("hfpatch."):
                return (
                    parent.name
                    if parent.name not in ("aten::empty", "aten::empty_strided")
                    else _maker(parent)
                )
            backward = backward or parent.name.removeprefix("autograd::engine::evaluate_function: ")
    return backward


def _maker(node) -> str:
    """The operator around aten::empty, which called it."""
    for parent in above(node):
        if parent.typed[0].name != "TorchOp":
            break
        if parent.name.startswith(("aten::", "hfpatch::")) and not parent.name.startswith(
            "aten::empty"
        ):
            return parent.name
    return node.name


def line(events: Events, node) -> str:
    """The innermost frame that is not plumbing, such as
    'transformers/models/llama/modeling_llama.py:64', or ''.

    In a backward, whose only frame is the training loop's, it is the line of the forward.
    """
    for parent in above(node):
        if parent.typed[0].name in ("PyCall", "PyCCall"):
            frame = parent.typed[1].caller
            if not frame.file_name.startswith(SKIPPED):
                return f"{frame.file_name}:{frame.line_number}"
        elif parent.typed[0].name == "TorchOp" and is_backward(parent):
            forward = events.forward_of(node)
            return line(events, forward) if forward is not None else ""
    return ""


def allocations(events: Events, device_type: str, preexisting, marks, head: str = "lm_head"):
    """(Allocations of the device's allocator, phases), times in seconds from the first phase.

    Args:
        preexisting: (data_ptr, bytes, category) of blocks alive before the recording.
        marks: (phase name, {data_ptr: category}). A block with that address at the phase's end has
            that category. With a pair (category, module), only a block that is older than the
            module's first call has it.
        head: the output projection's module name. Its blocks, and those of modules that hold it,
            belong to the loss.
    """
    zero = (
        events.phases[0][1]
        if events.phases
        else (events.allocations[0].start_time_ns if events.allocations else 0)
    )
    ends = {name: end for name, _, end, _ in events.phases}
    forward_end = ends.get("forward")
    checks = [(ends[name], pointers) for name, pointers in marks if name in ends]
    living = {pointer: (None, count, category) for pointer, count, category in preexisting}
    done = []

    def close(entry, died):
        node, count, category = entry
        done.append(_owned(events, node, count, category, died, zero, forward_end, head))

    for node in events.allocations:
        fields = node.typed[1]
        if fields.device.type != device_type:
            continue
        while checks and node.start_time_ns > checks[0][0]:
            _mark(events, living, checks.pop(0)[1])
        if fields.alloc_size > 0:
            if fields.ptr in living:  # the profiler missed that it was freed
                close(living.pop(fields.ptr), node.start_time_ns)
            living[fields.ptr] = (node, fields.alloc_size, None)
        elif fields.ptr in living:
            close(living.pop(fields.ptr), node.start_time_ns)
    for _, pointers in checks:
        _mark(events, living, pointers)
    for entry in living.values():
        close(entry, None)
    phases = [
        [name, (start - zero) / 1e9, (end - zero) / 1e9] for name, start, end, _ in events.phases
    ]
    return done, phases


def _mark(events, living, pointers):
    for pointer, category in pointers.items():
        if pointer not in living:
            continue
        node, count, known = living[pointer]
        if isinstance(category, tuple):
            category, module = category
            if node is not None and node.start_time_ns > events.first_call.get(module, 0):
                continue  # the address was used again
        living[pointer] = (node, count, known or category)


def _owned(events, node, count, category, died, zero, forward_end, head) -> Allocation:
    """One Allocation, with its owner and its category."""
    died_s = None if died is None else (died - zero) / 1e9
    if node is None:
        return Allocation(count, min(0.0, died_s or 0.0), died_s, category, "", "before the step")
    born = node.start_time_ns
    module, phase = events.module_at(node), events.phase_at(born)
    module = NOWHERE if module is None else module
    if category is None:
        outlives = forward_end is not None and (died is None or died > forward_end)
        category = category_of(phase, module, head, outlives)
    place = operator(node), line(events, node)
    return Allocation(count, (born - zero) / 1e9, died_s, category, module, phase, *place)


def category_of(phase: str, module: str, head: str, outlives: bool) -> str:
    """The category of a block that nothing marked. outlives: it outlives the forward."""
    if phase == "optimizer":
        return "working set"
    if module != NOWHERE and holds(head, module):
        return "loss"
    if phase == "forward" and outlives:
        return "activations"
    return "working set" if phase else "other"


def holds(head: str, module: str) -> bool:
    """Whether the module is the head, a part of it (an adapter), or the causal LM that holds it and
    calls the loss.
    """
    return module == "" or (head + ".").startswith(module + ".") or module.startswith(head + ".")
