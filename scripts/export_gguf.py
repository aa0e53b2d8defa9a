"""A trained Llama and its tokenizer as one GGUF file for llama.cpp. Needs `pip install gguf`.

    python scripts/export_gguf.py runs/my-model my-model-q8_0.gguf --type q8_0

Reads a Hugging Face folder (config.json, safetensors, tokenizer.json) tensor by tensor, so memory
stays near the largest single weight. llama.cpp rotates neighbouring pairs and HF rotates halves, so
rows of q and k are reordered. Llama-3's RoPE scaling has no metadata key in GGUF. The tensor
rope_freqs.weight holds it, as one divisor per frequency.
"""

import argparse
import json
import math
import os
import sys
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer

TYPES = {
    "f32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "f16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "bf16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}
# Llama 3's split of text before the merges, as tokenizer.json spells it. llama.cpp knows splits by
# name only, and silently tokenizes wrongly under a wrong name.
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5


def export(
    source: str, target: str, *, kind: str = "f16", pre: str | None = None, force: bool = False
) -> Path:
    """Writes source (an HF folder) to target.

    Args:
        kind: one of TYPES. Vectors (norms, biases) stay float32, as llama.cpp expects.
        pre: llama.cpp's pre-tokenizer name, for a tokenizer with an unknown split pattern.

    Raises:
        ValueError: the export would not be exact. Nothing is written then.
    """
    folder, out = Path(source), Path(target)
    if kind not in TYPES:
        raise ValueError(f"hfpatch: --type must be one of {', '.join(TYPES)}, got {kind}.")
    if out.exists() and not force:
        raise ValueError(f"hfpatch: {out} exists. Give another name or --force.")
    if (folder / "adapter_config.json").exists():
        raise ValueError(
            f"hfpatch: {folder} holds a LoRA adapter. Merge it (merge_and_unload) and export the "
            "result."
        )
    if not (folder / "config.json").exists():
        raise ValueError(
            f"hfpatch: no config.json in {folder}. Give the folder that save_pretrained wrote."
        )
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    if config.model_type != "llama":
        raise ValueError(
            f"hfpatch: the model must be of type llama, got {config.model_type}. Use llama.cpp's "
            "converter."
        )
    if config.hidden_act != "silu":
        raise ValueError(
            f"hfpatch: hidden_act must be silu for llama.cpp's llama, got {config.hidden_act!r}."
        )
    where = _tensor_files(folder)
    expected = _expected_tensors(config, where)
    # The process id in the name keeps another process's .part untouched.
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        _write(part, folder, config, where, expected, kind, pre)
        part.replace(out)
    finally:
        part.unlink(missing_ok=True)
    return out


def _write(
    part: Path, folder: Path, config, where: dict, expected: dict, kind: str, pre: str | None
) -> None:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    writer = gguf.GGUFWriter(part, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.LLAMA])
    _write_config(writer, config, kind, folder.resolve().name)
    _write_tokenizer(writer, folder, config.vocab_size, pre)

    factors = rope_factors(config)
    if factors is not None:
        writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes)
    for name, shape in expected.items():
        stored = _stored_type(shape, kind)
        nbytes = math.prod(gguf.quant_shape_to_byte_shape(shape, stored))
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor_info(gguf_name, shape, np.dtype(np.float32), nbytes, raw_dtype=stored)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if factors is not None:
            writer.write_tensor_data(factors)
        for name, shape in expected.items():
            writer.write_tensor_data(_encode(_read(where, name), name, shape, config, kind))
    finally:
        writer.close()


