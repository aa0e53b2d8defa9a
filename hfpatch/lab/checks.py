"""What `hfpatch prove` compares with float64: the gradients of patched models.

The dtype to train in comes first. New memory holds NaN, so that what nothing wrote cannot pass.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

import hfpatch
from hfpatch.budget.policy import Checkpointing
from hfpatch.lab.budget import share_of_allowed
from hfpatch.lab.device import clean, is_out_of_memory, nan_in_new_memory, one_line
from hfpatch.lab.made import made
from hfpatch.lab.twin import exact


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
        rounding errs.
        """
        rounds = self.dtype in ("bfloat16", "float16")
        return self.share <= 1.0 and not (rounds and self.share == 0)  # NaN is not


@dataclass(frozen=True)
class Sizes:
    """Sizes of the checks. model_lengths: of further rows through the same patched model."""

    model: dict
    model_tokens: int
    model_lengths: tuple[int, ...]
    tile: int


SMALL = Sizes(
    model={"hidden_size": 64, "intermediate_size": 112, "vocab_size": 97},
    model_tokens=45,
    model_lengths=(29, 61, 45),
    tile=16,
)
# Llama-3.1-8B's heads. Consumer cards multiply float64 at a 64th of float32's rate. Lengths and a
# vocabulary that no block size divides.
LARGE = Sizes(
    model={
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "vocab_size": 4099,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
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
            if is_out_of_memory(error):
                left_out.append(f"{what}: {one_line(error)}")
            else:
                done.append(Check(what, "", 0, math.inf, one_line(error)))
        clean()
    return done, left_out


def jobs(device: torch.device, sizes: Sizes) -> Iterator[tuple[str, Callable[[], list[Check]]]]:
    """(name, function that runs it) of each check: a Llama of four layers in all `ways`, and over
    several lengths.
    """
    for dtype in dtypes(device):
        yield f"model {_name(dtype)}", partial(_model, device, dtype, sizes)
        yield f"model, lengths {_name(dtype)}", partial(_lengths, device, dtype, sizes)


def _worst(shares: dict[str, float]) -> str:
    """The result with the largest share; of those that pass, one without any error comes first."""
    worst = max(shares, key=shares.get)
    exact = [name for name, share in shares.items() if share == 0]
    return exact[0] if exact and shares[worst] <= 1 else worst


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- whole models ---------------------------------------------------------------------------------


def ways(tile: int) -> dict:
    """Ways to keep a layer's tensors. All must give the same gradients."""
    least = partial(Checkpointing, every=1, tile=tile, plain=0)
    return {
        "host": least(offload="host", keep="attention"),
        "host, attention again": least(offload="host", keep="input"),
        "host, all kept": least(offload="host", keep="gate_up"),
        "gpu": least(offload="gpu", keep="attention"),
        "gpu, all kept": least(offload="gpu", keep="gate_up"),
        "every second": Checkpointing(offload="host", every=2, tile=tile),
        "one tile": least(offload="host", keep="attention", tile=1 << 20),
        "last layer plain": least(offload="host", keep="attention", plain=1),
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


def shares_of(
    model: nn.Module, batch: dict, true: dict, plain: dict, dtype: torch.dtype
) -> dict[str, float]:
    """The loss and every gradient of the patched model: its error over the allowed one."""
    got = gradients(model, batch)
    assert got.keys() == true.keys(), "the same parameters must have gradients"
    return {n: share_of_allowed(got[n], plain[n], true[n], dtype) for n in got}


def compared(model: nn.Module, batch: dict, settings: dict, dtype: torch.dtype) -> Iterator:
    """(way, worst share of the allowed error, the gradient's name) for each way of `settings`."""
    true, plain = references(model, batch)
    for way, checkpointing in settings.items():
        hfpatch.apply(model, checkpointing=checkpointing)
        found = shares_of(model, batch, true, plain, dtype)
        hfpatch.undo(model)
        worst = _worst(found)
        yield way, found[worst], worst


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
    checks = []
    for T, batch, found in zip(sizes.model_lengths, batches, known):
        shares = shares_of(model, batch, *found, dtype)
        worst = _worst(shares)
        checks.append(Check("model, lengths", _name(dtype), T, shares[worst], worst))
    return checks
