"""`hfpatch plan --images --video-tokens`: the image tower beside the text model, held to the
simulator.
"""

import copy
import json
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText

import hfpatch
from hfpatch.budget.policy import LEAST
from hfpatch.cli import main as cli
from hfpatch.lab.adapters import Adapters
from hfpatch.lab.hardware import GPUS
from hfpatch.lab.models import config_of, with_images
from hfpatch.lab.shallow import Values, model_of
from hfpatch.lab.simulate.simulator import simulate
from hfpatch.lab.steps import Steps
from hfpatch.planner.evaluate import NONE
from hfpatch.planner.plan import plan
from hfpatch.planner.towers import tower_in_front

QWEN = "Qwen/Qwen3-VL-8B"
RUN = {"seq_len": 8192, "gpu": "a100-80gb", "placement": "gpu8bit-fused"}
SMALL_VISION = {"depth": 4, "deepstack_visual_indexes": [1, 2], "num_hidden_layers": 4}


class Alone(nn.Module):
    """An image tower with a loss, for the simulator."""

    def __init__(self, visual, config):
        super().__init__()
        self.visual, self.config = visual, config

    def forward(self, input_ids, labels, pixel_values, grid):
        out = self.visual(pixel_values, grid_thw=grid)
        features = [out.pooler_output, *getattr(out, "deepstack_features", ())]
        return type("Loss", (), {"loss": sum(x.sum() for x in features)})


def values_of(kind: str) -> dict:
    values = copy.deepcopy(config_of(QWEN)[1])
    values["text_config"]["num_hidden_layers"] = 2
    values["vision_config"] |= SMALL_VISION
    if kind == "qwen2_5_vl":  # gated, and one merger behind
        values["text_config"]["model_type"] = "qwen2_5_vl_text"
        values["vision_config"] |= {
            "fullatt_block_indexes": [0, 1, 2, 3],
            "intermediate_size": 3420,
        }
    return values | {"model_type": kind}


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("way", ["host", "stock"])
def test_a_towers_closed_form_is_the_simulators(kind, way):
    """Four frames of 1,024 visual tokens; all of it trained. To a fifth: it stands for any family."""
    values = values_of(kind)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(
            AutoConfig.for_model(**copy.deepcopy(values)), dtype=torch.bfloat16
        )
    policy = LEAST if way == "host" else way
    if way == "host":
        hfpatch.apply(model, checkpointing="host")
    visual = model.model.visual
    tower = tower_in_front(values, 0, 4096, 10**6)
    found = simulate(
        Alone(visual, model.config), 1, 8, policy=policy if way == "host" else None,
        inputs={"pixel_values": torch.zeros(4 * 4096, tower.pixels),
                "grid": torch.tensor([[1, 64, 64]] * 4)},
    )  # fmt: skip
    assert tower.parameters == sum(p.numel() for p in visual.parameters())
    moments = tower.beside([], 0, 1, policy, False)
    peak = max(m.gradients + m.beyond for m in moments) + 2 * tower.parameters
    assert peak == pytest.approx(found.peak_bytes, rel=0.2)
    assert tower.host(1, policy, False) == pytest.approx(found.host_peak_bytes, rel=0.01)
    flops = tower.flops(1, policy, False)
    assert flops.matmul == pytest.approx(sum(found.flops["matmul"].values()), rel=0.15)
    assert 0.5 < flops.moved / sum(found.ledger.traffic.values()) < 1.5


def test_images_and_videos_are_counted():
    text = plan(QWEN, **RUN)
    plans = [plan(QWEN, **RUN, images=2), plan(QWEN, **RUN, images=2, video_tokens=4_000)]
    assert [p.visual_tokens for p in (text, *plans)] == [0, 2048, 6048]
    for less, more in zip((text, *plans), plans):
        assert more.step_seconds > less.step_seconds and more.host_peak_bytes > less.host_peak_bytes
        assert more.flops > less.flops
    more = plans[0].gpu_bytes["parameters"] - text.gpu_bytes["parameters"]
    assert more == pytest.approx(2 * tower_in_front(QWEN, 1, 0, 8192).parameters, rel=0.01)
    assert 0 < plans[0].seconds["image_tower"] < plans[1].seconds["image_tower"]
    assert "seconds" not in text.seconds and "image_tower" not in text.seconds
    double = plan(QWEN, **RUN, batch=2, images=2)
    assert double.seconds["image_tower"] == pytest.approx(2 * plans[0].seconds["image_tower"])


