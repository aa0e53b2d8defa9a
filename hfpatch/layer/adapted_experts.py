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

from hfpatch.compat import modules_of
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


def experts_in(modules: list[nn.Module]) -> tuple[dict, list]:
    """The fused experts among a layer's modules (parts.experts.layouts_in), and PEFT's wrappers of
    their parameters: (the wrappers from the outermost inwards, the experts).
    """
    layouts = experts.layouts_in(modules)
    wrappers = [m for m in modules if _is_wrapper(m)] if "peft" in sys.modules else []
    inner = [modules_of(m)["base_layer"] for m in wrappers]
    chains = [_chain(m) for m in wrappers if m not in inner]
    return layouts, [(chain, base) for chain, base in chains if base in layouts]


def experts_forwards(layouts: dict, chains: list, taken, adding) -> list:
    """(module, forward) pairs of a layer's experts, beside those of `taken`, and of PEFT's
    wrappers.

    A wrapper of an engine (expert parallelism) stays around its experts and calls ours inside.

    Args:
        layouts, chains: from experts_in.
        adding: see parts.experts.run.
    """
    found = []
    for m, layout in layouts.items():
        if "forward" not in vars(m) and m not in taken:
            found.append((m, partial(experts.run, m, layout=layout, adding=adding)))
    for chain, base in chains:
        if "forward" not in vars(base):
            found.append((chain[0], partial(_forward, chain, base)))
    return found


def _forward(chain: list, base: nn.Module, x: Tensor, *args, **kwargs) -> Tensor:
    """Replaces the forward of the outermost wrapper, chain[0]."""
    weights = None if kwargs else experts.weights_of(base)
    factors = None if weights is None else _factors(chain, weights[0].dtype)
    if factors is None:
        return type(chain[0]).forward(chain[0], x, *args, **kwargs)
    none = (None, None)
    adapters = {
        "first": factors.get("gate_up_proj", none),
        "second": factors.get("down_proj", none),
    }
    return base(x, *args, weights=weights, **adapters)


def _factors(chain: list[nn.Module], dtype: torch.dtype) -> dict | None:
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
            if None in made:
                return None
            A = torch.cat([down for down, _ in made], 1)
            B = torch.cat([up for _, up in made], 2)
            more = -A.shape[1] % _EIGHT
            A = nn.functional.pad(A, (0, 0, 0, more)).to(dtype)
            B = nn.functional.pad(B, (0, more)).to(dtype)
            found[wrapper.parameter_name] = A, B
    return found


def _pair(wrapper: nn.Module, name: str) -> tuple[Tensor, Tensor] | None:
    """The factors of one adapter, as PEFT's get_delta_factors cuts them; B is scaled."""
    down = wrapper.lora_A[name]
    up = wrapper.lora_B[name]
    if type(down) is not nn.Linear or type(up) is not nn.Linear or up.bias is not None:
        return None
    E = wrapper.num_experts
    B = up.weight.unflatten(1, (-1, E)).permute(2, 0, 1)
    return down.weight.unflatten(0, (E, -1)), B * wrapper.scaling[name]
