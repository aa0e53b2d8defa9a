"""Towers of sound: their blocks are checkpointed whole, trained or frozen, beside a tiled text."""

import copy

import pytest
import torch
from test_families import assert_close, step
from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration

import hfpatch
from hfpatch.decoder.small_instance import scaled_config

AUDIO = 60
ENCODER = {
    "num_mel_bins": 8, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48,
    "d_model": 32, "max_source_positions": 16,
}  # fmt: skip


def small():
    """(model, batch of one row of 40 tokens, eight of them a sound's)"""
    made = Qwen2AudioConfig(audio_config=ENCODER, audio_token_index=AUDIO)
    made.text_config = scaled_config(made.text_config, 2)
    torch.manual_seed(0)
    model = Qwen2AudioForConditionalGeneration._from_config(made, attn_implementation="eager")
    ids = torch.randint(1, 50, (1, 40))
    ids[0, 6:14] = AUDIO
    labels = ids.masked_fill(ids == AUDIO, -100)
    return model.double().train(), {
        "input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids),
        "input_features": torch.randn(1, 8, 32, dtype=torch.float64),
        "feature_attention_mask": torch.ones(1, 32, dtype=torch.long),
    }  # fmt: skip


# Qwen2-Audio's forward cuts its logits by the mask and calls CrossEntropyLoss itself.
@pytest.mark.filterwarnings("ignore:hfpatch. the loss runs through whole logits:UserWarning")
@pytest.mark.parametrize("way", ["trained", "frozen"])
@pytest.mark.parametrize("offload", ["host", "gpu"])
def test_sound_and_text(way, offload):
    stock, batch = small()
    for name, p in stock.named_parameters():
        p.requires_grad_(way == "trained" or "audio_tower" not in name)
    ours = copy.deepcopy(stock)
    report = hfpatch.apply(ours, checkpointing=hfpatch.Checkpointing(offload=offload, tile=16))
    assert any("2 blocks of audio_tower" in n or "2 blocks of model.audio_tower" in n
               for n in report.notes)  # fmt: skip
    calls = []
    tower = next(m for n, m in ours.named_modules() if n.endswith("audio_tower"))
    for block in tower.layers:
        block.register_forward_pre_hook(lambda m, args: calls.append(torch.is_grad_enabled()))
    (_, loss, grads), (_, wanted_loss, wanted) = step(ours, batch), step(stock, batch)
    assert abs(loss - wanted_loss) <= 1e-5 * abs(wanted_loss)
    assert_close(grads, wanted)
    assert any("audio_tower" in n for n in grads) == (way == "trained")
    assert calls == ([True] * 2 if way == "trained" else [False] * 2)
