"""`hfpatch run` before launchers and other trainers' commands: what trains is patched, or the run
says so.

Commands that are not installed here are played by scripts that start their processes as those do.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny
from workbench import PLACES, WHOLE, execute, variables_of

RUN = (sys.executable, "-m", "hfpatch", "run")
ONE_STEP = Path(__file__).parent / "one_step.py"
TRAINS = f"import runpy, sys; runpy.run_path({str(ONE_STEP)!r}, run_name='__main__')\n"
WARNING = "no process of this run trained a patched model"

# ms-swift starts its module's file by python, or by torchrun where the environment asks for several
# processes.
SWIFT = """
import os, subprocess, sys
file, count = "{site}/swift/cli/sft.py", os.environ.get("NPROC_PER_NODE")
command = ["torchrun", "--standalone", "--nproc_per_node", count] if count else [sys.executable]
sys.exit(subprocess.run([*command, file, *sys.argv[2:]]).returncode)
"""
# Axolotl becomes accelerate launch, which starts its module.
AXOLOTL = """
import os, sys
command = ["accelerate", "launch", "--num_processes", "1", "--num_machines", "1", "--cpu", "--mixed_precision", "no",
           "--dynamo_backend", "no", "-m", "axolotl.cli.train", *sys.argv[2:]]
os.execvpe(command[0], command, os.environ)
"""
# LLaMA-Factory trains in its own process, or starts a file of its own by torchrun with a copy of
# the environment.
LLAMAFACTORY = """
import copy, os, subprocess, sys
if os.environ.get("FORCE_TORCHRUN"):
    command = ["torchrun", "--standalone", "--nproc_per_node", "1", "{site}/llamafactory/launcher.py", *sys.argv[2:]]
    sys.exit(subprocess.run(command, env=copy.deepcopy(dict(os.environ)), check=True).returncode)
sys.argv[1:] = sys.argv[2:]
import llamafactory.launcher
"""
PLAYED = {
    "swift": (SWIFT, "swift/cli/sft.py"),
    "axolotl": (AXOLOTL, "axolotl/cli/train.py"),
    "llamafactory-cli": (LLAMAFACTORY, "llamafactory/launcher.py"),
}


def played(folder: Path, name: str) -> Path:
    """The command's script, and beside it the package with the module that trains."""
    text, module = PLAYED[name]
    file, site = folder / name, folder / "site"
    (site / module).parent.mkdir(parents=True)
    (site / module).write_text(TRAINS)
    file.write_text(
        f"#!{sys.executable}\nimport sys; sys.path.append('{site}')\n"
        + text.replace("{site}", str(site))
    )
    file.chmod(0o755)
    return file


def reports(folder: Path) -> list[dict]:
    return [json.loads(file.read_text()) for file in sorted(folder.glob("rank*.json"))]


def assert_patched(folder: Path, ranks: int, err: str) -> None:
    """Each rank ran our layers, and one of them printed the report."""
    found = reports(folder)
    assert len(found) == ranks and all(report["ranks"] == ranks for report in found)
    assert all(any(module.startswith("hfpatch.") for module in report["layer"]) for report in found)
    assert err.count("hfpatch on LlamaForCausalLM") == 1 and WARNING not in err
    assert "2 x LlamaDecoderLayer" in err and not WHOLE.search(err)


