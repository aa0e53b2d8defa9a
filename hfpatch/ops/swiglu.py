"""The gated activation of an MLP: activation(gate) * up, computed in float32 and rounded once.

Legend: N tokens, F intermediate. Any leading dimensions. gate and up may be strided: halves of one
projection, for example.

    y = act(gate) * up        dup = dy * act(gate)        dgate = dy * up * act'(gate)
The backward reads dy, gate and up once and writes dgate and dup once. Nothing else is saved.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from hfpatch.ops._library import define, no_second_derivative, refuse, wide_dtype

# Names in transformers' ACT2FN -> the function computed. Other names are refused, never replaced.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_python": "gelu",
}
_APPROXIMATE = {"gelu": "none", "gelu_tanh": "tanh"}


def swiglu_ref(gate: Tensor, up: Tensor, *, activation: str = "silu") -> Tensor:
    """swiglu in plain torch, with any number of derivatives. float64 stays float64."""
    wide = wide_dtype(gate.dtype, up.dtype)
    y = _act(gate.to(wide), ACTIVATIONS[activation]) * up.to(wide)
    return y.to(torch.promote_types(gate.dtype, up.dtype))


def _act(x, name):
    if name == "silu":
        return F.silu(x)
    return F.gelu(x, approximate=_APPROXIMATE[name])


def _dgate(dact, x, name):
    """The gradient of x from dact, the gradient of act(x)."""
    if name == "silu":
        return torch.ops.aten.silu_backward(dact, x)
    return torch.ops.aten.gelu_backward(dact, x, approximate=_APPROXIMATE[name])


# The op, its backward op and their fakes.


def _plain_fwd(gate, up, activation):
    return swiglu_ref(gate, up, activation=activation).contiguous()


def _plain_bwd(dy, gate, up, activation):
    wide = wide_dtype(gate.dtype, up.dtype)
    dy = dy.to(wide)
    gate_wide = gate.to(wide)
    dgate = _dgate(dy * up, gate_wide, activation)
    dup = _act(gate_wide, activation).mul_(dy)
    return dgate.to(gate.dtype).contiguous(), dup.to(up.dtype).contiguous()


def _bwd_fake(dy, gate, up, activation):
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


SWIGLU_BACK = define(
    "swiglu_bwd(Tensor dy, Tensor gate, Tensor up, str activation) -> (Tensor dgate, Tensor dup)",
    _plain_bwd,
    "swiglu.swiglu_bwd",
    _bwd_fake,
    backward=no_second_derivative("swiglu"),
)


def _setup_context(ctx, inputs, output):
    gate, up, ctx.activation = inputs
    ctx.save_for_backward(gate, up)


def _backward(ctx, dy):
    return *SWIGLU_BACK(dy, *ctx.saved_tensors, ctx.activation), None


def _fwd_fake(gate, up, activation):
    return gate.new_empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype))


SWIGLU = define(
    "swiglu(Tensor gate, Tensor up, str activation) -> Tensor",
    _plain_fwd,
    "swiglu.swiglu_fwd",
    _fwd_fake,
    backward=_backward,
    setup_context=_setup_context,
)


def swiglu(gate: Tensor, up: Tensor, *, activation: str = "silu") -> Tensor:
    """activation(gate) * up, computed in float32 and rounded once.

    Args:
        gate, up: [..., F], of one shape, bf16, fp16 or fp32 (fp64 on the plain path).
        activation: a key of ACTIVATIONS.

    Returns:
        [..., F], contiguous, of the promoted dtype. It has one derivative.

    Raises:
        ValueError: for other shapes, integers, or an unknown activation.

    Example:
        y = swiglu(gate_proj(x), up_proj(x), activation="silu")
    """
    refuse(
        "swiglu",
        (activation not in ACTIVATIONS,
         "activation must be one of {}, got {!r}. Leave that MLP stock with apply(mlp=False)",
         ", ".join(ACTIVATIONS), activation),
        (not gate.dtype.is_floating_point,
         "gate must be floating-point, got {}. Cast it first", gate.dtype),
        (gate.shape != up.shape,
         "gate and up must have one shape, got {} and {}. Their projections must have one width",
         gate.shape, up.shape),
    )  # fmt: skip
    return SWIGLU(gate, up, ACTIVATIONS[activation])
