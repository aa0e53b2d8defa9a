"""The dry device itself is sound: what of a real CUDA torch works on it (sound_worker.py)."""

import json
import re
import subprocess

import pytest

from tests.dry.conftest import HERE, command, environment

SOURCE = (HERE / "sound_worker.py").read_text()
CHECKS = re.findall(r"^def check_(\w+)", SOURCE, re.M)


def answers_on(sm: int) -> dict:
    words = command(str(HERE / "sound_worker.py"))
    run = subprocess.run(words, env=environment(DRY_SM=sm), capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def answers():
    return answers_on(90)


@pytest.mark.parametrize("check", CHECKS)
def test_real_torch_works_on_it(check, answers):
    assert answers[check] == "ok"


@pytest.mark.long
@pytest.mark.parametrize("sm", [80, 100])
def test_other_cards(sm):
    assert set(answers_on(sm).values()) == {"ok"}
