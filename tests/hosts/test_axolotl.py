"""Axolotl on CPUs: its own check of the YAML with the plugin, and its own training beside stock, in
one process and, under FSDP2 and DeepSpeed, in two.
"""

import json
import os
import re
import sys
from pathlib import Path

import host_runs
import pytest
import torch
import yaml
from trainer.workbench import execute

from hfpatch.context.classes import is_patched

os.environ["AXOLOTL_DO_NOT_TRACK"] = "1"
os.environ["WANDB_MODE"] = "disabled"
config = pytest.importorskip("axolotl.utils.config")

DOCS = (Path(__file__).parents[2] / "docs/start/run.md").read_text()
DIFF = re.search(r"```diff\n(.*?)```", DOCS, re.DOTALL)[1].splitlines()
YAML = yaml.safe_load("\n".join(line[1:] for line in DIFF)) | {
    "lora_r": 8, "lora_alpha": 16, "lora_target_linear": True, "micro_batch_size": 1,
    "gradient_accumulation_steps": 1, "learning_rate": 1e-4, "num_epochs": 1, "sequence_len": 64,
    "datasets": [{"path": "a/set", "type": "alpaca"}],
}  # fmt: skip
ABLE = {"bf16": True, "n_gpu": 1, "compute_capability": "sm_80"}


def checked(**more):
    """The config as Axolotl hands it to its plugins."""
    from axolotl.utils.dict import DictDefault

    cfg = DictDefault(YAML | more)
    config.prepare_plugins(cfg)
    return config.validate_config(
        cfg, capabilities=ABLE, env_capabilities={"torch_version": "2.13.0"}
    )


def test_the_yaml_of_the_docs_is_accepted():
    from hfpatch.trainer.plugins.axolotl import LORA_KERNELS, HFPatchPlugin

    cfg = checked()
    assert sum(line.startswith("+") for line in DIFF) == 3
    assert not any(cfg.get(name) for name in LORA_KERNELS)
    assert cfg["hfpatch"]["checkpointing"] == "least"
    HFPatchPlugin().pre_model_load(cfg)
    cfg = checked(hfpatch={"checkpointing": {"offload": "host", "tile": 4096}})
    assert cfg["hfpatch"]["checkpointing"]["tile"] == 4096


ENGINES = {
    "fsdp2": {"fsdp_version": 2, "fsdp_config": {
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "reshard_after_forward": True,
        "transformer_layer_cls_to_wrap": "LlamaDecoderLayer", "state_dict_type": "FULL_STATE_DICT",
    }},
    "deepspeed": {"deepspeed": "deepspeed_configs/zero3.json"},
}  # fmt: skip


@pytest.mark.parametrize("engine", ENGINES)
def test_the_yaml_with_an_engine_is_accepted(engine):
    """As Axolotl's examples write them."""
    from hfpatch.trainer.plugins.axolotl import HFPatchPlugin

    HFPatchPlugin().pre_model_load(checked(**ENGINES[engine]))


def test_what_is_refused():
    from hfpatch.trainer.plugins.axolotl import HFPatchPlugin

    with pytest.raises(ValueError, match="tile_size"):
        checked(hfpatch={"tile_size": 8})
    with pytest.raises(ValueError, match="lora_mlp_kernel and hfpatch cannot be combined"):
        HFPatchPlugin().pre_model_load(checked(lora_mlp_kernel=True))


PLUGIN = {"plugins": YAML["plugins"], "hfpatch": {"checkpointing": {"tile": 8}}}
LORA = {"lora_r": 4, "lora_alpha": 8, "lora_target_linear": True, "lora_dropout": 0.0}
TRAININGS = {
    "full": {},
    "lora": {"adapter": "lora", **LORA},
    "qlora": {"adapter": "qlora", "load_in_4bit": True, **LORA},
    "packed": {"sample_packing": True, "pad_to_sequence_len": True, "micro_batch_size": 1,
               "sequence_len": 768, "num_epochs": 4},
}  # fmt: skip


