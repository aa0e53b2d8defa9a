"""Reads and checks ds_configs/ and fsdp_configs/ before any model is loaded.

Why a check of our own: DeepSpeed reads its top-level keys one by one and never looks at the rest, so a misspelt or
misplaced key (`overlap_comm` outside `zero_optimization`) silently does nothing; inside a section it turns "true" into
True and drops "auto" where nothing fills it in. Trainer's fsdp_config ignores unknown keys altogether.
Sections with a model of their own in the installed DeepSpeed (zero_optimization, bf16, fp16) are checked against that; it has
none of its top level, nor Trainer of FSDP's keys: those tables stand here, held against both by tests/engines/test_configs.py.
"""

import difflib
import enum
import functools
import importlib.metadata
import importlib.util
import json
import typing
from dataclasses import dataclass
from pathlib import Path

BOOL, INT, NUMBER, TEXT, SECTION, LIST = (
    "true or false",
    "a whole number",
    "a number",
    "a string",
    "a section",
    "a list",
)
ANYTHING = "anything"  # that the engine takes
_KINDS = {bool: BOOL, int: INT, float: NUMBER, str: TEXT, Path: TEXT, list: LIST}
_MODELS = {
    "zero_optimization": ("deepspeed.runtime.zero.config", "DeepSpeedZeroConfig"),
    "bf16": ("deepspeed.runtime.precision_config", "DeepSpeedBF16Config"),
    "fp16": ("deepspeed.runtime.precision_config", "DeepSpeedFP16Config"),
}

AIO = {
    "block_size": INT, "queue_depth": INT, "intra_op_parallelism": INT, "single_submit": BOOL, "overlap_events": BOOL,
    "use_gds": BOOL,
}  # fmt: skip
DATA_TYPES = {
    "grad_accum_dtype": ("fp32", "bf16", "fp16"), "param_dtype": ("fp32", "bf16", "fp16"),
    "buffer_dtype": ("fp32", "bf16", "fp16"), "keep_in_fp32_modules": LIST,
}  # fmt: skip
_SCALARS = {
    "train_batch_size": INT, "train_micro_batch_size_per_gpu": INT, "gradient_accumulation_steps": INT,
    "gradient_clipping": NUMBER, "steps_per_print": INT, "wall_clock_breakdown": BOOL, "memory_breakdown": BOOL,
    "dump_state": BOOL, "disable_allgather": BOOL, "disable_python_gc": BOOL, "prescale_gradients": BOOL,
    "gradient_predivide_factor": NUMBER, "gradient_allreduce_op": TEXT, "communication_data_type": TEXT,
    "seq_parallel_communication_data_type": TEXT, "dataloader_drop_last": BOOL, "log_level": TEXT,
    "managed_gradient_accumulation": BOOL, "use_data_before_expert_parallelism": BOOL, "vocabulary_size": INT,
    "zero_allow_untested_optimizer": BOOL, "zero_force_ds_cpu_optimizer": BOOL, "sparse_gradients": BOOL,
    "graph_harvesting": BOOL,
}  # fmt: skip
# Sections whose insides the engine alone checks; only their place is checked here.
_SECTIONS = (
    "activation_checkpointing", "amp", "autotuning", "bfloat16", "checkpoint", "comet", "comms_logger", "compile",
    "compression_training", "csv_monitor", "curriculum_learning", "data_efficiency", "datastates_ckpt", "eigenvalue",
    "elasticity", "expert_parallel", "flops_profiler", "hybrid_engine", "nebula", "optimizer", "pipeline",
    "progressive_layer_drop", "quantize_training", "scheduler", "sparse_attention", "tensor_parallel", "tensorboard",
    "timers", "torch_autocast", "wandb", "weight_quantization",
)  # fmt: skip


@functools.cache
def deepspeed_keys() -> dict:
    """What stands in a DeepSpeed config: each key with what it takes, of a section the keys inside.

    Raises ValueError where DeepSpeed is not installed.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise ValueError(
            "hfpatch: a DeepSpeed config needs the package deepspeed, it is missing; pip install deepspeed."
        )
    models = {name: _section(*where) for name, where in _MODELS.items()}
    return {**_SCALARS, **dict.fromkeys(_SECTIONS, SECTION), "aio": AIO, "data_types": DATA_TYPES, **models}


def _section(module: str, model: str) -> dict | str:
    try:
        return _keys_of(getattr(importlib.import_module(module), model))
    except (ImportError, AttributeError):  # a version that has it elsewhere: it looks into the section itself
        return SECTION


def _keys_of(model) -> dict:
    """The keys of one of DeepSpeed's pydantic models, deprecated ones left out, as _check_section() reads them."""
    fields = {field.alias or name: field for name, field in model.model_fields.items()}
    old = {name for name, field in fields.items() if (field.json_schema_extra or {}).get("deprecated")}
    return {name: _wanted(field.annotation) for name, field in fields.items() if name not in old}


