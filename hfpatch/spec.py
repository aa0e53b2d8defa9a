"""Which class of transformers gets which fused class: a family is its rows and one small file in models/."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from hfpatch.models import fused, llama


@dataclass(frozen=True)
class Swap:
    """One row. option: the keyword of apply(); theirs: transformers' class; ours: the fused subclass of it.

    refuses: given a module, the reason why it keeps transformers' class, or None.
    """

    option: str
    theirs: type
    ours: type
    refuses: Callable[[nn.Module], str | None] = lambda module: None


def _activation(mlp: nn.Module) -> str | None:
    name = mlp.config.hidden_act
    return None if name in fused.ACTIVATIONS else f"no fused form of hidden_act {name!r}"


def _kernels_off(module: nn.Module) -> str | None:
    return "its forward is replaced on the instance (Liger or use_kernels)" if "forward" in vars(module) else None


def family(classes) -> tuple[Swap, ...]:
    """The rows of a family whose file in models/ names its classes as transformers does."""
    hf = classes.hf

    def row(option, name, refuses=_kernels_off):
        return Swap(option, getattr(hf, name), getattr(classes, name), refuses)

    prefix = classes.PREFIX
    return (
        row("rms_norm", f"{prefix}RMSNorm"),
        row("mlp", f"{prefix}MLP", lambda m: _kernels_off(m) or _activation(m)),
        row("rope", f"{prefix}Attention"),
        row("loss", f"{prefix}ForCausalLM"),
        row("checkpointing", f"{prefix}DecoderLayer"),
        row("model", f"{prefix}Model"),
    )


SPECS = {"llama": family(llama)}
# Plain torch classes that a family's modules hold: swapped by where they are, not by their type alone.
HEAD = Swap("loss", nn.Linear, fused.HEAD)
EMBEDDING = Swap("checkpointing", nn.Embedding, fused.EMBEDDING)
