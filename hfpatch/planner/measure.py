"""`--gpu this`: measures the rates of this machine's GPU with a second of matmuls, attention and
copies.
"""

import time

import torch

from hfpatch.lab.hardware import Gpu
from hfpatch.planner.machine import gpu_limit


def _seconds(run, least: float = 0.1) -> float:
    run()
    torch.cuda.synchronize()
    count, started = 0, time.perf_counter()
    while True:
        run()
        count += 1
        torch.cuda.synchronize()
        spent = time.perf_counter() - started
        if spent > least and count >= 3:
            return spent / count


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large matmul of random values (zeros run faster)."""
    a, b = (torch.randn(8192, 8192, device=device, dtype=dtype) for _ in range(2))
    return 2 * 8192**3 / _seconds(lambda: a @ b)


def measure_this(dtype: torch.dtype = torch.bfloat16) -> Gpu:
    """This machine's first GPU as a Gpu, with its rates for `dtype`. ValueError without a GPU."""
    if not torch.cuda.is_available():
        raise ValueError(
            "hfpatch: --gpu this measures a CUDA device, and there is none here. Name the GPU you "
            "mean instead."
        )

    device = torch.device("cuda:0")
    properties = torch.cuda.get_device_properties(device)
    return Gpu(
        name=properties.name, memory_bytes=gpu_limit(device), **_rates(device, dtype),
        source="measured on this machine",
        processors=properties.multi_processor_count, measured=True, major=properties.major
    )  # fmt: skip


def _rates(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """A Gpu's rates, each timed."""
    from hfpatch.attention.attention import BACKENDS, pick

    make = lambda *shape: torch.randn(*shape, device=device, dtype=dtype)  # noqa: E731
    T, H, K, E = 16384, 32, 8, 128
    q, k, v = make(1, T, H, E), make(1, T, K, E), make(1, T, K, E)
    forward, backward = BACKENDS[pick(q)]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scale = E**-0.5
    flops = 2 * H * T * T * E
    fwd = flops / _seconds(lambda: forward(q, k, v, scale))
    out, lse, state = forward(q, k, v, scale)
    bwd = 2.5 * flops / _seconds(lambda: backward(out, q, k, v, out, lse, state, scale))
    big = torch.empty(1 << 28, dtype=torch.uint8, device=device)
    other = torch.empty_like(big)
    bandwidth = 2 * big.numel() / _seconds(lambda: other.copy_(big))
    host = torch.empty(1 << 28, dtype=torch.uint8, device="cpu", pin_memory=True)
    link = big.numel() / _seconds(lambda: big.copy_(host, non_blocking=True))
    peer = 0.0
    if torch.cuda.device_count() > 1:
        there = torch.empty_like(big, device="cuda:1")
        peer = big.numel() / _seconds(lambda: there.copy_(big))
    return {
        "peak_flops": matmul_rate(device, dtype), "bandwidth": bandwidth, "link": link, "attention_forward": fwd,
        "attention_backward": bwd,
        "peer": peer
    }  # fmt: skip
