"""`--gpu this`: measures the rates of this machine's GPU with a second of matmuls, attention and
copies.
"""

import itertools
import time

import torch

from hfpatch.lab.hardware import Gpu
from hfpatch.planner.machine import gpu_limit


def _seconds(run, least: float = 0.1) -> float:
    run()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for count in itertools.count(1):
        run()
        torch.cuda.synchronize()
        spent = time.perf_counter() - started
        if spent > least and count >= 3:
            return spent / count


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large matmul of random values (zeros run faster)."""
    a = torch.randn(8192, 8192, device=device, dtype=dtype)
    b = torch.randn_like(a)
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

    # 16,384 tokens, 32 query and 8 KV heads of 128 channels, as [batch, heads, tokens, channels]
    q = torch.randn(1, 16384, 32, 128, device=device, dtype=dtype).transpose(1, 2)
    k = torch.randn(1, 16384, 8, 128, device=device, dtype=dtype).transpose(1, 2)
    v = torch.randn_like(k)
    forward, backward = BACKENDS[pick(q.transpose(1, 2))]
    scale = 128**-0.5
    flops = 2 * 32 * 16384**2 * 128
    fwd = flops / _seconds(lambda: forward(q, k, v, scale))
    out, lse, state = forward(q, k, v, scale)
    bwd = 2.5 * flops / _seconds(lambda: backward(out, q, k, v, out, lse, state, scale))
    big = torch.empty(1 << 28, dtype=torch.uint8, device=device)
    other = torch.empty_like(big)
    host = torch.empty(1 << 28, dtype=torch.uint8, device="cpu", pin_memory=True)
    link = big.numel() / _seconds(lambda: big.copy_(host, non_blocking=True))
    peer = 0.0
    if torch.cuda.device_count() > 1:
        there = torch.empty_like(big, device="cuda:1")
        peer = big.numel() / _seconds(lambda: there.copy_(big))
    return {
        "peak_flops": matmul_rate(device, dtype),
        "bandwidth": 2 * big.numel() / _seconds(lambda: other.copy_(big)),
        "link": link,
        "attention_forward": fwd,
        "attention_backward": bwd,
        "peer": peer,
    }
