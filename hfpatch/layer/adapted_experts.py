"""LoRA on the weights of fused experts, without the adapted weight.

PEFT's ParamWrapper builds the adapted weight, as large as all experts, in each call, and its
gradient in each backward: 1.1 GiB a layer of Qwen3-30B-A3B for adapters of 12 MiB. Here the wrapper
passes the two factors to the experts (parts/experts.py), which add x A^T B^T to x W^T. Each wrapper
adapts one parameter; several are nested. Unknown kinds run as PEFT has them, tile by tile.
"""

import sys
from functools import partial

import torch
from torch import Tensor, nn

from hfpatch.compat import is_fused_experts, modules_of
from hfpatch.context.current import having
from hfpatch.parts import experts
from hfpatch.parts.quantised import kinds_of

_EIGHT = 8  # rows of a grouped matmul start at whole 16 bytes


def _is_wrapper(module: nn.Module) -> bool:
    return "peft.ParamWrapper" in kinds_of(type(module))


def _chain(wrapper: nn.Module) -> tuple[list[nn.Module], nn.Module]:
    """The wrappers from this one inwards, and the experts."""
    found = []
    while _is_wrapper(wrapper):
        found.append(wrapper)
        wrapper = wrapper.base_layer
    return found, wrapper


def fused_in(modules: list[nn.Module]) -> tuple[list[nn.Module], list[nn.Module]]:
    """The fused experts among these modules, and PEFT's outermost wrappers of parameters."""
    fused = [m for m in modules if is_fused_experts(m)]
    wrappers = [m for m in modules if _is_wrapper(m)] if "peft" in sys.modules else []
    inner = {id(modules_of(m)["base_layer"]) for m in wrappers}
    return fused, [m for m in wrappers if id(m) not in inner]


def pairs(wrappers: list[nn.Module]) -> list:
    """(wrapper, forward) of the wrappers whose experts run here."""
    return [(m, partial(_forward, m)) for m in wrappers if experts.can_run(_chain(m)[1])]


def _forward(wrapper: nn.Module, x: Tensor, *args, **kwargs) -> Tensor:
    """Replaces `wrapper.forward`."""
    chain, base = _chain(wrapper)
    factors = None if kwargs else _factors(chain, base)
    if factors is None:
        return type(wrapper).forward(wrapper, x, *args, **kwargs)
    with having(factors=factors):
        return base(x, *args)


def _factors(chain: list[nn.Module], base: nn.Module) -> dict | None:
    """A parameter's name -> A [E, r, in] and B [E, out, r] of its adapters; None if PEFT must run
    them.
    """
    found: dict = {}
    for wrapper in chain:
        names = [n for n in wrapper.active_adapters if n in wrapper.lora_A]
        odd = wrapper.merged or wrapper.lora_variant or wrapper.num_experts == 1
        if odd or wrapper.parameter_name in found:
            return None
        if names and not wrapper.disable_adapters:
            made = [_pair(wrapper, name) for name in names]
            if any(pair is None for pair in made):
                return None
            A, B = (torch.cat(parts, at) for parts, at in zip(zip(*made), (1, 2)))
            more = -A.shape[1] % _EIGHT
            found[wrapper.parameter_name] = (
                nn.functional.pad(A, (0, 0, 0, more)),
                nn.functional.pad(B, (0, more)),
            )
    return found


def _pair(wrapper: nn.Module, name: str) -> tuple[Tensor, Tensor] | None:
    """The factors of one adapter, as PEFT's get_delta_factors cuts them; B is scaled."""
    down, up = wrapper.lora_A[name], wrapper.lora_B[name]
    if type(down) is not nn.Linear or type(up) is not nn.Linear or up.bias is not None:
        return None
    E = wrapper.num_experts
    A, B = down.weight.unflatten(0, (E, -1)), up.weight.unflatten(1, (-1, E)).permute(2, 0, 1)
    return A, B * wrapper.scaling[name]
