"""The tiny Llama of all tests, and the comparisons: ours against stock, both against a float64 twin
(hfpatch/lab/twin.py).
"""

import copy
import itertools

import numerics
import pytest
import torch
import transformers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import hfpatch
from hfpatch.lab.twin import ExactNorm, exact, exact_loss, with_exact_norms  # noqa: F401

LONG = pytest.mark.long
VOCAB, TOKENS = 97, 24
TILED = hfpatch.Checkpointing(tile=8)  # three tiles of TOKENS
WAYS = {"off": "off", "tiled": TILED, "segments": hfpatch.Checkpointing(tile=8, every=2)}


def not_before_transformers(version: tuple, reason: str):
    """A mark for what an older transformers does in another way; `reason` says which."""
    here = transformers.__version__
    return pytest.mark.skipif(
        tuple(map(int, here.split(".")[:2])) < version, reason=f"transformers {here} {reason}"
    )


def covering(*axes) -> list:
    """All rows of a grid, for parametrize: the plain suite runs so many that each value is in one of
    them; `test.sh --all` the rest.
    """
    longest = max(map(len, axes))
    kept = {tuple(i % len(axis) for axis in axes) for i in range(longest)}
    rows = itertools.product(*(range(len(axis)) for axis in axes))
    values = {row: [axis[i] for axis, i in zip(axes, row)] for row in rows}
    return [pytest.param(*v, marks=[] if row in kept else LONG) for row, v in values.items()]


def longer(rows, *short) -> list:
    """Rows of which the plain suite runs those named in `short` alone; `test.sh --all` all."""
    assert all(row in rows for row in short)
    several = [row if isinstance(row, tuple) else (row,) for row in rows]
    return [row if row in short else pytest.param(*one, marks=LONG)
            for row, one in zip(rows, several)]  # fmt: skip


# hfpatch says so (trainer/configs.py), and names accelerate's own file.
FSDP_FILES = not_before_transformers((5, 17), "has a Trainer that reads no FSDP file of ours")


def config(**changes) -> LlamaConfig:
    settings = {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2,
        "initializer_range": 0.1, "attn_implementation": "sdpa",
    }  # fmt: skip
    return LlamaConfig(**{**settings, **changes})


def llama(cls=LlamaForCausalLM, dtype=torch.float32, **changes) -> nn.Module:
    """A stock model in training mode; the same weights for the same arguments, biases and norms not
    trivial.
    """
    torch.manual_seed(0)
    model = cls(config(**changes)).to(dtype).train()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(0.2 * torch.randn(p.shape).to(dtype))
    return model


def patched(model: nn.Module, **options) -> nn.Module:
    """A patched copy; checkpointing is tiled unless said otherwise."""
    ours = copy.deepcopy(model)
    hfpatch.apply(ours, **{"checkpointing": TILED, **options})
    return ours


class Shift(nn.Module):
    """A user's own: hands a share of each token on to the next; a number, or a weight."""

    def __init__(self, inner, share):
        super().__init__()
        self.inner, self.share = inner, share

    def forward(self, x):
        y = self.inner(x)
        return y + self.share * nn.functional.pad(y, (0, 0, 1, 0))[:, :-1]


class OfAnEngine:
    """A hook that layers in tiles run, as they run those of engines: for one of a user's own they
    run untiled.
    """

    __module__ = "deepspeed"

    def __init__(self, hook):
        self.hook = hook

    def __call__(self, *args):
        return self.hook(*args)


def checkpoint(model: nn.Module, **kwargs) -> None:
    """transformers' own checkpointing, by the name it has in this version."""
    enable = (
        getattr(model, "activation_checkpointing_enable", None)
        or model.gradient_checkpointing_enable
    )
    enable(kwargs or {"use_reentrant": False})


