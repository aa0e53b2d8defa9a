"""Chooses what layers keep for backward, and where: resolves a `Checkpointing` to a `Policy` for
the free bytes.

The candidates are the rungs of a ladder (ladder.py). For each candidate a binary search finds how
many of the last layers can keep everything, since each such layer shortens the step. The candidate
with the fewest predicted seconds among those that fit is chosen. formula.py counts the bytes,
seconds.py the seconds.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache

from hfpatch.budget.flops import step_flops
from hfpatch.budget.formula import GiB, ModelShape, StepMemory, step_memory
from hfpatch.budget.hardware import GPUS, PIN_BYTES_PER_SECOND, Gpu
from hfpatch.budget.ladder import policies
from hfpatch.budget.measured import HOST_SHARE, PINNED_MOST
from hfpatch.budget.policy import (
    KEEPABLE,
    Checkpointing,
    Policy,
    auto_tile,
)
from hfpatch.budget.seconds import step_time

# Device bytes that stay free during a step, for fragmentation and for allocations that the closed
# form lacks: a share of the step's bytes, and at least RESERVE_LEAST.
RESERVE_SHARE, RESERVE_LEAST = 0.04, 256 << 20
SAME = 1 + 1e-9  # predicted seconds whose ratio is below this count as equal
NOMINAL = "a100-80gb"  # its rates decide where the device's own are unknown
REFINED = 3  # this many of the fastest options are tried with other losses and attention again


@dataclass(frozen=True)
class Option:
    """A policy with its cost.

    device: most bytes on the device at any moment, beyond parameters and gradients. host: pinned
    bytes. seconds: of a step without its optimizer. wait: the seconds among them that copies add.
    """

    policy: Policy
    device: int
    host: int
    seconds: float
    wait: float = 0.0

    def line(self, free: int) -> str:
        """The cost in words for users. free: bytes on the device."""
        pin = self.host / PIN_BYTES_PER_SECOND
        once = f", about {pin:.0f} s to pin once" if pin >= 1 else ""
        return (
            f"{self.device / GiB:.1f} of {free / GiB:.1f} GiB free on the device, "
            f"{self.host / GiB:.1f} GiB on the host{once}"
        )


@dataclass(frozen=True)
class Budget:
    """Bytes that a step may take on the device and on the host; None if unknown.

    pinned: the limit on the host for a policy that keeps more than it must, to save time.
    """

    device: int | None
    host: int | None
    pinned: int | None = PINNED_MOST

    def admits(self, option: Option) -> bool:
        return self.admits_device(option) and self.admits_host(option)

    def admits_device(self, option: Option) -> bool:
        return self.device is None or option.device + reserve(option.device) <= self.device

    def admits_host(self, option: Option) -> bool:
        # A policy that keeps more only to save time has the lower limit: pinning costs time too.
        limits = (self.host, self.pinned if option.policy.keep else None)
        return option.host <= min((n for n in limits if n is not None), default=option.host)

    def lack(self, option: Option) -> int:
        """Missing bytes, on the device and on the host together."""
        needs = option.device + reserve(option.device)
        device = 0 if self.device is None else max(0, needs - self.device)
        return device + (0 if self.host is None else max(0, option.host - self.host))


def reserve(nbytes: int) -> int:
    """Bytes that must stay free on the device during a step that takes `nbytes`."""
    return max(RESERVE_LEAST, int(RESERVE_SHARE * nbytes))


def best_interval(num_layers: int, checkpoint_bytes: float, recompute_bytes: float) -> int:
    """The layers per checkpoint that keep the fewest bytes.

    With one checkpoint of u bytes for every a layers, memory holds n / a checkpoints and one
    segment of a layers that runs again, v bytes each: n / a * u + a * v is least at
    a = sqrt(n * u / v).
    """
    best = round(math.sqrt(num_layers * checkpoint_bytes / recompute_bytes))
    return max(1, min(num_layers, best))


class Search:
    """The policies that settings allow for one batch shape. Each is priced once.

    Args:
        settings: the user's `Checkpointing`.
        gpu: the GPU whose rates decide; None for NOMINAL.
        able: names of KEEPABLE that layers can keep now (adapters, autocast or unfused parts
            exclude some).

    Raises:
        ValueError: `settings.keep` names a tensor that this model's layers cannot keep.
    """

    def __init__(
        self, settings: Checkpointing, shape: ModelShape, *, batch: int, tokens: int,
        itemsize: int = 2, gpu: Gpu | None = None, able: tuple = KEEPABLE,
    ):  # fmt: skip
        asked = () if settings.keep == "auto" else settings.keep
        for name in asked:
            if name not in shape.keepable:
                raise ValueError(
                    f"hfpatch: keep must be what the model's layers can keep, got {name}. Leave "
                    "Checkpointing's keep "
                    '"auto".'
                )
        self.settings, self.shape, self.gpu, self.able = settings, shape, gpu or GPUS[NOMINAL], able
        self.sizes = {"batch": batch, "tokens": tokens, "itemsize": itemsize}
        self.rows = batch * tokens
        self.price, self.memory = cache(self.price), cache(self.memory)
        self.best, self.least = cache(self.best), cache(self.least)
        ladder = {"batch": batch, "tokens": tokens, "able": able}
        self.candidates = policies(settings, shape, **ladder)

    def budget(self, gpu_free: int | None, host_free: int | None, n_ranks: int = 1) -> Budget:
        """The bytes of one of the n_ranks that share the machine's free memory."""
        host = None if host_free is None else int(host_free * HOST_SHARE) // n_ranks
        return Budget(gpu_free, host, PINNED_MOST if self.settings.keep == "auto" else None)

    def memory(self, policy: Policy) -> tuple[StepMemory, Option]:
        """The step's memory, and the same as an option without its seconds."""
        memory = step_memory(self.shape, policy, **self.sizes)
        host = memory.host if policy.offload == "host" else 0
        return memory, Option(policy, max(m.beyond for m in memory.moments), host, math.nan)

    def price(self, policy: Policy) -> Option:
        """The bytes and seconds of a policy, from the closed forms."""
        memory, option = self.memory(policy)
        batch, tokens = self.sizes["batch"], self.sizes["tokens"]
        flops = step_flops(self.shape, policy, batch=batch, tokens=tokens)
        time, _ = step_time(self.gpu, flops, memory, policy, self.shape, **self.sizes)
        return replace(option, seconds=time.total, wait=time.copy_wait)

    def plains(self) -> tuple[int, int]:
        """The fewest and the most layers that may keep everything."""
        if self.settings.frozen_weights == "host":
            return 0, 0  # a layer that keeps everything would keep its weights too
        if self.settings.plain != "auto":
            return self.settings.plain, self.settings.plain
        return 0, self.shape.num_layers

    # -- the choice -----------------------------------------------------------------------
    def decide(self, budget: Budget) -> Option:
        """The option that the settings' aim chooses within the budget.

        Raises:
            ValueError: the host cannot hold the requested checkpoints.
        """
        found = None
        if self.settings.aim == "fastest":
            found = self.best(budget) if budget.device is not None else self._cautious(budget)
        found = found or self.least(budget)
        if not budget.admits_host(found):
            raise ValueError(_host_too_small(self, found, budget))
        return found

    def best(self, budget: Budget) -> Option | None:
        """The fastest option that fits, or None."""
        found = self._fitting((p for p in self.candidates if p.every == 1), budget)
        # Segments copy fewer bytes, and leave room for a plain layer where hardly one fits. They
        # keep only inputs, so an explicit `keep` excludes them if anything else fits.
        kept_as_asked = self.settings.keep not in ("auto", ())
        fastest = min(found, key=lambda o: o.seconds, default=None)
        if not fastest or not kept_as_asked and (fastest.wait or not fastest.policy.plain):
            found += self._fitting((p for p in self.candidates if p.every > 1), budget)
        if not found:
            return None
        found += self._refined(sorted(found, key=lambda o: o.seconds)[:REFINED], budget)
        return min(found, key=_simplest(found))

    def _fitting(self, policies: Iterable[Policy], budget: Budget) -> list[Option]:
        """The policies that fit with some number of plain layers, each with the most."""
        found = (self._most_plain(policy, budget) for policy in policies)
        return [option for option in found if option]

    def _most_plain(self, base: Policy, budget: Budget) -> Option | None:
        """The policy with as many plain layers (which keep everything) as fit, or None.

        Each further plain layer takes more bytes, with two exceptions: without any tiled layer
        there is no tile's working set, and the first plain layer may take less than it spares.
        """

        def option(plain: int) -> Option:
            return self.memory(self._within_host(replace(base, plain=plain), budget))[1]

        def fits(plain: int) -> bool:
            return budget.admits_device(option(plain))

        low, high = self.plains()
        first = next((n for n in (high, low, low + 1) if n <= high and fits(n)), None)
        if first is None:
            return None
        found = option(_last(fits, first, high))
        return self.price(found.policy) if budget.admits_host(found) else None

    def _within_host(self, policy: Policy, budget: Budget) -> Policy:
        """The policy with attention run again in as few layers as the host's room requires.

        A policy that keeps more is unchanged: rungs that keep less are tried too.
        """
        if policy.keep or not self._may_run_again(policy):
            return policy

        def lacks(again: int) -> bool:
            return not budget.admits_host(self.memory(replace(policy, again=again))[1])

        most = self.shape.num_layers - policy.plain - 1
        if not lacks(0) or lacks(most):
            return replace(policy, again=0)
        return replace(policy, again=_last(lacks, 0, most) + 1)

    def _may_run_again(self, policy: Policy) -> bool:
        """Whether some layers may compute again what the others keep for speed."""
        asked = self.settings.keep if policy.keep else self.settings.save_attention
        keeps = policy.keep or policy.save_attention
        several = self.shape.num_layers - policy.plain > 1
        where = policy.every == 1 and policy.offload == "host"
        return bool(asked == "auto" and keeps and where and several)

    def _refined(self, options: list[Option], budget: Budget) -> list[Option]:
        """The options that wait for copies, with more layers that keep less."""
        more = []
        for one in options:
            if one.wait and self._may_run_again(one.policy):
                layers = range(one.policy.again + 1, self.shape.num_layers - one.policy.plain)
                tried = (self.price(replace(one.policy, again=again)) for again in layers)
                more += [option for option in tried if budget.admits(option)]
        return more

    def _cautious(self, budget: Budget) -> Option | None:
        """The option if the device's free bytes are unknown: nothing is kept for speed alone, and
        checkpoints go to the host while it has room."""
        settings = self.settings
        auto = lambda value, other: other if value == "auto" else value  # noqa: E731
        settings = replace(
            settings, tile=auto(settings.tile, auto_tile(self.rows)),
            plain=auto(settings.plain, 0), keep=auto(settings.keep, ()),
        )  # fmt: skip
        for place in ("host", "gpu") if settings.offload == "auto" else (settings.offload,):
            settings = replace(settings, offload=place)
            search = Search(settings, self.shape, **self.sizes, gpu=self.gpu, able=self.able)
            simple = [p for p in search.candidates if not p.wide]
            for segments in (False, True):
                found = search._fitting((p for p in simple if segments == (p.every > 1)), budget)
                if found:
                    return min(found, key=_simplest(found))
        return None

    def least(self, budget: Budget) -> Option:
        """The option with the fewest device bytes that the host admits, with nothing kept for speed
        alone; the fastest of nearly equal ones. If nothing fits, the one with the smallest lack."""
        plain, asked = self.plains()[0], self.settings.keep != "auto"
        frugal = (p for p in self.candidates if not p.wide and (asked or not p.keep))
        tried = (self._within_host(replace(p, plain=plain), budget) for p in frugal)
        every = [self.price(policy) for policy in tried]
        found = [o for o in every if budget.admits(o)]
        if not found:
            return min(every, key=lambda o: (budget.lack(o), o.seconds))
        # Running attention twice costs much time and saves few bytes, as do segments.
        found = [o for o in found if o.policy.save_attention] or found
        found = [o for o in found if o.policy.every == 1] or found
        fewest = min(o.device for o in found)
        found = [o for o in found if o.device <= 1.001 * fewest]
        return min(found, key=lambda o: (o.seconds, o.device))


