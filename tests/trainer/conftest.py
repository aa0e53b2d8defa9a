"""What the training tests share: a byte-level tokenizer, a chat template of our own, data, one way
to run train.py.
"""

import json
import os
from pathlib import Path
from unittest import mock

import pytest
import torch
from workbench import JSON_SOURCES, TEMPLATE

from hfpatch.cli import train
from hfpatch.trainer import tokenizer as byte_level


@pytest.fixture(autouse=True)
def precision_of_its_own(monkeypatch):
    """accelerate leaves a run's bf16 in the environment, where the next run of the process finds
    it.
    """
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Real text that every machine has: the sources of Python's json package."""
    return [file.read_text() for file in sorted(JSON_SOURCES.glob("*.py"))]


@pytest.fixture(scope="session")
def tokenizer(texts):
    made = byte_level.train(texts, 300)
    made.chat_template = TEMPLATE
    return made


@pytest.fixture(scope="session")
def saved_tokenizer(tokenizer, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def chat_file(tmp_path) -> Path:
    file = tmp_path / "chat.jsonl"
    rows = [
        [
            ("user", f"What is {i} and {i}?"),
            ("assistant", f"It is {2 * i}."),
            ("user", "Sure?"),
            ("assistant", "Yes!"),
        ]
        for i in range(40)
    ]
    lines = [json.dumps({"messages": [{"role": r, "content": c} for r, c in row]}) for row in rows]
    file.write_text("\n".join(lines) + "\n")
    return file


@pytest.fixture
def run_train(tmp_path, saved_tokenizer, capsys):
    """run_train(name, **flags) -> (exit code, stdout, stderr, output folder) of `hfpatch train` in
    this process.

    A flag None is left out. The default is 6 steps of a tiny Llama on the json sources, packed.
    """
    threads = torch.get_num_threads()

    def run(name: str = "run", *extra, **flags):
        settings = {
            "model": "llama-tiny", "config_overrides": "vocab_size=300,num_hidden_layers=2",
            "tokenizer": saved_tokenizer, "data": JSON_SOURCES, "data_glob": "*.py",
            "packing": True,
            "seq_len": 32, "per_device_train_batch_size": 2, "max_steps": 6,
            "logging_steps": 1, "learning_rate": 1e-2,
            "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True,
            "cache_dir": tmp_path / "cache", "output_dir": tmp_path / name,
        } | flags  # fmt: skip
        argv = list(extra)
        for flag, value in settings.items():
            if value is not None:
                argv += [
                    f"--{flag}",
                    *(map(str, value) if isinstance(value, (list, tuple)) else [str(value)]),
                ]
        torch.set_num_threads(1)
        code = train.main(argv)
        captured = capsys.readouterr()
        return code, captured.out, captured.err, Path(settings["output_dir"])

    with mock.patch.dict(os.environ):  # an engine's RANK would be that of every later child
        yield run
    torch.set_num_threads(threads)
