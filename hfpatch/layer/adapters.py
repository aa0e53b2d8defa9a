"""Adapters that tiles would change: their effect on a token depends on other tokens, on its place
in the row, or on a random draw for all tokens.

Recognised by the names of PEFT's classes; PEFT is not imported for a model without adapters.
"""

import sys
from functools import cache

from torch import nn

from hfpatch.parts.quantised import WRAPPED, kinds_of

# values that PEFT's model forward passes to its adapters
TOLD = "offsets from the end of a row", "a task for each row"
_WHOLE = {
    "peft.LilyLayer": "experts that all tokens' mean weighs",
    "peft.PveraLayer": "a draw for all tokens",
    "peft.PolyLayer": TOLD[1],
}
_VARIANTS = {
    "ALoraLinearVariant": TOLD[0],
    "MontecloraLinearVariant": "a draw for all tokens",
    "VeloraLinearVariant": "a mean over the first batch",
}


@cache
def _of_kind(kind: type) -> tuple:
    """(the property of this class that makes a layer run whole, or None; whether it is LoRA;
    whether it is another adapter).
    """
    names = kinds_of(kind)
    lora = "peft.LoraLayer" in names and kind.__module__.startswith("peft.tuners.lora")
    reason = next((why for name, why in _WHOLE.items() if name in names), None)
    return reason, lora, "peft.BaseTunerLayer" in names and not lora


def _of_variants(loras) -> str | None:
    kinds = {
        type(variant).__name__ for m in loras for variant in getattr(m, "lora_variant", {}).values()
    }
    return next((why for name, why in _VARIANTS.items() if name in kinds), None)


def look(modules: list[nn.Module]) -> tuple[str | None, bool]:
    """(the property of an adapter among these modules that makes the layer run whole, or None;
    whether adapters may draw random numbers).
    """
    draws = False
    for kind in {*map(type, modules)} if "peft" in sys.modules else ():
        reason, lora, other = _of_kind(kind)
        if lora and reason is None:
            reason = _of_variants(m for m in modules if type(m) is kind)
        if reason is not None:
            return reason, draws
        draws = draws or other
    return None, draws


def add_a_bias(modules: list[nn.Module]) -> bool:
    """Whether an adapter among these modules adds a bias of its own. A projection of zeros, which
    padding is before a mixer, is then no longer zero.
    """
    for module in modules if "peft" in sys.modules else ():
        _, lora, other = _of_kind(type(module))
        names = [n for n, _ in module.named_parameters()] if lora or other else ()
        if any("bias" in name and not name.startswith(WRAPPED) for name in names):
            return True
    return False
