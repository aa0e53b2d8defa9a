"""Reads ds_configs/ and fsdp_configs/ before any model is loaded. DeepSpeed's own model checks its
section of ZeRO.
"""

import importlib.metadata
import json
from dataclasses import dataclass
from pathlib import Path

from hfpatch.budget.limits import did_you_mean
from hfpatch.planner.placements import PLACEMENTS


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
    names = sorted({p.stem for folder in folders for p in folder.glob("*.json")})
    raise ValueError(
        f"hfpatch: there is no placement {name_or_path!r}."
        f"{did_you_mean(name_or_path, [*PLACEMENTS, *names])} Give a JSON file or one of "
        f"{', '.join(dict.fromkeys(['auto', *PLACEMENTS, *names]))}."
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
