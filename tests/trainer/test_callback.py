"""hfpatch.Callback in a user's own Trainer: the columns, where they go, and `apply` on init."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.flop_counter import FlopCounterMode
from transformers import Trainer, TrainerState, TrainingArguments

import hfpatch
from hfpatch.trainer.callback import (
    Callback,
)
from hfpatch.trainer.footprint import against
from hfpatch.trainer.model_flops import Work

COLUMNS = {"tokens_per_second", "mfu", "step_seconds", "peak_host_gib"}


def make_trainer(tmp_path, *callbacks, model=None, **flags):
    settings = {"max_steps": 3, "logging_steps": 1, "save_strategy": "no", "report_to": "none",
                "disable_tqdm": True,
                "use_cpu": True, "per_device_train_batch_size": 2,
                "dataloader_pin_memory": False}  # fmt: skip
    rows = [{"input_ids": torch.arange(3, 19), "labels": torch.arange(3, 19)} for _ in range(16)]
    args = TrainingArguments(output_dir=str(tmp_path), **settings | flags)
    model = {} if "model_init" in flags else {"model": model or tiny.llama()}
    return Trainer(
        **model, args=args, train_dataset=rows, eval_dataset=rows[:4], callbacks=list(callbacks)
    )


def test_a_plan_is_compared_with_the_second_step(tmp_path, capsys, monkeypatch):
    planned = SimpleNamespace(
        gpu=SimpleNamespace(peak_bytes=58.5 * 2**30), time=SimpleNamespace(step_seconds=1.9)
    )
    trainer = make_trainer(tmp_path, Callback(plan=planned), gradient_accumulation_steps=2)
    trainer.train()
    line = r"hfpatch: planned 1\.9 s, took \d+\.\d \(a batch of step 2\)\."
    assert len(re.findall(line, capsys.readouterr().err)) == 1
    assert against(planned, 57.94, 2.13).startswith(
        "planned 58.5 GiB, peak 57.9; planned 1.9 s, took"
    )


def test_a_sequence_beyond_the_models_positions_is_said_once(tmp_path, capsys):
    """Of packed rows only if a document is longer."""
    said = "the model has 8 positions and the sequence 16 tokens."
    model = tiny.llama(max_position_embeddings=8)
    make_trainer(tmp_path, Callback(), model=model).train()
    assert capsys.readouterr().err.count(said) == 1
    trainer = make_trainer(tmp_path, Callback(), model=model)
    packed = torch.arange(8).repeat(2)
    trainer.train_dataset = [row | {"position_ids": packed} for row in trainer.train_dataset]
    trainer.train()
    assert "positions" not in capsys.readouterr().err


def test_columns_in_each_log_line_and_in_tensorboard(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "tb"))
    # as a GPU has one
    monkeypatch.setattr("hfpatch.trainer.callback.peak_flops", lambda *device_and_dtype: 1e10)
    callback = Callback()
    trainer = make_trainer(tmp_path, callback, report_to=["tensorboard"])
    callback.attach(trainer)
    trainer.train()
    lines = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(lines) == 3 and all(COLUMNS <= entry.keys() for entry in lines)
    assert all(0 < entry["mfu"] < 1.5 and entry["tokens_per_second"] > 0 for entry in lines)
    [folder] = {file.parent for file in tmp_path.rglob("events.out.tfevents*")}
    events = EventAccumulator(str(folder))
    events.Reload()
    for column in COLUMNS:
        written = [event.value for event in events.Scalars(f"train/{column}")]
        assert written[:3] == pytest.approx([entry[column] for entry in lines], rel=1e-6)


def test_tokens_are_counted_over_accumulation_and_not_without_gradients(tmp_path, monkeypatch):
    counted = []
    monkeypatch.setattr(Work, "flops", lambda self, B, T, *rest: counted.append(B * T) or 1.0)
    trainer = make_trainer(
        tmp_path, Callback(), gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=1
    )
    loss = trainer.compute_loss
    trainer.compute_loss = lambda model, inputs, *rest, **named: (
        torch.no_grad()(model.__call__)(**inputs),  # as DPO's reference
        loss(model, inputs, *rest, **named),
    )[1]
    trainer.train()
    assert counted == [2 * 16] * 2 * 3


def test_model_is_left_without_hooks(tmp_path):
    trainer = make_trainer(tmp_path, Callback())
    trainer.train()
    assert not trainer.model._forward_pre_hooks


def test_apply_patches_before_training(tmp_path):
    callback = Callback(apply={"checkpointing": "off"})
    trainer = make_trainer(tmp_path, callback)
    assert (
        callback.report.count("rms_norm") == 5
        and ("checkpointing", "not asked for") in callback.report.skipped
    )
    trainer.train()
    stock = make_trainer(tmp_path)
    stock.train()
    ours, theirs = (
        [e["loss"] for e in t.state.log_history if "loss" in e] for t in (trainer, stock)
    )
    assert ours == pytest.approx(theirs, rel=1e-5)


def test_no_options_are_no_refusal_and_other_values_are_refused(tmp_path):
    """An empty dict left the model as it was, in silence."""
    callback = Callback(apply={})
    make_trainer(tmp_path, callback)
    assert callback.report is not None
    for wrong in (
        {"apply": "yes"},
        {"apply": None},
        {"attention_share": -0.1},
        {"attention_share": "all"},
    ):
        with pytest.raises(
            ValueError, match=f"^hfpatch: {next(iter(wrong))} must be [^\n]*, got [^\n]*[.]$"
        ):
            Callback(**wrong)


def test_apply_too_late_is_refused(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.add_callback(Callback(apply=True))
    with pytest.raises(
        ValueError,
        match=r"hfpatch: the model that trains is not the one that Trainer was made with.*callbacks=\[",
    ):
        trainer.train()


def test_apply_with_model_init_is_refused(tmp_path):
    args = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True
    )
    trainer = Trainer(
        model_init=lambda: tiny.llama(),
        args=args,
        train_dataset=[],
        callbacks=[Callback(apply=True)],
    )
    trainer.train_dataset = [{"input_ids": torch.arange(9), "labels": torch.arange(9)}]
    with pytest.raises(ValueError, match="with model_init call hfpatch.apply inside it"):
        trainer.train()


def test_a_model_made_anew_and_patched_there_trains(tmp_path):
    """As under `hfpatch run`, which gives every Trainer such a callback."""

    def model_init():
        model = tiny.llama()
        hfpatch.apply(model)
        return model

    args = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True, max_steps=1
    )
    rows = [{"input_ids": torch.arange(9), "labels": torch.arange(9)}]
    trainer = Trainer(
        model_init=model_init, args=args, train_dataset=rows, callbacks=[Callback(apply=True)]
    )
    assert trainer.train().global_step == 1


def test_apply_beside_liger_is_refused(tmp_path):
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    args.use_liger_kernel = True  # Trainer itself would ask for Liger to be installed
    with pytest.raises(ValueError, match="use_liger_kernel and hfpatch"):
        Callback(apply=True).on_init_end(args, None, None, model=tiny.llama())


def test_flops_are_those_of_the_stock_model():
    """torch counts eager attention's six matmuls over the whole square; the rest is ours, to the
    rotary table.
    """
    model = tiny.llama(attn_implementation="eager")
    batch = {k: v for k, v in tiny.labelled().items() if k in ("input_ids", "labels")}
    B, T = batch["input_ids"].shape
    with FlopCounterMode(display=False) as counter:
        model(**batch).loss.backward()
    work, config = Work.of(model), model.config
    square = B * T * T * config.hidden_size * config.num_hidden_layers
    ours = work.flops(B, T) - 6 * square  # causal half: 2 forward, 4 backward
    rotary = B * T * config.head_dim  # [E/2, 1] x [1, T] a row
    assert counter.get_total_flops() - 12 * square == pytest.approx(ours, abs=rotary)


WARNING = r"\d+ of \d+ trained tensors are bfloat16 alone, and AdamW loses"


def test_weights_that_are_rounded_away_are_warned_of_once(tmp_path):
    trainer = make_trainer(tmp_path, Callback(), model=tiny.llama(dtype=torch.bfloat16))
    with pytest.warns(UserWarning, match=WARNING) as caught:
        trainer.train()
        trainer.train()
    assert len([w for w in caught if "loses updates" in str(w.message)]) == 1


def readme_snippet() -> str:
    text = (Path(__file__).parents[2] / "README.md").read_text()
    return re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]


@pytest.mark.parametrize("optimizer", tiny.longer(["readme", "stock"], "readme"))
def test_readme_snippet_learns_in_bf16(tmp_path, optimizer, monkeypatch):
    """README's own lines move bf16 weights as far as fp32 weights move; with Trainer's default most
    of it is lost.
    """
    monkeypatch.chdir(tmp_path)
    data = [{"input_ids": row, "labels": row} for row in torch.randint(3, 64, (80, 16))]
    small = {"max_steps": 10, "save_strategy": "no", "report_to": "none", "use_cpu": True,
             "disable_tqdm": True, "seed": 1}  # fmt: skip
    drop = {"optim", "optim_args"} if optimizer == "stock" else set()

    def run(dtype, drop):
        def arguments(folder, **asked):
            return TrainingArguments(
                folder, **{k: v for k, v in asked.items() if k not in drop}, **small
            )

        names = {"torch": torch, "data": data, "TrainingArguments": arguments, "Trainer": Trainer}
        model = tiny.llama(dtype=dtype)
        names["AutoModelForCausalLM"] = SimpleNamespace(from_pretrained=lambda name, dtype: model)
        before = torch.cat([p.detach().double().flatten() for p in model.parameters()])
        with torch.compiler.set_stance("force_eager"):
            exec(readme_snippet(), names)
        return torch.cat([p.detach().double().flatten() for p in model.parameters()]) - before

    exact, moved = run(torch.float32, {"optim", "optim_args"}), run(torch.bfloat16, drop)
    kept = ((moved @ exact) / (exact @ exact)).item()
    assert kept > 0.9 if optimizer == "readme" else kept < 0.5, kept


SHARED = SimpleNamespace(sp_size=2, cp_size=1, tp_size=1)


def counted_of_shared_rows(parallelism_config) -> tuple[float, Work]:
    model, columns = tiny.llama(), Callback()
    args = SimpleNamespace(
        world_size=2, process_index=0, optim_args="", device="cpu", bf16=False, fp16=False,
        parallelism_config=parallelism_config,
    )  # fmt: skip
    columns.on_train_begin(args, TrainerState(), None, model=model)
    model(tiny.ids(1, 12))
    return columns._flops, Work.of(model)


def test_mfu_counts_whole_rows():
    """Of two ranks that share a row each attends to all of it, for half of the heads."""
    flops, work = counted_of_shared_rows(SHARED)
    assert 2 * flops == pytest.approx(work.flops(1, 24))
    assert 2 * work.flops(1, 12) < work.flops(1, 24)


def test_features_of_no_text_are_not_counted():
    """sentence-transformers gives pixels too, in one mapping."""
    assert not Callback()._count(torch.nn.Linear(1, 1), ({"pixel_values": torch.ones(1)},), {})
