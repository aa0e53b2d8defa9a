"""Where weights, gradients and optimizer states live: their bytes on a GPU, on the host and over
the link each step.

The names are those of `--placement` (one GPU) and of the engine configurations (several). Standard
library only.
"""

from dataclasses import dataclass

from hfpatch.budget.formula import WEIGHT_SLOTS
from hfpatch.budget.seconds import Resident
from hfpatch.budget.shape import ModelShape

# gathered and reused at most, ds_configs/zero3*.json: 2 * 500,000,000
LIVE_PARAMETERS = 1_000_000_000


@dataclass(frozen=True)
class Placement:
    """One row: what `--placement` accepts, in the order in which auto tries them; auto False: only
    where it is named.
    """

    name: str
    many: bool
    one: bool
    summary: str
    auto: bool = True
    # of the weights, and taken for all activations, though autocast makes some of them narrower
    itemsize: int = 2

    @property
    def sharded(self) -> bool:
        """Whether an engine gathers the weights layer by layer."""
        return not self.name.startswith(("gpu8bit", "adamw"))


PLACEMENTS = {
    p.name: p
    for p in (
        Placement("fsdp2", True, False, "fp32 shards, gradients and Adam states on the GPUs"),
        Placement("zero3", True, False, "ZeRO-3: bf16 and fp32 shards and Adam states on the GPUs"),
        Placement(
            "zero3-offload", True, True, "fp32 master weights and Adam states in host memory"
        ),
        Placement(
            "fsdp2-offload", True, False, "fp32 shards, gradients and Adam states in host memory"
        ),
        Placement(
            "gpu8bit",
            False,
            True,
            "bf16 weights rounded at random, 8-bit Adam states, all on the GPU",
        ),
        Placement(
            "gpu8bit-fused",
            False,
            True,
            "gpu8bit stepping inside backward: one layer's gradients at a time",
        ),
        # What a Trainer does by itself. In bf16 it rounds small updates away (trainer/callback.py),
        # so auto has it not.
        Placement(
            "adamw",
            False,
            True,
            "torch's AdamW on bf16 weights, bf16 states, all on the GPU",
            auto=False,
        ),
        Placement(
            "adamw-fp32",
            False,
            True,
            "torch's AdamW on fp32 weights under bf16 autocast, all on the GPU",
            False,
            4,
        ),
    )
}


# where adapters are trained: a whole copy of the frozen base on each GPU
ADAPTED = ("gpu8bit", "adamw")


def candidates(
    name: str, gpus: int, adapters: bool = False, uneven: str | None = None
) -> list[str]:
    """The placements to try. ValueError for an unknown name, or one that this number of GPUs,
    adapters, or ranks that share rows cannot have. uneven: why heads do not go evenly over such
    ranks, which DeepSpeed refuses; None where they do.
    """
    possible = [p.name for p in PLACEMENTS.values() if (p.one if gpus == 1 else p.many)]
    possible = list(ADAPTED) if adapters else possible
    if uneven:
        possible = [n for n in possible if n.startswith("fsdp2")]
        if name in PLACEMENTS and name not in possible or not possible:
            # which adapters are not planned under
            other = ", or --placement fsdp2" if possible else ""
            raise ValueError(
                f"hfpatch: {uneven}, which DeepSpeed's Ulysses refuses; pass another "
                f"--sp-size{other}."
            )
    if name == "auto":
        return [n for n in possible if PLACEMENTS[n].auto]
    if name not in PLACEMENTS:
        raise ValueError(
            f"hfpatch: the placements are auto, {', '.join(PLACEMENTS)}, {name!r} came; pass one "
            "of them."
        )
    if name not in possible and adapters:
        raise ValueError(
            "hfpatch: adapters over a frozen base are planned with --placement "
            f"{', '.join(ADAPTED)}, {name} came; pass one of "
            "those, or leave --lora-r out."
        )
    if name not in possible:
        raise ValueError(
            f"hfpatch: --placement {name} is for {'several GPUs' if gpus == 1 else 'one GPU'}, "
            f"--gpus {gpus} came; "
            f"pass one of {', '.join(possible)}."
        )
    return [name]


def resident(name: str, shape: ModelShape, gpus: int, policy=None) -> Resident:
    """The bytes of a placement on each of `gpus` GPUs of one machine. policy: a Policy or the
    settings that lead to one; of layers that run whole, one after the other, a word.
    """
    whole = isinstance(policy, str)
    if shape.adapters:
        T, base, host = shape.trained_parameters, shape.parameter_bytes(), 0
        if getattr(policy, "frozen_weights", "gpu") == "host":
            # Two layers' frozen weights on the GPU at a time; each process has its own of all.
            host = shape.over(shape.frozen_bytes_of)
            base += WEIGHT_SLOTS * max(map(shape.frozen_bytes_of, shape.kinds)) - host
        moments = 2 * T * shape.trained_itemsize(2) if name == "adamw" else 2 * T + 8 * T // 256
        return Resident(
            base, None, moments, host=gpus * host, passed=base - T * shape.trained_itemsize(2)
        )
    P, layer = shape.parameters, shape.layer_parameters
    root = shape.parameters - shape.body_parameters
    largest = max(layer, shape.embedding_parameters)
    share = -(-P // gpus)
    gathers = 2 * (P - share)
    if name == "gpu8bit":
        return Resident(2 * P, None, 2 * P + 8 * P // 256)
    if name == "gpu8bit-fused":
        return Resident(2 * P, 2 * largest, 2 * P + 8 * P // 256)
    if name == "adamw":
        return Resident(2 * P, None, 4 * P)
    if name == "adamw-fp32":
        # Autocast keeps a bf16 copy of each weight until the forward ends, where the loss has its
        # peak; a tiled one drops its own.
        copies = 2 * (P if whole else largest)
        return Resident(4 * P + copies, None, 8 * P, passed=copies)
    if name == "zero3-offload":
        # Weights down twice, gradients up once, this rank's share of each; 16 bytes a parameter
        # read, 14 written.
        live = 2 * min(P, LIVE_PARAMETERS)
        moved = {"link": 6 * share, "host_optimizer": 30 * P, "gathers": gathers}
        return Resident(live, 2 * largest, 0, host=18 * P, **moved)
    if name == "zero3":
        live = 2 * min(P, LIVE_PARAMETERS)
        own = 2 * share + live, 2 * share + 2 * largest, 12 * share
        return Resident(*own, passed=live, gathers=gathers)
    # FSDP2: the layer that runs and the next one gathered in bf16, and the root unit (embedding,
    #     norm, head) all step.
    gathered = 2 * (2 * layer + root)
    if name == "fsdp2":
        own = 4 * share + gathered, 4 * share + 2 * largest, 8 * share
        return Resident(*own, passed=gathered, gathers=gathers)
    return Resident(
        gathered,
        2 * largest + 4 * largest // gpus,
        0,
        host=16 * P,
        link=12 * share,
        host_optimizer=28 * P,
        gathers=gathers,
    )
