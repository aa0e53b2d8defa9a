"""Training steps of a whole model, one implementation a process: `python scripts/gpu/step.py
cases.json results.jsonl now.json`.

The entries write cases and read results (`run_cases`); a case that runs out of memory is a row that
says so. A case is a dict:

    impl            "stock" | "liger" | "trl" | "hfpatch"
    tokens          of one sequence; batch is 1
    layers, preset, changes   the model: a preset with so many layers, and changes to its config
    config          the model, in place of a preset: the values of a configuration, model_type too
    fp8             products of the layers in float8 by this recipe of torchao
    checkpointing   hfpatch: "auto" or the fields of hfpatch.Checkpointing; others: "plain" | "offload" | "off" | "selective":
                    offload under TRL's selective checkpointing, which does not run attention again.
                    trl: TRL's fused head, always selective
    lora            rank of adapters (PEFT, every Linear of the layers) over a frozen base
    base            of lora: "4bit" (nf4.py), unless it says "bf16"
    cap_gib         device memory this process may take, as on a smaller card
    warmup, steps   steps that are not timed, steps that are
    split, floor    also record one step's kernels; also measure the least time on this card first
    ballast_gib     device memory taken away first, for layers that are not there
    host_gib        host memory to plan with, where the machine's own figure grows as it is used
    until           time.time() at which nothing more is begun: a first timed step comes in any case, further ones, warm-up
                    steps and the split only where they fit
"""

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import common
import torch
from watch import GradWatch, HostWatch, owned_bytes, policy_of

from hfpatch.budget.shape import ModelShape
from hfpatch.lab.made import config_of, made, made_of
from hfpatch.lab.recorded import recorded
from hfpatch.lab.watch import pinned_gib

GiB = common.GiB


def changed(case) -> tuple[str, dict]:
    """The case's preset, and what is not as there."""
    layers = {"num_hidden_layers": case["layers"]} if case.get("layers") else {}
    return case.get("preset", "llama-3.1-8b"), case.get("changes", {}) | layers


def build(case, device, dtype=torch.bfloat16):
    if case.get("config"):
        values = case["config"] | changed(case)[1]
        model = made_of(values, device, dtype)
    else:
        model = made(*changed(case), device, dtype, case["tokens"])
    if case.get("fp8"):
        from hfpatch.trainer.float8 import convert

        convert(model, case["fp8"])
    return adapted(model, case["lora"], case.get("base", "4bit")) if case.get("lora") else model


def adapted(model, rank: int, base: str):
    """Adapters in the base's own dtype, as TRL keeps them, over a base in bf16 or 4 bits."""
    from nf4 import quantise
    from peft import LoraConfig, get_peft_model

    if base == "4bit":
        quantise(model)
    common.clean()
    settings = LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    return get_peft_model(model, settings, autocast_adapter_dtype=False)


def checkpoint(model, offload: bool) -> None:
    """transformers' own checkpointing, by the name it has in this version; TRL's selective one
    wraps the older name alone.
    """
    enable = model.gradient_checkpointing_enable
    if not getattr(enable, "_is_sac_wrapped", False):
        enable = getattr(model, "activation_checkpointing_enable", enable)
    if offload and torch.cuda.is_available():
        enable({"use_reentrant": False}, offload=True)
    else:
        enable({"use_reentrant": False})


# of each family's file into which Liger put its classes for the whole process, what was there
# before
LIGERS: dict = {}


def become(model, case) -> str:
    """Makes the model what the case asks for; returns what was done, in a line."""
    impl, kept = (
        case["impl"],
        case.get("checkpointing", "auto" if case["impl"] == "hfpatch" else "plain"),
    )
    if impl == "hfpatch":
        import hfpatch

        settings = hfpatch.Checkpointing(**kept) if isinstance(kept, dict) else kept
        hfpatch.apply(model, checkpointing=settings)
        return "hfpatch"
    if impl == "liger":
        if not torch.cuda.is_available():
            raise ValueError("Liger's kernels need a GPU")
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        if not getattr(model, "_liger_applied", False):
            family = sys.modules[
                type(model.get_base_model() if case.get("lora") else model).__module__
            ]
            LIGERS.setdefault(family, dict(vars(family)))
            _apply_liger_kernel_to_instance(
                model=model.get_base_model() if case.get("lora") else model
            )
            model._liger_applied = True
    if impl == "trl" and not getattr(model, "_trl_applied", False):
        from trl.trainer.utils import add_fused_lm_head

        add_fused_lm_head(model.get_base_model() if case.get("lora") else model)
        model._trl_applied = True
    if impl == "trl" or kept == "selective":
        from trl.models import enable_selective_activation_checkpointing

        enable_selective_activation_checkpointing(model)
    if kept != "off":
        checkpoint(model, kept in ("offload", "selective"))
    return f"{impl}, checkpointing {kept}"


# --- one case -------------------------------------------------------------------------------------


