"""The plugins for other trainers, whose interfaces are played: the trainers themselves are not
installed here.
"""

import configparser
import importlib
import importlib.util
import inspect
import sys
import types
from pathlib import Path

import pytest
import tiny
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

import hfpatch
import hfpatch.budget.policy
from hfpatch.context.classes import is_patched
from hfpatch.trainer import plugins


def played(monkeypatch, **modules) -> None:
    """Modules of another trainer, by their dotted names with __ for a dot, and what they hold."""
    for name, held in modules.items():
        parts = name.split("__")
        for end in range(1, len(parts) + 1):
            full = ".".join(parts[:end])
            if full not in sys.modules:
                monkeypatch.setitem(sys.modules, full, types.ModuleType(full))
        vars(sys.modules[".".join(parts)]).update(held)


def trainer_of(model, tmp_path, kind=Trainer, **more):
    args = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to="none", max_steps=2, save_strategy="no",
        logging_steps=1,
        disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    rows = [{"input_ids": torch.arange(3, 19), "labels": torch.arange(3, 19)} for _ in range(16)]
    return kind(model=model, args=args, train_dataset=rows, **more)


def losses_of(trainer) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.fixture
def axolotl(monkeypatch):
    """The plugin's module, with Axolotl's base class played."""
    played(monkeypatch, axolotl__integrations__base={"BasePlugin": type("BasePlugin", (), {})})
    monkeypatch.delitem(sys.modules, "hfpatch.trainer.plugins.axolotl", raising=False)
    return importlib.import_module("hfpatch.trainer.plugins.axolotl")


def test_axolotl_patches_between_adapters_and_trainer(axolotl, tmp_path, capsys):
    """Axolotl's order of calls: config, model, adapters, plugin, Trainer, callbacks. The losses are
    stock's.
    """
    plugin, cfg = (
        axolotl.HFPatchPlugin(),
        {"hfpatch": {"checkpointing": "least", "loss": None}, "tiled_mlp": None},
    )
    module, _, name = plugin.get_input_args().rpartition(".")
    assert getattr(importlib.import_module(module), name)(
        hfpatch=cfg["hfpatch"] | {"loss": True}
    ).hfpatch.mlp
    model = tiny.llama()
    plugin.pre_model_load(cfg)
    plugin.post_model_load(cfg, model)
    assert (
        all(is_patched(layer) for layer in model.model.layers)
        and "hfpatch on" in capsys.readouterr().err
    )
    assert model._hfpatch_report.count("checkpointing") == 2
    trainer = trainer_of(model, tmp_path)
    for callback in plugin.add_callbacks_post_trainer(cfg, trainer):
        trainer.add_callback(callback)
    assert losses_of(trainer) == pytest.approx(
        losses_of(trainer_of(tiny.llama(), tmp_path)), rel=1e-5
    )
    assert all(
        "tokens_per_second" in entry for entry in trainer.state.log_history if "loss" in entry
    )


def test_axolotl_block_takes_all_options(axolotl):
    """Each of apply's and Checkpointing's, typed and checked as those are."""
    defaults = {
        name: p.default
        for name, p in inspect.signature(hfpatch.apply).parameters.items()
        if name != "model"
    }
    assert axolotl.Options().model_dump() == defaults
    block = {"offload": "host", "tile": 4096, "keep": "gate_up", "every": 1}
    options = axolotl.Options(checkpointing=block).for_apply()
    assert options["checkpointing"] == hfpatch.Checkpointing(**(block | {"keep": "gate_up"}))
    for word, meaning in ((False, "off"), ("host,tile=64", None), ("./folder", None)):
        made = axolotl.Options(checkpointing=word).for_apply()["checkpointing"]
        assert made == hfpatch.budget.policy.parse_checkpointing(meaning or word)


@pytest.mark.parametrize(
    "block",
    [
        {"tile_size": 8}, {"checkpointing": "fast"}, {"checkpointing": {"tile": 0}},
        {"checkpointing": {"tiles": 8}}, {"mlp": "perhaps"}, {"checkpointing": {"keep": ["x"]}},
    ],
)  # fmt: skip
def test_axolotl_block_is_checked(axolotl, block):
    with pytest.raises(ValueError, match="tile|fast|perhaps|keep"):
        axolotl.Arguments(hfpatch=block)


def test_axolotl_refuses_rivals(axolotl):
    for rival in axolotl.RIVALS:
        with pytest.raises(ValueError, match=f"^hfpatch: {rival} and hfpatch cannot be combined"):
            axolotl.HFPatchPlugin().pre_model_load({rival: True})


def auto_enabled(cfg: dict) -> dict:
    """Axolotl 0.19's check_auto_enable_lora_kernels, which runs after `register`."""
    kernels = [f"lora_{part}_kernel" for part in ("mlp", "qkv", "o", "embedding")]
    if cfg.get("adapter") in ("lora", "qlora") and all(cfg.get(name) is None for name in kernels):
        cfg |= dict.fromkeys(kernels, True)
    return cfg


def test_axolotl_lora_kernels_stay_off(axolotl):
    """The three lines of the docs train LoRA; kernels that the YAML asks for are refused."""
    plugin, cfg = axolotl.HFPatchPlugin(), {"adapter": "lora", "hfpatch": {}}
    plugin.register(cfg)
    plugin.pre_model_load(auto_enabled(cfg))
    asked = {"adapter": "lora", "lora_embedding_kernel": True}
    plugin.register(asked)
    with pytest.raises(ValueError, match="lora_embedding_kernel and hfpatch cannot be combined"):
        plugin.pre_model_load(auto_enabled(asked))


