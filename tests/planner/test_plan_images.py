"""`hfpatch plan --images --video-tokens`: the image tower, simulated beside the text model."""

import copy
import json
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
from tiny import LONG
from transformers import AutoConfig

import hfpatch
from hfpatch.budget.policy import LEAST
from hfpatch.cli import main as cli
from hfpatch.lab.adapters import Adapters
from hfpatch.lab.hardware import GPUS
from hfpatch.lab.models import config_of, with_images
from hfpatch.lab.shallow import Values, model_of
from hfpatch.lab.simulate.simulator import simulate
from hfpatch.lab.steps import Steps
from hfpatch.planner.answer import make_run
from hfpatch.planner.evaluate import NONE
from hfpatch.planner.plan import plan
from hfpatch.planner.towers import IMAGE_TOKENS, tower_in_front

QWEN = "Qwen/Qwen3-VL-8B"
RUN = {"seq_len": 8192, "gpu": "a100-80gb", "placement": "gpu8bit-fused"}
SMALL_VISION = {"depth": 4, "deepstack_visual_indexes": [1, 2], "num_hidden_layers": 4}


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


@pytest.mark.parametrize("kind", ["qwen3_vl", pytest.param("qwen2_5_vl", marks=LONG)])
@pytest.mark.parametrize("way", ["host", pytest.param("stock", marks=LONG)])
def test_few_pictures_tell_what_many_take(kind, way):
    """Twelve pictures of 1,024 visual tokens, carried on from few, and all simulated."""
    _few_tell_of_all(values_of(kind), way)


def test_few_pictures_tell_what_many_take_that_attend_to_each_other():
    """Pixtral's tower attends across all pictures under a mask of their square."""
    config = AutoConfig.for_model("mistral3")
    config.vision_config.num_hidden_layers = 2
    _few_tell_of_all(config.to_dict(), "stock")


def _few_tell_of_all(values: dict, way: str) -> None:
    run = {"seq_len": 40_000, "gpu": "a100-80gb", "images": 12, "checkpointing": way}
    run = make_run(values, **run)
    few = run.tower.cost(run)
    all_ = run.tower._few(run, 12, IMAGE_TOKENS)
    assert few.numbers == pytest.approx(all_.numbers, rel=0.02)
    peaks = [max(map(sum, found.moments.values())) for found in (few, all_)]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.02)


def test_images_and_videos_are_counted():
    values, run = values_of("qwen3_vl"), RUN | {"checkpointing": "host"}
    text = plan(values, **run)
    plans = [plan(values, **run, images=2), plan(values, **run, images=2, video_tokens=4_000)]
    assert [p.run.visual_tokens for p in (text, *plans)] == [0, 2048, 6048]
    for less, more in zip((text, *plans), plans):
        assert more.host.peak_bytes > less.host.peak_bytes
        assert more.time.step_seconds > less.time.step_seconds and more.time.flops > less.time.flops
    more = plans[0].gpu.parts["parameters"] - text.gpu.parts["parameters"]
    assert more == pytest.approx(2 * tower_in_front(values, 1, 0).parameters, rel=0.01)
    assert 0 < plans[0].time.parts["image_tower"] < plans[1].time.parts["image_tower"]
    assert "image_tower" not in text.time.parts
    double = plan(values, **run, batch=2, images=2)
    assert double.time.parts["image_tower"] == pytest.approx(
        2 * plans[0].time.parts["image_tower"], rel=0.03
    )


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
    sizes = {"seq_len": tokens, "video_tokens": visual, "checkpointing": "host"}
    run = make_run(values, **sizes)
    moments = run.tower.beside(cost.moments, run)
    beyond = max(moment.beyond for moment in moments)
    assert found.most_beyond_bytes == pytest.approx(beyond, rel=0.1)
    host = cost.host + run.tower.cost(run).numbers["host"]
    assert found.host_peak_bytes == pytest.approx(host, rel=0.1)


def test_beside_adapters_the_tower_is_frozen():
    """No graph: nothing of it waits on the host, and it runs once."""
    values, fixed = values_of("qwen3_vl"), RUN | {"checkpointing": "host"}
    run = fixed | {"placement": "gpu8bit", "adapters": Adapters(16)}
    text, found = plan(values, **run), plan(values, **run, video_tokens=4096)
    assert found.gpu.parts["optimizer"] == text.gpu.parts["optimizer"]
    full = plan(values, **fixed, video_tokens=4096)
    assert found.time.parts["image_tower"] < full.time.parts["image_tower"] / 3
    assert found.host.peak_bytes == text.host.peak_bytes < full.host.peak_bytes


@pytest.mark.parametrize("kind, per_image", tiny.longer([
    ("qwen2_5_vl", 1024), ("qwen3_5", 1024), ("gemma3", 256), ("llava", 576), ("mistral3", 3025),
    ("internvl", 256), ("llama4", 256),
], ("qwen3_5", 1024), ("mistral3", 3025)))  # fmt: skip
def test_each_family(kind, per_image):
    config = AutoConfig.for_model(kind)
    vision = config.vision_config
    for name in {"depth", "num_hidden_layers"} & set(dir(vision)):
        setattr(vision, name, 3)
    if kind == "gemma3":
        vision.image_size, vision.patch_size = 896, 14
    if kind == "llama4":  # as released: transformers' own defaults do not fit each other
        vision.hidden_size = 1408
    run = make_run(config.to_dict(), seq_len=4096, images=1)
    assert run.tower.tokens(run) == per_image and run.tower.parameters > 0
    numbers = run.tower.cost(run).numbers
    assert numbers["seconds"] > 0 and numbers["held"] + numbers["host"] > 0


@tiny.not_before_transformers((5, 24), "cannot build an Idefics 3 from its own defaults")
def test_a_family_whose_pictures_cannot_be_made_is_named():
    with pytest.raises(
        ValueError, match="pictures of Idefics3ForConditionalGeneration cannot be planned"
    ):
        plan(AutoConfig.for_model("idefics3").to_dict(), seq_len=4096, images=1)


WRONG = {
    "no tower": (["--images", "1"], "llama-3.1-8b", "need a model with an image tower"),
    "short": (["--video-tokens", "4000"], QWEN, "--seq-len must be at least the 4,000 visual tokens"),
    "negative": (["--images", "-1"], QWEN, "images must be a whole number, got -1"),
    "shared": (["--images", "1", "--gpus", "2", "--sp-size", "2"], QWEN, "--images and --sp-size 2 cannot"),
}  # fmt: skip


@pytest.mark.parametrize("case", tiny.longer(list(WRONG), "no tower", "negative", "shared"))
def test_one_sentence_for_what_cannot_be(case, capsys):
    words, model, sentence = WRONG[case]
    assert cli.main(["plan", "--model", model, "--seq-len", "2048", *words]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]  # behind lines of progress
    assert sentence in said and said.startswith("hfpatch:")


def test_the_command(capsys):
    words = ["plan", "--model", QWEN, "--seq-len", "8k", "--gpu", "h200", "--images", "4"]
    words += ["--placement", "gpu8bit", "--checkpointing", "host"]
    assert cli.main(words) == 0
    said = capsys.readouterr().out
    assert "1 x 8,192 tokens (4,096 of them visual) on h200" in said and "image tower" in said
    assert cli.main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run"]["visual_tokens"] == 4096
