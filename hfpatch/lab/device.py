"""Helpers of measurements: wait for the device, free memory, time a call, measure limits."""

import gc
import math
import statistics
import time
from contextlib import contextmanager

import torch

from hfpatch.lab.compat import keep_busy


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def clean() -> None:
    """Returns memory to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on a CPU too, whose allocator raises a plain RuntimeError."""
    kinds, text = (torch.OutOfMemoryError, MemoryError), str(error)
    return isinstance(error, kinds) or "out of memory" in text or "can't allocate memory" in text


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[
        :200
    ]


@contextmanager
def nan_in_new_memory():
    """Within, torch.empty and its relatives return NaN."""

    def filled(make):
        def wrapper(*args, **kwargs):
            made = make(*args, **kwargs)
            if type(made) is torch.Tensor and made.is_floating_point():
                with torch.no_grad():
                    made.fill_(math.nan)
            return made

        return wrapper

    with torch.device("cpu"):  # torch notes once which functions `with torch.device` is for
        torch.empty(0)
    places = [(torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")]
    before = [getattr(owner, name) for owner, name in places]
    try:
        for (owner, name), make in zip(places, before):
            setattr(owner, name, filled(make))
        yield
    finally:
        for (owner, name), make in zip(places, before):
            setattr(owner, name, make)


# --- timing ---------------------------------------------------------------------------------------


class Clock:
    """Marks on the device's own clock. Between the marks of a run the device must not wait for the
    host (see `timed`)."""

    def __init__(self):
        self.marks: list = []

    def mark(self) -> None:
        if torch.cuda.is_available():
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def gaps_ms(self) -> list[float]:
        """Milliseconds between neighbouring marks; waits for the device."""
        synchronize()
        pairs = zip(self.marks, self.marks[1:])
        if torch.cuda.is_available():
            return [a.elapsed_time(b) for a, b in pairs]
        return [(b - a) * 1e3 for a, b in pairs]


def timed(
    stages, *, sets: int = 1, budget_ms: float = 300.0, least: int = 5, most: int = 60
) -> list[float]:
    """Median milliseconds of each stage. stages(i, mark): one run on input set i, which calls
    mark() after each stage.

    A first pass warms up (compilation, autotuning). A second one measures host and device. Then the
    device is kept busy while the host queues all runs, so that no gap of the host is measured.
    """
    for i in range(max(2, sets)):
        stages(i % sets, lambda: None)
    synchronize()
    start = time.perf_counter()
    stages(0, lambda: None)
    host = time.perf_counter() - start
    synchronize()
    whole = (time.perf_counter() - start) * 1e3
    runs = max(least, min(most, int(budget_ms / max(whole, 1e-3))))
    if torch.cuda.is_available():
        # Cycles at about 2 GHz; half a second is the most that a short op could need.
        keep_busy(int(min(0.5, 1.5 * host * runs) * 2e9))
    each = []
    for i in range(runs):
        clock = Clock()
        clock.mark()
        stages(i % sets, clock.mark)
        each.append(clock)
    gaps = [clock.gaps_ms() for clock in each]
    return [statistics.median(stage) for stage in zip(*gaps)]


# --- ceilings -------------------------------------------------------------------------------------


def copy_rate(device: torch.device, small: bool, nbytes: int = 4 << 30) -> float:
    """Bytes a second of a large copy on the device, read plus written."""
    n = (1 << 20) if small else nbytes
    a, b = (torch.empty(n, dtype=torch.uint8, device=device) for _ in range(2))
    a.random_()

    def run(i, mark):
        b.copy_(a)
        mark()

    return 2 * n / (timed(run, budget_ms=100, least=3)[0] / 1e3)


def matmul_rate(
    device: torch.device, small: bool, dtype=torch.bfloat16, m=8192, n=8192, k=8192
) -> float:
    """FLOP/s of a matmul of random values (zeros run faster)."""
    m, n, k = (64, 64, 64) if small else (m, n, k)
    a, b = torch.randn(m, k, device=device).to(dtype), torch.randn(k, n, device=device).to(dtype)

    def run(i, mark):
        a @ b
        mark()

    return 2 * m * n * k / (timed(run, budget_ms=200, least=5)[0] / 1e3)


def host_rates(device: torch.device, small: bool) -> tuple[float, float]:
    """Bytes a second from the device to pinned host memory and back."""
    n = (1 << 20) if small else (1 << 30)
    a = torch.empty(n, dtype=torch.uint8, device=device)
    host = torch.empty(n, dtype=torch.uint8, pin_memory=device.type == "cuda")

    def run(i, mark):
        host.copy_(a, non_blocking=True)
        mark()
        a.copy_(host, non_blocking=True)
        mark()

    out, back = timed(run, budget_ms=200, least=3)
    return n / (out / 1e3), n / (back / 1e3)
