"""One measured run: builds the model, applies an implementation, trains a few steps, records one.

Called by worker.py (one process per implementation) and by launched.py (under an engine, on
every rank).
"""

import gc
import resource
import time
from collections.abc import Callable
from pathlib import Path

import torch

from hfpatch.lab.compat import dump_allocations, local_part, record_allocations
from hfpatch.lab.device import is_out_of_memory, synchronize
from hfpatch.lab.made import model_of
from hfpatch.lab.models import config_of
from hfpatch.lab.profile import record
from hfpatch.lab.profile.options import Options
from hfpatch.lab.profile.owners import allocations
from hfpatch.lab.profile.timeline import Run, measure, versions
from hfpatch.lab.simulate.implementations import config_class, enable_checkpointing
from hfpatch.lab.watch import pinned_bytes, pools


def load_config(name: str):
    """The configuration of a model as `hfpatch plan` takes it. ValueError for an unknown one."""
    values = dict(config_of(name)[1])
    return config_class(values.pop("model_type", None))(**values)


def build_model(options: Options) -> torch.nn.Module:
    """The model in training mode, with random weights: memory and time do not depend on values."""
    config = load_config(options.model)
    config.use_cache = False
    if (config.max_position_embeddings or 0) < options.seq_len:
        config.max_position_embeddings = options.seq_len
    return model_of(config, options.on, options.torch_dtype)


def become(
    model: torch.nn.Module,
    impl: str,
    gradient_checkpointing: bool = True,
    checkpointing: list[str] | str = "auto",
) -> list[str]:
    """Makes the model one of IMPLEMENTATIONS. Returns the lines of apply()'s report. Raises
    ValueError if the implementation cannot run here.

    gradient_checkpointing: of hf and liger; checkpointing: of hfpatch, as hfpatch.apply takes it.
    """
    if impl == "hfpatch":
        import hfpatch

        return str(hfpatch.apply(model, checkpointing=checkpointing)).splitlines()
    if impl == "liger":
        if not next(model.parameters()).is_cuda:
            raise ValueError(
                "hfpatch: Liger's kernels need a GPU, the model is on none; left out of this "
                "report."
            )
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model)
    if gradient_checkpointing:
        enable_checkpointing(model)
    return []


