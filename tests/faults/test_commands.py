"""A known failure of any command or script: one sentence, a non-zero exit; `--debug` shows the
traceback; a bug keeps its own.
"""

import argparse
import errno
import importlib.util
import json
import os
import pickle
import shutil
import socket
import sys

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tiny import not_with_transformers_5_0
from torch.utils.data import DataLoader, IterableDataset

from hfpatch.budget.limits import parse_length
from hfpatch.cli.failures import explain, guarded
from hfpatch.cli.main import main
from hfpatch.lab.presets import preset_config
from hfpatch.planner.limits import RANGES, check_ranges
from hfpatch.store.disk import File
from hfpatch.trainer import arguments, checks, data, loading, placement
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
                         "dropout": {"attention_dropout": -0.1},
                         "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": "x"}},
                         "shared": {"num_attention_heads": 4, "num_key_value_heads": 3},
                         "word": {"num_hidden_layers": "2"},
                         "window": {"model_type": "mistral", "sliding_window": "x"},
                         "other": {"model_type": "theirs"},
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
        "": "required: command",
        "plan": "required: --model",
        f"{plan} --host-ram 256": "a size is written like 256GiB, '256' came",
        f"{plan} --host-ram 1e400GiB": "'1e400GiB' came",
        f"{plan} --gpu=--": "expected a value, --gpu=-- came",
        f"{plan} --lora-r 4 --lora-target=,": "expected names of Linear layers to adapt",
        f"{plan} --seq-len {'9' * 5000}": f"'{'9' * 199}... came",
        "env --model=": "expected a known model, '' came; the nearest are",
        "plan --model @/none.json": "expected a model's folder or config.json, there is none at",
        "plan --model none.json": (
            "expected a model's folder or config.json, there is none at none.json"
        ),
        "plan --model none/config.json": "there is none at none/config.json",
        "plan --model @/t5.json": (
            "expected a model that writes text one token after another, 't5' came"
        ),
        "env --model @/t5.json": (
            "expected a model that writes text one token after another, 't5' came"
        ),
        f"{plan} --checkpointing bogus": 'checkpointing must be "auto", "least", "off", "gpu", "host" or a directory',
        "plan --model @": "a model's folder holds a config.json",
        "env --model llama-tiny @/file": "--model takes no config files, ",
        "env --seq-len 8k": "pass --model as well",
        f"{plan} --no-such 1": "unrecognized arguments: --no-such 1; see hfpatch plan --help",
        f"{plan} --seqlen 4k": (
            "unrecognized arguments: --seqlen 4k; did you mean --seq-len? See hfpatch plan --help"
        ),
        f"{plan} --batch 0": "1 or more and 1048576 or less for --batch, 0 came",
        f"{plan} --gpus -1": "1 or more for --gpus",
        f"{plan} --seq-len 0": "a length is tokens such as 8192, 128k or 1M",
        f"{plan} --checkpointing tile=0": 'tile must be "auto" or a positive number of tokens, 0 came',
        f"{plan} --every 0": "1 or more for --every, 0 came",
        f"{plan} --lora-r -1": "0 or more for --lora-r, -1 came",
        f"{plan} --sp-size 0": "1 or more for --sp-size, 0 came",
        f"{profile} --impl hf --checkpointing tile=64": "checkpointing is for hfpatch, impl named hf; add hfpatch",
        f"{profile} --impl hfpatch --no-gradient-checkpointing": "turned off for hf and liger, impl named hfpatch alone",
        f"{profile} --checkpointing": "--checkpointing: expected one argument",
        f"{profile} --checkpointing tile=0": 'tile must be "auto" or a positive number of tokens, 0 came',
        f"{profile} --checkpointing tiles=4": "keep, aim, tiles came; did you mean tile?",
        f"{profile} --checkpointing tile=": "takes FIELD=VALUE, 'tile=' came",
        f"{profile} --from-first-step --warmup 2": "--warmup: not allowed with argument --from-first-step",
        f"{profile} --seq-len 1": "seq_len must be a whole number of at least 2, 1 came",
        "plan --model @/cut.json": "is no JSON",
        "plan --model @/bytes.json": "is no JSON",
        "plan --model @/list.json": "a list came",
        "plan --model @/heads.json": (
            "num_attention_heads must be a whole number of at least 1, 0 came"
        ),
        "plan --model @/dropout.json": (
            "attention_dropout must be a number of 0 or more and less than 1, -0.1 came"
        ),
        "plan --model @/theta.json": "rope_theta must be a number of more than 0, 'x' came",
        "plan --model @/shared.json": "a multiple of num_key_value_heads, 4 and 3 came",
        "plan --model @/word.json": (
            "num_hidden_layers must be a whole number of at least 1, '2' came"
        ),
        "plan --model @/window.json": "sliding_window must be a number of 0 or more, 'x' came",
        "plan --model @/experts.json": "experts must be a whole number, 'a' came",
        "env --model @/rope.json": "a llama config.json (KeyError: 'nope')",
        "env --model @/other.json": "expected a model type of transformers, 'theirs' came",
        "env --model nobody/nothing": "nothing is downloaded here",
        "profile --model llama-tiny --seq-len 64 --steps 0": "1 or more for --steps",
        "profile --model llama-tiny --seq-len 64 --warmup -1": "0 or more for --warmup",
        "env @/bad.yaml": "is not YAML",
        "env @/cut.json": "cut.json is not JSON",
        "env @/list.json": "list came",
        "env @/file/x": "a config file was expected",
        f"{plan} --checkpointing gpu --checkpointing host": "says offload twice, 'gpu' and 'host' came",
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
            "1 or more and 1048576 or less for --per_device_train_batch_size, 0",
        ),
        (
            {"gradient_accumulation_steps": 9_999_999_999},
            "1048576 or less for --gradient_accumulation_steps, 9999999999",
        ),
        ({"seed": -1}, "0 or more and 4294967295 or less for --seed, -1 came"),
        ({"data_seed": 2**32}, "for --data_seed"),
        ({"time_limit": -1}, "0 or more for --time_limit, -1.0 came"),
        ({"learning_rate": "nan"}, "for --learning_rate, nan came"),
        ({"learning_rate": "inf"}, "for --learning_rate, inf came"),
        ({"max_steps": 0}, "expected --max_steps of 1 or more"),
        ({"seq_len": "8x"}, "a length is tokens such as 8192, 128k or 1M, '8x' came"),
        ({"seq_len": "128k"}, "--seq-len 131072 is over the model's"),
        ({"output_dir": tmp_path / "file" / "run"}, "expected a folder, a file stands in the way"),
        ({"output_dir": "/proc/nothing/run"}, "there is no such file or folder"),
        ({"cache_dir": tmp_path / "file"}, "expected a folder, a file stands in the way"),
        (
            {"checkpointing": tmp_path / "file"},
            "name a directory, which is made where there is none",
        ),
        ({"checkpointing": tmp_path / "file" / "below"}, "file came, which is no folder"),
        ({"checkpointing": "somewhere"}, "checkpointing must be"),
        ({"zzz": 1}, "unknown flag '--zzz'; see hfpatch train --help"),
        (
            {"accelerator_config": '{"a": 1}'},
            "transformers does not take these flags, TypeError: AcceleratorConfig",
        ),
        # says transformers, hfpatch of an older one's
        ({"config_overrides": "num_attention_heads=3"}, "multiple of"),
        (
            {"config_overrides": "hidden_act=swoosh"},
            "hidden_act of transformers was expected, 'swoosh' came",
        ),
        ({"config_overrides": None, "model": model}, "no model loads from"),
    ):
        code, _, err, _ = run_train("refused", **flags)
        sentences = [line for line in err.splitlines() if line.startswith("hfpatch:")]
        assert code == 2 and len(sentences) == 1 and words in sentences[0], (flags, err)
        assert "Traceback" not in err
        assert not (tmp_path / "refused").exists()


