"""Memory that runs out: what is said and kept. That a second start fits: tests/dry/test_programs.py."""

from types import SimpleNamespace

import pytest
import torch
from transformers import Trainer, TrainingArguments

import hfpatch
from hfpatch.trainer import memory
from hfpatch.trainer.callback import Callback
from tests.layer.deep import tiny_llama, tokens
from tests.layer.devices import Counters, Told, on_device

pytestmark = pytest.mark.usefixtures("exact_loss")


@pytest.fixture
def arguments(tmp_path):
    return SimpleNamespace(
        output_dir=str(tmp_path), device="cpu", world_size=1, bf16=True, fp16=False,
        per_device_train_batch_size=1, resume_from_checkpoint=None,
    )  # fmt: skip


def test_what_another_training_measured_is_not_used(arguments, monkeypatch, tmp_path, capfd):
    model = tiny_llama()
    hfpatch.apply(model)
    on_device(monkeypatch, Told, counters=Counters())
    model(tokens(), labels=tokens()).loss.backward()
    memory.write(model, arguments)
    (entry,) = memory.read(tmp_path)
    for parameter in model.model.layers[0].parameters():  # others train now
        parameter.requires_grad_(False)
    capfd.readouterr()
    hfpatch.undo(model)
    hfpatch.apply(model)
    memory.begin(model, arguments)
    assert not any(meter.sizes for meter in memory.meters(model)) and not capfd.readouterr().err
    assert entry["trained"] > memory.key(model, arguments)["trained"]
    model(tokens(), labels=tokens()).loss.backward()
    memory.write(model, arguments)
    assert memory.read(tmp_path)[0] == entry and len(memory.read(tmp_path)) == 2


@pytest.mark.parametrize("expandable", [False, True])
def test_the_error_that_leaves_trainer_says_what_to_change(expandable, monkeypatch, tmp_path):
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    value = "expandable_segments:True" if expandable else ""
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", value)
    model = tiny_llama().float()
    hfpatch.apply(model)
    on_device(monkeypatch, Told, counters=Counters())
    args = TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=2, max_steps=1, use_cpu=True,
        report_to="none", disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in tokens(2, 16)]
    callback = Callback()
    trainer = Trainer(model, args, train_dataset=rows, callbacks=[callback])
    callback.attach(trainer)

    def runs_out(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    handle = model.model.norm.register_forward_pre_hook(runs_out)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        trainer.train()
    (text,) = raised.value.args
    assert text.startswith(
        "CUDA out of memory. Tried to allocate 2.00 GiB.\nhfpatch: out of memory in a step of"
    )
    assert ('checkpointing="least"' in text) == expandable
    assert (tmp_path / memory.FILE).exists() and text.count("hfpatch:") == 1
    handle.remove()
    trainer.train()


def test_what_was_measured_goes_with_the_checkpoint(monkeypatch, tmp_path):
    model = tiny_llama().float()
    hfpatch.apply(model)
    on_device(monkeypatch, Told, counters=Counters())
    args = TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=2, max_steps=2, save_steps=2,
        use_cpu=True, report_to="none", disable_tqdm=True,
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in tokens(4, 16)]
    Trainer(model, args, train_dataset=rows, callbacks=[Callback()]).train()
    found = [memory.read(folder) for folder in (tmp_path, tmp_path / "checkpoint-2")]
    assert found[0] == found[1] and found[0][0]["measured"]["kinds"]
    hfpatch.undo(model)
    hfpatch.apply(model)
    args.output_dir, args.resume_from_checkpoint = str(tmp_path / "b"), tmp_path / "checkpoint-2"
    memory.begin(model, args)
    assert all(meter.sizes for meter in memory.meters(model)) and memory.meters(model)


@pytest.mark.parametrize("text", ["", "{", '{"a": 1}'])
def test_a_broken_file_is_no_entry(text, arguments, tmp_path):
    (tmp_path / memory.FILE).write_text(text)
    assert memory.read(tmp_path) == []
    memory.begin(torch.nn.Linear(2, 2), arguments)
