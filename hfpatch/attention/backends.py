"""The attention kernels for plain causal rows, and the choice between them.

A trial on the device finds the fastest kernel for a shape. It also times the first call at a new
exact length: cuDNN makes a plan for each, in 0.4 to 1 s. Once a process has run more than
FEW_LENGTHS lengths, that cost is added to every call, so batches of mixed lengths use kernels
without plans.

B batch, T tokens, H query heads, K key-value heads, E head dim. A kernel's tensors are
[B, heads, T, E] views.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import lru_cache
from time import perf_counter

import torch
from torch import Tensor

from hfpatch.attention.efficient import (
    efficient_backward,
    efficient_forward,
    for_each_head,
    of_groups,
)
from hfpatch.compat import aten, flash3, has_kernel
from hfpatch.report import say

HALF = (torch.float16, torch.bfloat16)
WIDEST_HEAD = 256  # columns; only the efficient kernel takes more
LONGEST_TRIAL = 16384  # tokens; which kernel is fastest does not change beyond
FEW_LENGTHS = 4
PLAN_SECONDS = 0.1  # a smaller delay of a new length's first call is noise or an allocation

# --- one row a backend --------------------------------------------------------------------------
# forward(q, k, v, scale) -> out, lse, state
# backward(dout, q, k, v, out, lse, state, scale) -> dq, dk, dv
# All tensors are [B, heads, T, E] views. `state`: the generator's state, unused without dropout.


def _cpu_forward(q, k, v, scale):
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)
    return out, lse, ()


def _cpu_backward(dout, q, k, v, out, lse, state, scale):
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, *for_each_head(q, k, v), out, lse, 0.0, True, scale=scale
    )
    return dq, *of_groups(k.shape[1], dk, dv)


def _flash_forward(q, k, v, scale, aten=aten):
    out, lse, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, True, False, scale=scale
    )
    return out, lse, (seed, offset)


def _flash_backward(dout, q, k, v, out, lse, state, scale, aten=aten):
    T = q.shape[2]
    return aten._scaled_dot_product_flash_attention_backward(
        dout, q, k, v, out, lse, None, None, T, T, 0.0, True, *state, scale=scale
    )


def _cudnn_forward(q, k, v, scale):
    out, lse, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, True, False, scale=scale
    )
    return out, lse, (seed, offset)


def _cudnn_backward(dout, q, k, v, out, lse, state, scale):
    T = q.shape[2]
    return aten._scaled_dot_product_cudnn_attention_backward(
        dout, q, k, v, out, lse, *state, None, None, None, T, T, 0.0, True, scale=scale
    )


# A trial times CANDIDATES. attention.py chooses the kernel for documents, windows and soft caps.
BACKENDS = {
    "cpu": (_cpu_forward, _cpu_backward),
    "flash": (_flash_forward, _flash_backward),
    "fa3": (lambda *x: _flash_forward(*x, flash3()), lambda *x: _flash_backward(*x, flash3())),
    "cudnn": (_cudnn_forward, _cudnn_backward),
    "efficient": (efficient_forward, efficient_backward),
}
CANDIDATES = (
    "flash",
    "cudnn",
    "fa3",
)  # the first that runs gives the reference for the others


@lru_cache(maxsize=16)
def has_flash(device: torch.device) -> bool:
    """Whether FA2 runs on a CUDA device: from Ampere on, not on V100 or T4. True without a device
    (a plan for another machine).
    """
    if torch.version.hip is not None or not torch.cuda.is_available():
        return True
    return torch.cuda.get_device_capability(device) >= (8, 0)


# Per device: the peak of its memory after the last trial, and how many trials ran out of memory.
trial_peaks: dict[torch.device, int] = {}
trials_without_room: Counter = Counter()
# Per device: the exact (B, T) that this process has run attention at, up to FEW_LENGTHS + 1.
lengths_met: dict[torch.device, set] = defaultdict(set)


@dataclass(frozen=True)
class Trial:
    """The result of a trial of one shape.

    seconds: of one forward and backward, by backend. new_length: extra seconds of the first call at
    an exact length. left_out: why the other backends cannot be used.
    """

    seconds: dict[str, float]
    new_length: dict[str, float]
    left_out: dict[str, str]

    def fastest(self, many_lengths: bool = False) -> str:
        """The fastest backend; "efficient" if no tried backend works."""
        cost = self.new_length if many_lengths else {}
        return min(
            self.seconds, key=lambda n: self.seconds[n] + cost.get(n, 0), default="efficient"
        )

    def __str__(self):
        found = [
            f"{n} {1e3 * s:.2f} ms" for n, s in sorted(self.seconds.items(), key=lambda row: row[1])
        ]
        first, then = self.fastest(), self.fastest(many_lengths=True)
        chosen = f"{first} is taken"
        if then != first:
            chosen += (
                f", and {then} beyond {FEW_LENGTHS} lengths, each of which costs {first} "
                f"{self.new_length[first]:.1f} s"
            )
        return "; ".join(
            [
                ", ".join(found) or "none serves",
                chosen,
                *(f"{n} {why}" for n, why in self.left_out.items()),
            ]
        )


@lru_cache(maxsize=64)
def tried(
    device: torch.device,
    dtype: torch.dtype,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    tokens: int,
    groups: int,
) -> Trial:
    """Times the backends in CANDIDATES on this CUDA device, and prints one line.

    Forward takes all heads, backward one of `groups` groups of heads at a time. A backend is left
    out if it raises, or if it differs by more than rounding from the first that runs.

    Raises:
        torch.OutOfMemoryError: the device has no room for a trial. Raised, not returned: the result
            is cached.
    """
    seconds, new_length, left_out, expected = {}, {}, {}, None
    inputs = _trial_inputs(device, dtype, n_heads, n_kv_heads, head_dim, tokens)
    other = [x[:, :, : tokens - 8] for x in inputs]
    for name in CANDIDATES:
        try:
            got = _timed(name, inputs, groups)[1]  # untimed: loads or compiles
            took = min(_timed(name, inputs, groups)[0] for _ in range(2))
            first_at_other = _timed(name, other, groups)[0]
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            left_out[name] = (
                f"raised {type(error).__name__}: {str(error).strip().partition(chr(10))[0][:120]}"
            )
            continue
        expected = expected or got
        if not all((g - e).norm() <= 2e-2 * e.norm() for g, e in zip(got, expected)):
            left_out[name] = "gave other numbers"
            continue
        seconds[name], more = took, first_at_other - took
        new_length[name] = more if more >= PLAN_SECONDS else 0.0
    trial_peaks[device] = torch.cuda.max_memory_allocated(device)
    found = Trial(seconds, new_length, left_out)
    say(
        f"attention of {n_heads} heads over {n_kv_heads} of {head_dim} at {tokens:,} tokens: "
        f"{found}."
    )
    return found


def _trial_inputs(
    device, dtype, n_heads: int, n_kv_heads: int, head_dim: int, tokens: int
) -> list[Tensor]:
    """q, k, v and dout as slices of a wider tensor, as the layer passes them."""
    generator = torch.Generator(device).manual_seed(0)
    options = {"generator": generator, "device": device, "dtype": dtype}
    return [
        torch.randn(1, tokens, 2 * h, head_dim, **options)[:, :, h:].transpose(1, 2)
        for h in (n_heads, n_kv_heads, n_kv_heads, n_heads)
    ]


def packed(x: Tensor) -> Tensor:
    """x with the strides of a new tensor. contiguous() keeps other strides of axes of size 1, and
    since torch 2.14 cuDNN's plans are kept by strides: each layout costs another plan.
    """
    expected = 1
    for size, stride in zip(reversed(x.shape), reversed(x.stride())):
        if stride != expected:
            return x.clone(memory_format=torch.contiguous_format)
        expected *= size
    return x


def _timed(name: str, inputs: list[Tensor], groups: int) -> tuple[float, list[Tensor]]:
    """(seconds, [out, the groups' dq, dk and dv]) of one forward and backward. The time includes
    the layout copies that `attention_backward` makes.
    """
    forward, backward = BACKENDS[name]
    q, k, v, dout = inputs
    scale = q.shape[3] ** -0.5
    torch.cuda.synchronize(q.device)
    start = perf_counter()
    out, lse, state = forward(q, k, v, scale)
    got, first = (
        [out],
        0 if name == "cudnn" else 3,
    )  # index in (q, k, v, out, dout) of the first that attention_backward makes contiguous
    for *part, lse_part in zip(*(x.chunk(groups, 1) for x in (q, k, v, out, dout, lse))):
        part[first:] = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in part[first:])
        got += backward(part[4], *part[:4], packed(lse_part), state, scale)
    torch.cuda.synchronize(q.device)
    return perf_counter() - start, got


def pick(q_BTHE: Tensor, k_BTKE: Tensor, groups: int = 1) -> str:
    """The backend for these shapes.

    groups: the number of groups of heads in the backward. On CUDA a trial runs once per device and
    shape, at the next power of two of tokens, up to LONGEST_TRIAL.
    """
    device, (B, T, H, E) = q_BTHE.device, q_BTHE.shape
    if device.type != "cuda":
        return (
            "cpu"
            if has_kernel("_scaled_dot_product_flash_attention_for_cpu_backward")
            else "blocks"
        )
    if q_BTHE.dtype == torch.float64:
        return "blocks"  # no kernel takes it
    if q_BTHE.dtype not in HALF or not has_flash(device) or E > WIDEST_HEAD:
        return "efficient"
    # Only FA2 has a deterministic backward, and only FA2 takes a single token. The setting is read
    # each time: a user may turn it on later. With few tokens the call costs more than the kernel.
    if torch.are_deterministic_algorithms_enabled() or torch.version.hip is not None or T < 128:
        return "flash"
    met = lengths_met[device]
    if len(met) <= FEW_LENGTHS:
        met.add((B, T))
    try:
        tokens = min(LONGEST_TRIAL, 1 << (T - 1).bit_length())
        found = tried(device, q_BTHE.dtype, H, k_BTKE.shape[2], E, tokens, groups)
    except torch.OutOfMemoryError:
        trials_without_room[device] += 1
        trial_peaks[device] = torch.cuda.max_memory_allocated(device)
        return "flash"  # for now; the next call tries again
    return found.fastest(many_lengths=len(met) > FEW_LENGTHS)
