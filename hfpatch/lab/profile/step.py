"""One measured run: builds the model, applies an implementation, trains a few steps, records one.

Called by worker.py, one process per implementation.
"""

import gc
import resource
import time
from collections.abc import Callable
from pathlib import Path

import torch

from hfpatch.lab.compat import dump_allocations, record_allocations
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


def new_run(options: Options, device: str, dtype: torch.dtype, source: str = "measured") -> Run:
    """A Run with what was asked, and no figures yet."""
    ours = options.impl == "hfpatch"
    setup = {
        "model": options.model,
        "dtype": str(dtype).removeprefix("torch."),
        "optimizer": options.optimizer,
        "gradient_checkpointing": None if ours else options.gradient_checkpointing,
        "checkpointing": options.checkpointing if ours else None,
    }
    if source == "measured":
        setup |= {"warmup": options.warmup, "steps": options.steps}
    return Run(options.impl, options.seq_len, options.batch, source, device, setup=setup,
               versions=software())  # fmt: skip


def record_run(
    model, optimizer, batch: dict, options: Options, *,
    progress: Callable[[str], None] = lambda text: None,
) -> Run:  # fmt: skip
    """Warm-up steps, one recorded step, then timed steps. The Run has an error if memory ran out."""
    device = batch["input_ids"].device
    name = "cpu"
    if device.type != "cpu":
        name = f"{device} {torch.cuda.get_device_name(device)}"
    run = new_run(options, name, options.torch_dtype)
    step = Step(model, optimizer, batch)
    profiler, before = _profiler(device, options), None
    try:
        for i in range(options.warmup):
            progress(f"warm-up step {i + 1} of {options.warmup}")
            step()
        progress("recorded step")
        _start_history(device)
        before = _preexisting(model, optimizer, batch, device)
        with record.module_markers(model) as step.inputs, profiler:
            step(marked=True)
            synchronize()
        _end_history(model, device, options, run)
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
        _end_history(model, device, options, run)
    if before is not None:
        progress("reading the events")
        events = record.Events(profiler)
        blocks, run.phases = allocations(events, device.type, before, step.marks, head_name(model))
        measure(run, blocks)
        if options.trace:
            name = f"trace-{run.name}.json.gz"
            profiler.export_chrome_trace(str(Path(options.folder) / name))
            run.keep("trace", options.folder, name)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    run.memory["process_peak_bytes"] = usage.ru_maxrss * 1024
    return run


class Step:
    """One training step, in phases.

    marks: addresses of gradients and optimizer states of a marked step, by phase. inputs: those of
    its layers' inputs (record.module_markers).
    """

    def __init__(self, model, optimizer, batch: dict):
        self.model, self.optimizer, self.batch = model, optimizer, batch
        self.marks: list = []
        self.inputs: dict = {}

    def __call__(self, marked: bool = False) -> None:
        with record.phase("forward"):
            # Keeping the output object would hold the logits through the backward.
            loss = self.model(**self.batch).loss
        if marked:
            self.marks.append(("forward", _marked(host=_host_areas(self.model)) | self.inputs))
        with record.phase("backward"):
            loss.backward()
        del loss
        if marked:
            self.marks.append(("backward", _marked(gradients=_gradients(self.model))))
        if self.optimizer is None:
            self.model.zero_grad(set_to_none=True)
            return
        with record.phase("optimizer"):
            self.optimizer.step()
        if marked:
            self.marks.append(("optimizer", _marked(optimizer=_states(self.optimizer))))
        self.optimizer.zero_grad(set_to_none=True)


def _profiler(device, options: Options) -> torch.profiler.profile:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    return torch.profiler.profile(
        activities=activities, profile_memory=True, with_stack=options.stacks, record_shapes=False
    )


def _start_history(device) -> None:
    """Starts the allocator's own record, for PyTorch's memory viewer. A CPU has none."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        record_allocations(True)


def _end_history(model, device, options, run: Run) -> None:
    """Keeps that record, and the allocator's own counts, to compare with the followed figures."""
    if device.type != "cuda":
        return
    stats = torch.cuda.memory_stats(device)
    allocated, reserved = stats["allocated_bytes.all.peak"], stats["reserved_bytes.all.peak"]
    run.memory |= {
        "allocated_peak_bytes": allocated,
        "reserved_peak_bytes": reserved,
        "fragmentation_bytes": reserved - allocated,
        "pinned_host_peak_bytes": pinned_bytes(model),
    }
    name = f"snapshot-{run.name}.pickle"
    dump_allocations(str(Path(options.folder) / name))
    record_allocations(False)
    run.keep("snapshot", options.folder, name)


def _storages(tensors) -> dict:
    """{data_ptr: storage} of tensors with memory."""
    storages = (t.untyped_storage() for t in tensors if t.device.type != "meta")
    return {storage.data_ptr(): storage for storage in storages}


def _marked(**kinds) -> dict:
    """{data_ptr: category} of tensors by category."""
    return {ptr: kind for kind, tensors in kinds.items() for ptr in _storages(tensors)}


def _host_areas(model) -> list:
    """The runtimes' host memory. On a CPU it must not count as the device's."""
    return [area.block.bytes for pool in pools(model) for area in pool.areas]


def _gradients(model) -> list:
    return [p.grad for p in model.parameters() if p.grad is not None]


def _states(optimizer) -> list:
    states = optimizer.state.values() if optimizer is not None else ()
    return [v for state in states for v in state.values() if isinstance(v, torch.Tensor)]


def _preexisting(model, optimizer, batch, device) -> list:
    """(data_ptr, bytes, category) of the storages alive on the device before the recorded step."""
    found: dict = {}
    for category, tensors in (
        ("host", _host_areas(model)),
        ("parameters", [*model.parameters(), *model.buffers()]),
        ("gradients", _gradients(model)),
        ("optimizer", _states(optimizer)),
        ("other", batch.values()),
    ):
        for pointer, storage in _storages(tensors).items():
            if storage.device.type == device.type and pointer:
                found.setdefault(pointer, (pointer, storage.nbytes(), category))
    known = [*found.values()]
    if device.type == "cuda":  # of all other tensors the allocator knows the bytes alone
        rest = torch.cuda.memory_allocated(device) - sum(count for _, count, _ in known)
        known.append((-1, max(0, rest), "other"))
    return known


def head_name(model) -> str:
    head = model.get_output_embeddings()
    return next((name for name, m in model.named_modules() if m is head), "lm_head")


def software() -> dict:
    """Versions that the figures depend on."""
    found = versions(("torch", "triton", "transformers", "liger-kernel", "accelerate"))
    found["cuda"] = torch.version.cuda
    return {name: version for name, version in found.items() if version}
