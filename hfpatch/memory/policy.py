"""What layers keep, and where: the user's `Checkpointing`, and the `Policy` that it is resolved into (choice.py). Standard
library only."""

import os
from dataclasses import dataclass, replace

# What a layer may keep beside x, out and lse: q, k and v; the sum after attention (its second norm's input); gate and up.
KEEPABLE = ("qkv", "mid", "gate_up")
PLACES = ("auto", "gpu", "host")
AIMS = ("fastest", "least")
WEIGHTS = ("auto", "gpu", "host")
TILE_MOST = 8192
LOSS_WORKSPACE = 512 << 20  # ops.linear_cross_entropy's workspace_bytes
# Where memory is free: chunks of 8,192 rows of Llama 3's vocabulary. Each passes over the float32 sums of the head's gradient.
LOSS_WORKSPACE_FREE = 2 << 30


@dataclass(frozen=True)
class Checkpointing:
    """What decoder layers keep for backward, for `hfpatch.apply(model, checkpointing=...)`.

    Every field but aim may be "auto" (the default): chosen at the first step from the memory that is free.

    offload: where checkpoints live: "gpu", "host" (pinned memory) or a directory (an NVMe tier, one file a tensor).
    every: layers per checkpoint: keep the input of every k-th layer alone; the layers between are run again.
    save_attention: keep attention outputs too, one more [batch, tokens, hidden] a layer, so that the attention forward
        is never run twice.
    tile: tokens a tile of the parts that work token by token (norms, projections, MLP).

    plain: how many of the last layers keep all that autograd saves, and run nothing again.
    keep: what the other layers keep beside their input and attention output: names of "qkv", "mid" (the sum after
    attention), "gate_up".
    weights: where the layers' frozen weights (LoRA's base) wait: "gpu", or "host": in pinned memory, each layer's coming to the
    device a layer ahead of its use; "auto" is the host where they do not fit on the device.
    aim: of what is left "auto": "fastest" step that fits, or "least" device memory.
    Raises ValueError for a value outside these.

    >>> hfpatch.apply(model, checkpointing=hfpatch.Checkpointing(offload="host", tile=8192))
    """

    offload: str = "auto"
    every: int | str = "auto"
    save_attention: bool | str = "auto"
    tile: int | str = "auto"
    plain: int | str = "auto"
    keep: tuple | str = "auto"
    weights: str = "auto"
    aim: str = "fastest"

    def __post_init__(self):
        if not isinstance(self.offload, (str, os.PathLike)) or not str(self.offload):
            raise ValueError(
                f'hfpatch: offload must be "auto", "gpu", "host" or a directory, {self.offload!r} came; '
                'pass "host" for pinned memory.'
            )
        if str(self.offload).startswith("~"):  # no shell expands it in Python, in a file or behind a `=`
            object.__setattr__(self, "offload", os.path.expanduser(self.offload))
        if self.offload not in PLACES and os.sep not in str(self.offload) and not os.path.isdir(self.offload):
            raise ValueError(
                f'hfpatch: offload must be "auto", "gpu", "host" or a directory, {str(self.offload)!r} came; '
                f'write a directory as a path, for example "./{self.offload}".'
            )
        if self.offload not in PLACES and os.path.exists(self.offload) and not os.path.isdir(self.offload):
            raise ValueError(
                f'hfpatch: offload must be "auto", "gpu", "host" or a directory, the file {str(self.offload)!r} came; '
                "name a directory, which is made where there is none."
            )
        for name, wanted in (
            ("every", "a positive number of layers"), ("tile", "a positive number of tokens"), ("plain", "a number of layers"),
        ):  # fmt: skip
            value, least = getattr(self, name), 0 if name == "plain" else 1
            if value != "auto" and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise ValueError(f'hfpatch: {name} must be "auto" or {wanted}, {value!r} came; leave it "auto".')
        if self.save_attention != "auto" and not isinstance(self.save_attention, bool):
            raise ValueError(
                f'hfpatch: save_attention must be "auto", True or False, {self.save_attention!r} came; leave it "auto".'
            )
        keep = self.keep
        listed = isinstance(keep, (tuple, list)) and all(name in KEEPABLE for name in keep)
        if keep != "auto" and not listed:
            raise ValueError(
                f'hfpatch: keep must be "auto" or a tuple of {", ".join(KEEPABLE)}, {keep!r} came; leave it "auto".'
            )
        if keep != "auto":
            object.__setattr__(self, "keep", tuple(keep))  # a list has no hash
        if self.weights not in WEIGHTS:
            raise ValueError(
                f'hfpatch: weights must be one of {", ".join(WEIGHTS)}, {self.weights!r} came; leave it "auto".'
            )
        if self.weights == "host" and self.plain not in ("auto", 0):
            raise ValueError(
                f'hfpatch: expected plain=0 with weights="host", {self.plain} came: layers that keep all that autograd saves keep '
                'their weights; leave plain "auto".'
            )
        if self.aim not in AIMS:
            raise ValueError(f"hfpatch: aim must be one of {', '.join(AIMS)}, {self.aim!r} came; leave it out.")

    @classmethod
    def of(cls, value) -> "Checkpointing":
        """From what `apply` and `plan` take: "auto", "least", a place or a directory, or a Checkpointing. ValueError."""
        if isinstance(value, cls):
            return value
        try:
            return cls(aim="least") if value == "least" else cls(offload=value)
        except ValueError as error:  # of one of its fields; a caller knows this argument
            said = str(error).replace('offload must be "auto",', 'checkpointing must be "auto", "least", "off",')
            raise ValueError(said) from None

    @property
    def directory(self) -> str | None:
        """The disk tier's folder, None where checkpoints stay in memory."""
        return None if self.offload in PLACES else os.fspath(self.offload)


