"""Reads and checks ds_configs/ and fsdp_configs/ before any model is loaded.

DeepSpeed reads its top-level keys one by one and never looks at the rest: a misspelt or misplaced
key (`overlap_comm` outside `zero_optimization`) does nothing. It also drops "auto" in silence if
nothing fills it in. Trainer's fsdp_config ignores unknown keys.
The installed DeepSpeed's own models of sections (zero_optimization, bf16, fp16) check their names
and values. DeepSpeed's top level and Trainer's FSDP keys have no model, so their names are here;
tests/engines/test_configs.py compares them to both libraries.
"""

import contextlib
import difflib
import functools
import importlib.metadata
import importlib.util
import json
import typing
from dataclasses import dataclass
from pathlib import Path

_MODELS = {
    "zero_optimization": ("deepspeed.runtime.zero.config", "DeepSpeedZeroConfig"),
    "bf16": ("deepspeed.runtime.precision_config", "DeepSpeedBF16Config"),
    "fp16": ("deepspeed.runtime.precision_config", "DeepSpeedFP16Config"),
}

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
    zero_force_ds_cpu_optimizer
""".split()
AIO = "block_size queue_depth intra_op_parallelism single_submit overlap_events use_gds".split()
DATA_TYPES = "grad_accum_dtype param_dtype buffer_dtype keep_in_fp32_modules".split()


@functools.cache
def deepspeed_keys() -> dict:
    """The keys of a DeepSpeed config: name -> the keys inside, None if DeepSpeed alone knows them.

    Raises ValueError if DeepSpeed is not installed.
    """
    models = {name: _keys_of(model) for name, model in _models().items()}
    sections = {"aio": dict.fromkeys(AIO), "data_types": dict.fromkeys(DATA_TYPES)}
    return dict.fromkeys([*TOP, *_MODELS]) | sections | models


def _models() -> dict:
    """DeepSpeed's own model of each section, as far as the installed version has it."""
    if importlib.util.find_spec("deepspeed") is None:
        raise ValueError(
            "hfpatch: a DeepSpeed config needs the package deepspeed, it is missing; pip install "
            "deepspeed."
        )
    found = {}
    for section, (module, name) in _MODELS.items():
        # Another version may have the model elsewhere; then DeepSpeed alone checks the section.
        with contextlib.suppress(ImportError, AttributeError):
            found[section] = getattr(importlib.import_module(module), name)
    return found


def _keys_of(model) -> dict:
    """The keys of one of DeepSpeed's pydantic models without deprecated ones."""
    found = {}
    for name, field in model.model_fields.items():
        if not (field.json_schema_extra or {}).get("deprecated"):
            kinds = typing.get_args(field.annotation) or (field.annotation,)
            inside = [_keys_of(kind) for kind in kinds if hasattr(kind, "model_fields")]
            found[field.alias or name] = inside[0] if inside else None
    return found


# Trainer fills these "auto" values in; anywhere else DeepSpeed drops "auto" and takes its default
# in silence.
AUTO = {
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
    "gradient_clipping", "fp16.enabled", "bf16.enabled", "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
}  # fmt: skip

_FSDP_BOTH = """
    version auto_wrap_policy transformer_layer_cls_to_wrap min_num_params cpu_offload
    cpu_ram_efficient_loading activation_checkpointing state_dict_type reshard_after_forward
""".split()
FSDP2 = dict.fromkeys(_FSDP_BOTH)
_FSDP1_ALONE = """
    forward_prefetch backward_prefetch use_orig_params sync_module_states limit_all_gathers
""".split()
FSDP1 = FSDP2 | dict.fromkeys(_FSDP1_ALONE)


@dataclass(frozen=True)
class EngineConfig:
    """A checked engine config: engine is "deepspeed" or "fsdp", values what the file says."""

    engine: str
    path: Path
    values: dict

    @property
    def offload(self) -> str:
        """Where optimizer states live: "none", "cpu" or "nvme"."""
        if self.engine == "fsdp":
            return "cpu" if self.values.get("cpu_offload") else "none"
        return self.values["zero_optimization"].get("offload_optimizer", {}).get("device", "none")


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
        f"hfpatch: no engine config {name_or_path!r}; give a JSON file or one of "
        f"{', '.join(known)}."
    )


