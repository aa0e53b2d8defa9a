"""A real step on the CPU: the recorded memory against two other witnesses, owners, and an
out-of-memory error.
"""

import gc
import json
import pickle

import pytest
import torch

import hfpatch
from hfpatch.lab.presets import preset_config
from hfpatch.lab.profile import step
from hfpatch.lab.profile.options import Options
from hfpatch.lab.profile.report import markdown
from hfpatch.lab.profile.simulated import simulated_run
from hfpatch.lab.profile.timeline import measure
from hfpatch.lab.simulate.simulator import simulate


def options(tmp_path, **changes):
    """96 tokens: enough for a layer's blocks to outweigh the odd scalar. No stacks: pytest's own
    are slow to read.
    """
    wanted = {
        "model": "llama-tiny",
        "seq_len": 96,
        "steps": 1,
        "device": "cpu",
        "folder": str(tmp_path),
    }
    return Options(**{"stacks": False, **wanted, **changes})


def recorded(wanted, model=None):
    model = model or step.build_model(wanted)
    applied = step.become(model, wanted.impl, wanted.gradient_checkpointing)
    optimizer = step.make_optimizer(model.parameters(), wanted.optimizer)
    run = step.record_run(
        model,
        optimizer,
        step.make_batch(model.config.vocab_size, wanted, torch.device("cpu")),
        wanted,
    )
    run.applied = applied
    return model, run


@pytest.fixture(autouse=True)
def alone():
    """Tensors that other tests' modules still hold are not this step's: a profile has a process of
    its own.
    """
    gc.collect()
    gc.freeze()


@pytest.mark.parametrize("impl, checkpointing", [("hf", False), ("hf", True), ("hfpatch", True)])
def test_peak_agrees_with_the_simulator(tmp_path, impl, checkpointing):
    """Two methods that share no code: the allocator's events, and storages followed on fake
    tensors; 3% is promised.

    A vocabulary of 64, so that a layer's backward is the peak: what the loss takes inside its op
    differs by device.
    """
    config = tmp_path / "config.json"
    config.write_text(json.dumps(preset_config("llama-tiny") | {"vocab_size": 64}))
    wanted = options(
        tmp_path,
        model=str(config),
        impl=impl,
        gradient_checkpointing=checkpointing,
        optimizer="none",
        seq_len=256,
    )
    model, run = recorded(wanted)
    expected = simulate(model, 1, 256, rounding=1, cuda=False).peak_bytes
    assert run.error is None
    assert run.peak_bytes == pytest.approx(expected, rel=0.03)


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
    run = simulated_run(options(tmp_path, model=str(config), impl=impl, optimizer="none"))
    assert run.error is None and run.peak_bytes == sum(row["bytes"] for row in run.rows) > 0


@pytest.fixture
def blocks(monkeypatch):
    """The allocations of each recorded step."""
    found = []

    def note(run, allocations):
        found.append(allocations)
        return measure(run, allocations)

    monkeypatch.setattr(step, "measure", note)
    return found


def test_end_of_forward_is_what_autograd_saved(tmp_path, blocks):
    """With no checkpointing, what the forward leaves alive beside the model is what saved-tensor
    hooks saw.
    """
    wanted = options(tmp_path, gradient_checkpointing=False, optimizer="none")
    model, run = recorded(wanted)
    saved = {}

    def pack(tensor):
        saved[tensor.untyped_storage().data_ptr()] = (tensor.untyped_storage().nbytes(), tensor)
        return tensor

    batch = step.make_batch(512, wanted, torch.device("cpu"))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(**batch).loss
    for tensor in [*model.parameters(), *model.buffers(), *batch.values()]:
        saved.pop(tensor.untyped_storage().data_ptr(), None)
    kept = sum(count for count, _ in saved.values())
    loss.backward()
    # The forward's last free, of the logits, may carry a time just past its end.
    border = run.phases[1][1]
    alive = [b for b in blocks[0] if b.born <= border and (b.died is None or b.died > border)]
    measured = sum(b.bytes for b in alive if b.category in ("checkpoints", "activations", "loss"))
    assert measured == pytest.approx(kept, rel=0.01)