def yaml_of(folder, data, out, **more):
    """A file that trains four steps in float32 on a CPU."""
    text = {
        "base_model": str(folder), "output_dir": str(out), "dataset_prepared_path": f"{out}-rows",
        "datasets": [{"path": str(data), "ds_type": "json", "type": "alpaca"}],
        "sequence_len": 256, "micro_batch_size": 2, "gradient_accumulation_steps": 1,
        "max_steps": 4, "learning_rate": 0.1, "optimizer": "sgd", "val_set_size": 0,
        "lr_scheduler": "constant", "bf16": False, "fp16": False, "tf32": False, "seed": 1,
        "logging_steps": 1, "save_strategy": "no", "attn_implementation": "sdpa",
        "dataset_num_proc": 1, "num_dataset_shards_to_save": 1,
        "special_tokens": {"pad_token": "<pad>"}, **more,
    }  # fmt: skip
    file = out.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(text))
    return file


def trained_by(file):
    """(the model after the steps of a YAML's file, its losses)"""
    from axolotl.cli.config import load_cfg
    from axolotl.common.datasets import load_datasets
    from axolotl.integrations.base import PluginManager
    from axolotl.train import train

    PluginManager.get_instance().plugins.clear()  # those of an earlier YAML would stay
    cfg = load_cfg(str(file))
    rows = load_datasets(cfg=cfg)
    torch.manual_seed(0)  # of an adapter's first weights, which Axolotl draws before it seeds
    model, _, trainer = train(cfg=cfg, dataset_meta=rows)
    return model, host_runs.losses(trainer.state.log_history)


@pytest.mark.parametrize("kind", TRAININGS)
def test_against_stock(kind, tmp_path):
    places = host_runs.saved_llama(tmp_path / "model"), host_runs.alpaca_file(tmp_path)
    off = {"lora_mlp_kernel": False}  # Axolotl's own LoRA kernels, which need a GPU
    stock, theirs = trained_by(yaml_of(*places, tmp_path / "stock", **TRAININGS[kind], **off))
    ours, mine = trained_by(yaml_of(*places, tmp_path / "ours", **TRAININGS[kind], **PLUGIN))
    host_runs.assert_tiled(ours)
    assert not any(map(is_patched, stock.modules()))
    assert len(theirs) == 4 and mine == pytest.approx(theirs, rel=1e-4)
    host_runs.assert_same_training(ours, stock)


ZERO3 = {
    "zero_optimization": {"stage": 3, "overlap_comm": True, "contiguous_gradients": True,
                          "sub_group_size": 0, "reduce_bucket_size": "auto"},
    "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
}  # fmt: skip


def on_two_ranks(engine, *places, **more):
    """(what each rank found, the weights) of a YAML's training."""
    out = places[-1]
    out.mkdir()
    own = dict(ENGINES[engine])
    if engine == "deepspeed":
        (out / "zero3.json").write_text(json.dumps(ZERO3))
        own["deepspeed"] = str(out / "zero3.json")
    worker, launcher = Path(__file__).with_name("axolotl_worker.py"), "torch.distributed.run"
    code, words, err = execute(
        sys.executable, "-m", launcher, "--standalone", "--nproc_per_node", 2,
        worker, engine, yaml_of(*places, **own, **more), out,
    )  # fmt: skip
    assert code == 0, words[-4000:] + err[-4000:]
    ranks = [json.loads((out / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    return ranks, torch.load(out / "weights.pt")


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_on_two_ranks_against_stock(engine, tmp_path):
    places = host_runs.saved_llama(tmp_path / "model"), host_runs.alpaca_file(tmp_path)
    stock, theirs = on_two_ranks(engine, *places, tmp_path / "stock")
    ours, mine = on_two_ranks(engine, *places, tmp_path / "ours", **PLUGIN)
    assert all(found["sharded"] for found in ours + stock)
    assert [found["layers"] for found in ours] == [[True, True]] * 2
    assert [found["layers"] for found in stock] == [[False, False]] * 2
    wanted = stock[0]["losses"]
    assert len(wanted) == 4 and ours[0]["losses"] == pytest.approx(wanted, rel=1e-4)
    host_runs.assert_same_weights(mine, theirs)


def test_the_command_is_patched(tmp_path):
    folder, data = host_runs.saved_llama(tmp_path / "model"), host_runs.alpaca_file(tmp_path)
    file = yaml_of(folder, data, tmp_path / "out", max_steps=2)
    host_runs.assert_command_is_patched("axolotl", "train", file, ACCELERATE_USE_CPU="true")
