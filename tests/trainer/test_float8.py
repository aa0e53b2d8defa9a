"""`hfpatch train --fp8`, emulated on a CPU: it learns as bf16 does, its layers in tiles."""

import pytest
import torch
import workbench

pytest.importorskip("torchao.float8")
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:torchao"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch.utils._pytree"),
]
STEPS = 40


def curve(folder) -> torch.Tensor:
    return torch.tensor([e["loss"] for e in workbench.history(folder) if "loss" in e])


@pytest.mark.long
# at this rate updates of bf16 weights are not rounded away
@pytest.mark.filterwarnings("ignore:hfpatch. .* trained tensors are:UserWarning")
def test_learns_as_bf16_does(run_train):
    """From the curve of bf16, ours is no further than twice what stock layers in float8 are."""
    curves = {}
    for name, flags in {
        "bf16": {}, "stock": {"fp8": "rowwise", "impl": "hf"}, "ours": {"fp8": "rowwise"},
        "high": {"fp8": "rowwise_with_gw_hp"},
    }.items():  # fmt: skip
        code, _, err, folder = run_train(
            name, max_steps=STEPS, save_strategy="steps", save_steps=STEPS, dtype="bfloat16",
            seq_len=48, checkpointing="host,tile=16" if flags.get("impl") != "hf" else None, **flags,
        )  # fmt: skip
        assert code == 0, err
        assert "run untiled" not in err
        curves[name] = curve(folder)
    bf16 = curves["bf16"]
    assert len(bf16) == STEPS and bf16[-5:].mean() < bf16[:5].mean() - 0.5, "it does learn"
    apart = {name: (found - bf16).norm() for name, found in curves.items()}
    assert 0 < apart["ours"] <= 2 * apart["stock"] and apart["high"] <= 2 * apart["stock"]


def test_the_checkpoint_is_as_without_it(run_train):
    from safetensors.torch import load_file

    saved = {}
    for name, flags in (("plain", []), ("float8", ["--fp8"])):  # rowwise
        code, _, err, folder = run_train(name, *flags, max_steps=1)
        assert code == 0, err
        saved[name] = load_file(folder / "model.safetensors")
    assert {n: (t.shape, t.dtype) for n, t in saved["plain"].items()} == {
        n: (t.shape, t.dtype) for n, t in saved["float8"].items()
    }
    assert any(not torch.equal(t, saved["float8"][n]) for n, t in saved["plain"].items())


@pytest.mark.parametrize(
    "flags, words",
    [
        ({"fp8": "rowwise", "lora_r": 4}, "--lora_r cannot be combined"),
        ({"fp8": "rowwise", "engine": "zero3"}, "and an engine cannot be combined"),
        ({"fp8": "tensorwise"}, "tensorwise"),
        ({"fp8": "rowwise", "config_overrides": "vocab_size=300,hidden_size=40,intermediate_size=56,"
          "num_attention_heads=1,num_key_value_heads=1,num_hidden_layers=2"}, "multiples of 16"),
    ],
)  # fmt: skip
def test_what_is_refused(run_train, flags, words):
    code, _, err, _ = run_train(**flags)
    assert code == 2 and words in err
