"""Ranks that share each sequence, under both contracts: exact gradients, whole rows' documents, one
decision for all.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file
from test_launch import HERE, ROOT, torchrun

from hfpatch.trainer import runs as folders

# float64 of one process, relative to the largest value; sums over ranks come in another order
CLOSE = 1e-12
# A float64 model of these families rounds norms, rotations or routers to float32: one step of that.
CLOSE_FAMILY = 1e-5


def check(reports: list[dict], n_cases: int) -> None:
    for report in reports:
        exact = dict(list(report["worst"].items())[:n_cases])
        assert len(exact) == n_cases
        assert not {name: error for name, error in exact.items() if not error <= CLOSE}
        assert not {
            name: error for name, error in report["worst"].items() if not error <= CLOSE_FAMILY
        }


def test_gradients_are_those_of_one_process(tmp_path):
    """Fewer KV heads than ranks, batch 1 and 2, packed, padded, zigzag, LoRA, every,
    tiers, saved or not, no label on a rank.
    """
    reports = torchrun("sequence_worker.py", "short", folder=tmp_path)
    check(reports, 12)
    for report in reports:
        assert report["calls"] > 12 * 3  # every layer's attention was exchanged
        positions, packed = report["said"]
        assert positions.startswith("hfpatch: sequences on several ranks need position_ids")
        assert "attention dropout does not work while ranks share" in packed
        labels, none, tokens = report["lengths"]
        for said in (labels, none, tokens):
            assert "all ranks that share a sequence must get parts of one shape" in said
        if report is reports[-1]:
            assert "rank 1 got input_ids (1, 12) and {'labels': (1, 10), 'position_ids'" in labels
            assert "rank 1 got input_ids (1, 12) and {'position_ids': (1, 12)}" in none
            assert "rank 1 got input_ids (1, 10) and {'labels': (1, 10), 'position_ids'" in tokens
        assert max(report["evaluation"]) <= 1e-6 and report["scores"] <= 1e-5
        parts, errors = report["parts"]
        said = (
            "does not work while ranks share",
            "mixes tokens by something other",
            "may mix tokens by something other",
        )
        assert len(parts) == 26 and not {
            n: s
            for n, s in parts.items()
            if not isinstance(s, str) or not any(w in s for w in said)
        }
        assert len(errors) == 2 and all(
            loss <= 2e-7 and grad <= CLOSE for loss, grad in errors.values()
        ), errors
        # on all, though one alone is short of host memory
        assert report["short"] == "attention of 0 layers"
        assert report["least"] == [10, 19, None]


@pytest.mark.parametrize("ways, free, speeds", [
    # The first rank has less memory, and it alone has a link to keep gate and up over.
    pytest.param("rows,weights,untiled", "2.5,1000", "1,0", marks=tiny.not_before_transformers(
        (5, 16), "splits weights by hooks, whose layers run untiled")),
    # The second rank's link is faster: it alone would keep gate and up.
    pytest.param("rows", "2.5,2.5", "1,10", marks=pytest.mark.long),
])  # fmt: skip
def test_ranks_on_other_devices_run_one_plan(ways, free, speeds, tmp_path):
    """The least of their plans, asked for in each step, where ranks share rows or split layers
    between them, tiled or not: with other plans one waits for an exchange that never comes.
    """
    reports = torchrun("agreed_worker.py", ways, free, speeds, folder=tmp_path)
    expected = {
        "rows": (2, 11, CLOSE, int(speeds == "1,10")),
        "weights": (2, 12, 1.0, 0),
        "untiled": (2, 12, 1.0, -1),
    }
    for way in ways.split(","):
        plain, asked, close, keep = expected[way]
        one, other = (report[way] for report in reports)
        assert one["own"][-1] != other["own"][-1]  # alone, they would not have run alike
        assert one["ran"] == other["ran"]
        keeps_all = [False] * (4 - plain) + [True] * plain
        assert one["ran"][-1] == [[plain, 1024, keep], keeps_all]
        assert one["asked"] == other["asked"] == asked
        assert max(one["worst"], other["worst"]) <= close


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_way_and_family(ranks, tmp_path):
    check(
        torchrun("sequence_worker.py", "all", folder=tmp_path, ranks=ranks, seconds=1500),
        12 + 2 * 3 * 3 * 4,
    )


class Runs:
    """hfpatch train on paragraphs of a few words, packed; one process, or ranks of which two share
    each row.
    """

    def __init__(self, folder: Path, engine: str):
        words = [f"word{i} of the sea" for i in range(400)]
        (folder / "a.txt").write_text(
            "\n\n".join(" ".join(words[i : i + 3 + i % 9]) for i in range(0, 380))
        )
        config = json.loads((ROOT / "ds_configs" / "zero3.json").read_text())
        config |= {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}
        (folder / "zero.json").write_text(json.dumps(config))
        self.folder = folder
        self.share = [
            "--placement",
            folder / "zero.json" if engine == "zero3" else engine,
            "--sp_size",
            2,
        ]
        self.common = [
            "--data", folder / "a.txt", "--text_unit", "paragraph", "--seq-len", 63, "--packing",
            "--use_cpu", True, "--seed", 3,
            "--validation_split", 0.1, "--eval_strategy", "steps", "--eval_steps", 4,
            "--save_steps", 3, "--logging_steps", 1,
            "--per_device_train_batch_size", 1, "--report_to", "none", "--disable_tqdm", True,
            "--lr_scheduler_type", "constant", "--cache_dir", folder / "cache",
        ]  # fmt: skip
        self("model", 1, "--model", "llama-tiny", "--train_tokenizer", 300, "--max_steps", 1)
        self.common += ["--model", folder / "model"]

    def __call__(self, name: str, ranks: int, *more) -> list[dict]:
        """The losses in training, then those in evaluation."""
        words = [
            *map(
                str,
                [
                    *self.common,
                    "--output_dir",
                    self.folder / name,
                    *self.share * (ranks > 1),
                    *more,
                ],
            )
        ]
        if ranks == 1:
            from hfpatch.cli.train import main

            assert main(words) == 0
        else:
            run = self.start(ranks, words)
            assert run.wait(timeout=300) == 0, (self.folder / "log.txt").read_text()[-4000:]
        rows = json.loads((self.folder / name / "trainer_state.json").read_text())["log_history"]
        return [row[kind] for kind in ("loss", "eval_loss") for row in rows if kind in row]

    def start(self, ranks: int, words: list[str], **more) -> subprocess.Popen:
        run = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node",
            str(ranks),
            "train_worker.py",
        ]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **more}
        with (self.folder / "log.txt").open("w") as log:
            return subprocess.Popen(
                [sys.executable, *run, *words],
                cwd=HERE,
                env=env,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def ended(self, how: str, name: str, checkpoint: str, *more) -> None:
        """Two ranks, of which the last is ended by SIGKILL ("killed"), or fails in the middle of an
        exchange, as soon as that checkpoint is whole: the other ends within a minute.
        """
        words = [*self.common, "--output_dir", self.folder / name, *more, *self.share]
        there = self.folder / name / checkpoint
        run = self.start(
            2, [*map(str, words)], **({} if how == "killed" else {"FAILS": str(there)})
        )
        ranks, began = {}, time.monotonic()
        while (
            run.poll() is None
            and there not in folders.checkpoints(there.parent)
            and time.monotonic() - began < 200
        ):
            ranks = processes_of(run.pid) if len(ranks) < 2 else ranks
            time.sleep(0.02)
        if how == "killed":
            os.kill(ranks[1], signal.SIGKILL)
        assert run.wait(timeout=60) != 0 and not any(map(running, ranks.values()))
        assert there in folders.checkpoints(there.parent)
        assert how == "killed" or "a kernel failed" in (self.folder / "log.txt").read_text()


def processes_of(launcher: int) -> dict[int, int]:
    """The process ids of the launcher's ranks."""
    found = {}
    for pid in map(int, Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()):
        words = Path(f"/proc/{pid}/environ").read_text().split("\0")
        found |= {int(word[5:]): pid for word in words if word.startswith("RANK=")}
    return found


