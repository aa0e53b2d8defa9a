"""A known failure of any command or script: one sentence, a non-zero exit; `--debug` shows the
traceback; a bug keeps its own.
"""

import errno
import json
import os
import pickle
import shutil
import sys

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from hfpatch.cli.failures import explain, guarded
from hfpatch.cli.main import main
from hfpatch.lab.presets import preset_config
from hfpatch.store.disk import File
from hfpatch.trainer import arguments, data, loading, placement
from tests.faults.runs import ROOT, run_train, saved_tokenizer, texts, tokenizer  # noqa: F401


@pytest.fixture
def said(capsys):
    """said(code): the one sentence of the command that ended with this code."""

    def check(code, wanted=(1, 2)):
        out, err = capsys.readouterr()
        lines = [line for line in err.splitlines() if not line.startswith("[transformers]")]
        assert (
            code in wanted
            and len(lines) == 1
            and lines[0].startswith("hfpatch: ")
            and lines[0][-1] in ".)?"
        ), err
        assert "Traceback" not in err
        return lines[0]

    return check


def test_what_a_command_is_given_is_checked(said, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "bad.yaml").write_text("a: [")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "cut.json").write_text('{"model_type": ')
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    for name, change in {"heads": {"num_attention_heads": 0},
                         "shared": {"num_attention_heads": 4, "num_key_value_heads": 3},
                         "word": {"num_hidden_layers": "2"},
                         "other": {"model_type": "theirs"},
                         "bare": {"model_type": None},
                         "experts": {"model_type": "mixtral", "num_local_experts": "a"},
                         "rope": {"rope_scaling": {"rope_type": "nope",
                                                   "factor": 2.0}}}.items():  # fmt: skip
        (tmp_path / f"{name}.json").write_text(json.dumps(preset_config("llama-tiny") | change))
    (tmp_path / "t5.json").write_text(json.dumps({"model_type": "t5", "num_layers": 2}))
    plan, profile = (
        "plan --model llama-tiny",
        f"profile --model llama-tiny --out {tmp_path}/profile",
    )
    for line, words in {
        "": "command is missing",
        "plan": "--model is missing",
        "paln": "Did you mean plan?",
        f"{plan} --lora-r 4 --base 4bits": "Did you mean 4bit?",
        f"{plan} --gpu rtx490": "got rtx490. Did you mean rtx4090?",
        "plan --modell x": "--modell. Did you mean --model? See hfpatch plan --help",
        f"{plan} --host-ram 256": "a size must be written like 256GiB, got '256'",
        f"{plan} --host-ram 1e400GiB": "got '1e400GiB'",
        f"{plan} --gpu=--": "--gpu has no value",
        f"{plan} --lora-r 4 --lora-target=,": "--lora-target must name Linear layers",
        f"{plan} --seq-len {'9' * 5000}": f"got '{'9' * 195}",
        "check --model=": "--model has no value",
        "plan --model @/bare.json": "bare.json lacks model_type",
        f"{plan} --gpus 2147483647": "--gpus must be 1 or more and 65536 or less",
        f"{plan} --seq-len 2147483647": "--seq-len must be 2 or more and 16777216 or less",
        "train --model llama-tiny --data d --output_dir o --sp_size 2147483647": (
            "--sp_size must be 1 or more and 65536 or less, got 2147483647"
        ),
        f"{profile} --out=": "--out has no value",
        f"{profile} --seq-len 1G": "a length must be tokens",
        "plan --model @/none.json": "there is no model folder or config.json at",
        "plan --model none.json": ("there is no model folder or config.json at none.json"),
        "plan --model none/config.json": "there is no model folder or config.json at none/config.json",
        "plan --model @/t5.json": ("the model must write text one token after another, got 't5'"),
        "check @/t5.json": ("the model must write text one token after another, got 't5'"),
        f"{plan} --checkpointing bogus": 'checkpointing must be "auto", "least", "off", "gpu", "host" or a directory',
        "plan --model @": "a model's folder must hold a config.json",
        f"{plan} --no-such 1": "unrecognized arguments: --no-such 1. See hfpatch plan --help",
        f"{plan} --seqlen 4k": (
            "unrecognized arguments: --seqlen 4k. Did you mean --seq-len? See hfpatch plan --help"
        ),
        f"{plan} --batch 0": "--batch must be 1 or more and 1048576 or less, got 0",
        f"{plan} --gpus -1": "--gpus must be 1 or more",
        f"{plan} --seq-len 0": "a length must be tokens such as 8192, 128k or 1M",
        f"{plan} --checkpointing tile=0": 'tile must be "auto" or a positive number of tokens, got 0',
        f"{plan} --lora-r -1": "--lora-r must be 0 or more, got -1",
        f"{plan} --sp-size 0": "--sp-size must be 1 or more and 65536 or less, got 0",
        f"{profile} --impl hf --checkpointing tile=64": "checkpointing works with impl hfpatch only, got hf",
        f"{profile} --impl hfpatch --no-gradient-checkpointing": "for hf and liger, got impl hfpatch alone",
        f"{profile} --checkpointing": "--checkpointing must have one value",
        f"{profile} --checkpointing tile=0": 'tile must be "auto" or a positive number of tokens, got 0',
        f"{profile} --checkpointing tiles=4": "aim, got tiles. Did you mean tile?",
        f"{profile} --checkpointing tile=": "must be FIELD=VALUE, got 'tile='",
        f"{profile} --seq-len 1": "seq_len must be a whole number of at least 2, got 1",
        "plan --model @/cut.json": "must be JSON",
        "plan --model @/bytes.json": "must be JSON",
        "plan --model @/list.json": "got a list",
        "plan --model @/heads.json": (
            "num_attention_heads must be a whole number of at least 1, got 0"
        ),
        "plan --model @/shared.json": "a multiple of num_key_value_heads, got 4 and 3",
        "plan --model @/word.json": (
            "num_hidden_layers must be a whole number of at least 1, got '2'"
        ),
        "plan --model @/experts.json": "num_local_experts",
        "check @/rope.json": "does not (KeyError: 'nope')",
        "check @/other.json": "model_type must be one of transformers', got 'theirs'",
        "check nobody/nothing": "its config.json could not be fetched",
        "profile --model llama-tiny --seq-len 64 --steps 0": "--steps must be 1 or more",
        "profile --model llama-tiny --seq-len 64 --warmup -1": "--warmup must be 0 or more",
        f"{plan} --checkpointing gpu --checkpointing host": "names offload twice, got 'gpu' and 'host'",
    }.items():
        assert words in said(main(line.replace("@", str(tmp_path)).split()), (2,)), line
    assert not (tmp_path / "profile").exists()


