"""`python -m hfpatch run` on scripts that know nothing of hfpatch, and the two examples."""

import importlib.util
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
from workbench import ROOT, WHOLE, execute

from hfpatch.context.classes import is_mixed


@pytest.fixture(autouse=True)
def allocator_as_it_is(monkeypatch):
    """What an example sets is gone after the test."""
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)


@pytest.fixture
def model_folder(run_train, chat_file):
    code, _, err, folder = run_train(
        "base", data=chat_file, data_glob=None, seq_len=128, max_steps=1
    )
    assert code == 0, err
    return folder


SFT = """
import sys
from pathlib import Path
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

args = SFTConfig(output_dir=sys.argv[3], max_steps=2, per_device_train_batch_size=2, max_length=64, save_strategy="no",
                 logging_steps=1, report_to="none", use_cpu=True, bf16=False, dataloader_pin_memory=False,
                 disable_tqdm=True, gradient_checkpointing=False)
data = load_dataset("json", data_files=sys.argv[2], split="train")
trainer = SFTTrainer(model=sys.argv[1], args=args, train_dataset=data)
trainer.train()
print("LAYER", type(trainer.model.model.layers[0]).__mro__[1].__module__, "LOSSES",
      [e["loss"] for e in trainer.state.log_history if "loss" in e])
"""


@tiny.LONG  # tests/hosts has TRL's own command, which gives its trainer a string too
def test_sft_script_with_a_model_from_a_string_is_patched_unmodified(
    model_folder, chat_file, tmp_path
):
    script = tmp_path / "user_sft.py"
    script.write_text(SFT)
    found = {}
    for name, prefix in (("stock", []), ("patched", ["-m", "hfpatch", "run"])):
        code, out, err = execute(
            sys.executable, *prefix, script, model_folder, chat_file, tmp_path / name
        )
        assert code == 0 and not WHOLE.search(err), err
        layer, _, losses = out.rpartition("LAYER ")[2].strip().partition(" LOSSES ")
        found[name] = (
            layer,
            [float(x) for x in losses.strip("[]").split(",")],
            "hfpatch on LlamaForCausalLM" in err,
        )
    assert found["stock"][0].startswith("transformers.") and found["patched"][0].startswith(
        "hfpatch."
    )
    assert found["patched"][2] and not found["stock"][2]
    assert found["patched"][1] == pytest.approx(found["stock"][1], rel=1e-4)


def example(name):
    spec = importlib.util.spec_from_file_location(
        f"example_{name}", ROOT / "hfpatch/examples" / f"{name}.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


# of datasets' and TRL's own use of their dependencies
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_examples_run_on_the_tiny_model(model_folder, chat_file, tmp_path, texts):
    (tmp_path / "text.txt").write_text(texts[0])
    for name, data in (("trainer", tmp_path / "text.txt"), ("sft", chat_file)):
        # the optimizer's own compilation would take most of the time
        with torch.compiler.set_stance("force_eager"):
            trainer = example(name).main(str(model_folder), str(data), str(tmp_path / name))
        assert (
            trainer.optimizer.optimizer.bf16_stochastic_round
            and trainer.model.dtype == torch.bfloat16
        )
        lines = [entry for entry in trainer.state.log_history if "loss" in entry]
        assert len(lines) == 4 and all("tokens_per_second" in entry for entry in lines)
        assert is_mixed(trainer.model.model.norm)


@pytest.mark.filterwarnings("ignore")  # of datasets' and TRL's own use of their dependencies
@pytest.mark.parametrize(
    "name, more", [("dpo", {"max_length": 256}), ("grpo", {"max_completion_length": 4})]
)
def test_preference_examples_run_on_the_tiny_model(model_folder, tmp_path, name, more):
    trl = pytest.importorskip("trl")
    if not hasattr(trl.trainer.utils, "add_fused_lm_head"):
        pytest.skip(f"trl {trl.__version__} has no fused head")
    rows = [
        {"prompt": f"{i} and {i}?", "chosen": f" It is {2 * i}.", "rejected": f" {i}"}
        for i in range(8)
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text(
        "".join(
            json.dumps(row if name == "dpo" else {"prompt": row["prompt"]}) + "\n" for row in rows
        )
    )
    with torch.compiler.set_stance("force_eager"):
        trainer = example(name).main(str(model_folder), str(data), str(tmp_path / name), **more)
    models = [trainer.model, trainer.ref_model] if name == "dpo" else [trainer.model]
    assert all(is_mixed(m) and m._hfpatch_trl is not None for m in models)
    assert len([entry for entry in trainer.state.log_history if "loss" in entry]) == 2


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