def rope_factors(config) -> np.ndarray | None:
    """llama.cpp's divisor of each RoPE frequency, float32 [head_dim / 2]; None if RoPE is unscaled
    or linear.

    Llama 3.1's rule: wavelengths beyond the old context are stretched by `factor`, short ones left
    alone, those between interpolated (transformers' rope type "llama3").
    """
    rope = _rope(config)
    if rope["rope_type"] != "llama3":
        return None
    half = torch.arange(0, _head_dim(config), 2, dtype=torch.int64).float() / _head_dim(config)
    wavelength = 2 * math.pi * rope["rope_theta"] ** half
    old = rope["original_max_position_embeddings"]
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    smooth = ((old / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).numpy().astype(np.float32)


def _rope(config) -> dict:
    """RoPE's theta and scaling as one dict, from a config of either generation."""
    rope = dict(
        getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    )
    rope.setdefault("rope_theta", getattr(config, "rope_theta", 10000.0))
    rope.setdefault("rope_type", rope.pop("type", "default"))
    if rope["rope_type"] not in ("default", "linear", "llama3"):
        raise ValueError(
            f"hfpatch: RoPE scaling {rope['rope_type']!r} has no exact form here. Use llama.cpp's "
            "converter."
        )
    return rope


def _head_dim(config) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _write_config(writer, config, kind: str, name: str) -> None:
    rope = _rope(config)
    writer.add_name(name)
    writer.add_file_type(TYPES[kind][1])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(_head_dim(config))
    writer.add_value_length(_head_dim(config))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(_head_dim(config))
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])


def _write_tokenizer(writer, folder: Path, vocab_size: int, pre: str | None) -> None:
    path = folder / "tokenizer.json"
    if not path.exists():
        raise ValueError(
            f"hfpatch: no tokenizer.json in {folder}. Save the tokenizer beside the model."
        )
    spec = json.loads(path.read_text(encoding="utf-8"))
    model = spec["model"]
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        raise ValueError(
            f"hfpatch: the tokenizer must be a byte-level BPE, got {model.get('type')}"
            f"{' with byte fallback' if model.get('byte_fallback') else ''}. Use llama.cpp's "
            "converter."
        )
    if not model["merges"]:
        raise ValueError(
            "hfpatch: the tokenizer has no merges, which llama.cpp cannot load. Train it with at "
            "least one."
        )
    tokens = {index: token for token, index in model["vocab"].items()}
    types = dict.fromkeys(tokens, NORMAL)
    for added in spec.get("added_tokens", ()):
        tokens[added["id"]] = added["content"]
        types[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    if max(tokens) >= vocab_size:
        raise ValueError(
            f"hfpatch: token id {max(tokens)} is beyond the model's vocab_size {vocab_size}. "
            "Call resize_token_embeddings before exporting."
        )
    for index in range(vocab_size):
        if index not in tokens:
            tokens[index], types[index] = f"[PAD{index}]", UNUSED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre or _pre_tokenizer(spec.get("pre_tokenizer")))
    writer.add_token_list([tokens[i] for i in range(vocab_size)])
    writer.add_token_types([types[i] for i in range(vocab_size)])
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in model["merges"]])
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    for token_id, add in [
        (tokenizer.bos_token_id, writer.add_bos_token_id),
        (tokenizer.eos_token_id, writer.add_eos_token_id),
        (tokenizer.pad_token_id, writer.add_pad_token_id),
        (tokenizer.unk_token_id, writer.add_unk_token_id),
    ]:
        if token_id is not None:
            add(token_id)
    ends = tokenizer("").input_ids
    writer.add_add_bos_token(
        tokenizer.bos_token_id is not None and tokenizer.bos_token_id in ends[:1]
    )
    writer.add_add_eos_token(
        tokenizer.eos_token_id is not None and tokenizer.eos_token_id in ends[1:]
    )
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def _pre_tokenizer(spec: dict | None) -> str:
    steps = (spec or {}).get("pretokenizers", [spec or {}])
    split = [s for s in steps if s.get("type") == "Split"]
    byte_level = [s for s in steps if s.get("type") == "ByteLevel"]
    if len(steps) == len(byte_level) == 1 and byte_level[0].get("use_regex", True):
        return "gpt-2"
    pattern = split[0].get("pattern", {}).get("Regex") if len(split) == 1 else None
    if len(steps) == 2 and byte_level and pattern == LLAMA3_SPLIT:
        return "llama-bpe"
    raise ValueError(
        "hfpatch: the tokenizer splits text in a way no known llama.cpp pre-tokenizer does. Name "
        "one with --pre."
    )


