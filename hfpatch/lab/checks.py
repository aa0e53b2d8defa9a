"""What `hfpatch prove` compares with float64: every op, and gradients of patched models.

The order is what a short run must know: whether the device computes at all, against the CPU; the
ops in the dtype to train in; a whole model's gradients; then the other dtypes. New memory holds NaN,
so that what nothing wrote cannot pass.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

import hfpatch
from hfpatch.attention.attention import CAUSAL, has_flash, supported
from hfpatch.budget.policy import KEEPABLE, Checkpointing
from hfpatch.lab import float64
from hfpatch.lab.device import clean, is_out_of_memory, nan_in_new_memory, one_line
from hfpatch.lab.elementwise import OPS, TINY, Error, Widths
from hfpatch.lab.made import made
from hfpatch.lab.twin import exact

# Layers take another backend if this one is missing or refuses a shape: left out, not failed.
MAY_REFUSE = ("attention cudnn",)


@dataclass(frozen=True)
class Check:
    """One comparison. share: the worst result's error over the allowed one. where: its name."""

    what: str
    dtype: str
    tokens: int
    share: float
    where: str

    @property
    def passed(self) -> bool:
        """Whether the error is within the allowed one, and not exactly zero in half precision:
        rounding errs, except of a single token, which RoPE leaves as it is.
        """
        rounds = self.dtype in ("bfloat16", "float16") and self.tokens > 1
        return self.share <= 1.0 and not (rounds and self.share == 0)  # NaN is not

    @property
    def of_a_model(self) -> bool:
        return self.what.startswith("model")


@dataclass(frozen=True)
class Sizes:
    """Sizes of the checks.

    Attributes:
        attention_tokens: fewer, because all scores exist at once.
        odd_vocab: with a vocabulary that no power of two divides, as an added token makes it.
        model_lengths: of further rows through the same patched model.
    """

    widths: Widths
    tokens: tuple[int, ...]
    attention_tokens: tuple[int, ...]
    odd_vocab: Widths
    model: dict
    model_tokens: int
    model_lengths: tuple[int, ...]
    tile: int


