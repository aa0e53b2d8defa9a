"""One step beside the clock's: what each stream did when, and the copies that compute waited for.

python scripts/gpu/18_timeline.py --out $OUT
"""

import gzip
import json
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import common
import step
import torch
from watch import policy_of

import hfpatch
from hfpatch.budget.hardware import gpu_named, gpu_row
from hfpatch.lab.checks import batch_of
from hfpatch.lab.clock import DOWN, UP
from hfpatch.lab.made import config_of
from hfpatch.lab.profile.families import copy_wait, family
from hfpatch.lab.simulate.implementations import build, prepare
from hfpatch.lab.watch import policy_used
from profiles.clock.clocked import clocked
from profiles.clock.timeline import Timeline, trace_events

WORDS = """
A warm step of Llama-3.1-8B's widths under torch's profiler, and the same model and policy on the
clock (`hfpatch profile --clock`), whose seconds come from the step model. Forward and backward, no
optimizer. `exposed_s` is the time in which the compute stream was idle while a copy between host
and device ran; `idle_s` is all its idle time, the host's too. Copies hide where `exposed_share`
stays below 3%. `step_ratio` is the card's seconds over the clock's. The two traces of each length
open in ui.perfetto.dev.
"""
COLUMNS = (
    "tokens layers step_s clock_s step_ratio exposed_s exposed_share clock_exposed_s idle_s "
    "to_host_s clock_to_host_s to_device_s clock_to_device_s kernels policy"
).split()
TO_HOST, TO_DEVICE = ("DtoH", "Device -> Host"), ("HtoD", "Host -> Device")


@dataclass
class Seen:
    """One recorded step. events: (name, stream, start, end) on the device, seconds; trace: the
    profiler's own JSON.
    """

    events: list
    trace: str

    @property
    def span(self) -> tuple[float, float]:
        return min(e[2] for e in self.events), max(e[3] for e in self.events)

    def seconds_of(self, *names: str) -> float:
        """Of copies whose name has one of these."""
        return sum(e - s for n, _, s, e in self.events if any(x in n for x in names))

    @property
    def idle(self) -> float:
        """Seconds of the step in which the compute stream had no kernel."""
        busy: dict = {}
        for name, stream, start, end in self.events:
            if not family(name).startswith("copy host"):
                busy[stream] = busy.get(stream, 0.0) + end - start
        start, end = self.span
        return end - start - max(busy.values(), default=0.0)


def record(run, out: Path) -> Seen:
    """A run() under the profiler; its trace goes to `out`, without the operators of the host."""
    cuda, kinds = torch.cuda.is_available(), torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CUDA if cuda else kinds.CPU]) as profiler:
        run()
        common.synchronize()
    kind = torch.autograd.DeviceType.CUDA if cuda else torch.autograd.DeviceType.CPU
    events = [
        (e.name, getattr(e, "device_resource_id", 0), e.time_range.start / 1e6,
         e.time_range.end / 1e6)
        for e in profiler.events()
        if e.device_type == kind
    ]  # fmt: skip
    zero = min((e[2] for e in events), default=0.0)
    rows = [
        {"ph": "X", "pid": 0, "tid": stream, "name": name, "ts": round(1e6 * (start - zero), 1),
         "dur": round(1e6 * (end - start), 1)}
        for name, stream, start, end in events
    ]  # fmt: skip
    _write(out, rows)
    return Seen(events, out.name)


def _write(path: Path, rows: list) -> None:
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": rows, "displayTimeUnit": "ms"}, file)


def on_the_clock(case, policy, tokens: int, device) -> Timeline:
    """The same model, shape and policy with streams as clocks of this card, or of an H100."""
    gpu = gpu_named(common.device_name(device)) or gpu_row("h100")
    config = config_of(*step.changed(case), tokens)
    model = prepare(build(config.to_dict(), torch.bfloat16, None), "hfpatch")
    return clocked(model, gpu, policy, batch=1, seq_len=tokens, title=f"{gpu.name}, {tokens:,}")


