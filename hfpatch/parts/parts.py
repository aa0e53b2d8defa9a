"""Fused norms and MLPs for any family, where a probe on random input agrees; embeddings without a
gradient that is unread.

Agreement means equal bits, or the few rounding steps that fusing saves, in gradients too. Otherwise
the module keeps transformers' class, and the report says why. Projections are called as modules,
never read by `.weight`, because LoRA, quantisation and engine hooks act on the call.
"""

import inspect
from collections import namedtuple
from functools import cache
from inspect import isroutine
from itertools import product

import torch
from torch import Tensor, nn

from hfpatch import ops
from hfpatch.compat import (
    OF_ALL,
    asks_for_input_gradients,
    buffers_of,
    forward_hooks,
    hooks_on_all,
    modules_of,
    other_hooks,
    parameters_of,
    twin_of,
    values_for_now,
)
from hfpatch.context.class_code import reached, wrote
from hfpatch.context.current import current
from hfpatch.ops.rms_norm import CASTS
from hfpatch.ops.swiglu import ACTIVATIONS

# --- norms ----------------------------------------------------------------------------------------

_EPS = ("variance_epsilon", "eps", "epsilon", "norm_eps")
_NORM_DTYPES = (  # of hidden states and of the weight
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.float32),
)


class FusedRMSNorm:
    """An RMSNorm in one kernel.

    _hfpatch: (name of the epsilon attribute, offset, cast), see ops/rms_norm.py.
    """

    def forward(self, hidden_states: Tensor) -> Tensor:
        if self._hfpatch_base.forward is not type(self)._hfpatch_code:
            return super().forward(hidden_states)
        eps, offset, cast = self._hfpatch
        weight = getattr(self, "weight", None)
        return ops.rms_norm(hidden_states, weight, getattr(self, eps), offset=offset, cast=cast)


