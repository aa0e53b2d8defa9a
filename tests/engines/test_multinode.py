"""scripts/launch_multinode.sh: two "machines" on this one really meet, and a wrong environment is
one sentence.
"""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "launch_multinode.sh"
WORKER = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
print("sum", int(total), "of", dist.get_world_size(), sys.argv[1:], flush=True)
dist.barrier()
os._exit(0)
"""


def environment(**settings) -> dict:
    gone = (
        "WORLD_SIZE",
        "RANK",
        "MACHINE_RANK",
        "LOCAL_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "GPUS",
        "LAUNCHER",
        "CONFIG_FILE",
    )
    kept = {key: value for key, value in os.environ.items() if key not in gone}
    path = os.pathsep.join([str(Path(sys.executable).parent), kept["PATH"]])
    return {
        **kept,
        "PATH": path,
        "OMP_NUM_THREADS": "1",
        **{key: str(value) for key, value in settings.items()},
    }


def run(*arguments, **settings) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments],
        env=environment(**settings),
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["accelerate", "torchrun"])
def test_two_machines_meet(launcher, tmp_path):
    (tmp_path / "worker.py").write_text(WORKER)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    machines = [
        subprocess.Popen(
            ["bash", str(SCRIPT), "--launcher", launcher, str(tmp_path / "worker.py"), "--flag",
             "a b"],
            env=environment(WORLD_SIZE=2, MACHINE_RANK=rank, MASTER_ADDR="127.0.0.1",
                            MASTER_PORT=port, GPUS=1),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [machine.communicate(timeout=120)[0] for machine in machines]
    for rank, (machine, output) in enumerate(zip(machines, outputs)):
        assert machine.returncode == 0, output
        assert (f"machine 1 meets machine 0 at 127.0.0.1:{port}; " in output) == (rank == 1)
        assert "sum 3 of 2 ['--flag', 'a b']" in output


def test_the_command_says_what_the_environment_said():
    found = run(
        "t.py",
        "x",
        WORLD_SIZE=3,
        MACHINE_RANK=2,
        MASTER_ADDR="m0",
        MASTER_PORT=1234,
        GPUS=8,
        DRY_RUN=1,
    )
    assert found.returncode == 0
    for part in ("--num_machines 3", "--machine_rank 2", "--num_processes 24",
                 "--main_process_ip m0",
                 "--main_process_port 1234", "t.py x"):  # fmt: skip
        assert part in found.stdout
    config = ROOT / "fsdp_configs" / "fsdp2.yaml"
    found = run("t.py", GPUS=8, DRY_RUN=1, CONFIG_FILE=config)
    assert f"--config_file {config} t.py" in found.stdout and "--multi_gpu" not in found.stdout


@pytest.mark.parametrize(
    "settings,message",
    [
        (dict(WORLD_SIZE=2), "MASTER_ADDR must be the address of machine 0"),
        (
            dict(WORLD_SIZE=2, MACHINE_RANK=2, MASTER_ADDR="a"),
            "MACHINE_RANK must be from 0 to 1, got 2",
        ),
        (dict(WORLD_SIZE="two"), "WORLD_SIZE must be a whole number, got 'two'"),
        (dict(LAUNCHER="mpirun"), "LAUNCHER must be accelerate or torchrun, got 'mpirun'"),
        (dict(CONFIG_FILE="none.yaml"), "CONFIG_FILE must be a file, got none.yaml"),
        (dict(CONFIG_FILE="a.yaml", LAUNCHER="torchrun"), "CONFIG_FILE works with accelerate only"),
        (dict(GPUS=0), "GPUS must be from 1 to 1024, got 0"),
        (dict(GPUS=""), "GPUS must be a whole number, got ''"),
        (dict(WORLD_SIZE=0), "WORLD_SIZE must be from 1 to 100000, got 0"),
        (dict(MASTER_PORT=70000), "MASTER_PORT must be from 1 to 65535, got 70000"),
        (dict(MASTER_PORT=-1), "MASTER_PORT must be a whole number, got '-1'"),
        (dict(MACHINE_RANK="9" * 30), "MACHINE_RANK must be a whole number"),
    ],
)
def test_a_wrong_environment_is_one_sentence(settings, message):
    found = run("t.py", **{"GPUS": 1, "DRY_RUN": 1, **settings})
    assert found.returncode == 2 and found.stdout == ""
    assert (
        found.stderr.startswith("hfpatch: ")
        and message in found.stderr
        and found.stderr.count("\n") == 1
    )


def test_leading_zeros_are_no_octal():
    found = run("t.py", WORLD_SIZE="08", MACHINE_RANK="07", MASTER_ADDR="m0", GPUS="09", DRY_RUN=1)
    assert (
        found.returncode == 0
        and "--num_machines 8 --machine_rank 7 --num_processes 72" in found.stdout
    )


def test_no_command_is_a_failure(tmp_path):
    there = str(SCRIPT)
    for found in (run(GPUS=1), run("--launcher", GPUS=1), run("none.py", GPUS=1),
                  run(there, GPUS=1, WORLD_SIZE=2, MASTER_ADDR="no.host.invalid",
                      MASTER_WAIT=0)):  # fmt: skip
        assert found.returncode == 2 and found.stderr.startswith("hfpatch: ") and found.stdout == ""
    # No torch to count GPUs with; and no launcher.
    for name in ("bash", "env", "accelerate"):
        (tmp_path / name).symlink_to(shutil.which(name) or "/bin/true")
    (tmp_path / "python").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "python").chmod(0o755)
    found = run("t.py", PATH=str(tmp_path))
    assert found.returncode == 2 and "Set GPUS" in found.stderr
    found = run("t.py", PATH=str(tmp_path), LAUNCHER="torchrun", GPUS=1)
    assert found.returncode == 2 and "torchrun is not installed here" in found.stderr


@pytest.mark.parametrize("name", ["launch_multinode", "quickstart", "test"])
def test_help_is_the_scripts_own(name):
    found = subprocess.run(
        ["bash", str(SCRIPT.with_name(f"{name}.sh")), "--help"], capture_output=True, text=True
    )
    assert found.returncode == 0 and f"{name}.sh" in found.stdout and not found.stderr
    assert "set -" not in found.stdout and "#!" not in found.stdout and "case " not in found.stdout
