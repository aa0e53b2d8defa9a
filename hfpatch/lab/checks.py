"""What `hfpatch prove` compares with float64: every op, and gradients of patched models."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

import hfpatch
from hfpatch.attention.attention import CAUSAL, has_flash, supported
from hfpatch.budget.policy import KEEPABLE, Checkpointing
from hfpatch.lab import float64
from hfpatch.lab.device import clean, is_out_of_memory, one_line
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
        return self.share <= 1.0  # NaN is not


@dataclass(frozen=True)
class Sizes:
    """Sizes of the checks. attention_tokens: fewer, because all scores exist at once."""

    widths: Widths
    tokens: tuple[int, ...]
    attention_tokens: tuple[int, ...]
    model: dict
    model_tokens: int
    tile: int


SMALL = Sizes(
    widths=TINY,
    tokens=(1, 37),
    attention_tokens=(37,),
    model={"hidden_size": 64, "intermediate_size": 112, "vocab_size": 97},
    model_tokens=45,
    tile=16,
)
# Llama-3.1-8B's widths with a smaller vocabulary: consumer cards multiply float64 at a 64th of
# float32's rate. Lengths that no block size divides.
LARGE = Sizes(
    widths=Widths(vocab=32768),
    tokens=(127, 4097),
    attention_tokens=(127, 1000),
    model={
        "hidden_size": 512,
        "intermediate_size": 1408,
        "vocab_size": 4099,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
    model_tokens=1030,
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
    for what, check in (*ops(device, sizes), *models(device, sizes)):
        if time.monotonic() > until:
            left_out.append(f"{what}: the time was over")
            continue
        try:
            done += check()
        except Exception as error:  # any failure of a machine is one failed check
            if is_out_of_memory(error) or what.startswith(MAY_REFUSE):
                left_out.append(f"{what}: {one_line(error)}")
            else:
                done.append(Check(what, "", 0, math.inf, one_line(error)))
        clean()
    return done, left_out


def ops(device: torch.device, sizes: Sizes) -> Iterator[tuple[str, Callable[[], list[Check]]]]:
    """(name, function that runs it) of each op, the most used first."""
    for dtype in dtypes(device):
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
            continue  # layers with such attention run whole here, as plain PyTorch
        for key in keys[:1] if what else keys:
            full = f"attention {key}" + (f", {what}" if what else "")
            given = (key, dtype, T, widths, device, 1, pattern, sinks)
            yield f"{full} {_name(dtype)}", partial(of_op, full, dtype, T, float64.attention, given)


def of_op(what: str, dtype: torch.dtype, T: int, compare: Callable, given: tuple) -> list[Check]:
    found: dict[str, Error] = compare(*given)
    worst = float64.worst_of(found, dtype)
    return [Check(what, _name(dtype), T, found[worst].share(dtype), worst)]


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


def compared(model: nn.Module, batch: dict, settings: dict, dtype: torch.dtype) -> Iterator:
    """(way, worst share of the allowed error, the gradient's name) for each way of `settings`."""
    twin = exact(model)
    true = gradients(twin, batch)
    del twin
    clean()
    plain = gradients(model, batch)
    for way, checkpointing in settings.items():
        hfpatch.apply(model, checkpointing=checkpointing)
        got = gradients(model, batch)
        hfpatch.undo(model)
        assert got.keys() == true.keys(), "the same parameters must have gradients"
        found = {name: Error() for name in got}
        for name, error in found.items():
            error.see(got[name], plain[name], true[name])
        worst = float64.worst_of(found, dtype)
        yield way, found[worst].share(dtype), worst


def models(device: torch.device, sizes: Sizes) -> Iterator:
    """(name, check) of a Llama of four layers in each dtype, in all `ways`."""
    for dtype in dtypes(device):
        yield f"model {_name(dtype)}", partial(_model, device, dtype, sizes)


def _model(device, dtype: torch.dtype, sizes: Sizes) -> list[Check]:
    changes = sizes.model | {"num_hidden_layers": 4, "initializer_range": 0.05}
    model = made("llama-tiny", changes, device, dtype)
    batch = batch_of(model, sizes.model_tokens, device)
    return [
        Check(f"model, {way}", _name(dtype), sizes.model_tokens, share, where)
        for way, share, where in compared(model, batch, ways(sizes.tile), dtype)
    ]
