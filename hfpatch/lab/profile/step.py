"""Real steps of one implementation: builds the model, trains a few steps, and times them.

On a GPU one more step runs under the allocator's own history, for PyTorch's memory viewer. Called
by worker.py, one process per implementation.
"""

import resource
import time
from collections.abc import Callable
from pathlib import Path

import torch

from hfpatch.budget.free import host_free
from hfpatch.budget.limits import gib
from hfpatch.lab.compat import dump_allocations, record_allocations
from hfpatch.lab.device import is_out_of_memory, one_line, synchronize
from hfpatch.lab.made import model_of
from hfpatch.lab.models import config_of
from hfpatch.lab.profile.options import Options
from hfpatch.lab.profile.timeline import Run, versions
from hfpatch.lab.simulate.implementations import config_class, enable_checkpointing
from hfpatch.lab.watch import pinned_bytes, policy_used


def load_config(name: str):
    """The configuration of a model as `hfpatch plan` takes it. ValueError for an unknown one."""
    values = dict(config_of(name)[1])
    return config_class(values.pop("model_type", None))(**values)


def build_model(options: Options) -> torch.nn.Module:
    """The model in training mode, with random weights: memory and time do not depend on values.

    Raises:
        ValueError: the weights do not fit in host memory. A GPU raises by itself; without one the
            system would kill a process.
    """
    config = load_config(options.model)
    config.use_cache = False
    if (config.max_position_embeddings or 0) < options.seq_len:
        config.max_position_embeddings = options.seq_len
    if options.on == "cpu":
        shapes = model_of(config, "meta", options.torch_dtype)
        needed = 2 * sum(p.nbytes for p in shapes.parameters())
        free = host_free()
        if free is not None and needed > free:
            raise ValueError(
                f"hfpatch: weights and gradients must fit in {gib(free)} of free memory, got "
                f"{gib(needed)}. Pass a smaller model, or --simulate."
            )
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


def measure_steps(options: Options, progress: Callable[[str], None] = lambda text: None):
    """(Run with what real steps took, the policy that hfpatch's layers chose). The Run has an error
    if memory ran out.
    """
    device = torch.device(options.on)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    run = new_run(options, name, options.torch_dtype)
    model = None
    try:
        progress("building the model")
        model = build_model(options)
        run.applied = become(
            model, options.impl, options.gradient_checkpointing, options.checkpointing
        )
        _steps(run, model, options, device, progress)
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        run.error = f"out of memory: {one_line(error)}"
    run.memory["process_peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return run, None if model is None else policy_used(model)


def _steps(run: Run, model, options: Options, device: torch.device, progress) -> None:
    """Warm-up steps, timed ones, and on a GPU one under the allocator's history."""
    optimizer = make_optimizer(model.parameters(), options.optimizer)
    shape = (options.batch, options.seq_len)
    ids = torch.randint(0, model.config.vocab_size, shape, device=device)

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        if optimizer is not None:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        synchronize()

    for i in range(options.warmup):
        progress(f"warm-up step {i + 1} of {options.warmup}")
        step()
    for i in range(options.steps):
        progress(f"timed step {i + 1} of {options.steps}")
        start = time.perf_counter()
        step()
        run.step_seconds.append(time.perf_counter() - start)
    if device.type == "cuda":
        progress("recorded step")
        _record(run, model, step, device, Path(options.folder))


def _record(run: Run, model, step, device: torch.device, folder: Path) -> None:
    """One step under the allocator's history, and the allocator's own counts, also of a step that
    runs out of memory.
    """
    name = f"snapshot-{run.impl}-{run.seq_len}.pickle"
    torch.cuda.reset_peak_memory_stats(device)
    record_allocations(True)
    try:
        step()
    finally:
        dump_allocations(str(folder / name))
        record_allocations(False)
        stats = torch.cuda.memory_stats(device)
        allocated = stats["allocated_bytes.all.peak"]
        reserved = stats["reserved_bytes.all.peak"]
        run.memory |= {
            "allocated_peak_bytes": allocated,
            "reserved_peak_bytes": reserved,
            "fragmentation_bytes": reserved - allocated,
            "pinned_host_peak_bytes": pinned_bytes(model),
            "snapshot_file": name,
            "snapshot_file_bytes": (folder / name).stat().st_size,
        }


def head_name(model) -> str:
    head = model.get_output_embeddings()
    return next((name for name, m in model.named_modules() if m is head), "lm_head")


def software() -> dict:
    """Versions that the figures depend on."""
    found = versions(("torch", "triton", "transformers", "liger-kernel", "accelerate"))
    found["cuda"] = torch.version.cuda
    return {name: version for name, version in found.items() if version}
