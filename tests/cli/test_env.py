"""`hfpatch env`: what it says of machines that are not here, from the facts it would have gathered
there.
"""

import copy
import json
import re
from pathlib import Path

import pytest
import torch

from hfpatch.cli import env as doctor
from hfpatch.cli.main import main
from scripts import families

GOOD = {
    "versions": {"python": "3.11.7", "torch": "2.13.0+cu130", "transformers": "5.23.0",
                 "triton": "3.9.0",
                 "deepspeed": "0.19.8"},
    "drivers": [{"name": "NVIDIA H100", "driver": "580.65", "memory_mib": "81559"}],
    "torch_cuda": "13.0",
    "gpus": [{"name": "NVIDIA H100", "bytes": 80 << 30, "capability": [9, 0]}],
    "attention": {"sdpa flash": True},
    "limits": {"host_bytes": 256 << 30, "container_bytes": 256 << 30, "host_free_bytes": 200 << 30,
               "locked_bytes": None, "shared_memory_bytes": 64 << 30, "disk_free_bytes": 1 << 40,
               "cpus": 16},
    "builds": {"compiler": "/usr/bin/gcc", "python_headers": True},
    "environment": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
}  # fmt: skip

# (what is different there, words of the problem, words of its fix)
WORSE = [
    (
        {"versions": {"transformers": "4.57.6"}},
        "transformers 4.57.6 is not supported",
        "transformers>=5.5,<6",
    ),
    (
        {"versions": {"transformers": "6.0.0.dev0"}},
        "transformers 6.0.0.dev0 is not supported",
        "<6",
    ),
    ({"versions": {"torch": "2.10.0"}}, "torch 2.10.0", "torch>=2.11"),
    ({"versions": {"python": "3.9.18"}}, "python 3.9.18", "Python 3.10"),
    ({"versions": {"triton": None}}, "no triton", "pip install triton"),
    ({"builds": {"compiler": None}}, "no C compiler", "apt-get install gcc"),
    ({"builds": {"python_headers": False}}, "Python.h", "python3-dev"),
    (
        {"gpus": [], "torch_cuda": None},
        "built for CPUs only, and there is a NVIDIA H100",
        "CUDA build",
    ),
    ({"gpus": []}, "driver 580.65 gives it no GPU", "update the driver"),
    (
        {"gpus": [], "environment": {"CUDA_VISIBLE_DEVICES": ""}},
        "CUDA_VISIBLE_DEVICES is ''",
        "unset",
    ),
    ({"gpus": [{"name": "T4", "bytes": 16 << 30, "capability": [7, 5]}]}, "no bfloat16", "Ampere"),
    ({"environment": {"TRITON_INTERPRET": "1"}}, "TRITON_INTERPRET", "unset"),
    ({"environment": {"CUDA_LAUNCH_BLOCKING": "1"}}, "CUDA_LAUNCH_BLOCKING", "unset"),
    (
        {"environment": {"PYTORCH_CUDA_ALLOC_CONF": ""}},
        "expandable segments",
        "expandable_segments:True",
    ),
    ({"limits": {"container_bytes": 32 << 30}}, "32.0 GiB of the machine's 256.0 GiB", "--memory"),
    ({"limits": {"locked_bytes": 64 << 10}}, "ulimit -l is 64.0 KiB", "memlock=-1"),
]


def with_changes(changes):
    facts = copy.deepcopy(GOOD)
    for key, value in changes.items():
        facts[key] = facts[key] | value if isinstance(value, dict) else value
    return facts


def test_a_good_machine_has_no_problem():
    assert doctor.problems(GOOD) == []


@pytest.mark.parametrize("changes, what, fix", WORSE, ids=[what for _, what, _ in WORSE])
def test_each_problem_is_found_with_its_fix(changes, what, fix):
    found = doctor.problems(with_changes(changes))
    matching = [p for p in found if what in p.what]
    assert len(matching) == 1 and fix in matching[0].fix, found
    assert len(found) == 1 or "PYTORCH_CUDA_ALLOC_CONF" not in changes.get("environment", {}), found


def test_several_gpus_need_shared_memory():
    changes = {"gpus": GOOD["gpus"] * 2, "limits": {"shared_memory_bytes": 64 << 20}}
    assert ["/dev/shm has 64.0 MiB" in p.what for p in doctor.problems(with_changes(changes))] == [
        True
    ]


def test_this_machine(capsys):
    assert main(["env", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["versions"]["torch"] and values["limits"]["host_bytes"] > 0


def test_an_absent_gpu_is_explained(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["env"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "none that torch can use: hfpatch plan, profile and the tests work" in out


def test_a_model_is_told_what_apply_makes_of_it(capsys):
    """By its verdict, from its config: no weights, no code of a repository."""
    assert main(["check", "llama-tiny"]) == 0
    out = capsys.readouterr().out
    assert (
        "2 of 2 layers run tile by tile" in out
        and "norms, RoPE, MLP, loss" in out
        and "packed   isolated" in out
    )
    assert main(["check", "llama-tiny", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "agrees"


def page_row(kind: str) -> dict[str, str]:
    """What docs/models.md says of a family: the usual cells, but for those of its row of the table
    of exceptions.
    """
    page = (Path(__file__).parent.parent.parent / "docs/models.md").read_text()
    [usual] = re.findall(r"the verdict agrees: (.*)\.$", page, re.M)
    if kind in usual.split(", "):
        return dict(families.COLUMNS)
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    row = next(row for row in rows if kind in row[0].split(", "))
    names = "|".join(families.COLUMNS)
    differs = re.findall(rf"({names}): (.*?)(?=; (?:{names}): |$)", " ".join(row[2:]))
    return families.COLUMNS | {"fused": row[1]} | dict(differs)


# A dense family, and experts with sinks and windows.
@pytest.mark.parametrize("kind", [
    kind if kind in ("olmo2", "gpt_oss") else pytest.param(kind, marks=pytest.mark.long)
    for kind in families.FAMILIES
])  # fmt: skip
def test_the_models_page_says_of_a_family_what_its_verdict_says(kind):
    found = families.support_of(kind, families.family_config(kind))
    assert families.table_row(found) == page_row(kind)
