"""A trained Llama written as GGUF and read back through transformers' own loader."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import tiny
import torch
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from scripts import export_gguf

ROOT = Path(__file__).resolve().parents[2]

TEXT = [
    "the tiled layer runs tile by tile",
    "the héllo wörld of 12345 tiles\n\n  and  spaces",
    "don't stop",
]
SCALED = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def make_tokenizer(split=True) -> PreTrainedTokenizerFast:
    """A byte-level BPE of 320 tokens trained on the text above, with Llama-3's split, a BOS and a
    plain added token.
    """
    raw = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split)
    steps = [pre_tokenizers.Split(Regex(export_gguf.LLAMA3_SPLIT), behavior="isolated"), byte_level]
    raw.pre_tokenizer = pre_tokenizers.Sequence(steps) if split else byte_level
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|begin_of_text|>", "<|end_of_text|>"]
    raw.train_from_iterator(
        TEXT * 4,
        trainers.BpeTrainer(
            vocab_size=300, initial_alphabet=alphabet, special_tokens=special, show_progress=False
        ),
    )
    raw.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    bos = raw.token_to_id(special[0])
    raw.post_processor = processors.TemplateProcessing(
        single=f"{special[0]} $A", special_tokens=[(special[0], bos)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        bos_token=special[0],
        eos_token=special[1],
        chat_template="{{ messages[0]['content'] }}",
    )


def make_folder(folder: Path, *, split=True, **overrides) -> LlamaForCausalLM:
    # Rows of multiples of 32, as GGUF's 8-bit blocks want them.
    settings = {
        "vocab_size": 320,
        "intermediate_size": 96,
        "pad_token_id": None,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    config = tiny.config(**{**settings, "rms_norm_eps": 1e-5, "dtype": "float32", **overrides})
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).float().eval()
    # norms of exactly one would hide a swapped pair
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, mean=float("bias" not in name), std=0.2)
    model.save_pretrained(folder)
    make_tokenizer(split).save_pretrained(folder)
    return model


def read_back(path: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()


def logits(model) -> torch.Tensor:
    ids = torch.arange(3, 70)[None] % 300
    with torch.no_grad():
        return model(input_ids=ids).logits


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_f32_comes_back_exactly(tmp_path, tied):
    model = make_folder(tmp_path / "hf", tie_word_embeddings=tied)
    back = read_back(export_gguf.export(tmp_path / "hf", tmp_path / "m.gguf", kind="f32"))
    assert back.config.tie_word_embeddings == tied
    assert torch.equal(logits(back), logits(model))
    for (name, got), (_, wanted) in zip(back.named_parameters(), model.named_parameters()):
        assert torch.equal(got, wanted), name
    tensors = {t.name for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert ("output.weight" in tensors) is not tied and "rope_freqs.weight" not in tensors


@pytest.mark.parametrize("kind", ["f16", "bf16", "q8_0"])
def test_smaller_types_are_one_rounding_away(tmp_path, kind):
    """Each weight is the nearest value of its type, and the logits are those of a model with just
    those weights.
    """
    model = make_folder(tmp_path / "hf")
    back = read_back(export_gguf.export(tmp_path / "hf", tmp_path / "m.gguf", kind=kind))
    for (name, got), (_, exact) in zip(back.named_parameters(), model.named_parameters()):
        if exact.ndim == 1:
            assert torch.equal(got, exact), name
            continue
        if kind == "q8_0":
            blocks = exact.detach().reshape(-1, 32)
            step = blocks.abs().amax(1, keepdim=True) / 127
            # half a step for the integer, and the step itself is rounded to float16 (relative
            # 2^-11, 127 steps high)
            allowed = step * (0.5 + 127 * 2**-11)
            assert ((got.detach().reshape(-1, 32) - blocks).abs() <= allowed).all(), name
        else:
            rounded = exact.to({"f16": torch.float16, "bf16": torch.bfloat16}[kind]).float()
            assert torch.equal(got, rounded), name
    model.load_state_dict(back.state_dict())
    assert torch.equal(logits(back), logits(model))


def test_llama3_rope_scaling_is_hfs(tmp_path):
    model = make_folder(
        tmp_path / "hf", rope_parameters=SCALED, head_dim=64, max_position_embeddings=131072
    )
    export_gguf.export(tmp_path / "hf", tmp_path / "m.gguf", kind="f32")
    written = {t.name: t.data for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}[
        "rope_freqs.weight"
    ]
    scaled = LlamaRotaryEmbedding(model.config).inv_freq
    plain_config = LlamaConfig(
        **{**model.config.to_dict(), "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    )
    plain = LlamaRotaryEmbedding(plain_config).inv_freq
    # two float32 divisions apart
    np.testing.assert_allclose(written, (plain / scaled).numpy(), rtol=4 * np.finfo(np.float32).eps)
    assert written.min() == 1 and written.max() == 8 and ((written > 1) & (written < 8)).any()


def test_biases_are_written_with_their_rows_in_the_same_order(tmp_path):
    model = make_folder(tmp_path / "hf", attention_bias=True, mlp_bias=True)
    export_gguf.export(tmp_path / "hf", tmp_path / "m.gguf", kind="f32")
    written = {t.name: t.data for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    attention = model.model.layers[1].self_attn
    weight, bias = written["blk.1.attn_k.weight"], written["blk.1.attn_k.bias"]
    order = [
        int((attention.k_proj.weight == torch.from_numpy(row.copy())).all(1).nonzero())
        for row in weight
    ]
    assert sorted(order) == list(range(32)) and order != sorted(order)
    np.testing.assert_array_equal(bias, attention.k_proj.bias.detach().numpy()[order])
    np.testing.assert_array_equal(
        written["blk.1.ffn_down.bias"], model.model.layers[1].mlp.down_proj.bias.detach()
    )


@tiny.not_before_transformers((5, 18), "reads no merges of a GGUF file that are written as pairs")
@pytest.mark.parametrize("split", [True, False], ids=["llama-bpe", "gpt-2"])
def test_tokenizer_round_trips(tmp_path, split):
    make_folder(tmp_path / "hf", split=split)
    export_gguf.export(tmp_path / "hf", tmp_path / "m.gguf", kind="f16")
    ours = AutoTokenizer.from_pretrained(tmp_path / "hf")
    back = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    for text in [*TEXT, "<think>unseen ßtrings 99</think>", "<|end_of_text|>the end"]:
        ids = ours(text, add_special_tokens=False).input_ids
        assert back(text, add_special_tokens=False).input_ids == ids
        assert back.decode(ids) == ours.decode(ids) == text
    merged = ours(TEXT[0], add_special_tokens=False).input_ids
    assert len(merged) < len(TEXT[0].encode())  # merges really apply
    assert (back.bos_token, back.eos_token, back.chat_template) == (
        ours.bos_token,
        ours.eos_token,
        ours.chat_template,
    )
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    assert fields["tokenizer.ggml.pre"].contents() == ("llama-bpe" if split else "gpt-2")
    assert (
        fields["tokenizer.ggml.add_bos_token"].contents()
        and not fields["tokenizer.ggml.add_eos_token"].contents()
    )
    assert len(fields["tokenizer.ggml.tokens"].contents()) == 320
    assert fields["tokenizer.ggml.token_type"].contents()[301:] == [export_gguf.UNUSED] * 19
