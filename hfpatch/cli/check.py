"""`hfpatch check MODEL`: the result of `apply` on a model, from its verdict, without its weights."""

import json
from collections import Counter
from dataclasses import asdict, dataclass

from hfpatch.cli.quiet import progress
from hfpatch.lab.tables import table

PARTS = {"rms_norm": "norms", "rope": "RoPE", "mlp": "MLP", "loss": "loss"}


@dataclass(frozen=True)
class Support:
    """The result of apply() on a model.

    Attributes:
        layers, tiled: the number of layers, and of those that run tile by tile.
        reasons: why other layers do not.
        fused: the fused parts, of PARTS.
        packed: "isolated", or "refused" if nothing isolates documents.
        notes: the report's sentences.
        in_time, in_rows: the number of layers whose mixers run in tiles through time, and of those
            with a mixer that takes whole rows.
    """

    model: str
    layers: int
    tiled: int
    reasons: dict
    fused: tuple
    packed: str
    notes: tuple = ()
    in_time: int = 0
    in_rows: int = 0

    @property
    def verdict(self) -> str:
        whole = "; ".join(self.reasons)
        if not self.tiled:
            return whole
        return f"agrees; untiled: {whole}" if whole else "agrees"


def support_of(name: str, config: dict) -> Support:
    """Builds the model without memory and applies hfpatch to it. ValueError if transformers cannot
    build it.
    """
    import hfpatch
    from hfpatch.decoder.find import find_decoder
    from hfpatch.lab.simulate.implementations import build
    from hfpatch.layer.condition import look

    model = build(config)
    report = hfpatch.apply(model)
    decoder = find_decoder(model)
    layers = decoder.layers
    whole = Counter(reason for layer in layers if (reason := look(layer).reason))
    traits = [layer._hfpatch.traits for layer in layers]
    mixing = [t for t in traits if t.reason is None and t.mixers]
    in_rows = sum(len(t.timed) < len(t.mixers) for t in mixing)
    return Support(
        name,
        layers=len(layers),
        tiled=len(layers) - sum(whole.values()),
        reasons=dict(whole),
        fused=tuple(word for option, word in PARTS.items() if report.count(option)),
        packed="isolated" if decoder.stack._hfpatch.traits.isolates else "refused",
        notes=(*report.notes, *report.details),
        in_time=len(mixing) - in_rows,
        in_rows=in_rows,
    )


def add_arguments(parser) -> None:
    add = parser.add_argument
    add("--model", required=True, help="a preset, a config.json, a folder or a hub id")
    add("--json", action="store_true", help="everything on stdout as JSON")


def main(args) -> int:
    from hfpatch.lab.models import config_of

    with progress("trying a small instance"):
        found = support_of(*config_of(args.model))
    if args.json:
        print(json.dumps(asdict(found) | {"verdict": found.verdict}, indent=1))
        return 0
    mixers = f"{found.in_time} layers in tiles through time, {found.in_rows} over whole rows"
    rows = [
        ("verdict", found.verdict),
        *(("untiled", f"{n} layers: {reason}") for reason, n in found.reasons.items()),
        ("fused", ", ".join(found.fused) or "nothing"),
        ("packed", found.packed),
        *[("mixers", mixers)] * (found.in_time + found.in_rows > 0),
    ]
    print(f"{found.model}: {found.tiled} of {found.layers} layers run tile by tile", table(rows),
          *(f"  {note}" for note in found.notes), sep="\n")  # fmt: skip
    return 0