SMALL = Sizes(
    widths=TINY,
    tokens=(1, 37),
    attention_tokens=(37,),
    odd_vocab=replace(TINY, vocab=257),
    model={"hidden_size": 64, "intermediate_size": 112, "vocab_size": 97},
    model_tokens=45,
    model_lengths=(29, 61, 45),
    tile=16,
)
# Llama-3.1-8B's widths with a smaller vocabulary: consumer cards multiply float64 at a 64th of
# float32's rate. Lengths that no block size divides.
LARGE = Sizes(
    widths=Widths(vocab=32768),
    tokens=(127, 4097),
    attention_tokens=(127, 1000),
    odd_vocab=Widths(hidden=1024, vocab=128257),
    model={
        "hidden_size": 512,
        "intermediate_size": 1408,
        "vocab_size": 4099,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
    model_tokens=1030,
    model_lengths=(515, 1400, 1030),
    tile=256,
)


def dtypes(device: torch.device) -> list[torch.dtype]:
    """The dtypes that this device computes without emulation, the one to train in first."""
    if device.type != "cuda":
        return [torch.bfloat16, torch.float32]
    half = [torch.bfloat16] if torch.cuda.is_bf16_supported(including_emulation=False) else []
    return [*half, torch.float16, torch.float32]


def run(device: torch.device, sizes: Sizes, until: float) -> tuple[list[Check], list[str]]:
    """The checks that begin before `until` (by time.monotonic()), and a line for each other one."""
    done, left_out = [], []
    for what, check in jobs(device, sizes):
        if time.monotonic() > until:
            left_out.append(f"{what}: the time was over")
            continue
        try:
            with nan_in_new_memory():
                done += check()
        except Exception as error:  # any failure of a machine is one failed check
            if is_out_of_memory(error) or what.startswith(MAY_REFUSE):
                left_out.append(f"{what}: {one_line(error)}")
            else:
                done.append(Check(what, "", 0, math.inf, one_line(error)))
        clean()
    return done, left_out


def jobs(device: torch.device, sizes: Sizes) -> Iterator[tuple[str, Callable[[], list[Check]]]]:
    """(name, function that runs it) of each check, in the order of this module's docstring."""
    for index, dtype in enumerate(dtypes(device)):
        if index == 0:
            what = "against the CPU"
            given = (dtype, sizes.widths, device)
            check = partial(of_op, what, dtype, sizes.tokens[-1], float64.of_the_cpu, given)
            yield f"{what} {_name(dtype)}", check
        yield from ops(device, dtype, sizes)
        yield from models(device, dtype, sizes)


def ops(device: torch.device, dtype: torch.dtype, sizes: Sizes) -> Iterator:
    """The jobs of each op in one dtype, the most used first."""
    name = _name(dtype)
    for T in sizes.tokens:
        for op in OPS.values():
            given = (op, dtype, T, sizes.widths, device)
            check = partial(of_op, op.name, dtype, T, float64.element_wise, given)
            yield f"{op.name} {name}", check
        for masked in (0.0, 0.9)[: 1 + (T > 1)]:
            what = "linear_cross_entropy" + (", most tokens masked" if masked else "")
            given = (dtype, T, sizes.widths, device, masked)
            yield f"{what} {name}", partial(of_op, what, dtype, T, float64.loss, given)
    vocab, T = sizes.odd_vocab.vocab, sizes.attention_tokens[0]
    what, given = f"linear_cross_entropy, vocabulary {vocab:,}", (dtype, T, sizes.odd_vocab, device)
    yield f"{what} {name}", partial(of_op, what, dtype, T, float64.loss, given)
    for T in sizes.attention_tokens:
        yield from _attention(device, dtype, T, sizes.widths)


def _attention(device, dtype, T: int, widths: Widths) -> Iterator:
    """Each backend for this dtype. The first one also runs the patterns."""
    keys = ["cpu"] if device.type != "cuda" else ["efficient"]
    if dtype != torch.float32 and device.type == "cuda" and has_flash(device):
        keys = ["flash", "cudnn"]
    patterns = {"": (CAUSAL, False)}
    if T == 37 or T > 999:
        patterns |= float64.patterns(T, device)
    for what, (pattern, sinks) in patterns.items():
        if what and supported(widths.head_dim, dtype, device, pattern) is not None:
            continue  # layers with such attention run untiled here, as plain PyTorch
        for key in keys[:1] if what else keys:
            full = f"attention {key}" + (f", {what}" if what else "")
            given = (key, dtype, T, widths, device, 1, pattern, sinks)
            yield f"{full} {_name(dtype)}", partial(of_attention, full, dtype, T, given)


def of_op(what: str, dtype: torch.dtype, T: int, compare: Callable, given: tuple) -> list[Check]:
    found: dict[str, Error] = compare(*given)
    return [_check(what, dtype, T, found)]


def of_attention(what: str, dtype: torch.dtype, T: int, given: tuple) -> list[Check]:
    """The forward, and the kernel's own backward."""
    found = float64.attention(*given)
    checks = [_check(what, dtype, T, {"out": found.pop("out")})]
    return checks + [_check(f"{what}, backward", dtype, T, found)]


def _check(what: str, dtype: torch.dtype, T: int, found: dict[str, Error]) -> Check:
    worst = _worst(found, dtype)
    return Check(what, _name(dtype), T, found[worst].share(dtype), worst)


def _worst(found: dict[str, Error], dtype: torch.dtype) -> str:
    """The result with the largest share; of those that pass, one without any error comes first."""
    worst = float64.worst_of(found, dtype)
    exact = [name for name, error in found.items() if error.got == 0]
    return exact[0] if exact and found[worst].share(dtype) <= 1 else worst


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- whole models ---------------------------------------------------------------------------------


def ways(tile: int) -> dict:
    """Ways to keep a layer's tensors. All must give the same gradients."""
    least = partial(Checkpointing, every=1, save_attention=True, tile=tile, plain=0, keep=())
    return {
        "host": least(offload="host"),
        "host, attention again": least(offload="host", save_attention=False),
        "host, all kept": least(offload="host", keep=KEEPABLE),
        "gpu": least(offload="gpu"),
        "gpu, all kept": least(offload="gpu", keep=KEEPABLE),
        "every second": Checkpointing(offload="host", every=2, tile=tile),
        "one tile": least(offload="host", tile=1 << 20),
        "last layer plain": least(offload="host", plain=1),
        "auto": "auto",
    }


def gradients(model: nn.Module, batch: dict) -> dict[str, torch.Tensor]:
    """The loss and every gradient of one step, by name. Clears .grad before and after."""
    model.zero_grad(set_to_none=True)
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return {"loss": loss.detach()} | found


def batch_of(model: nn.Module, T: int, device, seed: int = 0) -> dict:
    """Random tokens [1, T], a fifth of them without a label."""
    g = torch.Generator(device=device).manual_seed(seed)
    ids = torch.randint(3, model.config.vocab_size, (1, T), device=device, generator=g)
    labels = ids.clone()
    labels[:, : T // 5] = -100
    return {"input_ids": ids, "labels": labels}


def references(model: nn.Module, batch: dict) -> tuple[dict, dict]:
    """The gradients of a float64 twin, and those of the model as it is."""
    true = gradients(exact(model), batch)
    clean()
    return true, gradients(model, batch)


def errors_of(model: nn.Module, batch: dict, true: dict, plain: dict) -> dict[str, Error]:
    """The errors of the loss and of every gradient of the patched model."""
    got = gradients(model, batch)
    assert got.keys() == true.keys(), "the same parameters must have gradients"
    found = {name: Error() for name in got}
    for name, error in found.items():
        error.see(got[name], plain[name], true[name])
    return found


def compared(model: nn.Module, batch: dict, settings: dict, dtype: torch.dtype) -> Iterator:
    """(way, worst share of the allowed error, the gradient's name) for each way of `settings`."""
    true, plain = references(model, batch)
    for way, checkpointing in settings.items():
        hfpatch.apply(model, checkpointing=checkpointing)
        found = errors_of(model, batch, true, plain)
        hfpatch.undo(model)
        worst = _worst(found, dtype)
        yield way, found[worst].share(dtype), worst


def models(device: torch.device, dtype: torch.dtype, sizes: Sizes) -> Iterator:
    """The jobs of a Llama of four layers in one dtype: in all `ways`, and over several lengths."""
    yield f"model {_name(dtype)}", partial(_model, device, dtype, sizes)
    yield f"model, lengths {_name(dtype)}", partial(_lengths, device, dtype, sizes)


def _made(device, dtype: torch.dtype, sizes: Sizes) -> nn.Module:
    changes = sizes.model | {"num_hidden_layers": 4, "initializer_range": 0.05}
    return made("llama-tiny", changes, device, dtype)


def _model(device, dtype: torch.dtype, sizes: Sizes) -> list[Check]:
    model = _made(device, dtype, sizes)
    batch = batch_of(model, sizes.model_tokens, device)
    return [
        Check(f"model, {way}", _name(dtype), sizes.model_tokens, share, where)
        for way, share, where in compared(model, batch, ways(sizes.tile), dtype)
    ]


def _lengths(device, dtype: torch.dtype, sizes: Sizes) -> list[Check]:
    """Rows of other lengths, one after the other: what is kept of one must not reach the next."""
    model = _made(device, dtype, sizes)
    batches = [batch_of(model, T, device) for T in sizes.model_lengths]
    known = [references(model, batch) for batch in batches]
    hfpatch.apply(model, checkpointing=ways(sizes.tile)["host"])
    return [
        _check("model, lengths", dtype, T, errors_of(model, batch, *found))
        for T, batch, found in zip(sizes.model_lengths, batches, known)
    ]