def running(pid: int) -> bool:
    return Path(f"/proc/{pid}/cmdline").exists() and bool(
        Path(f"/proc/{pid}/cmdline").read_bytes()  # empty of a process that has ended
    )


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    return lambda engine: Runs(tmp_path, engine)


@pytest.mark.long
def test_hfpatch_train_shares_rows(runs):
    """Losses in training and in evaluation are those of one process."""
    train = runs("zero3")
    more = ["--max_steps", 2, "--eval_steps", 2, "--save_strategy", "no"]
    one, two = train("one", 1, *more), train("two", 2, *more)
    assert one == pytest.approx(two, rel=2e-6) and len(one) == 3


@pytest.mark.long
@pytest.mark.parametrize("engine", ["zero3", "fsdp2"])
def test_weights_are_written_where_the_rest_fails(engine, runs):
    """Of all ranks, in the final save, whose config cannot be written; no rank waits for ever."""
    train = runs(engine)
    words = [*train.common, *train.share, "--output_dir", train.folder / "two", "--max_steps", 1]
    words += ["--save_strategy", "no", "--eval_strategy", "no"]
    run = train.start(2, [*map(str, words)], SAVES_NO_CONFIG="1")
    assert run.wait(timeout=200) != 0
    assert "no config today" in (train.folder / "log.txt").read_text()
    saved = [load_file(train.folder / name / "model.safetensors") for name in ("model", "two")]
    assert {n: x.shape for n, x in saved[0].items()} == {n: x.shape for n, x in saved[1].items()}
    assert all(torch.isfinite(x).all() for x in saved[1].values())


