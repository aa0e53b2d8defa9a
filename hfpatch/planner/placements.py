"""Where weights, gradients and optimizer states live: the values of `--placement`, and their bytes
on a GPU, on the host and over the link each step. Standard library only.
"""

from dataclasses import dataclass

from hfpatch.budget.policy import WEIGHT_SLOTS, Checkpointing, refuse_unknown

# The most parameters gathered and reused at once, by ds_configs/zero3*.json: 2 * 500,000,000
LIVE_PARAMETERS = 1_000_000_000


@dataclass(frozen=True)
class Placement:
    """A value of `--placement`. PLACEMENTS has them in the order in which auto tries them.

    Attributes:
        config: the engine's config in ds_configs or fsdp_configs; "" without an engine.
        one: possible on one GPU. Engines run on several.
        auto: False if only the name selects it.
        itemsize: bytes of a number of the weights. All activations count with it, though autocast
            makes some of them narrower.
        bf16: bf16 weights are the only copy.
        own: torch's AdamW steps on the GPU, in the dtype of the weights.
        fused: the optimizer steps inside backward.
    """

    name: str
    summary: str
    config: str = ""
    one: bool = True
    auto: bool = True
    itemsize: int = 2
    bf16: bool = False
    own: bool = False
    fused: bool = False

    @property
    def sharded(self) -> bool:
        """Whether an engine gathers the weights layer by layer."""
        return bool(self.config)


_TABLE = (
    Placement(
        "fsdp2", "fp32 shards, gradients and Adam states on the GPUs", "fsdp2", one=False
    ),
    Placement(
        "zero3", "ZeRO-3: bf16 and fp32 shards and Adam states on the GPUs", "zero3", one=False
    ),
    Placement(
        "zero3-offload", "fp32 master weights and Adam states in host memory", "zero3_cpu_offload"
    ),
    Placement(
        "fsdp2-offload", "fp32 shards, gradients and Adam states in host memory",
        "fsdp2_cpu_offload", one=False,
    ),
    # Rounding to nearest loses each update below half a bf16 step (2^-9 of the weight); rounding
    # at random keeps it on average, so bf16 may be the only copy.
    Placement(
        "gpu8bit", "bf16 weights rounded at random, 8-bit Adam states, all on the GPU", bf16=True
    ),
    Placement(
        "gpu8bit-fused", "gpu8bit stepping inside backward: one layer's gradients at a time",
        bf16=True, fused=True,
    ),
    # Not by auto: it takes 16 bytes a parameter, where gpu8bit takes 6.
    Placement(
        "adamw-fp32", "torch's AdamW on fp32 weights under bf16 autocast, all on the GPU",
        auto=False, itemsize=4, own=True,
    ),
    # Not by auto: in bf16 small updates are rounded away (trainer/callback.py).
    Placement(
        "adamw", "torch's AdamW on bf16 weights, bf16 states, all on the GPU",
        auto=False, bf16=True, own=True,
    ),
)  # fmt: skip
PLACEMENTS = {p.name: p for p in _TABLE}


# The placements for adapters: each GPU has a whole copy of the frozen base.
ADAPTED = ("gpu8bit", "adamw")


def placement_of_engine(name: str) -> str:
    """The placement of an engine's config: zero3-offload is zero3_cpu_offload's. Another name is
    returned as it is."""
    return next((p.name for p in _TABLE if p.config == name), name)


def candidates(name: str, gpus: int, adapters: bool = False) -> list[str]:
    """The placements to try.

    Raises:
        ValueError: the name is unknown, or impossible with this number of GPUs or with adapters.
    """
    possible = [p.name for p in PLACEMENTS.values() if (p.one if gpus == 1 else p.sharded)]
    possible = list(ADAPTED) if adapters else possible
    if name == "auto":
        return [n for n in possible if PLACEMENTS[n].auto]
    refuse_unknown([name], ("auto", *PLACEMENTS), "--placement")
    if name not in possible and adapters:
        raise ValueError(
            f"hfpatch: LoRA is planned with --placement {', '.join(ADAPTED)}, got {name}. Pass one "
            "of those, or leave --lora-r out."
        )
    if name not in possible:
        raise ValueError(
            f"hfpatch: --placement {name} is for {'several GPUs' if gpus == 1 else 'one GPU'}, got "
            f"--gpus {gpus}. Pass one of {', '.join(possible)}."
        )
    return [name]


