"""What layers keep for backward: `Checkpointing`, as a user sets it and as a step uses it."""

import functools
import inspect
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import TypeVar, cast

from hfpatch.budget.limits import did_you_mean, parse_word

PLACES = ("auto", "gpu", "host", "off")
ALL = 1 << 20  # more layers than any model has
# The words of `keep`, as the number of layers that keep gate and up; -1: attention's output neither.
KEEPS = {"input": -1, "attention": 0, "gate_up": ALL}
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

    of: what is named, "an argument of apply()" for example.
    """
    known = tuple(known)
    for name in names:
        if name not in known:
            end = did_you_mean(name, known) or " Name one of these."
            raise ValueError(f"hfpatch: {of} must be one of {', '.join(known)}, got {name}.{end}")


Named = TypeVar("Named", bound=Callable)


def names_the_nearest(function: Named) -> Named:
    """Wraps the function: an unknown keyword raises ValueError with the nearest known one."""
    known = [name for name in inspect.signature(function).parameters if name != "self"]
    of = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def checked(*given, **named):
        refuse_unknown(named, known, f"an argument of {of}()")
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
    meant = _MEANT.get(str(value), str(value))
    raise ValueError(
        f'hfpatch: {argument} must be {quoted} or a directory written as a path ("./name"), got '
        f"{str(value)!r}." + (did_you_mean(meant, words) or ' Pass "host" for pinned memory.')
    )


def _is_number(value, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


@dataclass(frozen=True)
class Checkpointing:
    """What decoder layers keep for backward, for `hfpatch.apply(model, checkpointing=...)`.

    Every field but aim may be "auto" (the default): hfpatch then chooses it from what the model's
    own steps have taken. What a step uses is a Checkpointing too, with no field left "auto".

    Args:
        offload: the place of checkpoints: "gpu", "host" (pinned memory) or a directory (NVMe, one
            file per tensor). "off" leaves checkpointing to transformers.
        every: layers per checkpoint: only the input of every k-th layer is kept, the layers between
            run again.
        tile: tokens per tile of the token-wise parts (norms, projections, MLP).
        frozen_weights: the place of frozen weights (LoRA's base): "gpu", or "host" (pinned memory;
            each layer's weights come to the device one layer ahead of use). "auto" uses the host if
            they do not fit on the device.
        keep: what a tiled layer keeps in addition to its input, if every is 1. "attention": attention's
            output, one more [batch, tokens, hidden] per layer, so that the attention forward runs
            once. "gate_up": the MLP's gate and up too. A number n: in the first n layers alone.
            "input": nothing more.
        plain: how many of the last layers run without any checkpointing: they keep everything that
            autograd saves, and nothing in them runs again.
        aim: the "fastest" step that fits, or "least" device memory: small tiles, and
            attention's backward by groups of heads.

    Raises:
        ValueError: a value outside these.

    Examples:
        >>> hfpatch.apply(model, checkpointing=hfpatch.Checkpointing(offload="host", tile=8192))
    """

    offload: str = "auto"
    every: int | str = "auto"
    tile: int | str = "auto"
    frozen_weights: str = "auto"
    keep: int | str = "auto"
    plain: int | str = "auto"
    aim: str = "fastest"

    def __post_init__(self):
        object.__setattr__(self, "offload", _place("offload", PLACES, self.offload))
        if isinstance(self.keep, str):
            object.__setattr__(self, "keep", KEEPS.get(self.keep, self.keep))
        for name, fits, wanted in (
            ("every", _is_number(self.every, 1), "a positive number of layers"),
            ("tile", _is_number(self.tile, 1), "a positive number of tokens"),
            ("plain", _is_number(self.plain, 0), "a number of layers"),
            ("keep", _is_number(self.keep, -1), f"{', '.join(KEEPS)} or a number of layers"),
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
        if self.offload == "off" and self.words() != ["off"]:
            raise ValueError(
                'hfpatch: checkpointing "off" takes no fields, and got some. Leave them out.'
            )

    def words(self) -> list[str]:
        """The fields that differ from their default, as a command line's words, which
        parse_checkpointing reads.
        """
        spelt = {number: word for word, number in KEEPS.items()}
        found = ["off"] if self.offload == "off" else []
        for name, value in asdict(self).items():
            if value not in (self.__dataclass_fields__[name].default, "off"):
                found.append(f"{name}={spelt.get(value, value) if name == 'keep' else value}")
        return found

    @property
    def tier(self) -> str:
        """Where checkpoints wait: "gpu", "host" or "disk"."""
        return self.offload if self.directory is None else "disk"

    @property
    def directory(self) -> str | None:
        """The disk tier's folder, or None if checkpoints stay in memory."""
        return None if self.offload in PLACES else self.offload

    @property
    def saves_attention(self) -> bool:
        """Whether layers keep attention's output and log-sum-exp, so that its forward runs once."""
        return self.every == 1 and self.keep >= 0

    def keeps_gates(self, index: int) -> bool:
        """Whether the tiled layer of this index keeps gate and up."""
        return self.every == 1 and index < self.keep

    @property
    def parks_dx(self) -> bool:
        """Whether the gradient of a layer's input waits on the host while attention's backward
        runs. Short of memory only: where there is more, attention takes all heads at once.
        """
        return self.offload == "host" and self.aim == "least"


setattr(Checkpointing, "__init__", names_the_nearest(Checkpointing.__init__))  # noqa: B010
# The least of a step in host memory: every field is set.
LEAST = Checkpointing("host", 1, TILE_MOST, "gpu", "attention", 0, "least")

_FIELD = "[a-z_-]+="
# A comma inside a folder's name separates nothing.
_NEXT = f",(?={_FIELD}|[./~]|(?:auto|least|off|gpu|host)(?:,|$))"
# The help text of --checkpointing on every command line.
CHECKPOINTING = (
    "what layers keep for backward: auto, least (device memory), off, a place (gpu, host, a "
    "folder), "
    "or fields of hfpatch.Checkpointing, as tile=4096; several with commas, or the flag again"
)


def parse_checkpointing(value) -> Checkpointing:
    """Reads `checkpointing=`, in Python and on every command line.

    Args:
        value: a Checkpointing, or its fields in a dict; "auto", "least", "off", or a place ("gpu",
            "host", a directory). A command line also names fields, alone or after a word:
            "least,tile=4096,keep=gate_up". A list of such texts is read as one.

    Raises:
        ValueError: anything else, an unknown field, or a field that comes twice.
    """
    if isinstance(value, Checkpointing):
        return value
    if isinstance(value, dict):
        return Checkpointing(**value)
    texts = value if isinstance(value, (list, tuple)) else [value]
    if not all(isinstance(text, (str, os.PathLike)) for text in texts):
        _place("checkpointing", WORDS, value)  # raises
    fields: dict = {}
    for word in [word for text in texts for word in re.split(_NEXT, os.fspath(text))]:
        for name, given in _field(word).items():
            if fields.setdefault(name, given) != given:
                raise ValueError(
                    f"hfpatch: checkpointing names {name} twice, got {fields[name]!r} and "
                    f"{given!r}. Leave one out."
                )
    return Checkpointing(**fields)


def _field(word: str) -> dict:
    """The field of Checkpointing that a word sets; none for "auto"."""
    if word == "auto":
        return {}
    if word == "least":
        return {"aim": "least"}
    if not re.match(_FIELD, word):
        return {"offload": _place("checkpointing", WORDS, word)}
    name, _, text = word.partition("=")
    name = name.replace("-", "_")
    refuse_unknown([name], Checkpointing.__dataclass_fields__, "a field of checkpointing")
    if not text:
        raise ValueError(
            f"hfpatch: a field of checkpointing must be FIELD=VALUE, got {word!r}. Write "
            "offload=host, for example."
        )
    return {name: text if name == "offload" else parse_word(text)}


def auto_tile(tokens: int) -> int:
    """Tokens per tile if the free memory is unknown: one tile up to 8192 tokens, 4096 a tile up to
    32,768, 8192 a tile beyond.

    A single tile needs no second q, k, v and no float32 sums, and its intermediates are small up to
    8192 rows. 4096 rows are enough for fast matmuls, and keep the MLP's intermediates below the
    bytes that the layer holds anyway.
    """
    return 4096 if TILE_MOST < tokens <= 4 * TILE_MOST else TILE_MOST


_WHERE = {"gpu": "on the device", "host": "on the host", "disk": "on the disk"}


def describe(policy: Checkpointing, num_layers: int, below: int = 0) -> str:
    """The policy of a step in one line for users: how many layers keep which tensors, and where.

    num_layers: that keep something. below: layers below them, which keep nothing.
    """
    plain = min(policy.plain, num_layers)
    tiled = num_layers - plain
    s, verb = ("s", "keep") if plain > 1 else ("", "keeps")
    said = [f"{plain} layer{s} {verb} everything"] * (plain > 0)
    if tiled:
        its, keep = ("its", "keeps") if tiled == 1 else ("their", "keep")
        kept = [f"{its} input" if policy.every == 1 else f"one input in {policy.every}"]
        kept += ["attention"] * policy.saves_attention
        if policy.keep > below:
            share = f" (in {policy.keep - below} of them)"
            kept.append("gate and up" + share * (policy.keep < below + tiled))
        listed = ", ".join(kept[:-1]) + (" and " if len(kept) > 1 else "") + kept[-1]
        said.append(
            f"{tiled} {keep} {listed} {_WHERE[policy.tier]}, in tiles of {policy.tile:,} tokens"
        )
    said += ["frozen weights come from the host"] * (policy.frozen_weights == "host")
    return "; ".join(said)
