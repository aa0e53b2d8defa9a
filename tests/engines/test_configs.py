"""Every shipped engine config, read by the installed engine itself."""

import json
import os
from pathlib import Path

import pytest
import tiny

from hfpatch.trainer import configs

ROOT = Path(__file__).resolve().parents[2]
DS = sorted((ROOT / "ds_configs").glob("*.json"))
FSDP = sorted((ROOT / "fsdp_configs").glob("*.json"))
YAML = sorted((ROOT / "fsdp_configs").glob("*.yaml"))


@pytest.fixture(scope="module")
def deepspeed_config():
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.runtime.config import DeepSpeedConfig

    return DeepSpeedConfig


def test_all_strategies_are_there():
    assert {p.stem for p in DS} == {
        "zero1",
        "zero2",
        "zero3",
        "zero3_cpu_offload",
        "zero3_nvme_offload",
    }
    assert {p.stem for p in FSDP} == {"fsdp2", "fsdp2_cpu_offload", "fsdp1_full_shard"}
    # Ranks that share rows: Trainer's arguments do not say so, accelerate's launch file does.
    assert {p.stem for p in YAML} == {p.stem for p in FSDP} | {"fsdp2_sequence"}


@pytest.mark.parametrize("path", DS, ids=lambda p: p.stem)
def test_deepspeed_takes_each_file_as_written(path, deepspeed_config):
    loaded = configs.load(str(path))
    assert loaded.engine == "deepspeed"
    numbers = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
    }
    fills = {
        **numbers,
        "gradient_clipping": 1.0,
        "bf16.enabled": True,
        "zero_optimization.reduce_bucket_size": 4096,
    }
    fills |= {
        "zero_optimization.stage3_prefetch_bucket_size": 512,
        "zero_optimization.stage3_param_persistence_threshold": 640,
    }

    def filled(section, prefix=""):
        out = {}
        for key, value in section.items():
            out[key] = filled(value, f"{prefix}{key}.") if isinstance(value, dict) else value
            if value == "auto":
                out[key] = fills[f"{prefix}{key}"]
        return out

    values = filled(loaded.values)
    engine = deepspeed_config(values)
    for key, value in values["zero_optimization"].items():
        got = getattr(engine.zero_config, key, None)
        if got is None:
            got = getattr(engine.zero_config, key.removeprefix("stage3_"))
        if isinstance(value, dict):
            for inner, wanted in value.items():
                assert str(getattr(got, inner)) == str(wanted), (key, inner)
        else:
            assert got == value, key
    assert engine.bfloat16_config.enabled
    for key, value in values.get("aio", {}).items():
        assert engine.aio_config[key] == value


@tiny.FSDP_FILES
@pytest.mark.parametrize("path", FSDP, ids=lambda p: p.stem)
def test_trainer_and_accelerate_take_each_fsdp_file(path, monkeypatch):
    """Both forms of one strategy give the same plugin."""
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils import FullyShardedDataParallelPlugin
    from transformers import TrainingArguments

    loaded = configs.load(str(path))
    args = object.__new__(TrainingArguments)
    args.gradient_checkpointing = False
    for name, value in configs.training_arguments(loaded).items():
        setattr(args, name, value)
    from_json = FullyShardedDataParallelPlugin(**args._process_fsdp_args())

    cluster = load_config_from_file(str(path.with_suffix(".yaml")))
    known = {action.dest for action in launch_command_parser()._actions}
    assert set(cluster.fsdp_config) <= known
    names = {"fsdp_offload_params": "OFFLOAD_PARAMS"}
    for key, value in cluster.fsdp_config.items():
        said = str(value).lower() if isinstance(value, bool) else str(value)
        monkeypatch.setenv("FSDP_" + names.get(key, key.removeprefix("fsdp_").upper()), said)
    from_yaml = FullyShardedDataParallelPlugin()
    # FSDP1's launcher states the strategy under its older name too, and that one wins.
    strategy = "sharding_strategy" if loaded.values["version"] == 1 else "reshard_after_forward"
    compared = """fsdp_version cpu_offload state_dict_type auto_wrap_policy cpu_ram_efficient_loading
        backward_prefetch use_orig_params sync_module_states""".split()
    for name in [strategy, *compared]:
        assert getattr(from_json, name) == getattr(from_yaml, name), name