def test_owners(tmp_path):
    """Blocks of known size belong to the module that made them, in forward, recomputation and
    backward alike.
    """
    model, run = recorded(options(tmp_path, warmup=1, stacks=True))
    weights = sum(t.untyped_storage().nbytes() for t in {*model.parameters(), *model.buffers()})
    split = run.peak_split
    assert split["parameters"] == weights
    assert split["optimizer"] == sum(2 * p.nbytes + 4 for p in model.parameters()), (
        "two moments and a step count each"
    )
    # llama-tiny at 96 tokens peaks in a layer's backward: gate, up, their product, in float32 [96,
    # 176].
    piece = 96 * 176 * 4
    owners = {(r["module"], r["phase"]) for r in run.rows if r["bytes"] % piece == 0 and r["bytes"]}
    assert ("model.layers.*.mlp.gate_proj", "backward") in owners
    assert run.peak_phase == "backward"
    lines = {
        r["line"].rsplit(":")[0].rsplit("/")[-1]
        for r in run.rows
        if r["module"].startswith("model.layers")
    }
    assert "modeling_llama.py" in lines, "Python lines come with the blocks"
    assert not any("profiling" in r["line"] for r in run.rows)
    # each layer's gradients come from its own modules, by the sequence numbers of autograd
    gradients = {r["module"] for r in run.rows if r["category"] == "gradients"}
    assert "lm_head" in gradients and "model.layers.*.mlp.down_proj" in gradients


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_out_of_memory_still_gives_a_report(tmp_path, where):
    wanted = options(tmp_path)
    model = step.build_model(wanted)
    mlp = model.model.layers[1].mlp

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.00 GiB.")

    handles = []

    def arm(module, args):
        armed.append(1)
        if len(armed) == 2:  # the warm-up step runs through
            handles.append(
                mlp.register_forward_hook(full)
                if where == "forward"
                else model.lm_head.weight.register_hook(full)
            )

    armed = []
    model.register_forward_pre_hook(arm)
    _, run = recorded(wanted, model)
    assert "Tried to allocate 7.00 GiB" in run.error
    assert run.peak_bytes > 0 and run.peak_phase == where and run.rows
    text = markdown([run])
    assert "hf (did not finish)" in text and "Tried to allocate 7.00 GiB" in text


def test_other_errors_are_not_swallowed(tmp_path):
    model = step.build_model(options(tmp_path))

    def wrong(*_):
        raise RuntimeError("shapes do not match")

    model.lm_head.register_forward_hook(wrong)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        recorded(options(tmp_path), model)


# the pool is filled inside the recorded step, or before it
@pytest.mark.parametrize("warmup", [0, 1])
def test_hfpatch_keeps_host_memory_apart(tmp_path, warmup):
    """On a CPU the pool of the offload engine is the same memory, and still no part of the device's
    peak.
    """
    wanted = options(
        tmp_path, seq_len=256, optimizer="none", gradient_checkpointing=False, warmup=warmup
    )
    model = step.build_model(wanted)
    hfpatch.apply(model, checkpointing=hfpatch.Checkpointing(offload="host", keep="input"))
    _, run = recorded(wanted, model)
    inputs = 2 * 256 * 64 * 4  # two layers' inputs [256, 64] float32
    assert run.memory["host_peak_bytes"] == inputs
    assert run.peak_split["checkpoints"] < inputs


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
    took: cuBLAS 32 MiB for each thread. tests/dry runs it too.
    """
    wanted = options(tmp_path, impl=impl, device="cuda", seq_len=4096, model="llama-160m")
    model = step.build_model(wanted)
    notes = step.become(model, impl)
    optimizer = step.make_optimizer(model.parameters(), "adamw")
    run = step.record_run(
        model, optimizer, step.make_batch(32000, wanted, torch.device("cuda", 0)), wanted
    )
    allocated = run.memory["allocated_peak_bytes"]
    assert run.peak_bytes == pytest.approx(allocated, rel=0.02, abs=66 << 20), notes
    assert run.memory["reserved_peak_bytes"] >= run.memory["allocated_peak_bytes"]
    snapshot = pickle.loads((tmp_path / run.memory["snapshot_file"]).read_bytes())
    assert snapshot["segments"] and snapshot["device_traces"], "what PyTorch's memory viewer reads"