@pytest.mark.parametrize("flags, words", [
    ({"report_to": "nonsense"}, "nonsense is not supported"),
    ({"optim": "galore_adamw"}, "You need to define `optim_target_modules`"),
    ({"optim": "stable_adamw"}, "ImportError: You need to install `torch-optimi`"),
    ({"lr_scheduler_type": "cosine_with_min_lr"}, "One of min_lr or min_lr_rate should be set"),
    ({"metric_for_best_model": "nope", "load_best_model_at_end": True, "validation_split": 0.3,
      "eval_strategy": "steps",
      "eval_steps": 1, "save_strategy": "steps", "save_steps": 1},
      "which is not found in the evaluation metrics"),
])  # fmt: skip
def test_what_trainer_refuses_is_a_sentence(flags, words, run_train):  # noqa: F811
    code, _, err, _ = run_train(max_steps=1, **flags)
    sentences = [line for line in err.splitlines() if line.startswith("hfpatch:")]
    assert code == 2 and words in sentences[-1] and "Traceback" not in err


def test_a_bug_while_the_model_is_patched_is_no_flags_fault(run_train, monkeypatch):  # noqa: F811
    def bug(model):
        raise KeyError("a bug")

    monkeypatch.setattr("hfpatch.patch.find_decoder", bug)
    with pytest.raises(KeyError, match="a bug"):
        run_train(max_steps=1)


