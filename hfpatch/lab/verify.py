"""`hfpatch.verify(model, batch)`: does the patched model compute what the stock one does, here?"""

import copy
import math
import statistics
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hfpatch.compat import is_shard
from hfpatch.decoder.find import find_decoder
from hfpatch.lab.budget import allowed_error
from hfpatch.lab.compat import local_part
from hfpatch.layer.traits import runtimes_in
from hfpatch.patch import apply, undo

FEW = 16  # gradients with fewer elements are not judged
CHUNK = 1 << 24  # elements of a gradient compared at once


@dataclass(frozen=True)
class Verified:
    """The result of `verify`. A distance is the norm of a difference over the stock result's norm.

    Attributes:
        ok: rounding explains the differences of the loss and of every gradient.
        loss, stock_loss: patched and stock.
        worst: the gradient (or "loss") with the largest distance over its limit.
        distance, limit: its distance, patched against stock, and the allowed one.
        noise: its distance between two stock runs that round differently.
        gradients: the number of gradients compared.
        dtype: the coarsest dtype that the model computes in.
    """

    loss: float
    stock_loss: float
    worst: str
    distance: float
    noise: float
    limit: float
    gradients: int
    dtype: str

    @property
    def ok(self) -> bool:
        return self.distance <= self.limit  # NaN is not

    def __str__(self) -> str:
        verdict = "agrees with" if self.ok else "DIFFERS from"
        return (
            f"hfpatch: the patched model {verdict} stock: loss {self.loss:.6g} against "
            f"{self.stock_loss:.6g}; of {self.gradients} gradients and the loss the worst, "
            f"{self.worst}, is {self.distance:.2g} of its size away, where rounding alone moves it "
            f"by {self.noise:.2g} and {self.limit:.2g} is allowed ({self.dtype})."
        )


def verify(model: nn.Module, batch: Mapping) -> Verified:
    """Compares the patched model with the stock one: these weights, this batch, this device.

    One forward and backward runs three times: stock, stock with other roundings, and patched. The
    second run measures the noise of the working dtype: it moves the output of every innermost
    module, and the gradient through it, at random by up to half a rounding step. That costs one
    more step, and no second copy of the weights. A patched gradient may differ from the stock one
    by three times its noise (or the median noise, if larger) and two rounding steps. float64 models
    round at float32's step, because transformers' norms and loss compute in float32. Gradients of
    fewer than 16 numbers are not judged: they are sums over all tokens, which may cancel. Pass a
    few hundred tokens; with experts no fewer, because rounding may send a token to another expert.

    The runs use copies of the modules that share the model's parameters. The model keeps its
    weights, .grad, training flag, random state and patch. Copies run in training mode without
    dropout. A patched model is compared under its own settings (under apply's defaults if it was
    patched with loss=False).

    Args:
        model: a causal language model of transformers, stock or patched, plain or wrapped by PEFT;
            not yet wrapped by DDP, FSDP, DeepSpeed or torch.compile.
        batch: the arguments of the model's forward: input_ids [batch, tokens] or inputs_embeds
            [batch, tokens, hidden], labels (by default input_ids), and others. They are moved to
            the model's device.

    Returns:
        A `Verified`: print it, or read its `ok`.

    Raises:
        ValueError: the model or batch cannot be compared.

    Examples:
        >>> print(hfpatch.verify(model, {"input_ids": ids, "labels": labels}))
    """
    # [Step 1] Refuse a model or a batch that cannot be compared.
    if any(is_shard(p) or local_part(p) is not p for p in model.parameters()):
        raise ValueError(
            "hfpatch: parameters must be whole, and some are sharded. Call verify() before an engine "
            "wraps the model."
        )
    if find_decoder(model) is None:
        raise ValueError(
            "hfpatch: the model must have a list of decoder layers, and none was found in "
            f"{type(model).__name__}. Pass a causal language model of transformers."
        )
    batch = _batch(model, batch)
    # [Step 2] Run the stock model twice. The second run, with other roundings, shows the noise.
    with _copied(model) as stock:
        # On the host: the device holds the gradients of one step at a time.
        wanted = {name: g.cpu() for name, g in _step(stock, batch).items()}
        rounding = Rounding(stock)
        noisy = _step(stock, batch)
    if rounding.ran.isdisjoint(find_decoder(stock).layers[0].modules()):  # the model's own ran
        raise ValueError(
            "hfpatch: the model's copy must run its own layers, and its forward runs another's. "
            "Remove what wraps model.forward (accelerator.unwrap_model) and call verify() again."
        )
    noise = {name: _distance(noisy[name], g) for name, g in wanted.items()}
    del noisy, stock
    # [Step 3] Run the patched model.
    with _copied(model, patched=True) as ours:
        got = _step(ours, batch)
    # [Step 4] Set a limit for each difference, and find the worst one.
    apart = {n: _distance(got[n], g) if n in got else math.inf for n, g in wanted.items()}
    middle = statistics.median(noise.values())
    limits = {}
    for name in noise:
        # The patched result may lose what `allowed_error` says, and the stock one its own noise.
        lost = max(noise[name], middle)
        limits[name] = lost + allowed_error(lost, rounding.step)
    shares = {name: apart[name] / limit for name, limit in limits.items()}
    worst = max(shares, key=lambda name: math.inf if math.isnan(shares[name]) else shares[name])
    return Verified(
        loss=got["loss"].item(),
        stock_loss=wanted["loss"].item(),
        worst=worst,
        distance=apart[worst],
        noise=noise[worst],
        limit=limits[worst],
        gradients=len(wanted) - 1,
        dtype=rounding.dtype,
    )