def _wanted(kind):
    if typing.get_origin(kind) is typing.Union:
        kinds = [one for one in typing.get_args(kind) if one is not type(None)]
        return _wanted(kinds[0]) if len(kinds) == 1 else ANYTHING
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return tuple(member.value for member in kind)
    return _keys_of(kind) if hasattr(kind, "model_fields") else _KINDS.get(typing.get_origin(kind) or kind, ANYTHING)


# Trainer fills these "auto" values in; anywhere else DeepSpeed drops "auto" and takes its default in silence.
AUTO = {
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
    "fp16.enabled", "bf16.enabled", "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size", "zero_optimization.stage3_param_persistence_threshold",
}  # fmt: skip

FSDP_STRATEGIES = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")
_FSDP_BOTH = {
    "version": (1, 2), "auto_wrap_policy": ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"),
    "transformer_layer_cls_to_wrap": LIST, "min_num_params": INT, "cpu_offload": BOOL,
    "cpu_ram_efficient_loading": BOOL, "activation_checkpointing": BOOL,
    "state_dict_type": ("FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT"),
}  # fmt: skip
FSDP2 = {**_FSDP_BOTH, "reshard_after_forward": BOOL}
FSDP1 = {
    **_FSDP_BOTH, "reshard_after_forward": FSDP_STRATEGIES, "forward_prefetch": BOOL,
    "backward_prefetch": ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"), "use_orig_params": BOOL,
    "sync_module_states": BOOL, "limit_all_gathers": BOOL,
}  # fmt: skip


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
    """A file as given, or a name such as "zero3" or "fsdp2" from ds_configs/ and fsdp_configs/; else ValueError."""
    given = Path(name_or_path)
    if given.is_file():
        return given
    package = Path(__file__).resolve().parent.parent
    roots = [Path.cwd(), package, package.parent]  # the package has them in a wheel, its parent in a checkout
    folders = [root / kind for root in roots for kind in ("ds_configs", "fsdp_configs")]
    for folder in folders:
        if (folder / f"{name_or_path}.json").is_file():
            return folder / f"{name_or_path}.json"
    known = sorted({p.stem for folder in folders for p in folder.glob("*.json")})
    raise ValueError(f"hfpatch: no engine config {name_or_path!r}; give a JSON file or one of {', '.join(known)}.")


def load(name_or_path: str, *, nvme_path: str | None = None) -> EngineConfig:
    """Reads and checks one config file; ValueError says which key is wrong and what was expected.

    nvme_path: folder on a fast disk, put into every section whose device is "nvme".
    """
    path = find(str(name_or_path))
    try:
        values = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_no_duplicates)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"hfpatch: {path} is not JSON ({error}); an accelerate YAML goes to `accelerate launch --config_file`."
        ) from error
    if not isinstance(values, dict):
        raise ValueError(f"hfpatch: {path}: expected one JSON object, came {_kind(values)}.")
    engine = "fsdp" if "version" in values or "fsdp_version" in values else "deepspeed"
    if engine == "deepspeed" and "zero_optimization" not in values:
        raise ValueError(
            f'hfpatch: {path}: neither "zero_optimization" (DeepSpeed) nor "version" (FSDP) is there; add one.'
        )
    if nvme_path is not None:
        zero = values.get("zero_optimization", {})
        for name in ("offload_param", "offload_optimizer"):
            if isinstance(zero.get(name), dict) and zero[name].get("device") == "nvme":
                zero[name]["nvme_path"] = nvme_path
    check(values, engine=engine, where=str(path))
    return EngineConfig(engine, path, values)


