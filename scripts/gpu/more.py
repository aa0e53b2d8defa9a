"""What the first nine minutes leave out: experts, LoRA and QLoRA, a hybrid, the longest sequence."""

import time

import common
import torch
import transformers
from common import timed
from nf4 import quantise
from speed import become, timed_steps

from hfpatch.lab.device import clean
from hfpatch.lab.made import made, model_of
from hfpatch.ops.experts import CLAMPED, Layout, experts_ref
from hfpatch.ops.experts import experts as fused_experts

# name: (D, F, experts, experts a token, layout)
SHAPES = {
    "qwen3-30b-a3b": (2048, 768, 128, 8, Layout("silu")),
    "gpt-oss-20b": (
        2880, 2880, 32, 4, Layout(CLAMPED, 1.702, 7.0, interleaved=True, transposed=True),
    ),
}  # fmt: skip


def experts(rows, part: str) -> None:
    """One layer's experts, routed at random: ms and TFLOP/s beside the loop over experts."""
    for T in (33,) if rows.args.small else (8192, 32768):
        for name, (D, F, E, k, layout) in SHAPES.items():
            if rows.args.small:
                D, F, E, k = 32, 16, 4, 2
            for impl, form in (("hfpatch", fused_experts), ("loop", experts_ref)):
                _experts(rows, part, name, impl, form, T, (D, F, E, k), layout)
                clean()


def _experts(rows, part, name, impl, form, T, sizes, layout) -> None:
    D, F, E, k = sizes
    g = torch.Generator(rows.args.device).manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=g, device=rows.args.device)

    scores = draw(T, E).softmax(-1).topk(k, -1)
    one, two = (E, 2 * F, D), (E, D, F)
    if layout.transposed:
        one, two = (E, D, 2 * F), (E, F, D)
    values = [draw(T, D), scores.values, draw(*one) * D**-0.5, draw(*two) * F**-0.5]
    x, w, w1, w2 = leaves = [t.bfloat16().requires_grad_() for t in values]
    up = torch.randn_like(x)

    def stages(i, mark):
        y = form(x, scores.indices, w, w1, w2, layout=layout)
        mark()
        torch.autograd.grad(y, leaves, up)
        mark()

    fwd, bwd = timed(stages)
    flops = 3 * 6 * T * k * D * F  # three products forward, and twice that backward
    rows.add(
        part=part, model=name, impl=impl, tokens=T, fwd_ms=fwd, bwd_ms=bwd,
        tflop_s=flops / (fwd + bwd) / 1e9,
    )  # fmt: skip


def adapted(model, base: str, dropout: float = 0.0):
    """LoRA of rank 16 on every Linear, as PEFT makes it, over a base in bf16 or 4 bits."""
    from peft import LoraConfig, get_peft_model

    if base == "4bit":
        quantise(model)
    clean()
    settings = LoraConfig(r=16, lora_alpha=32, lora_dropout=dropout, target_modules="all-linear")
    return get_peft_model(model, settings)


def _model(rows, preset: str, layers: int, tokens: int):
    changes = {"num_hidden_layers": layers}
    if rows.args.small:
        preset, changes = "llama-tiny", {}
    return made(preset, changes, rows.args.device, torch.bfloat16, tokens)


def _steps(rows, part, make, lengths: tuple[int, ...], count: int, said: dict) -> None:
    """Steps at each length of a model from `make`, gone before the next; "out of memory" is a row.

    make: (tokens) -> the model.
    """
    for tokens in (64,) if rows.args.small else lengths:
        model = make(tokens)
        become(model, "hfpatch")
        try:
            timed_steps(rows, part, model, tokens, count, True, False, said)
        except torch.OutOfMemoryError as error:
            rows.add(part=part, **said, tokens=tokens, **common.failure(error))
        model = None
        clean()


def _adapted_steps(rows, part, base: str, lengths, count: int, what: str) -> None:
    def make(tokens):
        return adapted(_model(rows, "llama-3.1-8b", 32, tokens), base)

    _steps(rows, part, make, lengths, count, {"what": what, "base": base})


def lora(rows, part: str) -> None:
    """8B with PEFT's float32 adapters, where memory once ran out under the default."""
    _adapted_steps(rows, part, "bf16", (8192, 32768), 4, "LoRA, all Linears")


def qlora(rows, part: str) -> None:
    """8B in 4 bits on 24 GiB of the card: 32k and 131,072 tokens."""
    if rows.args.cuda:
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, 24 * common.GiB / total))
    try:
        _adapted_steps(rows, part, "4bit", (32768, 131072), 2, "QLoRA on 24 GiB")
    finally:
        if rows.args.cuda:
            torch.cuda.set_per_process_memory_fraction(1.0)


def hybrid(rows, part: str) -> None:
    """Eight layers of Qwen3.5-9B's widths, whose config is transformers' default."""
    values = {"model_type": "qwen3_5_text", "num_hidden_layers": 8}
    if rows.args.small:
        values |= {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}
        values |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
        values |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "vocab_size": 256}
        values |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}

    def make(tokens):
        config = transformers.AutoConfig.for_model(**values, use_cache=False)
        return model_of(config, rows.args.device, torch.bfloat16)

    _steps(rows, part, make, (8192, 32768), 3, {"what": "Qwen3.5, 8 layers"})


def moe(rows, part: str) -> None:
    """Four layers of Qwen3-30B-A3B."""

    def make(tokens):
        return _model(rows, "Qwen/Qwen3-30B-A3B", 4, tokens)

    _steps(rows, part, make, (8192, 32768), 3, {"what": "Qwen3-30B-A3B, 4 layers"})


def longest(rows, part: str) -> None:
    """Four layers of 8B at 786,432 tokens: rows of more than 2^31 elements."""

    def make(tokens):
        return _model(rows, "llama-3.1-8b", 4, tokens)

    begin = time.time()
    _steps(rows, part, make, (786432,), 1, {"what": "8B, 4 layers"})
    rows.add(part=part, all_s=time.time() - begin)