def load(name_or_path: str, *, nvme_path: str | None = None) -> EngineConfig:
    """Reads and checks one config file; ValueError says which key is wrong and what was expected.

    nvme_path: folder on a fast disk, put into every section whose device is "nvme".
    """
    path = find(str(name_or_path))
    try:
        values = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_no_duplicates)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"hfpatch: {path} is not JSON ({error}); an accelerate YAML goes to `accelerate "
            "launch --config_file`."
        ) from error
    if not isinstance(values, dict):
        raise ValueError(
            f"hfpatch: {path}: expected one JSON object, came {json.dumps(values)[:40]}."
        )
    engine = "fsdp" if "version" in values or "fsdp_version" in values else "deepspeed"
    if engine == "deepspeed" and "zero_optimization" not in values:
        raise ValueError(
            f'hfpatch: {path}: neither "zero_optimization" (DeepSpeed) nor "version" (FSDP) is '
            "there; add one."
        )
    if nvme_path is not None:
        zero = values.get("zero_optimization", {})
        for name in ("offload_param", "offload_optimizer"):
            if isinstance(zero.get(name), dict) and zero[name].get("device") == "nvme":
                zero[name]["nvme_path"] = nvme_path
    check(values, engine=engine, where=str(path))
    return EngineConfig(engine, path, values)


def check(values: dict, *, engine: str, where: str = "config") -> None:
    """Checks that the engine reads every key, at its place, and that DeepSpeed takes the values.

    Raises ValueError.
    """
    if engine == "fsdp":
        values = {key.removeprefix("fsdp_"): value for key, value in values.items()}
        version = values.get("version")
        if version not in (1, 2):
            raise ValueError(f'hfpatch: {where}: "version": expected 1 or 2, came {version!r}.')
        _check_names(values, FSDP1 if version == 1 else FSDP2, "", where, auto=frozenset())
        return
    _check_names(values, deepspeed_keys(), "", where, auto=AUTO)
    _check_values(values, where)
    zero = values.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    if stage == 0:
        raise ValueError(
            f'hfpatch: {where}: "zero_optimization.stage" is 0 or missing and shards nothing; set '
            "1 to 3."
        )
    if zero.get("offload_param", {}).get("device", "none") != "none" and stage != 3:
        raise ValueError(f'hfpatch: {where}: "offload_param" needs "stage": 3, came stage {stage}.')
    for name in ("offload_param", "offload_optimizer"):
        if zero.get(name, {}).get("device") == "nvme" and not zero[name].get("nvme_path"):
            raise ValueError(
                f'hfpatch: {where}: "{name}" is on nvme without "nvme_path"; name a folder on a '
                "local disk."
            )
    stage3_only = sorted(k for k in zero if k.startswith("stage3_")) if stage != 3 else []
    if stage3_only:
        raise ValueError(
            f'hfpatch: {where}: "{stage3_only[0]}" does nothing in stage {stage}; remove it.'
        )


def training_arguments(config: EngineConfig, *, flags: dict | None = None) -> dict:
    """The TrainingArguments of the engine: {"deepspeed": ...} or {"fsdp": ..., "fsdp_config": ...}.

    flags: TrainingArguments that the user set. Raises ValueError if the config contradicts them.
    """
    flags = flags or {}
    for other in ("deepspeed", "fsdp", "fsdp_config"):
        if flags.get(other):
            raise ValueError(
                f"hfpatch: {config.path.name} and --{other} both name an engine; keep one."
            )
    if config.engine == "deepspeed":
        _contradictions(config, flags)
        if config.offload == "nvme":
            _writable(config)
        return {"deepspeed": config.values}
    if _version("transformers") < (5, 17):
        raise ValueError(
            f"hfpatch: Trainer reads {config.path.name} from transformers 5.17 on, came "
            f"{importlib.metadata.version('transformers')}; use `accelerate launch --config_file "
            f"{config.path.with_suffix('.yaml')}`."
        )
    if flags.get("gradient_checkpointing") and config.values.get("activation_checkpointing"):
        raise ValueError(
            f'hfpatch: {config.path.name} has "activation_checkpointing" and '
            "--gradient_checkpointing is on; keep one."
        )
    return {"fsdp": True, "fsdp_config": dict(config.values)}


