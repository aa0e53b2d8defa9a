"""What `hfpatch run` puts around Trainer and Accelerator in a process that trains, and its
options.
"""

import inspect

import accelerate
import pytest
import tiny
import torch
import transformers
from transformers import Trainer, TrainerCallback, TrainingArguments

import hfpatch
from hfpatch.cli import run
from hfpatch.context.classes import is_patched
from hfpatch.layer.traits import runtimes_in
from hfpatch.trainer import marks, watch
from hfpatch.trainer.callback import Callback


@pytest.fixture
def watched(monkeypatch, tmp_path):
    """Trainer and Accelerator as a process of a run has them, for one test. Returns the folder of
    the run's marks.
    """
    for cls, names in ((Trainer, ("__init__", "train")), (accelerate.Accelerator, ("prepare",))):
        for name in names:
            monkeypatch.setattr(cls, name, getattr(cls, name))
    folder = tmp_path / "marks"
    folder.mkdir()
    options = {"loss": False, "checkpointing": ["offload=host"]}
    for name, value in marks.environment(str(folder), options).items():
        monkeypatch.setenv(name, value)
    watch.loaded(transformers.trainer)
    watch.loaded(accelerate.accelerator)
    return folder


def arguments(tmp_path, **more):
    return TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", max_steps=1,
                             save_strategy="no",
                             disable_tqdm=True, dataloader_pin_memory=False, **more)  # fmt: skip


def rows():
    return [{"input_ids": torch.arange(3, 19), "labels": torch.arange(3, 19)} for _ in range(8)]


def test_every_trainer_gets_one_callback(watched, tmp_path, capsys):
    args = arguments(tmp_path)
    own = Callback(apply={"checkpointing": "off"})
    made = [
        Trainer(tiny.llama(), args),
        Trainer(model=tiny.llama(), args=args, callbacks=[own, TrainerCallback()]),
        Trainer(tiny.llama(), args, None, None, None, None, None, None, None, [Callback()]),
    ]
    for trainer in made:
        ours = [
            c for c in trainer.callback_handler.callbacks if isinstance(c, Callback) and c.apply
        ]
        assert len(ours) == 1 and is_patched(trainer.model.model.norm)
        assert bool(ours[0].report.count("loss")) == (ours[0] is own), (
            "the run's options, where the script has none"
        )
    err = capsys.readouterr().err
    assert err.count("hfpatch on LlamaForCausalLM") == 2, (
        "once for the run's options, once for the script's own"
    )
    assert "checkpoints: offload=host" in err


def test_a_model_that_the_script_patched_keeps_its_settings(watched, tmp_path):
    model = tiny.llama()
    hfpatch.apply(model, checkpointing="off")
    trainer = Trainer(model, arguments(tmp_path), train_dataset=rows())
    assert not any(isinstance(c, Callback) for c in trainer.callback_handler.callbacks)
    trainer.train()
    assert (watched / marks.TRAINED).exists() and not runtimes_in(model)


def test_a_model_that_model_init_patched_keeps_its_settings(watched, tmp_path, capsys):
    def made():
        model = tiny.llama()
        hfpatch.apply(model, checkpointing="off")
        return model

    trainer = Trainer(model_init=made, args=arguments(tmp_path), train_dataset=rows())
    trainer.train()
    assert "hfpatch on" not in capsys.readouterr().err and (watched / marks.TRAINED).exists()
    plain = Trainer(None, arguments(tmp_path), None, rows(), model_init=lambda: tiny.llama())
    with pytest.raises(ValueError, match="got a stock LlamaForCausalLM"):
        plain.train()


def test_training_a_plain_model_stops_before_the_first_step(watched, tmp_path):
    class Own(Trainer):
        def __init__(self, model):
            self.model = model

    with pytest.raises(
        ValueError,
        match=r"^hfpatch: .*Own.train\(\) got a stock LlamaForCausalLM under .*\. Call",
    ):
        Own(tiny.llama()).train()
    trainer = Trainer(tiny.llama(), arguments(tmp_path), train_dataset=rows())
    hfpatch.undo(trainer.model)
    with pytest.raises(ValueError, match="got a stock"):
        trainer.train()
    assert trainer.state.global_step == 0 and not (watched / marks.TRAINED).exists()