def auto_tile(tokens: int) -> int:
    """Tokens a tile where free memory is unknown: all of them up to 8192, 4096 up to 32,768, 8192 beyond.

    One tile needs no second q, k, v and no float32 sums, and up to 8192 rows its intermediates are small; 4096 rows
    keep matmuls at their rate, and the MLP's intermediates below what the layer holds anyway.
    """
    return 4096 if TILE_MOST < tokens <= 4 * TILE_MOST else TILE_MOST


@dataclass(frozen=True)
class Policy:
    """What the tiled layer keeps, and where: `hfpatch.Checkpointing` with every "auto" resolved for one shape.

    offload: where layer inputs (and attention outputs) wait for backward: "gpu", "host" or "disk".
    every: a checkpoint at every k-th layer; the layers between are run again from it.
    save_attention: keep out and lse, so that the attention forward runs once.
    stream_attention: fetch out and dout per KV group in the attention backward rather than hold them whole.
    tile: tokens a tile.
    park: a layer's input gradient waits with its checkpoints while attention runs backward.
    plain: how many of the last layers keep all that autograd saves, and run nothing again.
    keep: what the other layers keep beside x, out and lse, of KEEPABLE.
    by_group: q, k, v, the attention outputs and the gradients of all these wait in the tier while their layer runs, and are on
        the device a group of KV heads, or a tile, at a time.
    again: how many of the last tiled layers run the attention forward again where the others keep its output.
    weights: where the layers' frozen weights wait, "gpu", or "host": each layer's then come a layer ahead of their use.
    dense: frozen weights of 4 bits are written out once for all tiles of a phase, which holds them, not once a tile.
    loss_bytes: workspace of the loss, which sets how many tokens' logits there are at a time.
    wide: attention's backward takes all heads at once, whose scratch is that of all: its launches wait for fewer last blocks.
    """

    offload: str = "host"
    every: int = 1
    save_attention: bool = True
    stream_attention: bool = False
    tile: int = 8192
    plain: int = 0
    keep: tuple = ()
    park: bool = False
    by_group: bool = False
    again: int = 0
    weights: str = "gpu"
    dense: bool = False
    wide: bool = False
    loss_bytes: int = LOSS_WORKSPACE

    def of_layer(self, index: int, num_layers: int) -> "Policy":
        """What it says of one tiled layer."""
        runs_again = index >= num_layers - self.plain - self.again
        return replace(self, save_attention=self.save_attention and not runs_again, again=0) if self.again else self


_NAMES = {"qkv": "q, k and v", "mid": "the sum after attention", "gate_up": "gate and up"}
_WHERE = {"gpu": "on the device", "host": "on the host", "disk": "on the disk"}


def describe(policy: Policy, num_layers: int | None = None) -> str:
    """A policy in a line: how many layers keep what, and where. num_layers: None where it is not known."""
    plain = policy.plain if num_layers is None else min(policy.plain, num_layers)
    said = [f"{plain} layer{'s keep' if plain > 1 else ' keeps'} everything"] if plain else []
    if plain != num_layers:
        kept = ["their input" if policy.every == 1 else f"one input in {policy.every}"]
        some = f"attention in all but {policy.again}" if policy.again else "attention"
        kept += [some] if policy.save_attention and policy.every == 1 else []
        kept += [_NAMES[name] for name in policy.keep]
        listed = ", ".join(kept[:-1]) + (" and " if len(kept) > 1 else "") + kept[-1]
        tiled = num_layers - plain if num_layers else "the others" if plain else "layers"
        verb = "keeps" if tiled == 1 else "keep"
        said.append(f"{tiled} {verb} {listed} {_WHERE[policy.offload]}, in tiles of {policy.tile:,} tokens")
    said += ["frozen weights come from the host"] if policy.weights == "host" else []
    said += ["weights of 4 bits are written out once for all tiles"] if policy.dense else []
    return "; ".join(said)