def ids(batch: int = 2, tokens: int = TOKENS, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCAB, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def labelled(batch: int = 2, tokens: int = TOKENS) -> dict:
    """A batch with some labels ignored, unevenly over the rows."""
    input_ids = ids(batch, tokens)
    labels = input_ids.clone()
    labels[0, :7] = -100
    return {"input_ids": input_ids, "labels": labels}


def as_double(batch: dict) -> dict:
    return {
        n: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        for n, v in batch.items()
    }


def step(model: nn.Module, batch: dict, loss=lambda out: out.loss) -> dict[str, torch.Tensor]:
    """loss and every gradient, by name (of the inputs' embeddings too, where those were passed)."""
    model.zero_grad()
    batch = dict(batch)
    if "inputs_embeds" in batch:
        batch["inputs_embeds"] = batch["inputs_embeds"].detach().clone().requires_grad_()
    value = loss(model(**batch))
    value.backward()
    found = {"loss": value.detach()}
    found |= {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    if "inputs_embeds" in batch:
        found["inputs_embeds"] = batch["inputs_embeds"].grad
    return found


def assert_as_good(
    ours: nn.Module, stock: nn.Module, batch: dict, loss=lambda out: out.loss, against=None
) -> None:
    """Loss and gradients of `ours` err at most as numerics.budget allows; the same parameters have
    gradients.

    against: batch of the float64 twin where it is not the same (documents one by one, say).
    """
    got, plain = step(ours, batch, loss), step(stock, against or batch, loss)
    assert_within(got, plain, step(exact(stock), as_double(against or batch), loss))


def assert_within(got: dict, plain: dict, true: dict, dtype=None) -> None:
    """The same of what each of the three gave, by name. dtype: the working one, where it is not
    plain's.
    """
    assert got.keys() == plain.keys() == true.keys()
    for name, value in got.items():
        numerics.assert_close(value, plain[name], true[name], name, dtype)


def assert_equal_in_double(
    ours: nn.Module, stock: nn.Module, batch: dict, loss=lambda out: out.loss
) -> None:
    """Loss and gradients are those of the float64 twin, as `assert_same_in_double` has it."""
    assert_same_in_double(
        step(ours, as_double(batch), loss), step(exact(stock), as_double(batch), loss)
    )


def assert_same_in_double(got: dict, true: dict) -> None:
    """The same in float64, to a thousand rounding steps of the largest value: algebra, with nothing
    left to rounding.
    """
    assert got.keys() == true.keys()
    for name, value in got.items():
        # the loss as transformers gives it
        dtype = torch.float32 if name == "loss" else torch.float64
        assert value.dtype == dtype, name
        allowed = (
            (1000 if name != "loss" else 1) * torch.finfo(dtype).eps * true[name].abs().max().item()
        )
        error = (value - true[name]).abs().max().item()
        assert error <= allowed, f"{name}: error {error:.2e} exceeds {allowed:.2e}"


def stock_loss(
    model: nn.Module, labels: torch.Tensor, num_items_in_batch=None, **inputs
) -> torch.Tensor:
    """The model's causal loss; in float64 without transformers' rounding of the logits to
    float32.
    """
    if next(model.parameters()).dtype != torch.float64:
        return model(
            labels=labels, num_items_in_batch=num_items_in_batch, use_cache=False, **inputs
        ).loss
    logits = model(use_cache=False, **inputs).logits
    return exact_loss(logits, labels, logits.shape[-1], num_items_in_batch)


def gradients(model: nn.Module) -> dict:
    return {name: p.grad for name, p in model.named_parameters()}


def largest_difference(a: dict, b: dict) -> float:
    """The largest absolute difference of two dicts of gradients, which must have the same None
    entries.
    """
    assert {n for n, g in a.items() if g is None} == {n for n, g in b.items() if g is None}
    return max((a[n].double() - b[n].double()).abs().max().item() for n in a if a[n] is not None)


def classes(model: nn.Module) -> list[type]:
    return [type(m) for m in model.modules()]
