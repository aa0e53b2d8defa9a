"""Vision-language models, image and text through the wrapper: the language tower is tiled, the
blocks of the image's are checkpointed, the rest is transformers' own.
"""

import copy

import pytest
import tiny
import torch
import transformers
from test_families import assert_close, step
from test_mixers import lengths
from torch import nn
from transformers import AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import hfpatch
from hfpatch.decoder.find import find_decoder
from hfpatch.decoder.small_instance import scaled_config

IMAGE = 60
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
TOWER |= {
    "num_hidden_layers": 2,
    "depth": 2,
    "out_hidden_size": 64,
    "window_size": 16,
    "fullatt_block_indexes": [1],
    "head_dim": 16,
}
TOWER |= {"pooling_kernel_size": 2, "num_key_value_heads": 2, "position_embedding_size": 16}
TOWER |= {
    "deepstack_visual_indexes": [0, 1],
    "num_position_embeddings": 16,
    "projection_dim": 32,
    "intermediate_ratio": 4,
}
TOWER |= {"projector_input_dim": 32, "projector_output_dim": 32, "vision_output_dim": 32}
OURS = {"image_token_id": IMAGE, "image_token_index": IMAGE, "video_token_id": 61,
        "vision_start_token_id": 62,
        "vision_end_token_id": 63, "boi_token_index": 61, "eoi_token_index": 62,
        "mm_tokens_per_image": 4}  # fmt: skip
PATCHES = {"pixel_values": (16, 96)}  # of a 16 x 16 image, two frames of three colours
PIXELS = {"pixel_values": (1, 3, 16, 16)}
OF_A_ROW = {"pixel_values": (1, 1, 3, 16, 16)}
# Layers of the language tower, tokens of the image, what comes with it, whether its layers run tile
# by tile.
MODELS = {
    # three positions a token, image features added behind the first layers
    "qwen3_vl": (2, 4, PATCHES, True),
    "qwen2_5_vl": (2, 4, PATCHES, True),
    "mistral3": (2, 4, PIXELS, True),
    "llava": (2, 16, PIXELS, True),
    "llama4": (4, 4, PIXELS, True),  # the loss is computed around the model that has the head
    "idefics3": (2, 4, OF_A_ROW, True),
    "internvl": (2, 4, PIXELS, True),
    "qwen3_5": (4, 4, PATCHES, True),  # text layers with a delta net
    # image tokens see each other both ways, by a mask of the model's own
    "gemma3": (6, 4, PIXELS, False),
    "gemma4": (6, 4, {"pixel_values": (1, 16, 48)}, False),
}


def small(name):
    """(model, batch of one row of 40 tokens with an image in it)"""
    n_layers, n_image, shapes, _ = MODELS[name]
    if name not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    if name == "llama4" and transformers.__version__.startswith("5.24."):
        pytest.skip("its own forward asks an output for image_outputs that it has not")
    made = CONFIG_MAPPING[name](**({"vision_config": {}} if name == "gemma4" else {}))
    made.text_config = scaled_config(made.text_config, n_layers)
    for config, values in ((made.vision_config, TOWER), (made, OURS)):
        for key, value in values.items():
            if hasattr(config, key):
                both = name == "internvl" and key in ("image_size", "patch_size")
                setattr(config, key, [value, value] if both else value)
    if name == "llava":
        made.vision_feature_layer = -1
    if name == "llama4":
        made.vision_config.intermediate_size = 128  # of four patches in one
    torch.manual_seed(0)
    model = (
        AutoModelForImageTextToText.from_config(made, attn_implementation="eager").double().train()
    )
    with torch.no_grad():
        for p in model.parameters():
            step = torch.randn_like(p)
            p.add_(0.1 * step) if p.dim() < 2 else p.copy_(
                step * min(p.shape[0], p[0].numel()) ** -0.5
            )
    ids = torch.randint(1, 50, (1, 40))
    ids[0, 5], ids[0, 6 : 6 + n_image] = 62, IMAGE
    labels = ids.clone()
    labels[0, : 6 + n_image] = -100
    batch = {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}
    batch |= {key: torch.randn(shape, dtype=torch.float64) for key, shape in shapes.items()}
    if shapes is PATCHES:
        batch |= {
            "image_grid_thw": torch.tensor([[1, 4, 4]]),
            "mm_token_type_ids": (ids == IMAGE).int(),
        }
    if name == "mistral3":
        batch["image_sizes"] = torch.tensor([[16, 16]])
    if name == "gemma4":
        at = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="xy"), -1)
        batch |= {"image_position_ids": at.flatten(0, 1)[None],
                  "mm_token_type_ids": (ids == IMAGE).int()}  # fmt: skip
    if name == "gemma3":
        batch["token_type_ids"] = (ids == IMAGE).long()
    return model, batch