def one_step(model, batch, mark=lambda: None):
    asked = {"fused_lm_head": True} if getattr(model, "_trl_applied", False) else {}
    loss = model(**batch, use_cache=False, **asked).loss
    mark()
    loss.backward()
    mark()
    return loss.detach()


def kernel_split(model, batch) -> dict:
    """What hfpatch.lab.recorded finds of one more step."""
    found = recorded(lambda: one_step(model, batch))
    model.zero_grad(set_to_none=True)
    return found


def mfu_of(shape, tokens: int, seconds: float) -> float | None:
    """Share of the data sheet's bf16 rate that the model's own causal FLOPs take, recomputation not
    counted; None of a device that has none.
    """
    from hfpatch.trainer.callback import model_flops, published_peak

    rate = published_peak(
        common.device_name(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    )
    return model_flops(shape, 1, tokens) / seconds / rate if rate else None


@contextlib.contextmanager
def host_memory(gib: float | None):
    """What the policy takes for the free host memory, where gib says."""
    before = os.environ.get("HFPATCH_HOST_MEMORY")
    if gib:
        os.environ["HFPATCH_HOST_MEMORY"] = str(int(gib * GiB))
    try:
        yield
    finally:
        os.environ.pop("HFPATCH_HOST_MEMORY", None)
        if before is not None:
            os.environ["HFPATCH_HOST_MEMORY"] = before


@contextlib.contextmanager
def capped(gib: float | None):
    """No more device memory than gib, as on a smaller card; None changes nothing."""
    if not gib or not torch.cuda.is_available():
        yield
        return
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, gib * GiB / total))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@contextlib.contextmanager
def ballast(gib: float, device):
    """Takes device memory away, as layers that are not there would."""
    held = [torch.empty(int(gib * GiB), dtype=torch.uint8, device=device)]
    try:
        yield
    finally:
        held.clear()


def measure(model, case, device, found: dict | None = None, note=lambda: None) -> dict:
    """What the case's row says, into `found`. note: called after each step, which what comes next
    may end.
    """
    found = {} if found is None else found
    try:
        shape = ModelShape.from_config(model.config)
    except ValueError:  # layers that no closed form knows: no count of their FLOPs
        shape = None
    # Random tokens; every one a label.
    ids = torch.randint(3, model.config.vocab_size, (1, case["tokens"]), device=device)
    batch = {"input_ids": ids, "labels": ids}
    before = torch.cuda.memory_allocated() - owned_bytes(model) if device.type == "cuda" else 0
    host, last = HostWatch(), 0.0
    fits = lambda steps: time.time() + steps * last < case.get("until", math.inf)  # noqa: E731
    try:
        for i in range(case.get("warmup", 1)):
            if i and not fits(2):
                break
            start = time.perf_counter()
            loss = one_step(model, batch)
            common.synchronize()
            last = time.perf_counter() - start
            found.setdefault("first_step_s", last)
            found["policy"] = policy_of(model)
            note()
            model.zero_grad(set_to_none=True)
        watch = GradWatch(model)
        seconds, halves = [], []
        # The first timed step is also the one whose memory is followed: the counters cost
        #     microseconds.
        for i in range(case.get("steps", 2)):
            if i and not fits(1):
                break
            clock = common.Clock()
            common.synchronize()
            start = time.perf_counter()
            clock.mark()
            loss = one_step(model, batch, clock.mark)
            common.synchronize()
            last = time.perf_counter() - start
            seconds.append(last)
            found.setdefault("first_step_s", last)  # without a warm-up: it pinned and compiled
            halves.append(clock.gaps_ms())
            if watch is not None:
                found |= watch.close(before)
                watch = None
            model.zero_grad(set_to_none=True)
        best = min(range(len(seconds)), key=seconds.__getitem__)
        found |= {
            "step_s": seconds[best],
            "forward_s": halves[best][0] / 1e3,
            "backward_s": halves[best][1] / 1e3,
            "steps_s": " ".join(f"{s:.4g}" for s in seconds),
            "tokens_s": case["tokens"] / seconds[best],
            # A frozen base takes no weight gradients: the field's count of FLOPs does not describe
            #     it.
            "mfu": None
            if case.get("lora") or case.get("fp8") or shape is None
            else mfu_of(shape, case["tokens"], seconds[best]),
            "loss": loss.item(),
            "policy": policy_of(model),
            "pinned_gib": pinned_gib(model),
        }
        note()
        if case.get("split") and fits(1.5):  # recording costs some of it
            try:
                found |= kernel_split(model, batch)
            except (
                Exception
            ) as error:  # a machine may keep its counters to itself: what was timed stays
                found["split_error"] = common.one_line(error)
    finally:
        found |= host.close()
        model.zero_grad(set_to_none=True)
    return found


def run(cases: list[dict], write, under_way=lambda result: None) -> None:
    """Measures each case; write(case, result) at once. The model is kept while cases ask for the
    same one. under_way: gets what is known of the case that runs, whenever that is more.
    """
    try:
        _run(cases, write, under_way)
    finally:
        for family, before in LIGERS.items():
            vars(family).update(before)
        LIGERS.clear()


