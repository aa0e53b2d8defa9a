"""What layers keep for backward: the user's `Checkpointing`, and the `Policy` derived from it."""

import functools
import inspect
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import TypeVar, cast

from hfpatch.budget.limits import did_you_mean, parse_word

# What a layer may keep beside x, out and lse.
KEEPABLE = ("gate_up",)
PLACES = ("auto", "gpu", "host")
WORDS = ("auto", "least", "off", "gpu", "host")  # of apply's checkpointing
_MEANT = {"cpu": "host", "cuda": "gpu"}  # words of other libraries
AIMS = ("fastest", "least")
WEIGHTS = ("auto", "gpu", "host")
TILE_MOST = 8192
TILES = (1024, 2048, 4096, 8192, 16384)
RING_SLOTS = 3  # fetched tiles on the device: one in use, one ready, one on its way
# layers whose frozen weights fit on the device at once, if frozen weights wait on the host
WEIGHT_SLOTS = 2
LOSS_WORKSPACE = 512 << 20  # ops.linear_cross_entropy's workspace_bytes


def refuse_unknown(names: Iterable[str], known: Iterable[str], of: str) -> None:
    """Raises ValueError for the first unknown name; the message names the nearest known one.

    of: the owner of the names, "apply()" for example.
    """
    known = tuple(known)
    for name in names:
        if name not in known:
            end = did_you_mean(name, known) or " Name one of these."
            raise ValueError(f"hfpatch: {of} takes {', '.join(known)}, got {name}.{end}")


Named = TypeVar("Named", bound=Callable)


def names_the_nearest(function: Named) -> Named:
    """Wraps the function: an unknown keyword raises ValueError with the nearest known one."""
    known = [name for name in inspect.signature(function).parameters if name != "self"]
    of = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def checked(*given, **named):
        refuse_unknown(named, known, f"{of}()")
        return function(*given, **named)

    return cast(Named, checked)


def _place(argument: str, words: tuple, value) -> str:
    """The value, one of the words or a directory. Raises ValueError that names the argument."""
    if isinstance(value, (str, os.PathLike)):
        # Python does not expand "~", nor does a shell in a file or behind a `=`
        place = os.path.expanduser(value)
        if place in words or os.sep in str(place) and not os.path.isfile(place):
            return place
    quoted = ", ".join(f'"{word}"' for word in words)
    near = did_you_mean(_MEANT.get(str(value), str(value)), words)
    raise ValueError(
        f'hfpatch: {argument} must be {quoted} or a directory written as a path ("./name"), got '
        f"{str(value)!r}." + (near or ' Pass "host" for pinned memory.')
    )