def test_what_a_training_run_is_given_is_checked(run_train, tmp_path):  # noqa: F811
    (tmp_path / "file").touch()
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{")
    for flags, words in (
        (
            {"per_device_train_batch_size": 0},
            "--per_device_train_batch_size must be 1 or more and 1048576 or less, got 0",
        ),
        (
            {"gradient_accumulation_steps": 9_999_999_999},
            "--gradient_accumulation_steps must be 1 or more and 1048576 or less, got 9999999999",
        ),
        ({"seed": -1}, "--seed must be 0 or more and 4294967295 or less, got -1"),
        ({"data_seed": 2**32}, "--data_seed must be"),
        ({"time_limit": -1}, "--time_limit must be 0 or more, got -1"),
        ({"learning_rate": "nan"}, "--learning_rate must be more than 0, got nan"),
        ({"learning_rate": "inf"}, "--learning_rate must be more than 0, got inf"),
        ({"max_steps": 0}, "--max_steps must be 1 or more"),
        ({"seq_len": "8x"}, "a length must be tokens such as 8192, 128k or 1M, got '8x'"),
        ({"seq_len": "128k"}, "--seq-len must be at most the model's"),
        ({"output_dir": tmp_path / "file" / "run"}, "file, a file"),
        ({"output_dir": "/proc/nothing/run"}, "there is no such file or folder"),
        ({"cache_dir": tmp_path / "file"}, "a file is where a folder must be"),
        (
            {"checkpointing": tmp_path / "file"},
            "a directory written as a path",
        ),
        ({"checkpointing": tmp_path / "file" / "below"}, "file, a file"),
        ({"checkpointing": "somewhere"}, "checkpointing must be"),
        ({"zzz": 1}, "unknown flag '--zzz'. See hfpatch train --help"),
        (
            {"accelerator_config": '{"a": 1}'},
            "transformers does not take these flags, TypeError: AcceleratorConfig",
        ),
        # says transformers, hfpatch of an older one's
        ({"config_overrides": "num_attention_heads=3"}, "multiple of"),
        (
            {"config_overrides": "hidden_act=swoosh"},
            "hidden_act must be one of transformers', got 'swoosh'",
        ),
        ({"config_overrides": None, "model": model}, "no model loads from"),
    ):
        code, _, err, _ = run_train("refused", **flags)
        sentences = [line for line in err.splitlines() if line.startswith("hfpatch:")]
        assert code == 2 and len(sentences) == 1 and words in sentences[0], (flags, err)
        assert "Traceback" not in err
        assert not (tmp_path / "refused").exists()


def test_a_process_without_a_rank_waits_for_nobody(monkeypatch):
    """Schedulers set WORLD_SIZE for machines; an engine in a process that no launcher started is a
    group of one.
    """
    monkeypatch.delenv("RANK", raising=False)
    for name in ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "7")
    placement.single_process_environment()
    assert [os.environ.pop(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")] == [
        "0",
        "1",
        "0",
    ]
    assert os.environ["MASTER_ADDR"] == "127.0.0.1" and os.environ["MASTER_PORT"] != "7"


@pytest.mark.parametrize("piped, code", [(True, 0), (False, 1)])
def test_a_reader_that_goes_away(piped, code, monkeypatch, capsys):
    """`hfpatch plan | head` is done; a training run whose `tee` is killed is not."""
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # put back afterwards

    def command(argv):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    assert guarded(command, [], piped=piped) == code
    assert sys.stdout is None and capsys.readouterr().err.startswith(
        "hfpatch: what read the output is gone."
    ) == bool(code)


@pytest.mark.parametrize("file, values, words", [
    ("config.json", {"attention_bias": "x"}, "no model loads from .*attention_bias"),
    ("config.json", {"dtype": "x"}, "no model loads from .*: AttributeError .*'x'"),
    ("config.json", {"dtype": 0}, "dtype must be one such as bfloat16, got 0"),
    ("config.json", {"num_attention_heads": 0}, "no model loads from"),
    ("config.json", {"max_position_embeddings": 0},
     "max_position_embeddings must be 1 or more, got 0"),
    ("config.json", {"hidden_act": "x"},
     "no model loads from .*: hidden_act must be one of transformers', got 'x'"),
    ("tokenizer_config.json", [], "no tokenizer loads from"),
])  # fmt: skip
def test_what_a_models_files_hold_is_checked(file, values, words, saved_tokenizer, tmp_path):  # noqa: F811
    shutil.copytree(saved_tokenizer, tmp_path, dirs_exist_ok=True)
    config = preset_config("llama-tiny") | {"model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / file).write_text(
        json.dumps(config | values if isinstance(values, dict) else values)
    )
    save_file(
        {"lm_head.weight": torch.zeros(2, 2)},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    model = arguments.ModelArguments(model=str(tmp_path))

    def load():
        loaded = loading.load_config(model)
        data.load_tokenizer(model, arguments.DataArguments(), None)
        loading.load_model(model, loaded, 0)

    with pytest.raises(
        ValueError, match=f"^hfpatch: {words}" if words.startswith("no") else f"^hfpatch: .*{words}"
    ):
        load()


def caught(function) -> Exception:
    with pytest.raises(Exception) as error:
        function()
    return error.value


def test_what_the_machine_does_is_a_sentence(tmp_path, monkeypatch):
    """Real errors of the libraries where they can be had, so that the words are today's."""
    whole = tmp_path / "whole.safetensors"
    save_file({"a": torch.zeros(100)}, whole)
    (tmp_path / "cut.safetensors").write_bytes(whole.read_bytes()[:-40])
    torch.save({"a": torch.zeros(100)}, tmp_path / "whole.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "whole.pt").read_bytes()[:-300])
    cases = {
        "the disk is full": [
            OSError(errno.ENOSPC, "No space left on device", "/x"),
            OSError(errno.EDQUOT, "Disk quota exceeded"),
            SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
            SafetensorError("Error while serializing: I/O error: File too large (os error 27)"),
            RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0"),
            RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed"),
        ],
        "no permission": [PermissionError(errno.EACCES, "Permission denied", "/x")],
        "the disk is read-only": [
            OSError(errno.EROFS, "ro", "/x"),
            SafetensorError("Error while serializing: Read-only file system (os error 30)"),
        ],
        "a file is where a folder must be": [caught(lambda: (whole / "x").mkdir()),
                                     caught(lambda: whole.mkdir())],
        "there is no such file": [caught(lambda: open(tmp_path / "none"))],
        "in /proc/none: No such file or directory. Pass another": [caught(lambda: File("/proc/none"))],
        "a folder is where a file must be": [caught(lambda: open(tmp_path, "rb"))],
        "the memory ran out": [
            caught(lambda: torch.empty(1 << 60, dtype=torch.uint8)), MemoryError(),
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
            OSError(errno.ENOMEM, "Cannot allocate memory"),
        ],
        "too many files are open": [OSError(errno.EMFILE, "Too many open files", "/x")],
        "the port is in use": [
            OSError(errno.EADDRINUSE, "Address already in use"),
            RuntimeError("The server socket has failed to listen: EADDRINUSE"),
        ],
        "a file is broken or cut": [
            caught(lambda: load_file(tmp_path / "cut.safetensors")),
            caught(lambda: torch.load(tmp_path / "cut.pt")),
            pickle.UnpicklingError("invalid load key"), EOFError("Ran out of input"),
        ],
        "must be JSON": [caught(lambda: json.loads("{"))],
        "a file must be UTF-8": [caught(lambda: b"\xff".decode())],
        "the package nowhere is missing": [caught(lambda: __import__("nowhere"))],
    }  # fmt: skip
    for words, errors in cases.items():
        for error in errors:
            found = explain(error)
            assert found and words in found[0] and found[1] in (1, 2) and "\n" not in found[0], (
                error,
                found,
            )


def test_debug_shows_the_traceback_and_a_bug_its_own(capsys):
    def full(argv):
        assert "--debug" not in argv
        raise OSError(errno.ENOSPC, "No space left on device")

    assert guarded(full, ["x", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err
    assert main(["plan", "--model", "llama-tiny", "--host-ram", "256", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err
    for bug in (
        KeyError("x"),
        ValueError("no sentence of ours"),
        RuntimeError("expected a Tensor"),
    ):

        def broken(argv, bug=bug):
            raise bug

        with pytest.raises(type(bug)):
            guarded(broken, [])
    # TrainingArguments has a --debug with a word of its own.
    assert guarded(lambda argv: len(argv), ["--debug", "underflow_overflow"]) == 2