@tiny.LONG
@pytest.mark.parametrize(
    "name, variables", [("swift", {}), ("axolotl", {}), ("llamafactory-cli", {"FORCE_TORCHRUN": 1})]
)
def test_other_trainers_commands_are_patched(name, variables, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    places = os.pathsep.join([str(tmp_path / "site"), PLACES])
    code, _, err = execute(
        *RUN, "--require", played(tmp_path, name), "train", out, PYTHONPATH=places, **variables
    )
    assert code == 0, err
    assert_patched(out, 1, err)


LAUNCHERS = {
    "accelerate": ["accelerate", "launch", "--multi_gpu", "--num_processes", 2, "--num_machines", 1,
                   "--mixed_precision", "no",
                   "--dynamo_backend", "no"],
    "torchrun": ["torchrun", "--standalone", "--nproc_per_node", 2],
    "deepspeed": ["deepspeed", "--num_gpus", 1, "--no_local_rank"],
}  # fmt: skip


@tiny.LONG
@pytest.mark.parametrize("launcher, outer", [("accelerate", ()), ("torchrun", (*RUN, "--require"))])
def test_a_run_in_each_process_of_a_launcher(launcher, outer, tmp_path):
    """`torchrun -m hfpatch run`, alone or within a run, whose processes then belong to the outer
    one.

    test_run_module.py has `hfpatch run` before a launcher, under engines.
    """
    code, _, err = execute(*outer, *LAUNCHERS[launcher], *RUN[1:], ONE_STEP, tmp_path)
    assert code == 0, err
    assert_patched(tmp_path, 2, err)


@tiny.LONG
def test_deepspeed_launcher(tmp_path):
    pytest.importorskip("deepspeed")
    code, _, err = execute(*RUN, "--require", *LAUNCHERS["deepspeed"], ONE_STEP, tmp_path)
    assert code == 0, err
    assert_patched(tmp_path, 1, err)


@pytest.mark.parametrize("way", [["-I", "-c"], ["-c"]])
def test_a_process_that_escapes_is_warned_of(way, tmp_path):
    """Isolated mode and another PYTHONPATH hide the hook: the run trains stock, says so, and
    --require makes that a failure.
    """
    script = "import sys; sys.path.append('.'); sys.exit('Watch' in str(sys.meta_path))"
    for option, code in (((), 0), (("--require",), 3)):
        done = execute(*RUN, *option, "env", "PYTHONPATH=", sys.executable, *way, script)
        assert done[0] == code and WARNING in done[2]


@pytest.mark.parametrize(
    "script, code", [("import sys; sys.exit(7)", 7), ("import os; os.kill(os.getpid(), 15)", -15)]
)
def test_the_commands_own_exit_code_wins(script, code):
    done = execute(*RUN, "--require", sys.executable, "-c", script)
    assert done[0] == code and WARNING not in done[2]


def test_a_run_within_a_run_keeps_its_own_require():
    """It judges its own command: no other that trained within the outer run, before or after."""
    run, python = " ".join(RUN), sys.executable
    trains = f"{python} -c 'from hfpatch.trainer import marks; marks.mark_trained()'"
    nothing = f"{python} -c pass"
    for words, code in (
        (f"{run} --require {trains}; {run} --require {nothing}", 3),
        (f"{run} {nothing} && {run} --require {trains}", 0),
    ):
        done = execute(*RUN, "--require", "bash", "-c", words)
        assert done[0] == code and done[2].count(WARNING) == (code == 3), done[2]


def test_script_sees_its_own_name_arguments_and_folder(tmp_path):
    (tmp_path / "beside.py").write_text("value = 7\n")
    (tmp_path / "user.py").write_text(
        "import sys, beside\nprint(__name__, sys.argv[1:], beside.value)\n"
    )
    code, out, err = execute(*RUN, tmp_path / "user.py", "--flag", "1", "--help")
    assert code == 0 and out == "__main__ ['--flag', '1', '--help'] 7\n" and WARNING in err


def test_nothing_is_left_and_a_process_that_trains_nothing_loads_nothing(tmp_path):
    """No file stays in the temporary folder; the hook is the one module that a bare process has
    more.
    """
    script = "import sys; print(*sorted(sys.modules))"
    stock = execute(sys.executable, "-c", script)[1].split()
    code, out, _ = execute(*RUN, sys.executable, "-c", script, TMPDIR=tmp_path)
    assert (
        code == 0
        and set(out.split()) - set(stock) <= {"sitecustomize"}  # some systems' Python has one
        and not list(tmp_path.iterdir())
    )


def test_what_needs_no_library_is_refused_before_any_loads(tmp_path):
    """Libraries load for many seconds."""
    (tmp_path / "broken.yaml").write_text("a: [")
    script = (
        "import sys; from hfpatch.cli.train import main; "
        "print(*(main(words.split()) for words in sys.argv[1:]), 'torch' in sys.modules)"
    )
    files = f"train {tmp_path}/none.json {tmp_path}/broken.yaml".split()
    _, out, err = execute(sys.executable, "-c", script, *files, "--model a --data b --max_steps -5")
    assert out == "2 2 2 2 False\n" and "--max_steps must be -1 or more, got -5." in err


def test_a_sitecustomize_that_was_there_runs_too(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import os; os.environ['OF_THE_SITE'] = 'yes'\n")
    script = (
        "import os, sys, sitecustomize; print(sitecustomize.__file__, "
        "os.environ.pop('OF_THE_SITE'), sys.meta_path[0])"
    )
    places = os.pathsep.join([str(tmp_path), PLACES])
    code, out, err = execute(
        *RUN, "env", "-u", "OF_THE_SITE", sys.executable, "-c", script, PYTHONPATH=places
    )
    assert code == 0 and out.startswith(f"{tmp_path}/sitecustomize.py yes <") and "Watch" in out, (
        out + err
    )


def test_signals_reach_the_command(tmp_path):
    """SIGTERM ends in the command's own handler; where the run itself is killed, its command ends
    too.
    """
    script = ("import pathlib, signal, sys, time; signal.signal(15, lambda *_: (pathlib.Path(sys.argv[1]).write_text('end'),"
              " sys.exit(5))); print('ready', flush=True); time.sleep(60)")  # fmt: skip
    for number, code in ((signal.SIGTERM, 5), (signal.SIGKILL, -9)):
        if number == signal.SIGKILL and sys.platform != "linux":
            continue
        file = tmp_path / str(number)
        run = subprocess.Popen([*RUN, sys.executable, "-c", script, str(file)],
                               stdout=subprocess.PIPE,
                               stderr=subprocess.DEVNULL,
                               env=variables_of(TMPDIR=tmp_path))  # fmt: skip
        with run:
            assert run.stdout.readline() == b"ready\n"
            run.send_signal(number)
            assert run.wait(60) == code
            end = time.monotonic() + 60
            while not file.is_file() and time.monotonic() < end:
                time.sleep(0.05)
        assert file.is_file()
        if number != signal.SIGKILL:
            assert not list(tmp_path.glob("hfpatch-run-*")), "nothing is left behind"


def hears_ctrl_c():
    """A shell's background ignores Ctrl-C, and so would all that pytest starts there."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def required(script: str, tmp_path) -> subprocess.Popen:
    """`hfpatch run --require` of a script, in a session of its own."""
    return subprocess.Popen(
        [*RUN, "--require", sys.executable, "-c", script], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env=variables_of(TMPDIR=tmp_path), start_new_session=True,
        preexec_fn=hears_ctrl_c,
    )  # fmt: skip


def test_an_interrupted_command_ends_the_run_as_it_ended(tmp_path):
    """KeyboardInterrupt in the command, no traceback of the run's own."""
    script = "import time; print('ready', flush=True); time.sleep(60)"
    with required(script, tmp_path) as run:
        assert run.stdout.readline() == b"ready\n"
        run.send_signal(signal.SIGINT)
        err = run.stderr.read().decode()
        assert run.wait(60) == -signal.SIGINT
    assert err.count("Traceback") == 1 and WARNING not in err and not list(tmp_path.iterdir())