def check(values: dict, *, engine: str, where: str = "config") -> None:
    """Every key is one the engine reads, at its place, with a value of its type. ValueError otherwise."""
    if engine == "fsdp":
        values = {key.removeprefix("fsdp_"): value for key, value in values.items()}
        _check_section(values, FSDP1 if values.get("version") == 1 else FSDP2, "", where, auto=frozenset())
        return
    _check_section(values, deepspeed_keys(), "", where, auto=AUTO)
    zero = values.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    if stage == 0:
        raise ValueError(f'hfpatch: {where}: "zero_optimization.stage" is 0 or missing and shards nothing; set 1 to 3.')
    if zero.get("offload_param", {}).get("device", "none") != "none" and stage != 3:
        raise ValueError(f'hfpatch: {where}: "offload_param" needs "stage": 3, came stage {stage}.')
    for name in ("offload_param", "offload_optimizer"):
        if zero.get(name, {}).get("device") == "nvme" and not zero[name].get("nvme_path"):
            raise ValueError(
                f'hfpatch: {where}: "{name}" is on nvme without "nvme_path"; name a folder on a local disk.'
            )
    stage3_only = sorted(k for k in zero if k.startswith("stage3_")) if stage != 3 else []
    if stage3_only:
        raise ValueError(f'hfpatch: {where}: "{stage3_only[0]}" does nothing in stage {stage}; remove it.')


def training_arguments(config: EngineConfig, *, flags: dict | None = None) -> dict:
    """The TrainingArguments that turn the engine on: {"deepspeed": ...} or {"fsdp": ..., "fsdp_config": ...}.

    flags: TrainingArguments the user set; ValueError where the config says otherwise.
    """
    flags = flags or {}
    for other in ("deepspeed", "fsdp", "fsdp_config"):
        if flags.get(other):
            raise ValueError(f"hfpatch: {config.path.name} and --{other} both name an engine; keep one.")
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
            f'hfpatch: {config.path.name} has "activation_checkpointing" and --gradient_checkpointing is on; keep one.'
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
        if said not in (None, "auto") and flag in flags and flags[flag] is not None and said != flags[flag]:
            raise ValueError(
                f'hfpatch: {config.path.name} has "{key}": {json.dumps(said)} but --{flag} is {flags[flag]}; '
                f'write "auto" in the file.'
            )


def _writable(config: EngineConfig) -> None:
    for name in ("offload_param", "offload_optimizer"):
        section = config.values["zero_optimization"].get(name, {})
        if section.get("device") == "nvme" and not Path(section["nvme_path"]).is_dir():
            raise ValueError(
                f"hfpatch: {config.path.name}: nvme_path {section['nvme_path']} is no folder; make it on a local disk "
                "or name another."
            )


def _check_section(values: dict, table: dict, prefix: str, where: str, *, auto) -> None:
    for key, value in values.items():
        path = f"{prefix}{key}"
        if key not in table:
            raise ValueError(f'hfpatch: {where}: unknown key "{path}"{_hint(key, table, prefix)}.')
        wanted = table[key]
        if value == "auto":
            if path not in auto:
                raise ValueError(f'hfpatch: {where}: nothing fills in "auto" for "{path}"; give a value or remove it.')
        elif isinstance(wanted, dict):
            if not isinstance(value, dict):
                raise ValueError(f'hfpatch: {where}: "{path}": expected a section, came {_kind(value)}.')
            _check_section(value, wanted, f"{path}.", where, auto=auto)
        elif isinstance(wanted, tuple):
            if isinstance(value, bool) or value not in wanted:
                choices = ", ".join(json.dumps(w) for w in wanted)
                raise ValueError(f'hfpatch: {where}: "{path}": expected one of {choices}, came {json.dumps(value)}.')
        elif not _is(value, wanted):
            raise ValueError(f'hfpatch: {where}: "{path}": expected {wanted}, came {_kind(value)} {json.dumps(value)}.')


def _is(value, wanted: str) -> bool:
    if wanted in (BOOL, ANYTHING):
        return isinstance(value, bool) or wanted == ANYTHING
    if isinstance(value, bool):
        return False
    types = {INT: int, NUMBER: (int, float), TEXT: str, SECTION: dict, LIST: list}
    return isinstance(value, types[wanted])


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


def _kind(value) -> str:
    names = {bool: "a boolean", str: "the string", int: "the number", float: "the number", dict: "a section"}
    return names.get(type(value), "a list" if isinstance(value, list) else "null")


def _no_duplicates(pairs):
    keys = [k for k, _ in pairs]
    twice = [k for k in keys if keys.count(k) > 1]
    if twice:
        raise ValueError(f'hfpatch: key "{twice[0]}" appears twice; keep one.')
    return dict(pairs)


def _version(package: str) -> tuple[int, int]:
    major, minor = importlib.metadata.version(package).split(".")[:2]
    return int(major), int(minor)