def test_the_whole_model_is_that_of_the_simulator():
    """Text and tower together, on a row that holds the frames' places: two and four layers of them."""
    row = runpy.run_path(Path(__file__).parents[2] / "profiles" / "tower" / "whole.py")["row"]
    values, tokens, visual = values_of("qwen3_vl"), 12_048, 10_240
    model = with_images(values).train()
    hfpatch.apply(model, checkpointing="host")
    policy = replace(LEAST, tile=4096)
    found = simulate(model, 1, tokens, policy=policy, **row(model.config, tokens, visual))
    assert not found.whole
    text = model_of(Values(values["text_config"] | {"model_type": "qwen3"}))
    cost = Steps(text, text.sizes, GPUS["h100"], 1).cost(tokens, policy, NONE)
    tower = tower_in_front(values, 0, visual, tokens)
    moments = tower.beside(cost.moments, text.sizes.trained_bytes, 1, policy, False)
    beyond = max(moment.beyond for moment in moments)
    assert found.most_beyond_bytes == pytest.approx(beyond, rel=0.1)
    host = cost.host + tower.host(1, policy, False)
    assert found.host_peak_bytes == pytest.approx(host, rel=0.1)


def test_beside_adapters_the_tower_is_frozen():
    """No graph: nothing of it waits on the host, and it runs once."""
    run = RUN | {"placement": "gpu8bit", "adapters": Adapters(16)}
    text, found = plan(QWEN, **run), plan(QWEN, **run, video_tokens=4096)
    assert found.gpu_bytes["optimizer"] == text.gpu_bytes["optimizer"]
    full = plan(QWEN, **RUN, video_tokens=4096)
    assert found.seconds["image_tower"] < full.seconds["image_tower"] / 3
    tower = tower_in_front(QWEN, 0, 4096, 8192)
    assert tower.host(1, LEAST, True) == 0 < tower.host(1, LEAST, False)


@pytest.mark.parametrize("kind, per_image", [
    ("qwen2_5_vl", 1024), ("qwen3_5", 1024), ("gemma3", 256), ("llava", 576), ("mistral3", 3025),
    ("internvl", 256),
])  # fmt: skip
def test_each_family(kind, per_image):
    config = AutoConfig.for_model(kind)
    if kind == "gemma3":
        config.vision_config.image_size, config.vision_config.patch_size = 896, 14
    tower = tower_in_front(config.to_dict(), 1, 0, 4096)
    assert tower.tokens == per_image and tower.parameters > tower.depth * tower.weights > 0


WRONG = {
    "no tower": (["--images", "1"], "llama-3.1-8b", "need a model with an image tower"),
    "short": (["--video-tokens", "4000"], QWEN, "--seq-len must be at least the 4,000 visual tokens"),
    "negative": (["--images", "-1"], QWEN, "images must be a whole number, got -1"),
    "shared": (["--images", "1", "--gpus", "2", "--sp-size", "2"], QWEN, "--images and --sp-size 2 cannot"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_one_sentence_for_what_cannot_be(case, capsys):
    words, model, sentence = WRONG[case]
    assert cli.main(["plan", "--model", model, "--seq-len", "2048", *words]) == 2
    said = capsys.readouterr().err.strip()
    assert sentence in said and said.startswith("hfpatch:") and len(said.splitlines()) <= 2


def test_the_command(capsys):
    words = ["plan", "--model", QWEN, "--seq-len", "8k", "--gpu", "h200", "--images", "4"]
    assert cli.main(words) == 0
    said = capsys.readouterr().out
    assert "1 x 8,192 tokens (4,096 of them visual) on h200" in said and "image tower" in said
    assert cli.main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["visual_tokens"] == 4096