def test_the_yaml_of_shared_sequences_is_fsdp2_and_their_sizes(monkeypatch):
    """What the launcher makes of it: each process is one of eight ranks of a sequence."""
    from accelerate import ParallelismConfig
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    shared, plain = (
        load_config_from_file(str(ROOT / "fsdp_configs" / f"fsdp2{n}.yaml"))
        for n in ("_sequence", "")
    )
    assert shared.fsdp_config == plain.fsdp_config and not plain.parallelism_config
    known = {action.dest for action in launch_command_parser()._actions}
    assert set(shared.parallelism_config) <= known
    for key, value in shared.parallelism_config.items():
        monkeypatch.setenv(key.upper(), str(value))
    sizes = ParallelismConfig()
    assert (sizes.cp_size, sizes.total_size) == (8, shared.num_processes)


def _edited(tmp_path, stem, edit):
    values = json.loads((ROOT / "ds_configs" / f"{stem}.json").read_text())
    edit(values)
    path = tmp_path / f"{stem}.json"
    path.write_text(json.dumps(values))
    return str(path)


# Each row: what someone once wrote, and the sentence that stops it.
MISTAKES = [
    ("a word as a boolean", "zero2",
     lambda c: c["zero_optimization"].update(overlap_comm="often"), "zero_optimization.overlap_comm"),
    ("a stage nobody knows", "zero2", lambda c: c["zero_optimization"].update(stage=5), "stage"),
    ("a typing slip", "zero3", lambda c: c["zero_optimization"].update(stage3_max_live_parameter=1),
     "stage3_max_live_parameter"),
    ("a device nobody knows", "zero3_cpu_offload",
     lambda c: c["zero_optimization"]["offload_param"].update(device="disk"), "offload_param.device"),
    ("stage 0", "zero1", lambda c: c["zero_optimization"].update(stage=0), "shards nothing"),
]  # fmt: skip


@pytest.mark.parametrize("name,stem,edit,message", MISTAKES, ids=[m[0] for m in MISTAKES])
def test_mistakes_get_one_sentence(name, stem, edit, message, tmp_path):
    with pytest.raises(ValueError, match=message) as caught:
        configs.load(_edited(tmp_path, stem, edit))
    assert str(caught.value).startswith("hfpatch: ") and "\n" not in str(caught.value)


def test_files_that_are_no_config(tmp_path):
    with pytest.raises(ValueError, match="no placement 'zero9'.*zero3_cpu_offload"):
        configs.load("zero9")
    for text, message in [("{", "must be JSON"), ("{}", "shards nothing")]:
        path = tmp_path / "bad.json"
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            configs.load(str(path))


def test_a_config_that_contradicts_the_flags():
    plain = configs.load("zero3")
    assert configs.training_arguments(plain, flags={"bf16": True})["deepspeed"] == plain.values
    with pytest.raises(ValueError, match="Keep one"):
        configs.training_arguments(plain, flags={"fsdp": "full_shard"})


def test_nvme_path_is_put_in_and_must_exist(tmp_path):
    config = configs.load("zero3_nvme_offload", nvme_path=str(tmp_path))
    assert config.values["zero_optimization"]["stage"] == 3
    zero = configs.training_arguments(config)["deepspeed"]["zero_optimization"]
    assert zero["offload_optimizer"]["nvme_path"] == str(tmp_path)
    gone = configs.load("zero3_nvme_offload", nvme_path=str(tmp_path / "gone"))
    with pytest.raises(ValueError, match="must be a folder"):
        configs.training_arguments(gone)


def test_an_old_trainer_is_told_to_use_the_yaml(monkeypatch):
    monkeypatch.setattr(configs.importlib.metadata, "version", lambda package: "4.57.6")
    with pytest.raises(ValueError, match="fsdp2.yaml"):
        configs.training_arguments(configs.load("fsdp2"))
