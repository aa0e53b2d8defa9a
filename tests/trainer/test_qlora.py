"""`hfpatch train --load_in_4bit`, in the names of TRL and transformers, on the CPU."""

import json

import pytest
from safetensors.torch import load_file

BNB = pytest.mark.filterwarnings(
    "ignore::UserWarning:bitsandbytes", "ignore::UserWarning:peft", "ignore::FutureWarning"
)


@BNB
@pytest.mark.parametrize("flag, more", [
    ("load_in_4bit", {"lora_target_modules": ["q_proj", "down_proj"]}),
    pytest.param("load_in_8bit", {"placement": "gpu8bit"}, marks=pytest.mark.long),
])  # fmt: skip
def test_two_steps_over_a_quantised_base(run_train, tmp_path, flag, more):
    pytest.importorskip("bitsandbytes")
    assert run_train("base", max_steps=1)[0] == 0
    flags = {
        "config_overrides": None,
        "model": tmp_path / "base",
        "max_steps": 2,
        "dtype": "bfloat16",
    }
    code, out, err, folder = run_train("qlora", f"--{flag}", "True", lora_r=4, **flags, **more)
    assert code == 0, err
    saved = load_file(folder / "adapter_model.safetensors")
    kinds = {name.split(".lora_")[0].rpartition(".")[2] for name in saved}
    assert kinds == set(more.get("lora_target_modules", kinds)) and len(kinds) in (2, 7)
    assert all("lora_" in name for name in saved)
    assert any(tensor.abs().max() > 0 for name, tensor in saved.items() if "lora_B" in name)


@BNB
@pytest.mark.filterwarnings(
    "ignore:The following (rank|alpha)_pattern keys:RuntimeWarning"
)  # PEFT's own
@pytest.mark.filterwarnings("ignore:.pin_memory. argument is set")
@pytest.mark.long  # 40 s; the example runs in test_run_module.py too
@pytest.mark.parametrize("experts", [False, True])
def test_the_example_trains_adapters(experts, run_train, tmp_path, capsys):
    """experts: of a Qwen3-MoE, whose adapters join the experts' products."""
    pytest.importorskip("bitsandbytes")
    import runpy
    from pathlib import Path

    assert run_train("base", max_steps=1)[0] == 0
    if experts:
        from transformers import AutoConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

        sizes = {"hidden_size": 64, "moe_intermediate_size": 64, "num_experts": 4, "head_dim": 16,
                 "num_experts_per_tok": 2, "num_hidden_layers": 2, "num_attention_heads": 4,
                 "num_key_value_heads": 2}  # fmt: skip
        vocabulary = AutoConfig.from_pretrained(tmp_path / "base").vocab_size
        made = Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=vocabulary, **sizes))
        made.save_pretrained(tmp_path / "base")
    example = runpy.run_path(str(Path(__file__).parents[2] / "hfpatch/examples/qlora.py"))
    trainer = example["main"](str(tmp_path / "base"), json.__file__, str(tmp_path / "out"))
    assert [e["loss"] for e in trainer.state.log_history if "loss" in e][1] > 0
    assert any(
        t.abs().max() > 0
        for n, t in load_file(tmp_path / "out/adapter_model.safetensors").items()
        if "lora_B" in n
    )
    assert not experts or any(".experts." in n for n, _ in trainer.model.named_parameters() if
                              "lora_A" in n)  # fmt: skip
    said = capsys.readouterr().out
    assert "float32 over" not in said and "untiled" not in said


@pytest.mark.parametrize("flags, words", [
    ({"load_in_4bit": True}, "--lora_r"), ({"load_in_4bit": True, "load_in_8bit": True,
                                            "lora_r": 4}, "cannot be combined"),
    ({"load_in_8bit": True, "lora_r": 4}, "Name a folder or a hub id"),
    ({"lora_target_modules": ["q_proj"]}, "works with --lora_r only"),
])  # fmt: skip
def test_what_cannot_be_is_said_at_once(run_train, flags, words):
    code, _, err, folder = run_train(**flags)
    assert code == 2 and words in err and err.count("\n") == 1 and not folder.exists()


def test_targets_that_are_nowhere_are_named(run_train):
    code, _, err, _ = run_train(lora_r=4, lora_target_modules=["nonesuch"])
    assert code == 2 and "nonesuch" in err and "--lora_target_modules" in err