@pytest.mark.parametrize(
    "name",
    ["qwen3_vl", *(pytest.param(n, marks=pytest.mark.long) for n in MODELS if n != "qwen3_vl")],
)
def test_an_image_and_text(name, capsys):
    stock, batch = small(name)
    ours = copy.deepcopy(stock)
    hfpatch.apply(ours, checkpointing=hfpatch.Checkpointing(offload="host", tile=16))
    stack = find_decoder(ours).stack
    tower = {id(m) for m in stack.modules()}
    kept = [
        (type(a), type(b)) for a, b in zip(ours.modules(), stock.modules()) if id(a) not in tower
    ]
    assert sum(a is not b for a, b in kept) == 4 + (name == "llama4"), (
        "beside the language tower the model, the image's tower and its two blocks are ours"
    )
    found = []
    last = stack.layers[-1]
    lengths(last.post_attention_layernorm if name == "llama4" else last.mlp, found)
    out, loss, grads = step(ours, batch)
    _, wanted_loss, wanted = step(stock, batch)
    assert out.logits is None, "the loss is fused"
    assert abs(loss - wanted_loss) <= 1e-5 * abs(wanted_loss)
    assert_close(grads, wanted)
    assert any("vis" in n for n in grads), "the image's tower learns too"
    assert (max(found) <= 16) == MODELS[name][3]
    said = "run untiled, their inputs offloaded: an attention mask of the caller's own."
    assert capsys.readouterr().err.count(said) == (not MODELS[name][3])


@pytest.mark.parametrize("loss", [True, False])
def test_a_cache_that_nobody_asked_for_keeps_no_layer_whole(loss):
    """Idefics 2 and 3 and SmolVLM make one in training too, around the language tower."""
    stock, batch = small("idefics3")
    ours, found = copy.deepcopy(stock), []
    hfpatch.apply(ours, checkpointing=hfpatch.Checkpointing(tile=16), loss=loss)
    lengths(find_decoder(ours).layers[-1].mlp, found)
    out, wanted = ours(**batch), stock(**batch)
    assert wanted.past_key_values is not None and max(found) <= 16
    out.loss.backward(), wanted.loss.backward()
    assert_close(
        {n: p.grad for n, p in ours.named_parameters()},
        {n: p.grad for n, p in stock.named_parameters()},
    )
    assert ours(**batch, use_cache=True).past_key_values is not None, "where it was asked for"


WAYS = ("trained", "frozen", "adapted", "checkpointed", "embeddings want gradients")


# What makes embeddings of patches.
CONVOLUTIONS = ("patch_embed", "patch_embedding", "patch_conv", "patch_embeddings.projection",
                "patch_embedder.input_proj")  # fmt: skip