def make_optimizer(parameters, name: str):
    """adamw | sgd | none (gradients only)."""
    if name == "none":
        return None
    return {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[name](parameters, lr=1e-5)


def make_batch(vocab_size: int, options: Options, device) -> dict:
    """Random tokens [batch, seq_len] int64, each a label too."""
    ids = torch.randint(0, vocab_size, (options.batch, options.seq_len), device=device)
    return {"input_ids": ids, "labels": ids}


def _new_run(options: Options, device) -> Run:
    run = Run(
        impl=options.impl, seq_len=options.seq_len, batch=options.batch, device=_device_name(device)
    )
    ours = options.impl == "hfpatch"
    run.setup = {
        "model": options.model,
        "dtype": str(options.torch_dtype).removeprefix("torch."),
        "optimizer": options.optimizer,
        "gradient_checkpointing": None if ours else options.gradient_checkpointing,
        "checkpointing": options.checkpointing if ours else None,
        "warmup": options.warmup,
        "steps": options.steps,
    }
    run.versions = software()
    return run


def record_run(
    model,
    optimizer,
    batch: dict,
    options: Options,
    *,
    backward: Callable | None = None,
    progress: Callable[[str], None] = lambda text: None,
    main: bool = True,
) -> Run:
    """Warm-up steps, one recorded step, then timed steps. The Run has an error if memory ran out.

    backward: loss -> None, an engine's own (accelerator.backward). main: whether this rank writes
    the trace and the snapshot.
    """
    device = batch["input_ids"].device
    run = _new_run(options, device)
    step = Step(model, optimizer, batch, backward or (lambda loss: loss.backward()))
    profiler, recorded = _profiler(device, options), False
    try:
        for i in range(options.warmup):
            progress(f"warm-up step {i + 1} of {options.warmup}")
            step()
        progress("recorded step")
        before = _preexisting(model, optimizer, batch, device)
        _start_history(device)
        with record.module_markers(model) as step.inputs, profiler:
            recorded = True
            step(marked=True)
            synchronize()
        run.memory |= _allocator_figures(device)
        if main:
            _dump_snapshot(device, options, run)
        for i in range(1, options.steps):
            progress(f"timed step {i} of {options.steps - 1}")
            start = time.perf_counter()
            step()
            synchronize()
            run.step_seconds.append(time.perf_counter() - start)
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        run.error = f"out of memory: {str(error).strip().splitlines()[0]}"
        run.memory |= _allocator_figures(device)
        if main:
            _dump_snapshot(device, options, run)
    if device.type == "cuda":
        run.memory["pinned_host_peak_bytes"] = pinned_bytes(model)
    if recorded:
        progress("reading the events")
        _read(profiler, run, device, before, step.marks, head_name(model))
        if main and options.trace:
            _write_trace(profiler, options, run)
    run.memory["process_peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return run


class Step:
    """One training step, in phases.

    marks: addresses of gradients and optimizer states of a marked step, by phase. inputs: those of
    its layers' inputs (record.module_markers).
    """

    def __init__(self, model, optimizer, batch: dict, backward: Callable):
        self.model, self.optimizer, self.batch, self.backward = model, optimizer, batch, backward
        self.marks: list = []
        self.inputs: dict = {}

    def __call__(self, marked: bool = False) -> None:
        with record.phase("forward"):
            # Keeping the output object would hold the logits through the backward.
            loss = self.model(**self.batch).loss
        if marked:
            self.marks.append(("forward", _host_blocks(self.model) | self.inputs))
        with record.phase("backward"):
            self.backward(loss)
        del loss
        if marked:
            self._mark("backward", _gradients(self.model), "gradients")
        if self.optimizer is None:
            self.model.zero_grad(set_to_none=True)
            return
        with record.phase("optimizer"):
            self.optimizer.step()
        if marked:
            self._mark("optimizer", _states(self.optimizer), "optimizer")
        self.optimizer.zero_grad(set_to_none=True)

    def _mark(self, phase: str, tensors, category: str) -> None:
        self.marks.append((phase, dict.fromkeys(_pointers(tensors), category)))


def _profiler(device, options: Options) -> torch.profiler.profile:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    return torch.profiler.profile(
        activities=activities, profile_memory=True, with_stack=options.stacks, record_shapes=False
    )


def _read(profiler, run, device, before, marks, head):
    events = record.Events(profiler)
    blocks, run.phases = allocations(events, device.type, before, marks, head)
    measure(run, blocks)


def _device_name(device) -> str:
    return "cpu" if device.type == "cpu" else f"{device} {torch.cuda.get_device_name(device)}"


def _start_history(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        record_allocations(True)


def _dump_snapshot(device, options, run):
    if device.type != "cuda":
        return
    path = Path(options.folder) / f"snapshot-{run.key.replace('@', '-')}.pickle"
    dump_allocations(str(path))
    record_allocations(False)
    run.memory |= {"snapshot_file": path.name, "snapshot_file_bytes": path.stat().st_size}


def _write_trace(profiler, options, run):
    path = Path(options.folder) / f"trace-{run.key.replace('@', '-')}.json.gz"
    profiler.export_chrome_trace(str(path))
    run.memory |= {"trace_file": path.name, "trace_file_bytes": path.stat().st_size}


def _allocator_figures(device) -> dict:
    """The allocator's own counts, to compare with the followed figures. {} on a CPU, without
    counts.
    """
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats(device)
    allocated, reserved = stats["allocated_bytes.all.peak"], stats["reserved_bytes.all.peak"]
    return {
        "allocated_peak_bytes": allocated,
        "reserved_peak_bytes": reserved,
        "fragmentation_bytes": reserved - allocated,
        "allocation_retries": stats["num_alloc_retries"],
    }


def _pointers(tensors) -> set:
    return {
        t.untyped_storage().data_ptr() for t in map(local_part, tensors) if t.device.type != "meta"
    }


def _host_blocks(model) -> dict:
    """{data_ptr: "host"} of the runtimes' host memory. On a CPU it must not count as the device's."""
    areas = [area for pool in pools(model) for area in pool.areas]
    return {area.block.bytes.data_ptr(): "host" for area in areas}


def _gradients(model) -> list:
    return [p.grad for p in model.parameters() if p.grad is not None]


def _states(optimizer) -> list:
    """Optimizer states, and the fp32 copies that an engine keeps in its parameter groups."""
    inner = getattr(optimizer, "optimizer", optimizer)
    found = [
        v for state in inner.state.values() for v in state.values() if isinstance(v, torch.Tensor)
    ]
    return found + [
        p for group in inner.param_groups for p in group["params"] if isinstance(p, torch.Tensor)
    ]


def _preexisting(model, optimizer, batch, device) -> list:
    """(data_ptr, bytes, category) of every storage alive on the device before the recorded step."""
    gc.collect()
    kinds: dict = {}
    owned = [*model.parameters(), *model.buffers()]
    for tensors, category in (
        (owned, "parameters"),
        (_gradients(model), "gradients"),
        (_states(optimizer) if optimizer is not None else [], "optimizer"),
        (batch.values(), "other"),
    ):
        for pointer in _pointers(tensors):
            kinds.setdefault(pointer, category)
    sizes: dict = {}
    for thing in gc.get_objects():
        # type(), not isinstance(): proxies among a process's objects warn or raise for __class__.
        if (
            issubclass(type(thing), torch.Tensor)
            and thing.device.type == device.type
            and thing.layout is torch.strided
        ):
            storage = local_part(thing).untyped_storage()
            try:
                pointer = storage.data_ptr()
            except RuntimeError:
                # A compiler's fake or functional tensor claims the device and has no memory.
                continue
            if storage.nbytes() and storage.device.type == device.type:
                sizes[pointer] = storage.nbytes()
    for tensor in map(local_part, owned):
        sizes.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
    kinds |= _host_blocks(model)
    return [
        (pointer, count, kinds.get(pointer, "other")) for pointer, count in sizes.items() if pointer
    ]


def head_name(model) -> str:
    found = {id(m): name for name, m in model.named_modules()}
    inner = model
    while not hasattr(inner, "get_output_embeddings") and hasattr(inner, "module"):
        inner = inner.module
    head = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    return found.get(id(head), "lm_head")


def software() -> dict:
    """Versions that the figures depend on."""
    found = versions(("torch", "triton", "transformers", "liger-kernel", "accelerate", "deepspeed"))
    return {
        name: version for name, version in (found | {"cuda": torch.version.cuda}).items() if version
    }
