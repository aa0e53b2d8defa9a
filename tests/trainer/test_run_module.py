"""`python -m hfpatch run` on scripts that know nothing of hfpatch, and the two examples."""

import json
import os
import re
import runpy
import sys
import tempfile
from pathlib import Path

import engine_script
import numerics
import pytest
import tiny
import torch
import transformers
from packaging.version import Version
from workbench import ROOT, execute


@pytest.fixture(autouse=True)
def allocator_as_it_is(monkeypatch):
    """What an example sets is gone after the test."""
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["trainer", "sft", "dpo", "grpo", "qlora"])
@pytest.mark.parametrize("own", [None, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_examples_have_the_allocator_grow_its_segments(name, own, monkeypatch):
    """Before torch is imported, and not where the user says otherwise, by either name."""
    if own:
        monkeypatch.setenv(own, "max_split_size_mb:128")
    source = (ROOT / f"hfpatch/examples/{name}.py").read_text()
    before, *_ = re.split(r"^(?:import|from) (?!os$|sys$|pathlib )", source, flags=re.M)
    exec(compile(before, name, "exec"), {})
    wanted = {None: "expandable_segments:True", "PYTORCH_ALLOC_CONF": "max_split_size_mb:128"}
    assert os.environ.get("PYTORCH_ALLOC_CONF") == wanted.get(own)


# of datasets' and TRL's own use of their dependencies
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["trainer", "sft", "dpo", "grpo", "qlora"])
def test_examples_without_their_arguments_name_them(name, monkeypatch):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "model"])
    with pytest.raises(SystemExit, match=f"python -m hfpatch.examples.{name} MODEL"):
        runpy.run_path(str(ROOT / f"hfpatch/examples/{name}.py"), run_name="__main__")


@pytest.mark.filterwarnings("ignore")  # of datasets' and TRL's own use of their dependencies
@pytest.mark.parametrize("name", ["trainer", "sft", "dpo", "grpo", "qlora"])
def test_examples_run_as_they_stand(name, monkeypatch, capsys, tmp_path):
    """`--small`: a tiny model and made data on a CPU; nothing is read or downloaded."""
    if name != "trainer":
        pytest.importorskip("bitsandbytes" if name == "qlora" else "trl")
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--small"])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    try:
        runpy.run_path(str(ROOT / f"hfpatch/examples/{name}.py"), run_name="__main__")
    finally:
        torch.compiler.set_stance("default")
    assert "'loss'" in capsys.readouterr().out


FSDP2 = pytest.param(
    "fsdp2",
    marks=[
        tiny.LONG,
        pytest.mark.skipif(
            Version(transformers.__version__) < Version("5.17"),
            reason="Trainer reads a version 2 fsdp_config from 5.17 on",
        ),
    ],
)


# tests/engines has both in the plain suite, test_run_commands.py a run under DeepSpeed's launcher
@pytest.mark.parametrize("kind", [pytest.param("zero3", marks=tiny.LONG), FSDP2])
def test_unmodified_script_under_an_engine(kind, tmp_path):
    """Two processes: the layers are ours, the engine is really on, the losses are those of one
    stock process.
    """
    if kind == "zero3":
        pytest.importorskip("deepspeed")
    script = Path(__file__).parent / "engine_script.py"
    sections = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    automatic = (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
    )
    config = {"zero_optimization": {"stage": 3, **sections}, **dict.fromkeys(automatic, "auto")}
    config["zero_force_ds_cpu_optimizer"] = False  # else DeepSpeed builds its CPU Adam in C++
    (tmp_path / "zero.json").write_text(json.dumps(config))
    launcher = {
        "zero3": ["accelerate.commands.launch", "--num_processes", 2, "--num_machines", 1,
                  "--use_deepspeed",
                  "--deepspeed_config_file", tmp_path / "zero.json", "--mixed_precision", "no",
                  "--dynamo_backend",
                  "no", "--zero3_init_flag", "false"],
        "fsdp2": ["torch.distributed.run", "--standalone", "--nproc_per_node", 2],
    }[kind]  # fmt: skip
    code, out, err = execute(
        sys.executable, "-m", "hfpatch", "run", "-m", *launcher, script, kind, tmp_path
    )
    assert code == 0, out + err
    reports = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("rank*.json"))]
    assert len(reports) == 2 and err.count("hfpatch on LlamaForCausalLM") == 1, (
        "the report once, by the first rank"
    )
    plain = engine_script.losses(engine_script.train(tmp_path / "plain", batch=2))
    exact = engine_script.losses(
        engine_script.train(tmp_path / "exact", batch=2, dtype=torch.float64)
    )
    for report in reports:
        assert any(module.startswith("hfpatch.") for module in report["layer"])
        assert report["engine"] == {"zero3": "DEEPSPEED", "fsdp2": "FSDP"}[kind]
        assert report["sharded"] if kind == "zero3" else report["weight"] == "DTensor"
        numerics.assert_close(
            *(torch.tensor(x, dtype=torch.float64) for x in (report["losses"], plain, exact)),
            dtype=torch.float32,
        )