def in_a_way(model, way: str):
    """The model with a tower that is trained, frozen, or frozen with adapters in it."""
    if way == "checkpointed":
        model.gradient_checkpointing_enable()
    if way in ("frozen", "adapted", "embeddings want gradients"):
        for name, p in model.named_parameters():
            p.requires_grad_("vis" not in name)
    if way == "embeddings want gradients":  # as PEFT and Trainer have it beside checkpointing
        model.enable_input_require_grads()
        conv = next(m for n, m in model.named_modules() if n.endswith(CONVOLUTIONS))
        conv.register_forward_hook(lambda module, args, out: out.requires_grad_())
    if way == "adapted":
        peft = pytest.importorskip("peft")
        clips = any(n.endswith("q_proj.linear") for n, _ in model.named_modules())  # Gemma 4
        names = r"q_proj\.linear" if clips else "(q_proj|qkv)"
        settings = peft.LoraConfig(
            r=2, target_modules=rf".*vis.*\.{names}", init_lora_weights=False
        )
        model = peft.get_peft_model(model, settings).double()
    return model


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "name",
    ["qwen3_vl", *(pytest.param(n, marks=pytest.mark.long) for n in MODELS if n != "qwen3_vl")],
)
@pytest.mark.parametrize("offload", ["host", "gpu"])
def test_a_towers_gradients(name, way, offload):
    made, batch = small(name)
    stock = in_a_way(copy.deepcopy(made), way)
    ours = in_a_way(made, way)
    ours.load_state_dict(stock.state_dict())
    report = hfpatch.apply(ours, checkpointing=hfpatch.Checkpointing(offload=offload, tile=16))
    assert sum("are checkpointed, with offloaded inputs" in note for note in report.notes) == 1
    for _ in range(2):  # room and queues of the first step serve the second
        (_, loss, grads), (_, wanted_loss, wanted) = step(ours, batch), step(stock, batch)
        assert abs(loss - wanted_loss) <= 1e-5 * abs(wanted_loss)
        assert_close(grads, wanted)
    hfpatch.undo(ours)
    assert [type(m) for m in ours.modules()] == [type(m) for m in stock.modules()]
    assert_close(step(ours, batch)[2], wanted)


def test_a_tower_keeps_the_inputs_of_its_blocks():
    """Bytes that autograd keeps on the device: of a trained tower nothing within blocks, of a
    frozen one nothing at all."""
    kept = {}
    for way in ("trained", "frozen", "embeddings want gradients"):
        for patched in (False, True):
            model, batch = small("qwen3_vl")
            model = in_a_way(model, way)
            visual = model.model.visual
            if patched:
                hfpatch.apply(model, checkpointing=hfpatch.Checkpointing(offload="host"))
            saved = {}

            def note(x, saved=saved):
                saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
                return x

            weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
            with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
                out = visual(batch["pixel_values"], grid_thw=batch["image_grid_thw"])
            kept[way, patched] = sum(n for at, n in saved.items() if at not in weights)
            del out
    assert 0 < kept["trained", True] <= kept["trained", False] / 3
    assert kept["frozen", True] == kept["embeddings want gradients", True] == 0
    assert kept["embeddings want gradients", False] > 0


def test_a_model_without_a_tower_has_none():
    ours = tiny.llama()
    assert not any("blocks of" in note for note in hfpatch.apply(ours).notes)


def test_images_of_padded_rows_stay_with_their_rows():
    """Llama 3.2's cross-attention layers get an image's states for each row of the batch."""
    vision = TOWER | {"attention_heads": 2, "num_global_layers": 1, "max_num_tiles": 1,
                      "patch_size": 8, "vision_output_dim": 64, "intermediate_layers_indices": [0],
                      "supported_aspect_ratios": [[1, 1]]}  # fmt: skip
    config = transformers.MllamaConfig(vision_config=vision, image_token_index=IMAGE)
    config.text_config = scaled_config(config.text_config, 4)
    config.text_config.cross_attention_layers = [1, 3]
    torch.manual_seed(0)
    stock = transformers.MllamaForConditionalGeneration(config).double().train()
    for layer in (1, 3):
        nn.init.ones_(stock.model.language_model.layers[layer].cross_attn_attn_gate)
    mask = (torch.arange(tiny.TOKENS) < torch.tensor([[24], [17]])).long()
    ids = tiny.ids() % 50 * mask
    given = {"input_ids": ids, "labels": ids - 100 * (1 - mask), "attention_mask": mask,
             "pixel_values": torch.randn(2, 1, 1, 3, 16, 16).double(),
             "aspect_ratio_ids": torch.ones(2, 1).long(),
             "aspect_ratio_mask": torch.ones(2, 1, 1).long(),
             "cross_attention_mask": torch.ones(2, tiny.TOKENS, 1, 1).long()}  # fmt: skip
    assert_close(*(step(model, given)[2] for model in (tiny.patched(stock), stock)))
