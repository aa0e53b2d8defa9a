"""Helpers of the training tests: where things are, a run's log, a chat template of our own."""

import json
import os
import re
import subprocess
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLACES = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
JSON_SOURCES = Path(sysconfig.get_path("stdlib")) / "json"
# What reports say of layers that do not run in tiles.
WHOLE = re.compile(r"\b(runs?|checkpointed) whole\b")

# Llama 3's layout with plain words: no {% generation %} markers, tools listed first, content
# trimmed.
TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}<tools>{% for tool in tools %}{{ tool.function.name }};{% endfor %}</tools>{% "
    "endif %}"
    "{% for m in messages %}<{{ m.role }}>\n{% if m.tool_calls is defined %}"
    "{% for call in m.tool_calls %}[{{ call.function.name }}]{% endfor %}{% else %}{{ m.content | "
    "trim }}{% endif %}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<assistant>\n{% endif %}"
)


def history(folder: Path) -> list[dict]:
    """The log of the last checkpoint, or of trainer_state.json in the folder itself."""
    saved = folder.glob("checkpoint-*/trainer_state.json")
    by_step = sorted(saved, key=lambda state: int(state.parent.name.rpartition("-")[2]))
    states = [folder / "trainer_state.json", *by_step]
    return json.loads([s for s in states if s.is_file()][-1].read_text())["log_history"]


def variables_of(**more) -> dict[str, str]:
    """The environment of a child of a test: this checkout, the environment's commands, no network,
    one thread.
    """
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PATH": os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")]),
        "PYTHONPATH": PLACES,
        "DS_ACCELERATOR": "cpu",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HUB_OFFLINE": "1",
        **{name: str(value) for name, value in more.items()},
    }


def execute(*command, **more) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command, with these environment variables."""
    done = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        timeout=500,
        env=variables_of(**more),
    )
    return done.returncode, done.stdout, done.stderr
