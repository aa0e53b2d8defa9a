"""Optimizers of the user's own see the gradients that they would see without hfpatch: a few steps
end in the same weights.
"""

import pytest
import tiny
import torch
from own_optimizers import made
from transformers import Trainer, TrainingArguments
from transformers.optimization import Adafactor

import hfpatch


def trained(name: str, model):
    torch.manual_seed(0)  # of a random projection
    optimizers = [Adafactor(model.parameters())] if name == "transformers" else made(name, model)
    for optimizer in optimizers:
        getattr(optimizer, "train", lambda: None)()
    for step in range(3):
        model(tiny.ids(seed=step)).logits.square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return model


# GaLore's and APOLLO's packages call what torch has retired.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    ["muon", "adafactor", "transformers", "schedule-free", "apollo", "galore"],
)
def test_trains_as_with_stock(name):
    """In float64, where gradients are the same but for algebra: Muon, which rounds to bf16 inside,
    sees no other bit. transformers: its Adafactor, whose states are float32.
    """
    model = tiny.llama()
    stock, ours = tiny.exact(model), tiny.exact(model)
    hfpatch.apply(ours, checkpointing=tiny.TILED)
    trained(name, ours)
    trained(name, stock)
    before = dict(tiny.exact(model).named_parameters())
    for (key, mine), theirs in zip(ours.named_parameters(), stock.parameters()):
        moved = (theirs - before[key]).norm()
        assert moved > 0 and (mine - theirs).norm() <= 1e-5 * moved, key


# LOMO's package calls what torch has retired, and prints without a process group.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("optim, rate", [("lomo", 0.1), ("adalomo", 1e-2)])
@pytest.mark.parametrize("tied", [False, True])
def test_lomo_steps_inside_our_backward(optim, rate, tied, tmp_path, monkeypatch):
    """By Trainer, as LOMO needs accelerate's backward: a hook of each weight updates the weights
    whose gradients are there, while layers before it have yet to run again.
    """
    pytest.importorskip("lomo_optim")
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)  # AdaLomo's states
    rows = [{"input_ids": tiny.ids(1, 48, seed=i)[0]} for i in range(6)]
    rows = [row | {"labels": row["input_ids"]} for row in rows]
    args = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to="none", max_steps=3, optim=optim,
        learning_rate=rate, lr_scheduler_type="constant", per_device_train_batch_size=2,
        save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False, max_grad_norm=0.0,
    )  # fmt: skip
    ours, stock = (tiny.llama(tie_word_embeddings=tied) for _ in range(2))
    hfpatch.apply(ours, checkpointing=tiny.TILED)
    before = {name: weight.clone() for name, weight in stock.named_parameters()}
    for model in (ours, stock):
        Trainer(model=model, args=args, train_dataset=rows).train()
    for (name, mine), theirs in zip(ours.named_parameters(), stock.parameters()):
        moved = (theirs - before[name]).norm()
        assert moved > 0 and (mine - theirs).norm() <= 1e-3 * moved, name
        assert mine.grad is None, "no gradient outlives its hook"
