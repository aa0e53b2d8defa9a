"""Decoders whose layers attend to an encoder's states too: of those our masks and tiles say
nothing.
"""

import pytest
import tiny
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

SIZES = {
    "vocab_size": 64, "d_model": 32, "encoder_layers": 1, "decoder_layers": 2,
    "encoder_attention_heads": 4, "dropout": 0.0,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
TOKENS = 10


def bart():
    return BartForConditionalGeneration(BartConfig(**SIZES, max_position_embeddings=64))


def whisper():
    sizes = {"max_source_positions": TOKENS, "max_target_positions": 64, "num_mel_bins": 8}
    return WhisperForConditionalGeneration(WhisperConfig(**SIZES, **sizes))


def batch_of(make, seen: int):
    """seen: how many of the encoder's states."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(3, 64, (2, TOKENS), generator=generator)
    if make is whisper:
        sound = torch.randn(2, 8, 2 * TOKENS, generator=generator, dtype=torch.float64)
        return {"input_features": sound, "labels": labels}
    mask, decoder = torch.ones(2, seen, dtype=torch.long), torch.ones(2, TOKENS, dtype=torch.long)
    mask[0, -3:] = decoder[1, :2] = 0
    ids = torch.randint(3, 64, (2, seen), generator=generator)
    labels[1, :3] = -100
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "decoder_attention_mask": decoder,
        "labels": labels,
    }


@pytest.mark.parametrize("make, seen", [(bart, 13), (bart, TOKENS), (whisper, TOKENS)])
def test_a_decoder_beside_an_encoder_is_checkpointed_whole(make, seen, capsys):
    """Its small instance stands alone, and is tiled."""
    torch.manual_seed(0)
    stock, batch = make().double(), batch_of(make, seen)
    with torch.no_grad():
        for p in stock.parameters():
            p.mul_(5)
    ours = tiny.patched(stock, logits=True)
    with torch.no_grad():
        at = batch["labels"] >= 0
        torch.testing.assert_close(
            ours.eval()(**batch).logits[at], stock.eval()(**batch).logits[at]
        )
    got, true = tiny.step(ours.train(), batch), tiny.step(stock.train(), batch)
    assert got.keys() == true.keys()
    for name, wanted in true.items():
        assert (got[name] - wanted).norm() <= 1e-6 * wanted.norm().clamp_min(1e-9), name
    assert capsys.readouterr().err.count("an encoder's states") == 1


def test_a_decoder_layer_called_by_hand_beside_an_encoder_is_exact():
    torch.manual_seed(0)
    stock = bart().double()
    ours = tiny.patched(stock)
    theirs, layer = (model.model.decoder.layers[0] for model in (stock, ours))
    x, states = (
        torch.randn(2, TOKENS, 32, dtype=torch.float64),
        torch.randn(2, 13, 32, dtype=torch.float64),
    )
    alone = {"batch": {"hidden_states": x}, "loss": lambda y: y.pow(2).sum()}
    beside = alone | {"batch": {"hidden_states": x, "encoder_hidden_states": states}}
    tiny.step(layer, **alone)
    found = [tiny.step(layer, **beside), tiny.step(layer, **alone)]
    for got, given in zip(found, (beside, alone)):
        true = tiny.step(theirs, **given)
        assert got.keys() == true.keys()
        for name, wanted in true.items():
            assert (got[name] - wanted).norm() <= 1e-6 * wanted.norm().clamp_min(1e-9), name


def test_a_second_decoder_writes_to_its_cache_once():
    """Of two BERTs the first is taken for the decoder; the other's blocks come with a cache."""
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    half = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                      intermediate_size=48, vocab_size=97, **dropout)  # fmt: skip
    config = EncoderDecoderConfig.from_encoder_decoder_configs(half, half)
    config.update({"decoder_start_token_id": 1, "pad_token_id": 0})
    stock = EncoderDecoderModel(config=config).train()
    tiny.assert_as_good(tiny.patched(stock), stock, tiny.labelled())
