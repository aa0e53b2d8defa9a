"""Memory that runs out: what is said, what is kept, and a second start that fits."""

import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from transformers import Trainer, TrainingArguments

import hfpatch
from hfpatch.budget.hardware import GPUS
from hfpatch.lab.presets import preset_config
from hfpatch.lab.simulate import simulator
from hfpatch.lab.simulate.implementations import build, prepare
from hfpatch.layer import policies as runtime_module
from hfpatch.layer.room import Gauge
from hfpatch.trainer import memory
from hfpatch.trainer.callback import Callback
from profiles.clock.allocator import Allocator, PlacedFollower
from tests.layer.deep import tiny_llama, tokens

pytestmark = pytest.mark.usefixtures("exact_loss")
GiB, TOKENS = 1 << 30, 16384


class OfAllocator(Gauge):
    """A device that a simulated allocator manages."""

    allocator: Allocator

    def free(self):
        return self.allocator.limit - self.allocator.allocated

    def allocated(self):
        return self.allocator.allocated

    def peak(self):
        return self.allocator.peak

    def unused(self):
        return self.allocator.most_reserved - self.allocator.peak

    def ooms(self):
        return self.allocator.ooms

    def fragments(self):
        return 0

    def wait(self):
        pass

    def gpu(self):
        return GPUS["h100"]


@pytest.fixture
def arguments(tmp_path):
    return SimpleNamespace(
        output_dir=str(tmp_path), device="cpu", world_size=1, bf16=True, fp16=False,
        per_device_train_batch_size=1,
    )  # fmt: skip


def start(arguments, limit: float, surprise: float, monkeypatch) -> Allocator:
    """One training step of a run on a device of `limit` GiB, on which something that nobody planned
    for takes `surprise` GiB once the layers have chosen.
    """
    config = preset_config("llama-3.2-1b") | {"num_hidden_layers": 6, "vocab_size": 8192}
    model = prepare(build(config), "hfpatch")
    model._hfpatch_logits = False
    monkeypatch.setattr(runtime_module, "metered", lambda device: True)
    monkeypatch.setattr(runtime_module, "Gauge", OfAllocator)
    OfAllocator.allocator = allocator = Allocator(int(limit * GiB), expandable=True)

    def run(model, follower, ids, labels):
        held = []
        model.model.norm.register_forward_pre_hook(
            lambda *_: held.append(torch.empty(int(surprise * GiB), dtype=torch.uint8)) and None
        )
        memory.begin(model, arguments)
        try:
            model(input_ids=ids, labels=labels).loss.backward()
        except torch.OutOfMemoryError as error:
            memory.explain(model, arguments, (1, TOKENS), error)
            raise

    monkeypatch.setattr(simulator, "train_step", run)
    simulator.simulate(model, 1, TOKENS, follower=partial(PlacedFollower, allocator))
    return allocator


def test_a_run_that_ran_out_fits_when_it_starts_again(arguments, monkeypatch, tmp_path):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):  # `hfpatch train` sets it
        monkeypatch.delenv(name, raising=False)
    sizes = {"limit": 10.0, "surprise": 4.6}
    with pytest.raises(torch.OutOfMemoryError) as raised:
        start(arguments, **sizes, monkeypatch=monkeypatch)
    text = str(raised.value)
    assert text.startswith("CUDA out of memory.") and len(raised.value.args) == 1
    (entry,) = json.loads((tmp_path / memory.FILE).read_text())
    assert {"model", "card", "batch", "tokens", "ranks", "dtype", "learnt"} == entry.keys()
    assert (entry["batch"], entry["tokens"]) == (1, TOKENS)
    assert f"at most {entry['learnt']['most'] / GiB:.1f} GiB" in text
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in text
    allocator = start(arguments, **sizes, monkeypatch=monkeypatch)
    assert allocator.ooms == 0 and allocator.peak > 0.7 * allocator.limit


class Told(Gauge):
    """A device with counters of its own."""

    free = lambda self: 8 * GiB  # noqa: E731
    allocated = peak = ooms = fragments = unused = wait = lambda self: 0

    def gpu(self):
        return GPUS["h100"]


@pytest.mark.parametrize("expandable", [False, True])
def test_the_error_that_leaves_trainer_says_what_to_change(expandable, monkeypatch, tmp_path):
    monkeypatch.setattr(runtime_module, "metered", lambda device: True)
    monkeypatch.setattr(runtime_module, "Gauge", Told)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    value = "expandable_segments:True" if expandable else ""
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", value)
    model = tiny_llama().float()
    hfpatch.apply(model)
    args = TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=2, max_steps=1, use_cpu=True,
        report_to="none", disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in tokens(2, 16)]
    trainer = Trainer(model, args, train_dataset=rows, callbacks=[Callback()])

    def runs_out(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    handle = model.model.norm.register_forward_pre_hook(runs_out)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        trainer.train()
    (text,) = raised.value.args
    assert text.startswith("CUDA out of memory. Tried to allocate 2.00 GiB.\nhfpatch: expected")
    assert ('checkpointing="least"' in text) == expandable
    assert (tmp_path / memory.FILE).exists() and text.count("hfpatch:") == 1
    handle.remove()
    trainer.train()
    (room,) = model.model._hfpatch_runtime.rooms.values()
    assert room.most == json.loads((tmp_path / memory.FILE).read_text())[0]["learnt"]["most"]
    assert "training_step" not in vars(trainer)


def test_what_fragments_took_is_kept_beside_the_rest(arguments, monkeypatch):
    """The next start leaves out what this one held and could not use, of its own or of the file."""
    monkeypatch.setattr(runtime_module, "metered", lambda device: True)
    monkeypatch.setattr(runtime_module, "Gauge", Told)

    def started(unused: int) -> int:
        model = tiny_llama()
        hfpatch.apply(model)
        model(tokens(), labels=tokens()).loss.backward()
        (room,) = model.model._hfpatch_runtime.rooms.values()
        room.unused = unused
        memory.begin(model, arguments)
        return model, room

    model, room = started(3 * GiB)
    memory.write(model, arguments, (1, 37), memory.state(room))
    for own in (0, 2 * GiB, 5 * GiB):
        _, room = started(own)
        assert room.unused == max(own, 3 * GiB)
        assert room.bytes(careful=False) <= 8 * GiB - room.unused


@pytest.mark.parametrize("text", ["", "{", '{"a": 1}'])
def test_a_broken_file_is_no_entry(text, arguments, tmp_path):
    (tmp_path / memory.FILE).write_text(text)
    assert memory.read(tmp_path) == []
    memory.begin(torch.nn.Linear(2, 2), arguments)