def test_a_refused_model_is_evaluated_and_not_trained(watched, tmp_path):
    """The sentence of `apply` comes where training starts: evaluating needs no patch."""
    settings = transformers.ResNetConfig(
        embedding_size=4, hidden_sizes=[4], depths=[1], layer_type="basic", num_labels=2
    )
    model = transformers.ResNetForImageClassification(settings)
    rows = [{"pixel_values": torch.ones(3, 8, 8), "labels": 1} for _ in range(4)]
    trainer = Trainer(model, arguments(tmp_path), train_dataset=rows, eval_dataset=rows)
    assert trainer.evaluate()["eval_loss"] > 0
    with pytest.raises(ValueError, match="must have a list of decoder layers"):
        trainer.train()
    assert trainer.state.global_step == 0 and not list(watched.iterdir())


def test_a_loop_by_hand_needs_a_patched_model(watched):
    accelerator = accelerate.Accelerator(cpu=True)
    model = tiny.llama()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(
        ValueError,
        match=r"Accelerator.prepare\(\) got a stock LlamaForCausalLM under .*. Call hfpatch.apply\(model\)",
    ):
        accelerator.prepare(model, optimizer)
    accelerator.prepare(model)  # without an optimizer nothing trains
    # and what has no decoder layers is none of our business
    accelerator.prepare(torch.nn.Linear(2, 2), optimizer)
    assert not (watched / marks.TRAINED).exists()
    hfpatch.apply(model)
    accelerator.prepare(model, optimizer)
    assert (watched / marks.TRAINED).exists()


def test_options_are_those_of_apply():
    parsed = {action.dest for action in run._parser()._actions}
    assert set(inspect.signature(hfpatch.apply).parameters) - {"model"} <= parsed
    words = ["--no-loss", "--no-rms-norm", "--logits", "false", "--checkpointing",
             "least,host",
             "--checkpointing", "tile=64,every=2", "python", "--no-mlp"]  # fmt: skip
    options = run._options(run._parser().parse_args(words))
    assert options == {
        "loss": False, "rms_norm": False, "logits": False,
        "checkpointing": ["least,host", "tile=64,every=2"],
    }  # fmt: skip
    assert run._options(run._parser().parse_args(["python", "--no-loss"])) == {}, (
        "what follows the command is its own"
    )


@pytest.mark.parametrize("argv, words", [
    ([], "is missing"), (["-m"], "is missing"),
    (["/nowhere.py"], "there is no script or command /nowhere.py"),
    (["nowhere"], "there is no script or command"),
    (["--no-such", "python"], "unrecognized"),
    (["--checkpointing", "every=0", "python"], "every must be"),
    (["--checkpointing", "on"], "on"),
    (["--checkpointing", "off,every=8", "python"], "Leave them out"),
    (["--checkpointing", "nowhere", "python"], "checkpointing must be"),
])  # fmt: skip
def test_bad_arguments(capsys, argv, words):
    assert run.main(argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("hfpatch: ") and words in err and "usage: hfpatch run" in err


@pytest.mark.parametrize("mode", [0o755, 0o644])
@pytest.mark.parametrize("name", ["train", "train.sh"])
def test_a_command_that_cannot_start_is_one_sentence(name, mode, tmp_path, capfd, monkeypatch):
    """It names no interpreter, or nobody may execute it: no reason to take it for Python."""
    script = tmp_path / name
    script.write_text("echo no interpreter is named\n")
    script.chmod(mode)
    monkeypatch.chdir(tmp_path)
    for word in (str(script), name):
        assert run.main([word]) == 2
        err = capfd.readouterr().err
        assert err.startswith("hfpatch: the system cannot start")
        assert f"hfpatch run bash {word}" in err and err.count("\n") == 1


def test_two_dashes_end_the_options(tmp_path, capfd):
    script = tmp_path / "train.py"
    script.write_text("import sys\nprint(sys.argv[1:])\n")
    assert run.main(["--", str(script), "--", "--flag"]) == 0
    assert capfd.readouterr().out == "['--', '--flag']\n"
