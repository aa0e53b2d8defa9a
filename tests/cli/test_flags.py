"""One name for a thing on all command lines, however its words are joined."""

import importlib
import re
from dataclasses import fields

import pytest

from hfpatch.budget.policy import Checkpointing, parse_checkpointing
from hfpatch.cli.failures import Parser
from hfpatch.cli.main import main
from hfpatch.trainer import arguments
from hfpatch.trainer.flags import DataArguments, ModelArguments


@pytest.mark.parametrize("command", ["plan", "profile"])
@pytest.mark.parametrize(
    "length", ["--seq-len", "--seq_len", "--seq_length", "--max-length", "--max_length"]
)
def test_spellings(command, length):
    parser = Parser()
    importlib.import_module(f"hfpatch.cli.{command}").add_arguments(parser)
    words = [
        "--model",
        "llama-tiny",
        length,
        "64",
        "--checkpointing",
        "least,host",
        "--checkpointing",
        "tile=8,every=2",
    ]
    args = parser.parse_args(words)
    assert int(args.seq_len) == 64
    wanted = Checkpointing(aim="least", offload="host", tile=8, every=2)
    assert parse_checkpointing(args.checkpointing) == wanted
    assert "--max_length" not in parser.format_help(), "help lists one name"


def asked(*argv) -> Checkpointing | str:
    made, _, _ = arguments.parse([*argv, "--use_cpu", "true", "--report_to", "none"])
    return arguments.checkpointing_of(made)


def test_training_takes_the_same_words(tmp_path):
    assert asked("--checkpointing", "least", "--checkpointing", "tile=8") == Checkpointing(
        aim="least", tile=8
    )
    assert asked("--checkpointing", "every=2", "--max-length", "4k") == Checkpointing(every=2)
    config = tmp_path / "run.yaml"
    config.write_text("checkpointing: off\n")  # YAML reads false
    assert asked(str(config)) == Checkpointing("off")
    assert asked(str(config), "--checkpointing", "gpu") == Checkpointing(offload="gpu"), (
        "a flag wins over the file"
    )


@pytest.mark.parametrize("word", ["true", "false"])
def test_yes_and_no_of_yaml_are_no_folders(word):
    with pytest.raises(ValueError, match="^hfpatch: .*checkpointing"):
        parse_checkpointing([word])


def test_help_of_training_shows_every_flag_of_ours_once(capsys):
    assert main(["train", "--help"]) == 0
    shown = re.findall(r"(?m)^  --(\w+)", capsys.readouterr().out)
    assert len(shown) == len({*shown}) < 80
    own = [f.name for cls in (ModelArguments, DataArguments) for f in fields(cls)]
    assert {*own, "nan_steps", "learning_rate", "output_dir"} <= {*shown}
    with pytest.raises(SystemExit):
        main(["train", "--help-all"])
    assert "--adam_beta1" in capsys.readouterr().out