@pytest.mark.long
@pytest.mark.parametrize("engine", ["zero3", "fsdp2"])
def test_hfpatch_train_on_ranks_is_one_process(engine, runs):
    """The same losses, in training and evaluation, packed rows, with and without an end in the
    middle of an epoch.
    """
    train = runs(engine)
    one, two = train("one", 1, "--max_steps", 5), train("two", 2, "--max_steps", 5)
    assert one == pytest.approx(two, rel=2e-6) and len(one) == 7
    for how in ("killed", "failed"):
        train.ended(how, how, "checkpoint-3", "--max_steps", 5)
    assert train("killed", 2, "--max_steps", 5, "--resume_from_checkpoint", True) == two


@pytest.mark.long
@pytest.mark.parametrize("engine", ["zero3", "fsdp2"])
def test_a_mesh_of_four_goes_on_with_another(engine, runs):
    """Two pairs of ranks, each with rows of its own, are one process, however many micro-batches a
    step has; saved in the middle of an epoch, the run goes on with four that share each row, and on
    two ranks, where the engine's files allow that.
    """
    train = runs(engine)
    more = ["--max_steps", 5, "--gradient_accumulation_steps"]
    one = train("one", 1, *more, 4)
    four = train("four", 4, "--max_steps", 3, "--gradient_accumulation_steps", 2)
    assert one[:3] == pytest.approx(four[:3], rel=2e-6)
    # The odd number of micro-batches: one, and each pair has every other row.
    alone, odd = (
        train(name, ranks, "--max_steps", 3, "--gradient_accumulation_steps", n)
        for name, ranks, n in (("alone", 1, 2), ("odd", 4, 1))
    )
    assert alone == pytest.approx(odd, rel=2e-6) and len(odd) == 4
    resume = ["--resume_from_checkpoint", True]
    shutil.copytree(train.folder / "four", train.folder / "two")

    def goes_on(name: str, *given) -> None:
        found = train(name, *given, *more, 4, *resume)
        del found[5]  # evaluated after its third step, which was its last
        assert one == pytest.approx(found, rel=2e-6) and len(one) == 7

    goes_on("four", 4, "--sp_size", 4)
    if engine == "fsdp2":
        return goes_on("two", 2)
    with pytest.raises(AssertionError, match="under ZeRO, 4, got 2"):
        train("two", 2, *more, 4, *resume)