def _simplest(options: list[Option]):
    """A sorting key. The options as fast as the fastest come first; among these the ones without
    copies, then with the fewest device bytes, then with the largest tile."""
    fastest = min(o.seconds for o in options)

    def key(option: Option) -> tuple:
        policy = option.policy
        return option.seconds > SAME * fastest, option.host, option.device, -policy.tile

    return key


def _last(holds, low: int, high: int) -> int:
    """The last i from low to high where holds(i). It holds at low and up to some i, not beyond."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def choose(checkpointing: Checkpointing, shape: ModelShape, **sizes) -> Policy:
    """The policy of `decide`."""
    return decide(checkpointing, shape, **sizes).policy


def decide(
    checkpointing: Checkpointing,
    shape: ModelShape,
    *,
    gpu_free: int | None = None,
    host_free: int | None = None,
    n_ranks: int = 1,
    **sizes,
) -> Option:
    """Resolves every "auto" of the settings for one batch shape.

    Args:
        gpu_free: bytes on the device for the step's layers and loss, without gradients and
            optimizer states (budget/free.py: to_come); None if unknown.
        host_free: free bytes of the machine, shared by its n_ranks; None if unknown.
        sizes: batch, tokens, and the other arguments of `Search`.

    Raises:
        ValueError: the host cannot hold the requested checkpoints (the message names what fits), or
            the layers cannot keep a requested tensor.
    """
    search = Search(checkpointing, shape, **sizes)
    return search.decide(search.budget(gpu_free, host_free, n_ranks))


def _host_too_small(search: Search, found: Option, budget: Budget) -> str:
    u = search.rows * search.shape.hidden_size * search.sizes["itemsize"]
    least = best_interval(search.shape.num_layers, u, u)
    fewer = replace(found.policy, every=least, save_attention=False, keep=())
    saved = found.host - search.price(fewer).host
    return (
        f"hfpatch: checkpoints need {found.host / GiB:.1f} GiB of host memory, and "
        f"{budget.host / GiB:.1f} GiB are free to a rank. Checkpointing(save_attention=False, "
        f"every={least}) saves {saved / GiB:.1f} GiB, a directory as offload saves all."
    )


def frontier(search: Search, budget: Budget, *, points: int = 8) -> list[Option]:
    """Options from the least device memory to the fastest step, each faster than all before it.

    points: the number of device memory sizes to try, both ends included.
    """
    ends = [search.least(budget), search.best(budget)]
    if ends[1] is None:
        return ends[:1]
    low, high = (o.device + reserve(o.device) for o in ends)
    rooms = (low + (high - low) * i // (points - 1) for i in range(1, points - 1))
    found = [ends[0], *(search.best(replace(budget, device=room)) for room in rooms), ends[1]]
    kept: list[Option] = []
    for option in sorted((o for o in found if o), key=lambda o: (o.device, o.seconds)):
        if not kept or option.seconds < kept[-1].seconds:
            kept.append(option)
    return kept
