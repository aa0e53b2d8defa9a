"""What the fault tests of the training script share: the fixtures of tests/trainer, and the script
in a process of its own.
"""

import importlib.util
import os
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "trainer"))
_spec = importlib.util.spec_from_file_location(
    "training_fixtures", ROOT / "tests" / "trainer" / "conftest.py"
)
_fixtures = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_fixtures)
texts, tokenizer, saved_tokenizer, run_train = (
    getattr(_fixtures, name) for name in ("texts", "tokenizer", "saved_tokenizer", "run_train")
)


def flags(folder: Path, saved_tokenizer: Path, **more) -> list[str]:
    """The flags of a tiny run of 100,000 steps in folder/run."""
    values = {
        "model": "llama-tiny", "config_overrides": "vocab_size=300,num_hidden_layers=2",
        "tokenizer": saved_tokenizer,
        "data": Path(sysconfig.get_path("stdlib")) / "json", "data_glob": "*.py", "packing": True,
        "seq_len": 32, "per_device_train_batch_size": 2, "max_steps": 100_000, "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True, "use_cpu": True, "cache_dir": folder / "cache",
        "output_dir": folder / "run",
        "save_strategy": "no",
    } | more  # fmt: skip
    return [str(word) for name, value in values.items() for word in (f"--{name}", value)]


def environment() -> dict:
    kept = {
        k: v
        for k, v in os.environ.items()
        if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")
    }
    return kept | {
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": str(ROOT),
        "DS_ACCELERATOR": "cpu",
    }


def spawn(command, out: Path) -> subprocess.Popen:
    with open(out, "w") as file:
        return subprocess.Popen(
            [sys.executable, *map(str, command)], stdout=file, stderr=subprocess.STDOUT,
            env=environment(),
            start_new_session=True,
            # A shell's background ignores Ctrl-C, and so would all that pytest starts there.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip


def until(found, process: subprocess.Popen, out: Path, seconds: float = 120) -> None:
    """Waits until found(text so far) while the process lives; fails with its output."""
    end = time.monotonic() + seconds
    while not found(out.read_text()):
        assert process.poll() is None, out.read_text()[-3000:]
        assert time.monotonic() < end, out.read_text()[-3000:]
        time.sleep(0.05)


def end_group(process: subprocess.Popen) -> None:
    """Ends all that a spawned process left."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