@dataclass(frozen=True)
class Resident:
    """Bytes that a placement keeps for the whole step. Default: none.

    parameters, optimizer: on one GPU.
    gradients: on one GPU; None if all gradients stay there.
    host: on the machine, for all its ranks.
    link: over one GPU's host link in each step.
    host_optimizer: host memory that the optimizer reads and writes; 0 if it runs on the GPU.
    skipped: the part of `parameters` that the optimizer skips (frozen ones, copies, gathered ones).
    gathers: received from other GPUs by one gather of all weights; forward gathers them once,
        backward gathers them and sends as many bytes of their gradients.
    """

    parameters: int = 0
    gradients: int | None = 0
    optimizer: int = 0
    host: int = 0
    link: int = 0
    host_optimizer: int = 0
    skipped: int = 0
    gathers: int = 0


def resident(name: str, shape, gpus: int, policy: Checkpointing) -> Resident:
    """The bytes of a placement on each of `gpus` GPUs of one machine, under a policy."""
    if shape.adapters:
        host = 0
        base = shape.nbytes
        if policy.frozen_weights == "host":
            # Two layers' frozen weights are on the GPU at a time. Each process has its own copy of
            # all of them on the host.
            host = shape.frozen
            base += WEIGHT_SLOTS * shape.frozen_layer - host
        trained = shape.trained_parameters
        # 8-bit moments take a byte each, and a float32 scale for each block of 256.
        moments = 2 * shape.trained_bytes if name == "adamw" else 2 * trained + 8 * trained // 256
        return Resident(base, None, moments, host=gpus * host, skipped=base - shape.trained_bytes)
    P = shape.parameters
    largest = max(shape.layer_parameters, shape.embedding_parameters)
    share = -(-P // gpus)
    gathers = 2 * (P - share)
    if name == "gpu8bit":
        return Resident(2 * P, None, 2 * P + 8 * P // 256)
    if name == "gpu8bit-fused":
        return Resident(2 * P, 2 * largest, 2 * P + 8 * P // 256)
    own = PLACEMENTS[name]
    if own.own:
        # Autocast keeps a bf16 copy of each weight until the forward ends, where the loss has its
        # peak. A tiled layer drops its copies.
        alive = P if policy.offload == "off" else largest
        copies = 2 * alive if own.itemsize == 4 else 0
        return Resident(own.itemsize * P + copies, None, 2 * own.itemsize * P, skipped=copies)
    if name == "zero3-offload":
        # This rank's share of weights goes to the GPU twice, of gradients to the host once. The
        # optimizer reads 16 bytes a parameter and writes 14.
        live = 2 * min(P, LIVE_PARAMETERS)
        return Resident(
            live, 2 * largest, 0, host=18 * P, link=6 * share, host_optimizer=30 * P,
            gathers=gathers,
        )  # fmt: skip
    if name == "zero3":
        live = 2 * min(P, LIVE_PARAMETERS)
        gradients = 2 * share + 2 * largest
        return Resident(2 * share + live, gradients, 12 * share, skipped=live, gathers=gathers)
    # FSDP2 gathers the running layer and the next one in bf16, and the root unit (embedding, norm,
    # head) for the whole step.
    gathered = 2 * (2 * shape.layer_parameters + P - shape.body_parameters)
    if name == "fsdp2":
        gradients = 4 * share + 2 * largest
        return Resident(
            4 * share + gathered, gradients, 8 * share, skipped=gathered, gathers=gathers
        )
    return Resident(
        gathered,
        2 * largest + 4 * largest // gpus,
        0,
        host=16 * P,
        link=12 * share,
        host_optimizer=28 * P, gathers=gathers
    )  # fmt: skip