def one_length(sheet, case) -> None:
    tokens, device = case["tokens"], sheet.args.device
    model = step.build(case, device)
    hfpatch.apply(model)
    batch = batch_of(model, tokens, device)
    for _ in range(2):  # the first chooses and pins, the second chooses with what it learnt
        step.one_step(model, batch)
        model.zero_grad(set_to_none=True)
        common.synchronize()
    seen = record(lambda: step.one_step(model, batch), sheet.out / f"card_{tokens}.json.gz")
    policy, words = policy_used(model), policy_of(model)
    hfpatch.undo(model)
    model = None
    common.clean()
    timeline = on_the_clock(case, policy, tokens, device)
    _write(sheet.out / f"clock_{tokens}.json.gz", trace_events(timeline))
    start, end = seen.span
    exposed, clock = copy_wait(seen.events), timeline.seconds["step"]
    row = sheet.add(
        tokens=tokens, layers=case["layers"], step_s=end - start, clock_s=clock,
        step_ratio=(end - start) / clock, exposed_s=exposed, exposed_share=exposed / (end - start),
        clock_exposed_s=timeline.exposed_seconds, idle_s=seen.idle,
        to_host_s=seen.seconds_of(*TO_HOST), clock_to_host_s=timeline.busy(UP),
        to_device_s=seen.seconds_of(*TO_DEVICE), clock_to_device_s=timeline.busy(DOWN),
        kernels=len(seen.events), policy=words,
    )  # fmt: skip
    sheet.drawn.append((row, seen, timeline))


def draw_pair(axes, drawn) -> None:
    """A row a stream, the card's above the clock's, seconds from the step's beginning."""
    for axis, (row, seen, timeline) in zip(axes, drawn):
        start = seen.span[0]
        rows: dict = {}
        for name, stream, a, b in seen.events:
            way = "card: copies" if family(name).startswith("copy host") else f"card: {stream}"
            rows.setdefault(way, []).append((a - start, b - a))
        for s in [*timeline.slices, *timeline.waits]:
            rows.setdefault(f"clock: {s.stream}", []).append((s.start, s.end - s.start))
        for i, (name, bars) in enumerate(sorted(rows.items(), reverse=True)):
            axis.broken_barh(bars, (i - 0.4, 0.8), color="#d54e53" if "waits" in name else None)
        axis.set_yticks(range(len(rows)), sorted(rows, reverse=True), fontsize=6)
        axis.set(title=f"{row['tokens']:,} tokens", xlabel="s")


def main(argv=None) -> int:
    made = common.parser("18_timeline", __doc__)
    made.add_argument("--tokens", type=int, nargs="+", default=[8192, 16384, 131072])
    made.add_argument("--layers", type=int, nargs="+", default=[32, 32, 8])
    args = common.parse(made, argv)
    if len(args.layers) != len(args.tokens):
        made.error(
            f"expected one number of layers a length, {len(args.layers)} came for "
            f"{len(args.tokens)}; pass as many."
        )
    sheet = common.Sheet(args)
    sheet.drawn = []
    cases = [{"tokens": t, "layers": n} for t, n in zip(args.tokens, args.layers)]
    failed = False
    for case in step.small(sheet, cases):
        if sheet.late(f"{case['tokens']:,} tokens"):
            continue
        try:
            one_length(sheet, case)
        except Exception as error:  # a length that fails is a row, the next one runs
            sheet.add(tokens=case["tokens"], layers=case["layers"], **common.failure(error))
            failed = True
        common.clean()
    drawn = sheet.drawn
    picture = sheet.picture(lambda axes: draw_pair(axes, drawn), wide=len(drawn)) if drawn else None
    sheet.page("A step beside the clock", WORDS, [*COLUMNS, "error"], picture)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
