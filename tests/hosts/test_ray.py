"""`hfpatch run` and Ray: the actors of a cluster that the run started have the run's hook; those of
a cluster that was there before train stock, and the run says so.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import trainer
from trainer.workbench import PLACES, execute, variables_of

pytest.importorskip("ray")
ONE_STEP = Path(trainer.__path__[0]) / "one_step.py"
# Without a token, which Ray would write into the home folder.
VARIABLES = {"PYTHONPATH": PLACES, "RAY_AUTH_MODE": "disabled"}

TRAINS = f"""
import runpy, sys
import ray

@ray.remote
def trains(folder):
    sys.argv[1:] = [folder]
    runpy.run_path({str(ONE_STEP)!r}, run_name="__main__")

folder, address = sys.argv[1:]
own = {{"num_cpus": 1, "include_dashboard": False}} if address == "local" else {{}}
ray.init(address=address, **own)
ray.get(trains.remote(folder))
"""
CLUSTER = """
import ray
context = ray.init(address="local", num_cpus=1, include_dashboard=False)
print(context.address_info["gcs_address"], flush=True)
input()
"""


def layers_of(folder: Path, address: str):
    """(exit code, the libraries of the first layer's classes, stderr) of a run under --require."""
    folder.mkdir()
    script = folder / "script.py"
    script.write_text(TRAINS)
    run = (sys.executable, "-m", "hfpatch", "run", "--require", sys.executable, script)
    code, _, err = execute(*run, folder, address, **VARIABLES)
    assert any(folder.glob("rank*.json")), err
    [found] = [json.loads(file.read_text()) for file in folder.glob("rank*.json")]
    return code, {module.partition(".")[0] for module in found["layer"]}, err


def test_a_cluster_of_the_run_is_reached(tmp_path):
    code, libraries, err = layers_of(tmp_path / "own", "local")
    assert code == 0 and "hfpatch" in libraries, err


def test_a_cluster_from_before_the_run_trains_stock(tmp_path):
    before = subprocess.Popen(
        [sys.executable, "-c", CLUSTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=variables_of(**VARIABLES),
    )  # fmt: skip
    with before:
        code, libraries, err = layers_of(tmp_path / "theirs", before.stdout.readline().strip())
        before.communicate("\n", timeout=60)
    assert code == 3 and "hfpatch" not in libraries, err
    assert "no process of this run trained a patched model" in err