def _is_number(value, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


@dataclass(frozen=True, kw_only=True)
class Checkpointing:
    """What decoder layers keep for backward, for `hfpatch.apply(model, checkpointing=...)`.

    Every field but aim may be "auto" (the default): chosen from what steps measure. The last four
    are for experts.

    Args:
        offload: the place of checkpoints: "gpu", "host" (pinned memory) or a directory (NVMe, one
            file per tensor).
        every: layers per checkpoint: only the input of every k-th layer is kept, the layers between
            run again.
        tile: tokens per tile of the token-wise parts (norms, projections, MLP).
        frozen_weights: the place of frozen weights (LoRA's base): "gpu", or "host" (pinned memory;
            each layer's weights come to the device one layer ahead of use). "auto" uses the host if
            they do not fit on the device.
        save_attention: keep attention outputs too, one more [batch, tokens, hidden] per layer, so
            that the attention forward never runs twice.
        plain: how many of the last layers keep everything that autograd saves; nothing in them runs
            again.
        keep: ("gate_up",) where the other layers keep the MLP's gate and up in addition to input and
            attention output, () where not.
        aim: the aim of the "auto" fields: the "fastest" step that fits, or "least" device memory.

    Raises:
        ValueError: a value outside these.

    Examples:
        >>> hfpatch.apply(model, checkpointing=hfpatch.Checkpointing(offload="host", tile=8192))
    """

    offload: str = "auto"
    every: int | str = "auto"
    tile: int | str = "auto"
    frozen_weights: str = "auto"
    save_attention: bool | str = "auto"
    plain: int | str = "auto"
    keep: tuple | str = "auto"
    aim: str = "fastest"

    def __post_init__(self):
        object.__setattr__(self, "offload", _place("offload", PLACES, self.offload))
        self._check()
        if self.keep != "auto":
            object.__setattr__(self, "keep", tuple(self.keep))  # a list has no hash

    def _check(self) -> None:
        listed = isinstance(self.keep, (tuple, list))
        names = listed and all(name in KEEPABLE for name in self.keep)
        for name, fits, wanted in (
            ("every", _is_number(self.every, 1), "a positive number of layers"),
            ("tile", _is_number(self.tile, 1), "a positive number of tokens"),
            ("plain", _is_number(self.plain, 0), "a number of layers"),
            ("save_attention", isinstance(self.save_attention, bool), "True or False"),
            ("keep", names, f"a tuple of {', '.join(KEEPABLE)}"),
            ("frozen_weights", self.frozen_weights in WEIGHTS, "gpu or host"),
        ):
            value = getattr(self, name)
            if not fits and value != "auto":
                raise ValueError(
                    f'hfpatch: {name} must be "auto" or {wanted}, got {value!r}. Leave it "auto".'
                )
        if self.frozen_weights == "host" and self.plain not in ("auto", 0):
            raise ValueError(
                f'hfpatch: plain must be 0 with frozen_weights="host", got {self.plain}: layers '
                'that are not checkpointed keep their weights. Leave plain "auto".'
            )
        if self.aim not in AIMS:
            raise ValueError(
                f"hfpatch: aim must be one of {', '.join(AIMS)}, got {self.aim!r}. Leave it out."
            )

    def words(self) -> list[str]:
        """The fields that differ from their default, as FIELD=VALUE: parse_checkpointing reads them
        back.
        """
        chosen = (
            (f.name, getattr(self, f.name))
            for f in fields(self)
            if getattr(self, f.name) != f.default
        )
        return [
            f"{n}={','.join(v) if n == 'keep' and v != 'auto' else os.fspath(v) if n == 'offload' else v}"
            for n, v in chosen
        ]

    @property
    def directory(self) -> str | None:
        """The disk tier's folder, or None if checkpoints stay in memory."""
        return None if self.offload in PLACES else os.fspath(self.offload)


setattr(Checkpointing, "__init__", names_the_nearest(Checkpointing.__init__))  # noqa: B010

_FIELD = "[a-z_-]+="
# A comma inside a folder's name, or between names of keep=, separates nothing.
_NEXT = f",(?={_FIELD}|[./~]|(?:auto|least|off|gpu|host)(?:,|$))"
# The help text of --checkpointing on every command line.
CHECKPOINTING = (
    "what layers keep for backward: auto, least (device memory), off, a place (gpu, host, a "
    "folder), "
    "or fields of hfpatch.Checkpointing, as tile=4096; several with commas, or the flag again"
)


def parse_checkpointing(value) -> "Checkpointing | str":
    """Parses `checkpointing=`, in Python and on every command line.

    Args:
        value: a Checkpointing, or its fields in a dict; "auto", "least", "off", or a place ("gpu",
            "host", a directory). A command line also names fields, alone or after a word: "least,tile=4096,keep=gate_up". A
            list of such texts is read as one.

    Returns:
        A Checkpointing, or "off" if transformers' own checkpointing stays.

    Raises:
        ValueError: anything else, an unknown field, or a field that comes twice.
    """
    if isinstance(value, Checkpointing):
        return value
    if isinstance(value, dict):
        return Checkpointing(**value)
    texts = [value] if isinstance(value, (str, os.PathLike)) else value
    if not isinstance(texts, (list, tuple)) or not all(
        isinstance(t, (str, os.PathLike)) for t in texts
    ):
        _place("checkpointing", WORDS, value)
    words = [word for text in texts for word in re.split(_NEXT, os.fspath(text))]
    if words == ["off"]:
        return "off"
    found: dict = {}
    for word in words:
        name, given = _field(word)
        if name in found and found[name] != given:
            raise ValueError(
                f"hfpatch: checkpointing names {name} twice, got {found[name]!r} and {given!r}. "
                "Leave one out."
            )
        found |= {name: given} if name else {}
    return Checkpointing(**found)


def _field(word: str) -> tuple[str, object]:
    """(the field of Checkpointing that a word sets, its value); ("", None) for "auto"."""
    if not re.match(_FIELD, word):
        if word == "off":
            raise ValueError(
                'hfpatch: checkpointing "off" takes no fields, and got some. Leave them out.'
            )
        if word in ("auto", "least"):
            return ("aim", "least") if word == "least" else ("", None)
        return "offload", _place("checkpointing", WORDS, word)
    name, _, text = word.partition("=")
    name = name.replace("-", "_")
    refuse_unknown([name], Checkpointing.__dataclass_fields__, "checkpointing")
    if not text:
        raise ValueError(
            f"hfpatch: a field of checkpointing must be FIELD=VALUE, got {word!r}. Write "
            "offload=host, for example."
        )
    if name == "keep" and text != "auto":
        return name, tuple(text.split(","))
    return name, text if name in ("offload", "frozen_weights", "aim") else parse_word(text)


def auto_tile(tokens: int) -> int:
    """Tokens per tile if the free memory is unknown: one tile up to 8192 tokens, 4096 a tile up to
    32,768, 8192 a tile beyond.

    A single tile needs no second q, k, v and no float32 sums, and its intermediates are small up to
    8192 rows. 4096 rows are enough for fast matmuls, and keep the MLP's intermediates below the
    bytes that the layer holds anyway.
    """
    return 4096 if TILE_MOST < tokens <= 4 * TILE_MOST else TILE_MOST


@dataclass(frozen=True)
class Policy:
    """What tiled layers keep, and where: a `Checkpointing` with every "auto" resolved for one
    shape.

    Attributes:
        offload: the place of layer inputs and attention outputs: "gpu", "host" or "disk".
        every: layers per checkpoint; the layers between run again from it.
        save_attention: keep out and lse, so that the attention forward runs once.
        tile: tokens per tile.
        plain: the number of last layers that keep all that autograd saves, and run nothing again.
        again: how many of the last tiled layers compute gate and up again, which the others keep.
            None: no layer keeps them.
        frozen_weights: the place of frozen weights, "gpu" or "host"; from the host each layer's
            weights come one layer ahead of use.
        wide: attention's backward runs all heads at once: more scratch, fewer waits at its end.
    """

    offload: str = "host"
    every: int = 1
    save_attention: bool = True
    tile: int = 8192
    plain: int = 0
    again: int | None = None
    frozen_weights: str = "gpu"
    wide: bool = False

    def keeps_gates(self, index: int, num_layers: int) -> bool:
        """Whether the tiled layer of this index keeps gate and up."""
        return self.again is not None and index < num_layers - self.plain - self.again

    @property
    def parks_dx(self) -> bool:
        """Whether the gradient of a layer's input waits on the host while attention's backward
        runs. Short of memory only: where there is more, attention takes all heads at once.
        """
        return self.offload == "host" and not self.wide


_WHERE = {"gpu": "on the device", "host": "on the host", "disk": "on the disk"}


def describe(policy: Policy, num_layers: int | None = None) -> str:
    """The policy in one line for users: how many layers keep which tensors, and where.

    num_layers: None if unknown.
    """
    plain = policy.plain if num_layers is None else min(policy.plain, num_layers)
    said = [f"{plain} layer{'s keep' if plain > 1 else ' keeps'} everything"] if plain else []
    if plain != num_layers:
        kept = ["their input" if policy.every == 1 else f"one input in {policy.every}"]
        kept += ["attention"] if policy.save_attention and policy.every == 1 else []
        if policy.again is not None:
            some = num_layers and policy.again and num_layers - plain - policy.again
            kept.append("gate and up" + (f" (in {some} of them)" if some else ""))
        listed = ", ".join(kept[:-1]) + (" and " if len(kept) > 1 else "") + kept[-1]
        tiled = num_layers - plain if num_layers else "the others" if plain else "layers"
        verb = "keeps" if tiled == 1 else "keep"
        said.append(
            f"{tiled} {verb} {listed} {_WHERE[policy.offload]}, in tiles of {policy.tile:,} tokens"
        )
    said += ["frozen weights come from the host"] if policy.frozen_weights == "host" else []
    return "; ".join(said)