def close(ours: Tensor, theirs: Tensor, steps: float) -> bool:
    """Whether values differ by at most `steps` rounding steps, of the value or of the mean
    magnitude."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    theirs = theirs.double()
    size = theirs.abs().clamp_min(theirs.abs().mean())
    allowed = steps * torch.finfo(ours.dtype).eps * size
    return bool(((ours.double() - theirs).abs() <= allowed).all())


def norm_part(norm: nn.Module) -> tuple[type, dict] | str:
    """(fused class, its attributes) for this norm, or the reason why it keeps its class."""
    eps = next((n for n in _EPS if isinstance(getattr(norm, n, None), (int, float))), None)
    more = parameters_of(norm).keys() - {"weight"}
    if eps is None or more or modules_of(norm) or buffers_of(norm):
        return "no RMSNorm with one weight and an epsilon"
    kind = type(norm)
    if list(inspect.signature(kind.forward).parameters)[2:]:
        return "its forward takes more than hidden states"
    weighted = parameters_of(norm).get("weight") is not None
    variant = _norm_variant(
        kind, kind.forward, eps, getattr(norm, eps), weighted, _plain_items(norm)
    )
    if variant is None:
        return "its results differ from the fused norm's"
    return FusedRMSNorm, {"_hfpatch": variant}


def _plain_items(module: nn.Module) -> tuple:
    """The (name, value) pairs of a module's settings and functions, on which a forward may branch
    or which it may call.

    Names with an underscore are left out: engines and transformers set them.
    """
    own = module.__dict__
    names = sorted(n for n in own.keys() - OF_ALL if n[0] != "_" and not hasattr(nn.Module, n))
    read = [n for n in names if isinstance(own[n], (bool, str, float)) or isroutine(own[n])]
    return tuple((n, own[n]) for n in read)


@cache
def _norm_variant(
    kind: type, forward, eps_name: str, eps: float, weighted: bool, flags: tuple
) -> tuple[str, float, str] | None:
    generator = torch.Generator().manual_seed(0)
    make = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    probe = kind.__new__(kind)
    nn.Module.__init__(probe)
    vars(probe).update(dict(flags) | {eps_name: eps})
    offsets = (0.0, 1.0) if weighted else (0.0,)
    for exact, offset, cast in product((True, False), offsets, CASTS):
        if _norm_agrees(probe, make, weighted, eps, offset, cast, exact):
            return eps_name, offset, cast
    return None


def _norm_agrees(probe, make, weighted, eps, offset, cast, exact) -> bool:
    """exact: equal to the bit, except in float32, where the order of a sum may differ."""
    for x_dtype, w_dtype in _NORM_DTYPES:
        x = 3 * make(1, 7, 64)
        x[:, 5] *= max(eps, 1e-12) ** 0.5  # where the epsilon counts
        x[:, 6, 0] = 1000  # an outlier
        x = x.to(x_dtype).requires_grad_()
        weight = make(64).to(w_dtype).requires_grad_() if weighted else None
        leaves = [x, weight] if weighted else [x]
        parameters_of(probe)["weight"] = weight
        probe.training = x_dtype == w_dtype
        before = reached(probe)
        try:
            theirs = with_gradients((probe(x),), leaves)
        except Exception:  # a family's code may raise anything on a probe: it is another norm then
            return False
        y = ops.rms_norm(x, weight, eps, offset=offset, cast=cast)
        ours = with_gradients((y,), leaves)
        # 16-bit gradients, sums of rounded terms, are too coarse to compare.
        steps = (4, 4096, 4096) if x_dtype == torch.float32 else (int(not exact),)
        if wrote(before, probe) or not all(map(close, ours, theirs, steps)):
            return False
    return True


def with_gradients(ys, leaves) -> list[Tensor]:
    """Outputs, and the leaves' gradients for fixed random ones of the outputs: a user's forward may
    have another backward."""
    generator = torch.Generator().manual_seed(1)
    dys = [torch.randn(y.shape, generator=generator).to(y) for y in ys]
    return [*ys, *torch.autograd.grad(ys, leaves, dys, materialize_grads=True)]


# --- MLPs -----------------------------------------------------------------------------------------


# What the probe of an MLP found. gates: the projections that can be skipped where gate and up are kept,
# two, or one that makes both; kinds: the classes of its activation's modules at that time.
Gated = namedtuple("Gated", "gates kinds activation")


class _InPlaceOf(torch.autograd.Function):
    """Returns `value`. Its gradient goes unchanged to `computed`."""

    @staticmethod
    def forward(ctx, value, computed):
        return value.view_as(value)

    @staticmethod
    def backward(ctx, dy):
        return None, dy


class FusedMLP:
    """A gated MLP with one kernel for activation(gate) * up."""

    _hfpatch: Gated

    def forward(self, x: Tensor) -> Tensor:
        if not activation_as_found(self):
            return super().forward(x)
        made = [getattr(self, name)(x) for name in self._hfpatch.gates]
        noted, kept = current.gate_up
        if noted is not None:
            noted[:] = made
        if kept:
            # The kept values. Their gradients go to the projections, whose values are unread.
            made = [_InPlaceOf.apply(k, y) for k, y in zip(kept, made, strict=True)]
        if len(made) == 1:
            made = made[0].chunk(2, dim=-1)
        gate, up = made
        return self.down_proj(ops.swiglu(gate, up, activation=self._hfpatch.activation))


def _activations(mlp: nn.Module, gates: tuple[str, ...]) -> list[nn.Module]:
    return [m for n, m in modules_of(mlp).items() if n not in gates and n != "down_proj"]


def activation_as_found(mlp: nn.Module) -> bool:
    """Whether the fused form, which does not call the activation module, still computes the same:
    the MLP's class has the forward that apply() found, and the activation its class, its class's
    forward and no hooks.
    """
    now = _activations(mlp, mlp._hfpatch.gates)
    if hooks_on_all() or [type(m) for m in now] != mlp._hfpatch.kinds:
        return False
    if mlp._hfpatch_base.forward is not type(mlp)._hfpatch_code:
        return False
    for m in now:
        if forward_hooks(m) or other_hooks(m) or "forward" in m.__dict__:
            return False
    return True


_GATES = (("gate_proj", "up_proj"), ("gate_up_proj",))
_SIZES = {  # of the projections that the probe tries
    "gate_proj": (16, 24), "up_proj": (16, 24), "gate_up_proj": (16, 48), "down_proj": (24, 16)
}  # fmt: skip


# The rounding steps by which the outputs and gradients of two MLPs may differ.
_STEPS = (64, *[4096] * 9)
# Where the activation is not as found, its call raises.
_FusedTwin = type(
    "_FusedTwin",
    (FusedMLP, nn.Module),
    {"_hfpatch_base": nn.Module, "_hfpatch_code": nn.Module.forward},
)


def _as_trained(mlp: nn.Module, inputs) -> tuple[list[list[Tensor]], str | None]:
    """The MLP's outputs and gradients in training, then in eval mode, and why a fused form would do
    something else, or None. from_pretrained returns models in eval mode, without their dropout."""
    drawn = torch.get_rng_state()
    before = reached(mlp)
    outs = [_run(mlp, x, training) for training in (True, False) for x in inputs]
    reasons = {
        "its forward writes to more than its output": wrote(before, mlp),
        "it draws random numbers": not torch.equal(torch.get_rng_state(), drawn),
    }
    return outs, next((reason for reason, holds in reasons.items() if holds), None)


def _run(mlp: nn.Module, x: Tensor, training: bool = True) -> list[Tensor]:
    with values_for_now([(vars(module), "training", training) for module in mlp.modules()]):
        return with_gradients((mlp(x),), [x, *(p for p in mlp.parameters() if p.requires_grad)])


def mlp_part(mlp: nn.Module) -> tuple[type, dict] | str:
    """(fused class, its attributes) for this MLP, or the reason why it keeps its class."""
    # [Step 1] Refuse a module that is no gated MLP.
    modules = dict(modules_of(mlp))
    matching = [names for names in _GATES if modules.keys() >= {*names, "down_proj"}]
    if not matching or parameters_of(mlp):
        return "no gated MLP"
    # [Step 2] Make two small twins with the same random projections. One has the MLP's own forward,
    # the other the fused one.
    gates = matching[0]
    generator = torch.Generator().manual_seed(0)
    for name in (*gates, "down_proj"):
        n_in, n_out = _SIZES[name]
        # skip_init leaves the caller's random state unchanged.
        modules[name] = nn.utils.skip_init(
            nn.Linear, n_in, n_out, bias=False, device="cpu", dtype=torch.float32
        )
        modules[name].weight.data.copy_(torch.randn(n_out, n_in, generator=generator) / 4)
    twin = twin_of(mlp, modules)
    ours = twin_of(mlp, modules)
    ours.__class__ = _FusedTwin
    kinds = [type(m) for m in _activations(mlp, gates)]
    # [Step 3] Find the activation for which both return the same.
    x = torch.randn(2, 7, 16, generator=generator)
    # Also as large as outliers are: some families clamp gate and up (DeepSeek-V4 at 10).
    inputs = x.requires_grad_(), (100 * x).detach().requires_grad_()
    try:
        wanted, reason = _as_trained(twin, inputs)
        if reason:
            return reason
        for name in dict.fromkeys(ACTIVATIONS.values()):
            ours._hfpatch = Gated(gates, kinds, name)
            if all(all(map(close, _run(ours, x), y, _STEPS)) for x, y in zip(inputs * 2, wanted)):
                return FusedMLP, {"_hfpatch": ours._hfpatch}
    except Exception as error:  # a family's own code on a probe may raise anything
        return f"its probe failed ({type(error).__name__})"
    return "no fused form of its activation"


# --- embeddings ------------------------------------------------------------------------------------


class FreeEmbedding:
    """An embedding that ignores enable_input_require_grads() where only reentrant checkpoints need
    it.

    As a leaf that requires a gradient, the output would live for the whole step, and the first
    layer would compute a gradient that is unread. The hook still works where the user calls the
    embedding directly, where hidden states are returned (the caller may read the gradient), and in
    a frozen model (the backward has no other leaf).
    """

    def __call__(self, *args, **kwargs):
        out = super().__call__(*args, **kwargs)
        embeds = current.outer.embeds
        if torch.compiler.is_compiling() or embeds is None:
            return out
        hooks = forward_hooks(self)
        if not out.requires_grad or not out.is_leaf or not hooks:
            return out
        trains = any(p.requires_grad for p in embeds.parameters())
        return out.detach() if trains and all(map(asks_for_input_gradients, hooks)) else out