@pytest.mark.parametrize("values, words", [
    ({"WORLD_SIZE": "x"}, "1 or more in the environment's WORLD_SIZE, 'x' came"),
    ({"WORLD_SIZE": "0"}, "1 or more in the environment's WORLD_SIZE, '0' came"),
    ({"RANK": "-1"}, "0 or more in the environment's RANK"),
    ({"WORLD_SIZE": "2", "LOCAL_RANK": "0", "RANK": "2"},
     "0 or more and 1 or less in the environment's RANK, '2' came"),
    ({"LOCAL_WORLD_SIZE": ""}, "the environment's LOCAL_WORLD_SIZE, '' came"),
    ({"WORLD_SIZE": "2", "LOCAL_RANK": "0", "RANK": "1", "MASTER_ADDR": "no.host.invalid"},
     "'no.host.invalid' is not known"),
    ({"MASTER_PORT": "70000"}, "65535 or less in the environment's MASTER_PORT"),
    ({"HFPATCH_HOST_MEMORY": "²"}, "HFPATCH_HOST_MEMORY to be a number of bytes, '²' came"),
])  # fmt: skip
def test_what_stands_in_the_environment_is_checked(values, words, run_train, monkeypatch):  # noqa: F811
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(checks, "HOST_SECONDS", 0)
    code, _, err, folder = run_train(packing=False)
    assert code == 2 and words in err and "Traceback" not in err and not folder.exists()


def test_who_waits_for_rank_0_says_so(monkeypatch, capsys):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        for name, value in {
            "WORLD_SIZE": 4,
            "RANK": 2,
            "LOCAL_RANK": 0,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }.items():
            monkeypatch.setenv(name, str(value))
        for said in (
            f"hfpatch: rank 2 waits for rank 0 at 127.0.0.1:{port}, which does not answer yet (",
            "",
        ):
            checks.environment()
            assert capsys.readouterr().err.startswith(said) if said else not capsys.readouterr().err
            server.listen()


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
        "hfpatch: what read the output is gone;"
    ) == bool(code)


@pytest.mark.parametrize("file, values, words", [
    pytest.param("config.json", {"attention_bias": "x"}, "no model loads from .*attention_bias",
                 marks=not_with_transformers_5_0("takes any value for it")),
    ("config.json", {"dtype": "x"}, "no model loads from .*: AttributeError .*'x'"),
    ("config.json", {"dtype": 0}, "a dtype such as bfloat16 was expected, 0 came"),
    ("config.json", {"num_attention_heads": 0}, "no model loads from"),
    ("config.json", {"max_position_embeddings": 0},
     "max_position_embeddings of 1 or more was expected, 0 came"),
    ("config.json", {"hidden_act": "x"},
     "no model loads from .*: hidden_act of transformers was expected, 'x' came"),
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


class Refusing(IterableDataset):
    def __iter__(self):
        raise ValueError("hfpatch: --strict expects no malformed row, came a.jsonl row 3; mend it.")


def test_what_a_loaders_worker_raises_is_the_sentence_alone():
    error = caught(lambda: list(DataLoader(Refusing(), num_workers=1)))
    assert "Traceback" in str(error)
    assert explain(error) == ("--strict expects no malformed row, came a.jsonl row 3; mend it", 2)


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
        "a file stands in the way": [caught(lambda: (whole / "x").mkdir()),
                                     caught(lambda: whole.mkdir())],
        "there is no such file": [caught(lambda: open(tmp_path / "none"))],
        "in /proc/none, No such file or directory came; give another": [caught(lambda: File("/proc/none"))],
        "a folder came": [caught(lambda: open(tmp_path, "rb"))],
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
        "expected JSON": [caught(lambda: json.loads("{"))],
        "expected UTF-8": [caught(lambda: b"\xff".decode())],
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


def test_ranges_cover_the_flags_there_are():
    """Every row of the table is a flag of something, and every end is checked."""
    known = {action.dest for action in arguments.HfArgumentParser(arguments.CLASSES)._actions}
    for command in ("plan", "profile", "prove"):
        parser = argparse.ArgumentParser()
        importlib.import_module(f"hfpatch.cli.{command}").add_arguments(parser)
        known |= {action.dest for action in parser._actions}
    known |= {"seeds"}  # convergence's
    assert set(RANGES) <= known, set(RANGES) - known
    for name, (least, most) in RANGES.items():
        for end, step in ((least, -1), (most, 1)):
            if end is None:
                continue
            beyond = end[0] if isinstance(end, list) else end + step
            with pytest.raises(ValueError, match=f"^hfpatch: expected a number .*{beyond} came"):
                check_ranges({name: beyond})
            check_ranges({name: beyond - step})
    assert parse_length("128k") == 131072 and parse_length("1M") == 1 << 20


def test_secrets_of_a_config_are_not_shown(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text("hub_token: hf_secretsecret\nseed: 3\n")
    assert main(["env", str(tmp_path / "run.yaml"), "--json"]) == 0
    out = capsys.readouterr().out
    assert "hf_secret" not in out and '"seed": 3' in out


@pytest.mark.parametrize("name", ["convergence", "placement_curves"])
def test_scripts_share_the_handler(name, said, monkeypatch):
    spec = importlib.util.spec_from_file_location(f"script_{name}", ROOT / "scripts" / f"{name}.py")
    monkeypatch.setattr(sys, "path", list(sys.path))
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    flags = {
        "convergence": "--steps 0",
        "placement_curves": "--learning_rate nan",
    }  # fmt: skip
    said(script.main(flags[name].split()))