def _tensor_files(folder: Path) -> dict[str, Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            named = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"hfpatch: {index} must hold a weight_map, got none. Save the model again."
            ) from None
        out = sorted(str(file) for file in named.values() if Path(file).name != file)
        if out:
            raise ValueError(
                f"hfpatch: {index} names {out[0]!r}, which leads out of its folder. Do not use it."
            )
        return {name: folder / file for name, file in named.items()}
    single = folder / "model.safetensors"
    if not single.exists():
        raise ValueError(
            f"hfpatch: no model.safetensors in {folder}. Merge the sharded checkpoint first."
            " See docs/guides/export.md."
        )
    with safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), single)


def _expected_tensors(config, where: dict) -> dict[str, tuple[int, ...]]:
    """Every tensor the model must have, with its shape. The file must hold these and no others."""
    hidden, width, inner = config.hidden_size, _head_dim(config), config.intermediate_size
    q, kv = config.num_attention_heads * width, config.num_key_value_heads * width
    linears = {
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    wanted = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        wanted["lm_head.weight"] = (config.vocab_size, hidden)
    for layer in (f"model.layers.{i}." for i in range(config.num_hidden_layers)):
        wanted[layer + "input_layernorm.weight"] = wanted[
            layer + "post_attention_layernorm.weight"
        ] = (hidden,)
        for name, shape in linears.items():
            wanted[f"{layer}{name}.weight"] = shape
            if config.mlp_bias if name.startswith("mlp") else config.attention_bias:
                wanted[f"{layer}{name}.bias"] = shape[:1]
    missing = sorted(set(wanted) - set(where))
    extra = sorted(
        set(where) - set(wanted) - ({"lm_head.weight"} if config.tie_word_embeddings else set())
    )
    if missing or extra:
        what = (
            f"lacks {missing[0]}"
            if missing
            else f"holds {extra[0]}, which config.json does not describe"
        )
        raise ValueError(
            f"hfpatch: the checkpoint {what}. Export the folder that save_pretrained wrote."
        )
    return wanted


def _read(where: dict[str, Path], name: str) -> torch.Tensor:
    with safe_open(where[name], framework="pt") as file:
        return file.get_tensor(name)


def _stored_type(shape: tuple[int, ...], kind: str):
    """The type to store: float32 for vectors, float16 for a matrix whose rows are not whole Q8_0
    blocks of 32, as in llama.cpp.
    """
    if len(shape) == 1:
        return gguf.GGMLQuantizationType.F32
    if kind == "q8_0" and shape[-1] % 32:
        return gguf.GGMLQuantizationType.F16
    return TYPES[kind][0]


def _encode(tensor: torch.Tensor, name: str, shape, config, kind: str) -> np.ndarray:
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(
            f"hfpatch: {name} must have shape {tuple(shape)}, got {tuple(tensor.shape)}."
        )
    for projection, heads in (
        ("q_proj", config.num_attention_heads),
        ("k_proj", config.num_key_value_heads),
    ):
        if f".{projection}." in name:
            tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(tensor.shape)
    values = tensor.float().numpy()
    if not np.isfinite(values).all():
        raise ValueError(
            f"hfpatch: weights must be finite, and {name} holds nan or infinity. Export another "
            "checkpoint."
        )
    qtype = _stored_type(shape, kind)
    if qtype == gguf.GGMLQuantizationType.F16 and np.abs(values).max() > np.finfo(np.float16).max:
        raise ValueError(f"hfpatch: {name} has values beyond float16. Export with --type bf16.")
    return gguf.quantize(values, qtype)


def main(argv=None) -> int:
    """Runs the script. Returns its exit code."""
    parser = argparse.ArgumentParser(description="A trained Llama as one GGUF file for llama.cpp.")
    parser.add_argument("source", help="folder with config.json, *.safetensors and tokenizer.json")
    parser.add_argument("target", help="the .gguf file to write")
    parser.add_argument(
        "--type", choices=sorted(TYPES), default="f16", help="storage of the matrices (f16)"
    )
    parser.add_argument(
        "--pre", help="llama.cpp's pre-tokenizer name, where the split pattern is not a known one"
    )
    parser.add_argument("--force", action="store_true", help="overwrite an existing file")
    args = parser.parse_args(argv)
    try:
        out = export(args.source, args.target, kind=args.type, pre=args.pre, force=args.force)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{out}: {out.stat().st_size / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
