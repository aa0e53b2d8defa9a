"""Reads ds_configs/ and fsdp_configs/ before any model is loaded.

DeepSpeed never looks at a top-level key that it does not know, so a misplaced one (`overlap_comm`
outside of `zero_optimization`) does nothing. Its own models of sections refuse the rest.
"""

import difflib
import importlib.metadata
import json
from dataclasses import dataclass
from pathlib import Path

# Names that DeepSpeed reads at its top level, and in two sections that it has no model of.
TOP = """
    activation_checkpointing amp autotuning bfloat16 checkpoint comet comms_logger
    communication_data_type compile compression_training csv_monitor curriculum_learning
    data_efficiency dataloader_drop_last datastates_ckpt disable_allgather disable_python_gc
    dump_state eigenvalue elasticity expert_parallel flops_profiler gradient_accumulation_steps
    gradient_allreduce_op gradient_clipping gradient_predivide_factor graph_harvesting
    hybrid_engine log_level managed_gradient_accumulation memory_breakdown nebula optimizer
    pipeline prescale_gradients progressive_layer_drop quantize_training scheduler
    seq_parallel_communication_data_type sparse_attention sparse_gradients steps_per_print
    tensor_parallel tensorboard timers torch_autocast train_batch_size
    train_micro_batch_size_per_gpu use_data_before_expert_parallelism vocabulary_size
    wall_clock_breakdown wandb weight_quantization zero_allow_untested_optimizer
    zero_force_ds_cpu_optimizer zero_optimization bf16 fp16 aio data_types
""".split()
_FSDP_BOTH = """
    version auto_wrap_policy transformer_layer_cls_to_wrap min_num_params cpu_offload
    cpu_ram_efficient_loading activation_checkpointing state_dict_type reshard_after_forward
""".split()
_FSDP1_ALONE = """
    forward_prefetch backward_prefetch use_orig_params sync_module_states limit_all_gathers
""".split()


@dataclass(frozen=True)
class EngineConfig:
    """A checked engine config: engine is "deepspeed" or "fsdp", values what the file says."""

    engine: str
    path: Path
    values: dict


def find(name_or_path: str) -> Path:
    """The file itself, or the file of a name such as "zero3" or "fsdp2".

    Names are looked up in ds_configs/ and fsdp_configs/. Raises ValueError.
    """
    given = Path(name_or_path)
    if given.is_file():
        return given
    package = Path(__file__).resolve().parent.parent
    # A wheel has them in the package, a checkout beside it.
    roots = [
        Path.cwd(),
        package,
        package.parent,
    ]
    folders = [root / kind for root in roots for kind in ("ds_configs", "fsdp_configs")]
    for folder in folders:
        if (folder / f"{name_or_path}.json").is_file():
            return folder / f"{name_or_path}.json"
    known = sorted({p.stem for folder in folders for p in folder.glob("*.json")})
    raise ValueError(
        f"hfpatch: there is no engine config {name_or_path!r}. Give a JSON file or one of "
        f"{', '.join(known)}."
    )


def load(name_or_path: str, *, nvme_path: str | None = None) -> EngineConfig:
    """Reads and checks one config file; ValueError says which key is wrong.

    nvme_path: folder on a fast disk, put into every section whose device is "nvme".
    """
    path = find(str(name_or_path))
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"hfpatch: {path} must be JSON ({error}). An accelerate YAML goes to `accelerate "
            "launch --config_file`."
        ) from error
    engine = "fsdp" if {"version", "fsdp_version"} & {*values} else "deepspeed"
    known = TOP if engine == "deepspeed" else [*_FSDP_BOTH, *_FSDP1_ALONE]
    for key in values:
        if key.removeprefix("fsdp_") not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else "Remove it."
            raise ValueError(f'hfpatch: {path} has an unknown key "{key}". {hint}')
    if engine == "deepspeed":
        zero = values.get("zero_optimization", {})
        for name in ("offload_param", "offload_optimizer"):
            if nvme_path is not None and zero.get(name, {}).get("device") == "nvme":
                zero[name]["nvme_path"] = nvme_path
        _check_zero(zero, path)
    return EngineConfig(engine, path, values)


def _check_zero(zero: dict, path: Path) -> None:
    """Lets DeepSpeed's own model read the section; its first complaint is a sentence."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    try:
        DeepSpeedZeroConfig(**{k: v for k, v in zero.items() if v != "auto"})
    except ValueError as error:  # pydantic's
        first = error.errors()[0]
        where = ".".join(map(str, ("zero_optimization", *first["loc"])))
        raise ValueError(f'hfpatch: {path}: "{where}": {first["msg"]}.') from error
    if not zero.get("stage"):
        raise ValueError(
            f"hfpatch: {path} shards nothing. Set zero_optimization.stage to 1, 2 or 3."
        )


def training_arguments(config: EngineConfig, *, flags: dict | None = None) -> dict:
    """The TrainingArguments of the engine: {"deepspeed": ...} or {"fsdp": ..., "fsdp_config": ...}.
    Raises ValueError if one of flags names an engine too.
    """
    for other in ("deepspeed", "fsdp", "fsdp_config"):
        if (flags or {}).get(other):
            raise ValueError(
                f"hfpatch: {config.path.name} and --{other} both name an engine. Keep one."
            )
    if config.engine == "deepspeed":
        zero = config.values.get("zero_optimization", {})
        for section in (zero.get("offload_param", {}), zero.get("offload_optimizer", {})):
            nvme = section.get("nvme_path") if section.get("device") == "nvme" else "/"
            if not nvme or not Path(nvme).is_dir():
                raise ValueError(
                    f"hfpatch: {config.path.name}: nvme_path must be a folder, got {nvme}. Pass "
                    "--nvme_path with one on a local disk."
                )
        return {"deepspeed": config.values}
    version = tuple(map(int, importlib.metadata.version("transformers").split(".")[:2]))
    if version < (5, 17):
        raise ValueError(
            f"hfpatch: Trainer reads {config.path.name} with transformers 5.17 or newer. Use "
            f"`accelerate launch --config_file {config.path.with_suffix('.yaml')}`."
        )
    return {"fsdp": True, "fsdp_config": dict(config.values)}