_FLAGS = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "bf16.enabled": "bf16",
    "fp16.enabled": "fp16",
}


def _contradictions(config: EngineConfig, flags: dict) -> None:
    for key, flag in _FLAGS.items():
        section, _, name = key.rpartition(".")
        said = (config.values.get(section, {}) if section else config.values).get(name)
        if (
            said not in (None, "auto")
            and flag in flags
            and flags[flag] is not None
            and said != flags[flag]
        ):
            raise ValueError(
                f'hfpatch: {config.path.name} has "{key}": {json.dumps(said)} but --{flag} is '
                f"{flags[flag]}; "
                f'write "auto" in the file.'
            )


def _writable(config: EngineConfig) -> None:
    for name in ("offload_param", "offload_optimizer"):
        section = config.values["zero_optimization"].get(name, {})
        if section.get("device") == "nvme" and not Path(section["nvme_path"]).is_dir():
            raise ValueError(
                f"hfpatch: {config.path.name}: nvme_path {section['nvme_path']} is no folder; "
                "make it on a local disk or name another."
            )


def _check_names(values: dict, table: dict, prefix: str, where: str, *, auto) -> None:
    for key, value in values.items():
        path = f"{prefix}{key}"
        if key not in table:
            raise ValueError(f'hfpatch: {where}: unknown key "{path}"{_hint(key, table, prefix)}.')
        if value == "auto" and path not in auto:
            raise ValueError(
                f'hfpatch: {where}: nothing fills in "auto" for "{path}"; give a value or '
                "remove it."
            )
        if isinstance(table[key], dict) and value != "auto":
            if not isinstance(value, dict):
                came = json.dumps(value)
                raise ValueError(f'hfpatch: {where}: "{path}": expected a section, came {came}.')
            _check_names(value, table[key], f"{path}.", where, auto=auto)


def _check_values(values: dict, where: str) -> None:
    """Lets DeepSpeed's own models read their sections; their first complaint is a sentence."""
    for section, model in _models().items():
        try:
            model(**values.get(section, {}))
        except ValueError as error:  # pydantic's
            first = error.errors()[0]
            path = ".".join(map(str, (section, *first["loc"])))
            came = json.dumps(first["input"], default=str)
            reason = first["msg"][:1].lower() + first["msg"][1:]
            raise ValueError(f'hfpatch: {where}: "{path}": {reason}, came {came}.') from error


def _hint(key: str, table: dict, prefix: str) -> str:
    if table not in (FSDP1, FSDP2):
        for home, keys in _sections(deepspeed_keys()):
            if home != prefix and key in keys:
                return f'; it belongs in "{home[:-1]}"' if home else "; it belongs at the top level"
    elif key in FSDP1:
        return "; only FSDP1 reads it"
    near = difflib.get_close_matches(key, table, n=1)
    return f'; did you mean "{near[0]}"' if near else "; remove it"


def _sections(table: dict, prefix: str = ""):
    yield prefix, table
    for key, inside in table.items():
        if isinstance(inside, dict):
            yield from _sections(inside, f"{prefix}{key}.")


def _no_duplicates(pairs):
    keys = [k for k, _ in pairs]
    twice = [k for k in keys if keys.count(k) > 1]
    if twice:
        raise ValueError(f'hfpatch: key "{twice[0]}" appears twice; keep one.')
    return dict(pairs)


def _version(package: str) -> tuple[int, int]:
    major, minor = importlib.metadata.version(package).split(".")[:2]
    return int(major), int(minor)