def with_own_forward():
    """A model whose layers cannot be swapped: one has a forward of somebody's own."""
    model = tiny.llama()
    layer = model.model.layers[0]
    layer.forward = lambda *args, **kwargs: nn.Module.__call__(layer, *args, **kwargs)
    return model


def test_a_plugin_that_tiles_no_layer_is_refused():
    model = with_own_forward()
    with pytest.raises(
        ValueError,
        match=r"^hfpatch: no layer of LlamaForCausalLM runs tiled \(",
    ):
        plugins.apply_tiled(model, {})
    plugins.apply_tiled(model, {"checkpointing": "off"})


VERL = {
    "verl/__init__.py": "",
    "verl/workers/__init__.py": "",
    "verl/workers/engine/__init__.py": "",
    "verl/workers/engine/base.py": """
class EngineRegistry:
    engines = {}

    @classmethod
    def new(cls, model_type, backend, *args, **kwargs):
        return cls.engines[backend](*args, **kwargs)
""",
    "verl/models/__init__.py": "",
    "verl/models/transformers/__init__.py": "",
    "verl/models/transformers/dense_common.py": """
from dataclasses import dataclass
from transformers.utils import ModelOutput

@dataclass
class CausalLMOutputForPPO(ModelOutput):
    log_probs: object = None
    entropy: object = None
""",
}


@pytest.fixture
def verl_engine(monkeypatch, tmp_path):
    """Makes an engine as verl 0.9 does, which imports the plugin before its own registry.

    An engine's `_build_fsdp_module` gets the model and shards it: here it does nothing more.
    """
    for name, text in VERL.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    for name in [n for n in sys.modules if n.partition(".")[0] == "verl"]:
        monkeypatch.delitem(sys.modules, name)
    plugin = "hfpatch.trainer.plugins.verl"
    monkeypatch.delitem(sys.modules, plugin, raising=False)
    importlib.import_module(plugin)
    registry = importlib.import_module("verl.workers.engine.base").EngineRegistry

    class Engine:
        def __init__(self, model_config, engine_config):
            self.model_config, self.engine_config = model_config, engine_config

        def _build_fsdp_module(self, module):
            return module

    registry.engines = {"fsdp2": Engine, "fsdp": Engine, "megatron": type("M", (Engine,), {})}
    settings = {
        "model_type": "language_model", "external_lib": plugin, "use_fused_kernels": True,
        "use_liger": False, "enable_activation_offload": False,
    }  # fmt: skip

    def make(backend="fsdp2", *, ranks=1, **changes):
        engine = types.SimpleNamespace(ulysses_sequence_parallel_size=ranks, forward_only=False)
        model = types.SimpleNamespace(**(settings | changes))
        return registry.new("language_model", backend, model, engine)

    yield make
    for name in [n for n in sys.modules if n.partition(".")[0] == "verl"]:
        del sys.modules[name]


@pytest.mark.parametrize("rolled", [True, False])
def test_verl_scores_without_logits(verl_engine, rolled):
    """Log-probabilities and entropies of packed rows with a temperature, and their gradients."""
    ours, stock = tiny.exact(tiny.llama()), tiny.exact(tiny.llama())
    assert verl_engine()._build_fsdp_module(ours) is ours
    assert all(is_patched(layer) for layer in ours.model.layers)
    ids = tiny.ids(1, 24)
    positions = torch.cat([torch.arange(15), torch.arange(9)])[None]
    batch = {
        "input_ids": ids,
        "attention_mask": None,
        "position_ids": positions,
        "use_cache": False,
    }
    labels = ids.roll(-1, -1)
    more = {"shift_labels": labels} if rolled else {}
    out = ours(**batch, **more, temperature=0.7, return_dict=True)
    log_p = (stock(**batch).logits / 0.7).log_softmax(-1)
    wanted = log_p.gather(-1, labels[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)
    weights = torch.linspace(-1, 1, 24, dtype=torch.float64)
    for found, value in zip((out.log_probs, out.entropy), wanted):
        assert found.detach().double() == pytest.approx(value.detach(), rel=1e-5)
    for log_prob, entropy in ((out.log_probs, out.entropy), wanted):
        ((log_prob * weights).sum() + entropy.mean()).backward()
    for (name, mine), theirs in zip(ours.named_parameters(), stock.parameters()):
        assert mine.grad == pytest.approx(theirs.grad, rel=1e-4, abs=1e-6), name


def test_verl_is_asked_by_name(verl_engine, monkeypatch):
    """An installed hfpatch changes no training; the model's external_lib or the environment does."""
    model = tiny.llama()
    verl_engine(external_lib=None)._build_fsdp_module(model)
    assert not is_patched(model.model.layers[0])
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "another, hfpatch")
    verl_engine(external_lib=None)._build_fsdp_module(model)
    assert is_patched(model.model.layers[0])


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"backend": "fsdp"}, "engine must be fsdp2, got fsdp"),
        ({"backend": "megatron"}, "engine must be fsdp2, got megatron"),
        ({"ranks": 2}, "ulysses_sequence_parallel_size must be 1, got 2"),
        ({"use_liger": True}, "use_liger and hfpatch cannot be combined"),
        ({"use_fused_kernels": False}, "use_fused_kernels must be True, got False"),
    ],
)
def test_verl_is_refused(verl_engine, settings, words):
    with pytest.raises(ValueError, match=f"^hfpatch: .*{words}"):
        verl_engine(**settings)


def test_verl_finds_the_entry_point():
    parser = configparser.ConfigParser()
    parser.read(Path(__file__).parents[2] / "setup.cfg")
    [line] = parser["options.entry_points"]["verl.plugins"].strip().splitlines()
    assert line.split(" = ") == ["hfpatch", "hfpatch.trainer.plugins.verl"]
