"""Which layers of a model are its decoder's: those of the text that the head and the loss hang on,
wherever they are kept.
"""

import copy

import pytest
import torch
import transformers
from test_families import assert_close, step
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import hfpatch
from hfpatch.decoder.find import find_decoder

# More layers than the text has: the longest list is the tower's.
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5,
         "num_attention_heads": 2, "image_size": 16,
         "patch_size": 4, "projection_dim": 32}  # fmt: skip
BERT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 2, "vocab_size": 64,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0}  # fmt: skip
LLAMA = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
         "num_attention_heads": 2,
         "vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}  # fmt: skip
GEMMA = {"model_type": "gemma", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
         "vocab_size": 64,
         "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}  # fmt: skip
PALIGEMMA = {"model_type": "paligemma", "text_config": GEMMA, "projection_dim": 32,
             "image_token_id": 60,
             "vision_config": {"model_type": "siglip_vision_model", **TOWER}}  # fmt: skip
# Model, its config's settings, where its decoder is, how many of its first tokens are the image's,
# whether its layers are tiled.
MODELS = {
    "git": ("GitForCausalLM", {"vision_config": TOWER, **BERT}, "git.encoder", 0, False),
    "blip": (
        "BlipForConditionalGeneration",
        {"vision_config": TOWER, "text_config": BERT | {"encoder_hidden_size": 32}},
        "text_decoder.bert.encoder", 0, False,
    ),
    "blip-2": (
        "Blip2ForConditionalGeneration",
        {"vision_config": TOWER, "text_config": LLAMA, "qformer_config": BERT
         | {"num_hidden_layers": 4, "encoder_hidden_size": 32},
         "num_query_tokens": 4, "image_token_index": 60},
        "language_model.model", 4, True,
    ),
    "pi0": (
        "PI0ForConditionalGeneration",
        {"vlm_config": PALIGEMMA, "dit_config": GEMMA, "chunk_size": 8, "max_action_dim": 6,
         "max_state_dim": 6},
        "model.vlm.language_model", 16, False,
    ),
}  # fmt: skip


def small(name):
    """(model, a batch of two rows of 40 tokens with an image each)"""
    if name not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    kind, settings, _, n_image, _ = MODELS[name]
    torch.manual_seed(0)
    model = (
        getattr(transformers, kind)(CONFIG_MAPPING[name](**copy.deepcopy(settings)))
        .double()
        .train()
    )
    with torch.no_grad():
        for p in model.parameters():
            drawn = torch.randn_like(p)
            p.add_(0.1 * drawn) if p.dim() < 2 else p.copy_(
                drawn * min(p.shape[0], p[0].numel()) ** -0.5
            )
    ids = torch.randint(4, 59, (2, 40))
    ids[:, :n_image] = 60
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if name != "pi0":
        return model, batch | {
            "labels": ids,
            "pixel_values": torch.randn(2, 3, 16, 16, dtype=torch.float64),
        }
    shapes = {
        "pixel_values": (2, 1, 3, 16, 16),
        "state": (2, 6),
        "actions": (2, 8, 6),
        "noise": (2, 8, 6),
        "timestep": (2,),
    }
    batch |= {key: torch.rand(shape, dtype=torch.float64) for key, shape in shapes.items()}
    return model, batch | {"pixel_attention_mask": torch.ones(2, 1, dtype=torch.bool)}


@pytest.mark.parametrize("name", MODELS)
def test_the_layers_of_the_text_are_found_behind_a_longer_tower(name):
    stock, batch = small(name)
    ours = copy.deepcopy(stock)
    assert find_decoder(stock).stack is stock.get_submodule(MODELS[name][2])
    # Fused parts and the fused loss are held to budgets of their own elsewhere.
    report = hfpatch.apply(
        ours,
        checkpointing=hfpatch.Checkpointing(offload="host", tile=16),
        rms_norm=False,
        rope=False,
        mlp=False,
        loss=False,
    )
    assert ("run untiled" not in str(report)) == MODELS[name][4], report
    _, loss, grads = step(ours, batch)
    _, wanted_loss, wanted = step(stock, batch)
    assert abs(loss - wanted_loss) <= 1e-12 * abs(wanted_loss)
    assert_close(grads, wanted)


def built(kind, name):
    """A model of default sizes without memory, or a skip with its reason."""
    try:
        config = CONFIG_MAPPING[name]()
        with torch.device("meta"):
            return getattr(transformers, kind)(config)
    except (Exception, SystemError) as error:
        pytest.skip(f"no default one: {type(error).__name__}")


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES))
def test_no_tower_of_images_or_sound_is_taken_for_the_decoder(name):
    model = built(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[name], name)
    configs = [m.config for m in model.modules() if hasattr(m, "config")]
    towers = [getattr(c, n, None) for c in configs for n in ("vision_config", "audio_config")]
    found = find_decoder(model)
    assert found is None or all(found.stack.config is not tower for tower in towers)


def test_a_decoder_named_further_in_counts_where_nothing_outside_has_a_head():
    """Qwen2.5-Omni's outermost model names no decoder: its thinker does. CSM's has a head, and a
    longer backbone that nobody names than the decoder which a model inside it names.
    """
    omni = built("Qwen2_5OmniForConditionalGeneration", "qwen2_5_omni")
    found = find_decoder(omni)
    assert type(found.stack).__name__ == "Qwen2_5OmniThinkerTextModel"
    assert found.causal is omni.thinker
    csm = built("CsmForConditionalGeneration", "csm")
    assert find_decoder(csm).stack is csm.backbone_model