def _batch(model: nn.Module, batch: Mapping) -> dict:
    """The batch on the model's device, with labels."""
    if not isinstance(batch, Mapping):
        raise ValueError(
            "hfpatch: the batch must be a dict of the forward's arguments, got a "
            f"{type(batch).__name__}. Pass {{'input_ids': ids}}."
        )
    device = next(model.parameters()).device
    batch = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items()}
    if batch.get("input_ids") is None and batch.get("inputs_embeds") is None:
        raise ValueError(
            "hfpatch: the batch must have input_ids or inputs_embeds, got "
            f"{', '.join(batch) or 'an empty batch'}. Name the tokens so."
        )
    if batch.get("labels") is None:
        if batch.get("input_ids") is None:
            raise ValueError("hfpatch: inputs_embeds need labels, got none. Add them.")
        batch["labels"] = batch["input_ids"]
    if batch.get("inputs_embeds") is None and not any(p.requires_grad for p in model.parameters()):
        raise ValueError("hfpatch: some parameters must train, and all are frozen. Unfreeze some.")
    return {"use_cache": False, **batch}


@contextmanager
def _copied(model: nn.Module, patched: bool = False):
    """A context with a copy of the modules, without dropout, that shares the model's parameters.
    Frozen weights that wait on the host come to the device, and wait again from the next step on.
    """
    try:
        made = copy.deepcopy(model, {id(p): p for p in model.parameters()})
    except TypeError as error:  # a lock, a file, a generator among its attributes
        raise ValueError(
            f"hfpatch: the model must be one that can be copied, and has {error}. Remove it first."
        ) from error
    asked = next((s for m in made.modules() if (s := vars(m).get("_hfpatch_options"))), {})
    waiting = any(runtime.weights.on for runtime in runtimes_in(model))
    undo(made)
    if waiting:  # stock layers need their frozen weights on the device
        made.to(next(model.parameters()).device)
    made.train()
    _without_dropout(made)
    try:
        if patched:
            apply(made, **asked)
        yield made
    finally:
        undo(made)  # pinned memory goes; weights that waited on the host stay there


def _without_dropout(model: nn.Module) -> None:
    """Turns dropout off: tiles draw other random numbers than whole rows."""
    for module in model.modules():
        if "Dropout" in type(module).__name__:
            module.eval()
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def _step(model: nn.Module, batch: dict) -> dict[str, Tensor]:
    """The loss and the gradients, by name.

    autograd.grad leaves .grad alone, and runs no hook of its accumulation, such as an optimizer.
    """
    batch = dict(batch)
    leaves = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if batch.get("inputs_embeds") is not None:
        leaves["inputs_embeds"] = batch["inputs_embeds"].detach().requires_grad_()
        batch["inputs_embeds"] = leaves["inputs_embeds"]
    device = batch["labels"].device
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
        loss = model(**batch).loss
        gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    found = {"loss": loss.detach()}
    return found | {n: g for n, g in zip(leaves, gradients) if g is not None and g.numel() >= FEW}


def _distance(got: Tensor, wanted: Tensor) -> float:
    """|got - wanted| / |wanted|; 0 if both are zero."""
    off = size = 0.0
    for a, b in zip(got.flatten().split(CHUNK), wanted.flatten().split(CHUNK)):
        b = b.to(a.device).double()
        off += (a.double() - b).square().sum()
        size += b.square().sum()
    return (off / size).sqrt().item() if off else 0.0


class Rounding:
    """Hooks that round outputs and gradients of a stock model's innermost modules at random.

    step: the coarsest relative rounding step seen; dtype: the name of its dtype; ran: the modules.
    """

    def __init__(self, model: nn.Module):
        self.step = 0.0
        self.dtype = ""
        self.ran: set[nn.Module] = set()
        self.generators: dict[torch.device, torch.Generator] = {}
        for module in model.modules():
            if not any(True for _ in module.children()):
                module.register_forward_hook(self._moved)

    def _moved(self, module, args, out):
        if not isinstance(out, Tensor) or not out.is_floating_point():
            return None
        self.ran.add(module)
        # A rounding step, relative to the value; at least float32's.
        step = max(torch.finfo(out.dtype).eps, torch.finfo(torch.float32).eps)
        if step > self.step:
            self.step = step
            self.dtype = str(out.dtype).removeprefix("torch.")
        if out.device not in self.generators:
            self.generators[out.device] = torch.Generator(out.device).manual_seed(0)
        return _Moved.apply(out, step, self.generators[out.device])


class _Moved(torch.autograd.Function):
    """x, each value moved at random by up to half a rounding step and rounded, and its gradient so
    too."""

    @staticmethod
    def forward(ctx, x, step, generator):
        ctx.noise = (step, generator)
        return _moved(x, step, generator)

    @staticmethod
    def backward(ctx, dy):
        return _moved(dy, *ctx.noise), None, None


def _moved(x: Tensor, step: float, generator: torch.Generator) -> Tensor:
    # one rounding, after the sum
    return torch.addcmul(
        x, x, torch.empty_like(x).uniform_(-step / 2, step / 2, generator=generator)
    )
