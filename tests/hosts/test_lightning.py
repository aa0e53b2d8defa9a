"""Lightning and Fabric: `apply` on the model of transformers inside, before either wraps it."""

import host_runs
import pytest
import tiny
import torch

import hfpatch

lightning = pytest.importorskip("lightning")
OPTIONS = {"checkpointing": hfpatch.Checkpointing(tile=8)}
BATCHES = [tiny.labelled(2) for _ in range(3)]


class Module(lightning.LightningModule):
    """As people write them."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def training_step(self, batch, index):
        return self.model(**batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def test_lightning_against_stock(tmp_path):
    models = tiny.llama(), tiny.llama()
    hfpatch.apply(models[0], **OPTIONS)
    for model in models:
        trainer = lightning.Trainer(
            accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_progress_bar=False,
            enable_checkpointing=False, enable_model_summary=False, default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(Module(model), torch.utils.data.DataLoader(BATCHES, batch_size=None))
    host_runs.assert_tiled(models[0])
    host_runs.assert_same_training(*models)


def test_fabric_against_stock():
    models = tiny.llama(), tiny.llama()
    hfpatch.apply(models[0], **OPTIONS)
    for model in models:
        fabric = lightning.Fabric(accelerator="cpu", devices=1)
        wrapped, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        for batch in BATCHES:
            fabric.backward(wrapped(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
    host_runs.assert_tiled(models[0])
    host_runs.assert_same_training(*models)


def test_the_refusal_names_the_model_inside():
    with pytest.raises(ValueError, match=r"its model \(LlamaForCausalLM\)"):
        hfpatch.apply(Module(tiny.llama()))
