"""A profile's steps on the CPU: what holds a step's memory, and an out-of-memory error."""

import json
import pickle

import pytest
import torch

from hfpatch.lab.presets import preset_config
from hfpatch.lab.profile import step
from hfpatch.lab.profile.options import Options
from hfpatch.lab.profile.report import markdown
from hfpatch.lab.profile.simulated import follow


def options(tmp_path, **changes):
    wanted = {
        "model": "llama-tiny",
        "seq_len": 96,
        "steps": 1,
        "device": "cpu",
        "folder": str(tmp_path),
    }
    return Options(**{**wanted, **changes})


def followed(wanted):
    run, used = step.measure_steps(wanted)
    return follow(run, wanted, used)


def test_takes_the_names_that_a_plan_takes():
    """Of a preset by its id on the hub without asking the hub."""
    assert step.load_config("meta-llama/Llama-3.2-1B-Instruct").hidden_size == 2048
    with pytest.raises(
        ValueError,
        match="^hfpatch: there is no model folder or config.json at nothing.json. ",
    ):
        step.load_config("nothing.json")


@pytest.mark.parametrize("values, words", [
    ({"model_type": "theirs"}, "model_type must be one of transformers', got 'theirs'. "),
    ({}, ".* lacks model_type"),
])  # fmt: skip
def test_a_model_type_that_transformers_does_not_know_has_one_sentence(tmp_path, values, words):
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=f"^hfpatch: {words}"):
        step.load_config(str(tmp_path / "config.json"))


@pytest.mark.parametrize("impl", ["hf", "hfpatch"])
def test_simulates_families_that_sdpa_does_not_serve(tmp_path, impl):
    """gpt-oss has sinks: transformers refuses it sdpa."""
    config = tmp_path / "config.json"
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 16,
    }
    experts = {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 32,
        "vocab_size": 512,
    }
    config.write_text(
        json.dumps({"model_type": "gpt_oss", "num_key_value_heads": 2, **sizes, **experts})
    )
    wanted = options(tmp_path, model=str(config), impl=impl, optimizer="none")
    run = follow(step.new_run(wanted, "fake tensors", torch.bfloat16, "simulated"), wanted)
    assert run.peak_bytes == sum(row["bytes"] for row in run.rows) > 0


def test_owners(tmp_path):
    """Blocks of known size belong to the module that made them."""
    run = followed(options(tmp_path))
    assert run.error is None and len(run.step_seconds) == 1
    sizes = preset_config("llama-tiny")
    weights = sum(p.nbytes for p in step.build_model(options(tmp_path)).parameters())
    split = run.peak_split
    assert split["parameters"] == pytest.approx(weights, rel=0.02), "rounded, and with buffers"
    assert split["optimizer"] == pytest.approx(2 * weights, rel=0.05), "two moments each"
    assert sum(row["bytes"] for row in run.rows) == run.peak_bytes
    one = 96 * sizes["hidden_size"] * 4
    assert split["checkpoints"] in (one, 2 * one), "the inputs of layers whose backward is to come"
    assert run.peak_phase in ("forward", "backward") and run.phases[0][0] == "forward"


# Where a step runs out of memory the report still says what it would have held.
def test_out_of_memory_still_gives_a_report(tmp_path, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.00 GiB.")

    build = step.build_model

    def armed(wanted):
        model = build(wanted)
        model.lm_head.weight.register_hook(full)
        return model

    monkeypatch.setattr(step, "build_model", armed)
    run = followed(options(tmp_path))
    assert "Tried to allocate 7.00 GiB" in run.error and run.peak_bytes > 0 and run.rows
    text = markdown([run])
    assert "hf (did not finish)" in text and "Tried to allocate 7.00 GiB" in text


def test_other_errors_are_not_swallowed(tmp_path, monkeypatch):
    def wrong(*_):
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(step, "become", wrong)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        followed(options(tmp_path))


@pytest.mark.parametrize(
    "wrong, named",
    [({"impl": "x"}, "hf, liger, hfpatch"), ({"steps": 0}, "steps"), ({"seq_len": 1}, "seq_len")],
)
def test_options_refuse(tmp_path, wrong, named):
    with pytest.raises(ValueError, match=f"^hfpatch: .*{named}"):
        options(tmp_path, **wrong)


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["hf", "hfpatch"])
def test_gpu_peak_is_the_allocators(tmp_path, impl):
    """The followed peak is max_memory_allocated, but for what other users of the device's memory
    took: cuBLAS 32 MiB for each thread, and again for its lighter products. tests/dry runs it too.
    """
    run = followed(options(tmp_path, impl=impl, device="cuda", seq_len=4096, model="llama-160m"))
    allocated = run.memory["allocated_peak_bytes"]
    assert run.peak_bytes == pytest.approx(allocated, rel=0.01, abs=100 << 20), run.applied
    assert run.memory["reserved_peak_bytes"] >= run.memory["allocated_peak_bytes"]
    snapshot = pickle.loads((tmp_path / run.memory["snapshot_file"]).read_bytes())
    assert snapshot["segments"] and snapshot["device_traces"], "what PyTorch's memory viewer reads"