def _run(cases: list[dict], write, under_way) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, made = None, None
    for case in cases:
        result = {"device": common.device_name(device)}
        if time.time() > case.get("until", math.inf):
            write(case, result | {"error": "not started: the time of this run was over"})
            continue
        try:
            if case.get("floor"):
                from floor import floor

                shape = ModelShape.from_config(config_of(*changed(case), case["tokens"]))
                result |= floor(shape, case["tokens"], device, case.get("small", False))
                under_way(result)
                common.clean()
            parts = ("impl", "preset", "config", "layers", "changes", "lora", "base", "fp8")
            wanted = [case.get(k) for k in parts]
            if model is None or made != wanted:
                model, made = None, wanted
                common.clean()
                model = build(case, device)
            become(model.to(device), case)  # a base that was on the host comes back
            common.clean()
            with (
                capped(case.get("cap_gib")), ballast(case.get("ballast_gib", 0), device),
                host_memory(case.get("host_gib")),
            ):  # fmt: skip
                result |= measure(model, case, device, result, partial(under_way, result))
        except Exception as error:  # whatever a rival may raise: the row says what happened, and the next case runs
            result |= common.failure(error)
        if "error" in result:  # here the traceback, and what its frames held, is gone
            if model is not None:
                model.zero_grad(set_to_none=True)
            with contextlib.suppress(RuntimeError):
                common.clean()
        if model is not None and case["impl"] == "hfpatch":
            import hfpatch

            hfpatch.undo(model)
        write(case, result)


# --- the entries' side ----------------------------------------------------------------------------


def run_cases(sheet, cases: list[dict]) -> list[dict]:
    """A row of `sheet` for each case, run in one process of its own (in this one with --small).
    Returns the rows.
    """
    rows = []

    def write(case, result):
        label = {k: v for k, v in case.items() if k in ("impl", "tokens", "layers")}
        label |= {"kept": str(case.get("checkpointing", "auto"))} | case.get("label", {})
        rows.append(sheet.add(**label, **result))

    if sheet.args.small:
        run([{**case, "small": True} for case in cases], write)
        return rows
    if sheet.late(f"{cases[0]['impl']} {[c['tokens'] for c in cases]}"):
        return rows
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("cases.json", "results.jsonl", "now.json")]
        until = time.time() + sheet.left()
        files[0].write_text(json.dumps([{**case, "until": until} for case in cases]))
        worker = subprocess.Popen([sys.executable, __file__, *map(str, files)])
        ended = None
        while ended is None:
            code, over = (
                worker.poll(),
                sheet.left() < -common.OVERTIME,
            )  # before the file is read: what it wrote last is seen too
            lines = files[1].read_text().splitlines() if files[1].exists() else []
            for case, line in zip(cases[len(rows) :], lines[len(rows) :]):
                write(case, json.loads(line))
            if code is not None:
                ended = f"the process ended with code {code} before this case"
            elif over:
                worker.kill()
                worker.wait()
                ended = "stopped: the time of this run was over"
            else:
                time.sleep(0.2)
        known = json.loads(files[2].read_text()) if files[2].exists() else {}
    for case in cases[len(rows) :]:
        write(case, known | {"error": ended})
        known = {}
    return rows


TINY = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 112, "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}  # fmt: skip


def small(sheet, cases: list[dict]) -> list[dict]:
    """With --small the same cases over a tiny model and short sequences."""
    if not sheet.args.small:
        return cases
    tiny = {"layers": 2, "ballast_gib": 0}
    tiny |= {"warmup": 1, "steps": 1}
    shrunk: list[dict] = []
    for case in cases:
        kept = case.get("checkpointing")
        if isinstance(kept, dict):
            case = {**case, "checkpointing": kept | {"tile": 16}}  # three tiles
        family = {"preset": "llama-tiny", "changes": {"vocab_size": 128}}
        if "config" in case:
            family = {"config": case["config"] | TINY | case["tiny"]}
        if "preset" in case:  # the same family, its sizes shrunk
            family = {"preset": case["preset"], "changes": {**case.get("changes", {}), **TINY}}
        case = {
            **case,
            **tiny,
            **family,
            "tokens": 48,
            "split": case.get("split", False) and not shrunk,
        }
        if case not in shrunk:  # lengths are all one here
            shrunk.append(case)
    return shrunk


def main() -> int:
    cases, results, known = map(Path, sys.argv[1:4])
    with results.open("a", encoding="utf-8") as file:

        def write(case, result):
            file.write(json.dumps(result) + "\n")  # one write: the other side reads whole lines
            file.flush()
            known.unlink(missing_ok=True)

        def under_way(result):
            fresh = known.with_suffix(".new")
            fresh.write_text(json.dumps(result))
            fresh.replace(known)

        run(json.loads(cases.read_text()), write, under_way)
    return 0


if __name__ == "__main__":
    sys.exit(main())
