"""A longer context than the model's: the flags work with --model, reach the rotary table, and are
saved.
"""

import json

import pytest
import torch
from transformers import GPT2Config, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hfpatch.trainer import loading
from hfpatch.trainer.arguments import ModelArguments
from hfpatch.trainer.context import lengthened

YARN = {"rope_type": "yarn", "factor": 4.0}


def test_longer_than_the_model(run_train, tmp_path):
    code, _, err, base = run_train(
        "base", config_overrides="vocab_size=300,num_hidden_layers=2,max_position_embeddings=32"
    )
    assert code == 0, err
    flags = {"config_overrides": None, "model": base, "seq_len": 128, "max_steps": 2}
    code, _, err, _ = run_train("refused", **flags)
    assert (
        code == 2 and "must be at most the model's 32 positions" in err and "--rope_scaling" in err
    )
    config_file = tmp_path / "long.yaml"
    config_file.write_text("rope_scaling: {rope_type: yarn, factor: 4.0}\n")
    code, _, err, long = run_train("long", str(config_file), **flags)
    assert code == 0, err
    saved = json.loads((long / "config.json").read_text())
    assert saved["max_position_embeddings"] == 128
    assert (
        saved["rope_parameters"].items() >= {**YARN, "original_max_position_embeddings": 32}.items()
    )
    code, _, err, _ = run_train("again", **flags | {"model": long})
    assert code == 0, "what is saved needs no flags: " + err


def test_scaling_reaches_the_rotary_table(run_train):
    code, _, err, base = run_train("base", max_steps=1)
    assert code == 0, err
    asked = ModelArguments(model=str(base), rope_scaling=json.dumps(YARN))
    config = loading.load_config(asked)
    made = loading.load_model(asked, config, 0)
    expected, _ = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    plain = loading.load_model(
        ModelArguments(model=str(base)), loading.load_config(ModelArguments(model=str(base))), 0
    )
    assert torch.equal(made.model.rotary_emb.inv_freq, expected)
    assert not torch.equal(plain.model.rotary_emb.inv_freq, expected)
    assert torch.equal(made.lm_head.weight, plain.lm_head.weight), "the weights are the model's"


def test_limit_and_base_alone():
    config = LlamaConfig(max_position_embeddings=64, rope_theta=500000.0)
    assert lengthened(config, None, None) is config
    made = lengthened(config, 256, '{"rope_theta": 1e6}')
    assert (made.max_position_embeddings, made.vocab_size) == (256, config.vocab_size)
    found = getattr(made, "rope_parameters", None) or {"rope_theta": made.rope_theta}
    assert found["rope_theta"] == 1e6 and config.max_position_embeddings == 64


@pytest.mark.parametrize(
    "config, limit, scaling, words",
    [
        (LlamaConfig(), None, "yarn", "must be a JSON object"),
        (
            LlamaConfig(),
            None,
            '{"rope_type": "moon"}',
            "does not work with this model .'moon'.",
        ),
        (LlamaConfig(), None, '{"factor": 4.0}', "needs a rope_type"),
        (LlamaConfig(), None, '{"rope_type": "dynamic", "factor": 2.0}', "Use yarn or linear"),
        (
            LlamaConfig(),
            None,
            '{"rope_type": "llama3", "factor": 2.0}',
            "does not work with this model",
        ),
        (
            LlamaConfig(),
            None,
            '{"rope_type": "linear", "factor": "two"}',
            "does not work with this model",
        ),
        (GPT2Config(), 4096, None, "a gpt2 has none or several"),
        (
            lengthened(LlamaConfig(), None, json.dumps(YARN)),
            None,
            json.dumps(YARN),
            "scaled already .yarn.",
        ),
    ],
)
def test_what_cannot_be_lengthened(config, limit, scaling, words):
    with pytest.raises(ValueError, match=f"^hfpatch: .*{words}"):
        lengthened(config, limit, scaling)
