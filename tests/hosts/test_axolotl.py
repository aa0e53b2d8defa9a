"""Axolotl's own check of its YAML, with the plugin: LoRA as the documentation shows it."""

import pytest

config = pytest.importorskip("axolotl.utils.config")

YAML = {
    "base_model": "a/model", "adapter": "lora", "lora_r": 8, "lora_alpha": 16,
    "lora_target_linear": True, "micro_batch_size": 1, "gradient_accumulation_steps": 1,
    "learning_rate": 1e-4, "num_epochs": 1, "sequence_len": 64,
    "datasets": [{"path": "a/set", "type": "alpaca"}],
    "plugins": ["hfpatch.trainer.plugins.axolotl.HFPatchPlugin"],
    "hfpatch": {"checkpointing": {"offload": "host", "tile": 4096}},
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
    assert not any(cfg.get(name) for name in LORA_KERNELS)
    assert cfg["hfpatch"]["checkpointing"]["tile"] == 4096
    HFPatchPlugin().pre_model_load(cfg)


def test_what_is_refused():
    from hfpatch.trainer.plugins.axolotl import HFPatchPlugin

    with pytest.raises(ValueError, match="tile_size"):
        checked(hfpatch={"tile_size": 8})
    with pytest.raises(ValueError, match="lora_mlp_kernel came too"):
        HFPatchPlugin().pre_model_load(checked(lora_mlp_kernel=True))
