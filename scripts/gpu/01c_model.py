"""The whole patched model against float64, the copies' races, and no waiting for the device inside
a step.

python scripts/gpu/01c_model.py --out $OUT
"""

import contextlib
import os
import random
import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

# what cuBLAS needs to give the same bits again
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import common
import step
import torch

import hfpatch
from hfpatch.lab.checks import batch_of, compared, gradients, ways
from hfpatch.store.device import CudaDevice

WORDS = """
`model`: loss and every gradient of the patched model beside the stock one in the same dtype, both
against a float64 twin; `share` is the worst error over twice the stock's own, and `where` names it.
`race`: gradients with checkpoints on the host against those with checkpoints on the GPU, run after
run at a length with many tiles, torch's deterministic algorithms on, so that equal means to the bit
(`spread`: two runs without copies). The runs that are `delayed` have random waits before copies,
and before what copies wait for, of up to two milliseconds: whoever does not wait for a copy, or
overwrites what one still reads, computes with other numbers. `sync`: a forward and backward after
warm-up under torch.cuda.set_sync_debug_mode("error"); `host_ms` is when backward() returned,
`device_ms` when the device was done: a host that waits takes as long as the device.
"""


def against_float64(sheet, name, case, dtype, T, tile) -> None:
    model = step.build(case, sheet.args.device, dtype)
    for way, share, where in compared(
        model, batch_of(model, T, sheet.args.device), ways(tile), dtype
    ):
        sheet.add(
            check="model", model=name, dtype=str(dtype).removeprefix("torch."), tokens=T, way=way,
            passed=share <= 1.0,
            share=share, where=where,
        )  # fmt: skip


@contextlib.contextmanager
def delays(seed: int):
    """Within, streams stand still for a moment before a copy, and before an event that another
    stream waits for.
    """
    chosen, real = random.Random(seed), (CudaDevice.on, CudaDevice.mark)

    def wait(stream):
        with torch.cuda.stream(stream):  # None: the current one
            # cycles, at about 2 GHz
            torch.cuda._sleep(chosen.choice((0, 20_000, 400_000, 4_000_000)))

    def late(function):
        def run(device, stream=None):
            wait(stream)
            return function(device, stream)

        return run

    CudaDevice.on, CudaDevice.mark = map(late, real)
    try:
        yield
    finally:
        CudaDevice.on, CudaDevice.mark = real


def races(sheet, case, T, tile, runs) -> None:
    """Host-tier gradients against GPU-tier ones."""
    asked = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*deterministic", UserWarning)
            _races(sheet, case, T, tile, runs)
    finally:
        torch.use_deterministic_algorithms(asked[0], warn_only=asked[1])


def _races(sheet, case, T, tile, runs) -> None:
    device = sheet.args.device
    model = step.build(case, device)
    batch = batch_of(model, T, device)
    for way in ("host", "host, attention again", "host, all kept"):
        hfpatch.apply(model, checkpointing=ways(tile)["gpu, all kept" if "kept" in way else "gpu"])
        base = gradients(model, batch)
        spread = _apart(gradients(model, batch), base)
        hfpatch.apply(model, checkpointing=ways(tile)[way])
        for i in range(runs):
            delayed = i > 0 and sheet.args.cuda
            with delays(i) if delayed else contextlib.nullcontext():
                off = _apart(gradients(model, batch), base)
            # Nothing where two runs without copies agree to the bit; a tile of another layer's data
            # differs by order one.
            sheet.add(
                check="race",
                tokens=T,
                way=way,
                run=i,
                delayed=delayed,
                passed=off <= 4 * spread,
                share=off,
                spread=spread,
            )
    hfpatch.undo(model)


def _apart(a: dict, b: dict) -> float:
    return max(
        ((a[k].float() - b[k].float()).norm() / b[k].float().norm().clamp_min(1e-30)).item()
        for k in b
    )


def no_sync(sheet, case, T, tile) -> None:
    device = sheet.args.device
    model = step.build(case, device)
    plain = batch_of(model, T, device)
    positions = torch.arange(T, device=device).remainder(T // 3 + 1).unsqueeze(0)
    batches = {
        "labels": plain,
        "num_items_in_batch": plain
        | {"num_items_in_batch": torch.tensor(T - T // 5, device=device)},
        "attention_mask of ones": plain
        | {"attention_mask": torch.ones(1, T, dtype=torch.long, device=device)},
        "packed": plain | {"position_ids": positions},
    }
    for way in ("host", "gpu"):
        hfpatch.apply(model, checkpointing=ways(tile)[way])
        for name, batch in batches.items():
            for _ in range(2):
                model(**batch, use_cache=False).loss.backward()
                model.zero_grad(set_to_none=True)
            common.synchronize()
            message, times = "", []
            if sheet.args.cuda:
                torch.cuda.set_sync_debug_mode("error")
            try:
                start = time.perf_counter()
                model(**batch, use_cache=False).loss.backward()
                times.append((time.perf_counter() - start) * 1e3)
            except RuntimeError as error:
                if "synchroniz" not in str(error):
                    raise
                message = common.one_line(error)
            finally:
                if sheet.args.cuda:
                    torch.cuda.set_sync_debug_mode("default")
            common.synchronize()
            total = (time.perf_counter() - start) * 1e3
            model.zero_grad(set_to_none=True)
            sheet.add(
                check="sync", tokens=T, way=way, batch=name, passed=not message,
                host_ms=times[0] if times else None,
                device_ms=total, message=message,
            )  # fmt: skip
    hfpatch.undo(model)


def main(argv=None) -> int:
    args = common.parse(common.parser("01c_model", __doc__), argv)
    sheet = common.Sheet(args)
    sizes = {"hidden_size": 64, "intermediate_size": 112, "vocab_size": 97} if args.small else {
        "hidden_size": 512, "intermediate_size": 1408, "vocab_size": 4099, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 64,
    }  # fmt: skip
    narrow = {
        "preset": "llama-tiny",
        "layers": 4,
        "tokens": 4096,
        "changes": sizes | {"initializer_range": 0.05},
    }
    wide = (
        narrow
        if args.small
        else {"layers": 2, "tokens": 4096, "changes": {"initializer_range": 0.02}}
    )
    T, tile = (45, 16) if args.small else (1030, 256)
    long = (48, 16, 1) if args.small else (32768, 2048, 4)
    four = wide if args.small else wide | {"layers": 4, "tokens": 32768}
    jobs = [("small", against_float64, ("small", narrow, torch.bfloat16, T, tile))]
    if not args.small:
        jobs.append(("8B", against_float64, ("8B widths", wide, torch.bfloat16, 2051, 512)))
    jobs += [("sync", no_sync, (four, *long[:2])), ("race", races, (four, *long))]
    if not args.small:
        jobs += [
            ("small", against_float64, ("small", narrow, dtype, T, tile))
            for dtype in (torch.float16, torch.float32)
        ]
        jobs.append(("8B", against_float64, ("8B widths", wide, torch.float32, 2051, 512)))
    for name, job, arguments in jobs:
        if not sheet.late(name):
            job(sheet, *arguments)
            common.clean()
    failed = [r for r in sheet.rows if not r["passed"]]
    sheet.page(
        f"The patched model: {len(sheet.rows) - len(failed)} of {len(sheet.rows)} checks pass",
        WORDS,
    )
    for row in failed:
        print("  FAILED", row)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
