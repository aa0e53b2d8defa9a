"""The plugins for other trainers, whose interfaces are played: the trainers themselves are not
installed here.
"""

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
from hfpatch.context.classes import is_mixed
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
        all(is_mixed(layer) for layer in model.model.layers)
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


def test_axolotl_block_is_checked(axolotl):
    assert set(axolotl.Options.model_fields) == set(inspect.signature(hfpatch.apply).parameters) - {
        "model"
    }
    defaults = {
        name: p.default
        for name, p in inspect.signature(hfpatch.apply).parameters.items()
        if name != "model"
    }
    assert axolotl.Options().model_dump() == defaults
    with pytest.raises(ValueError, match="tile_size"):
        axolotl.Arguments(hfpatch={"tile_size": 8})
    for rival in axolotl.RIVALS:
        with pytest.raises(
            ValueError, match=f"^hfpatch: expected one implementation, {rival} came too; drop it"
        ):
            axolotl.HFPatchPlugin().pre_model_load({rival: True})


def test_ms_swift_callback_by_its_name(monkeypatch, tmp_path):
    """ms-swift executes the file, and makes the callback with its trainer once that has its
    model.
    """
    callbacks_map = {}
    played(monkeypatch, swift__callbacks={"callbacks_map": callbacks_map})
    file = Path(plugins.__path__[0]) / "ms_swift.py"
    spec = importlib.util.spec_from_file_location("ms_swift", file)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))

    class SwiftTrainer(Trainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.add_callback(callbacks_map["hfpatch"](self.args, self))

    trainer = trainer_of(tiny.llama(), tmp_path, SwiftTrainer)
    assert all(is_mixed(layer) for layer in trainer.model.model.layers)
    assert trainer.callback_handler.callbacks[-1].report.count("checkpointing") == 2
    assert losses_of(trainer) == pytest.approx(
        losses_of(trainer_of(tiny.llama(), tmp_path)), rel=1e-5
    )
    assert all(
        "tokens_per_second" in entry for entry in trainer.state.log_history if "loss" in entry
    )


def test_a_plugin_that_tiles_no_layer_is_refused(monkeypatch):
    model = tiny.llama()
    layer = model.model.layers[0]
    # a forward of somebody's own
    layer.forward = lambda *args, **kwargs: nn.Module.__call__(layer, *args, **kwargs)
    with pytest.raises(
        ValueError,
        match=r"^hfpatch: expected layers that run in tiles, LlamaForCausalLM has none \(",
    ):
        plugins.apply_tiled(model, {})
    plugins.apply_tiled(model, {"checkpointing": "off"})
