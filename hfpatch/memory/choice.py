"""Which checkpoints are kept, and where: a `Checkpointing` resolved from free memory into a `Policy`.

The choice is a small optimisation over the closed forms: the fewest predicted seconds (seconds.py) among what fits the
device, the host and the link (formula.py). Memory that is free buys layers that keep everything, from the last one down,
and tensors that the others need not compute again; where it is short, what costs the step least goes first.
"""

import math
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, combinations, product

from hfpatch.memory.cuts import head_groups
from hfpatch.memory.flops import step_flops
from hfpatch.memory.formula import GiB, ModelShape, StepMemory, step_memory
from hfpatch.memory.hardware import GPUS, PIN_BYTES_PER_SECOND, Gpu
from hfpatch.memory.policy import KEEPABLE, LOSS_WORKSPACE, LOSS_WORKSPACE_FREE, Checkpointing, Policy, auto_tile
from hfpatch.memory.seconds import step_time

TILES = (1024, 2048, 4096, 8192, 16384)
LOSSES = (LOSS_WORKSPACE, 2 * LOSS_WORKSPACE, LOSS_WORKSPACE_FREE)
DENSE_TILE = 2048  # up to which weights of 4 bits may be written out for all tiles at once
# Of the free device memory, for blocks that the allocator cannot join and what the closed form does not see.
RESERVE_SHARE, RESERVE_LEAST = 0.04, 256 << 20
# Of pinned memory that is kept for speed alone: what a minute of the first step pins.
PINNED_MOST = 60 * PIN_BYTES_PER_SECOND
HOST_SHARE = 0.9  # of the free host memory: the rest is for the process itself, the data loader, the page tables
SAME = 1 + 1e-9  # predicted seconds this close are equal: less memory decides
NOMINAL = "a100-80gb"  # whose rates decide where the device's are unknown


def best_interval(num_layers: int, checkpoint_bytes: float, recompute_bytes: float) -> int:
    """Layers per checkpoint that keep the fewest bytes.

    a checkpoints of u bytes stand beside the n / a layers of one segment being run again, v bytes each:
    a * u + (n / a) * v is least at a = sqrt(n * v / u), so the interval is n / a = sqrt(n * u / v).
    """
    return max(1, min(num_layers, round(math.sqrt(num_layers * checkpoint_bytes / recompute_bytes))))


@dataclass(frozen=True)
class Option:
    """A policy and what it costs: bytes on the device beyond parameters and gradients at any moment, on the host, seconds
    of a step without its optimizer, and those of them in which it waits for copies."""

    policy: Policy
    device: int
    host: int
    seconds: float
    wait: float = 0.0


@dataclass(frozen=True)
class Budget:
    """Bytes that a step may take on the device and on the host, None where unknown; pinned: on the host, where something is
    kept for speed alone."""

    device: int | None
    host: int | None
    pinned: int | None = PINNED_MOST

    def admits(self, option: Option) -> bool:
        return self.admits_device(option) and self.admits_host(option)

    def admits_device(self, option: Option) -> bool:
        return self.device is None or option.device + reserve(option.device) <= self.device

    def admits_host(self, option: Option) -> bool:
        # What is kept to save time must not take longer to pin than it may save.
        most = [n for n in (self.host, self.pinned if option.policy.keep else None) if n is not None]
        return option.host <= min(most, default=option.host)

    def lack(self, option: Option) -> int:
        """Bytes that are missing for it on the device and on the host."""
        device = 0 if self.device is None else max(0, option.device + reserve(option.device) - self.device)
        return device + (0 if self.host is None else max(0, option.host - self.host))


def reserve(nbytes: int) -> int:
    """Bytes left free beside a step that takes nbytes."""
    return max(RESERVE_LEAST, int(RESERVE_SHARE * nbytes))


class Search:
    """The policies that settings allow for one batch shape, each priced once, each budget searched once.

    gpu: whose rates decide; able: what the layers can keep as they are now (adapters, autocast, parts that are not fused);
    scarce: nothing is taken for speed alone. Raises ValueError for tensors to keep that this model's layers cannot.
    """

    def __init__(
        self, settings, shape, *, batch, tokens, itemsize=2, gpu: Gpu | None = None, able: tuple = KEEPABLE, scarce=False
    ):  # fmt: skip
        unknown = [n for n in settings.keep if n not in shape.keepable] if settings.keep != "auto" else []
        if unknown:
            raise ValueError(
                f"hfpatch: expected layers that can keep {unknown[0]}, this model's cannot; leave Checkpointing's keep "
                '"auto".'
            )
        self.settings, self.shape, self.gpu, self.able = settings, shape, gpu or GPUS[NOMINAL], able
        self.scarce = scarce
        self.sizes = {"batch": batch, "tokens": tokens, "itemsize": itemsize}
        self.price, self.memory, self.best, self.least = map(cache, (self.price, self.memory, self.best, self.least))
        self.losses = self._losses()

    def budget(self, gpu_free: int | None, host_free: int | None, n_ranks: int = 1) -> Budget:
        """What there is for one of n_ranks that share the machine's free bytes."""
        host = None if host_free is None else int(host_free * HOST_SHARE) // n_ranks
        return Budget(gpu_free, host, PINNED_MOST if self.settings.keep == "auto" else None)

    def memory(self, policy: Policy) -> tuple[StepMemory, Option]:
        """The step's memory, also as an option without its seconds."""
        memory = step_memory(self.shape, policy, **self.sizes)
        host = memory.host if policy.offload == "host" else 0
        return memory, Option(policy, max(m.beyond for m in memory.moments), host, math.nan)

    def price(self, policy: Policy) -> Option:
        """What the closed forms say of a policy."""
        memory, option = self.memory(policy)
        flops = step_flops(self.shape, policy, batch=self.sizes["batch"], tokens=self.sizes["tokens"])
        time, _ = step_time(self.gpu, flops, memory, policy, self.shape, **self.sizes)
        return replace(option, seconds=time.total - time.optimizer, wait=time.copy_wait)

    def _losses(self) -> dict[int, float]:
        """Workspaces of the loss, that of the fewest bytes first, then others: the seconds each takes off a step."""
        of_one = [self.price(Policy("gpu", loss_bytes=nbytes)) for nbytes in LOSSES]
        taken = lambda o: self.memory(o.policy)[0].moments[0].beyond  # noqa: E731
        first = min(of_one, key=lambda o: (taken(o), -o.policy.loss_bytes))
        spared = {o.policy.loss_bytes: first.seconds - o.seconds for o in of_one}
        return {first.policy.loss_bytes: 0.0} | {nbytes: seconds for nbytes, seconds in spared.items() if seconds > 0}

    # -- what settings allow -----------------------------------------------------------------------------------------
    def places(self) -> tuple:
        if self.settings.directory:
            return ("disk",)
        return ("gpu", "host") if self.settings.offload == "auto" else (self.settings.offload,)

    def spans(self, several: bool) -> list:
        """(every, save_attention): every layer's input, or, where several is set, those of fewer layers."""
        every, save = self.settings.every, self.settings.save_attention
        if every != "auto":
            spans = () if several else (every,)
        else:
            spans = _intervals(self.shape.num_layers) if several and save is not True else () if several else (1,)
        saves = (True, False) if save == "auto" else (save,)
        return [(k, s) for k in spans for s in saves if not (s and k > 1 and save == "auto")]

    def tiles(self) -> tuple:
        """All tokens at once where they are few, and the sizes below that."""
        if self.settings.tile != "auto":
            return (self.settings.tile,)
        rows = self.sizes["batch"] * self.sizes["tokens"]
        return tuple(t for t in TILES if t < rows) + ((TILES[-1],) if rows <= TILES[-1] else ())

    def keeps(self) -> list:
        if self.settings.keep != "auto":
            return [tuple(self.settings.keep)]
        names = [name for name in self.shape.keepable if name in self.able]
        return list(chain.from_iterable(combinations(names, k) for k in range(len(names) + 1)))

    def plains(self) -> range:
        """How many layers may keep everything: none whose weights have gone by then."""
        if self.settings.weights == "host":
            return range(1)
        if self.settings.plain != "auto":
            return range(self.settings.plain, self.settings.plain + 1)
        return range(self.shape.num_layers + 1)

    def bases(self, several: bool):
        """Every policy but for `plain`, `park`, `stream_attention`, `by_group`, `wide` and larger workspaces of the loss."""
        weights = "host" if self.settings.weights == "host" else "gpu"
        packed = self.shape.adapters is not None and self.shape.adapters.base == "4bit"
        fixed = {"weights": weights, "loss_bytes": next(iter(self.losses))}
        for place in self.places():
            for every, save in self.spans(several):
                for tile in self.tiles():
                    for keep in self.keeps() if every == 1 else [()]:
                        base = Policy(place, every, save, False, tile, keep=keep, **fixed)
                        yield base
                        if packed and tile <= DENSE_TILE and tile < self.sizes["batch"] * self.sizes["tokens"]:
                            yield replace(base, dense=True)

    def streamed(self, base: Policy) -> list[Policy]:
        """The same with dx parked during attention's backward, with attention outputs fetched per group, with both, and with
        all that has heads in the tier, where they wait elsewhere."""
        several = max(1, base.tile // self.sizes["batch"]) < self.sizes["tokens"]
        parks = (False, True) if base.offload != "gpu" and several else (False,)
        streams = (False, True) if base.offload != "gpu" and base.save_attention and base.every == 1 else (False,)
        ways = [replace(base, stream_attention=stream, park=park) for stream in streams for park in parks]
        if len(parks) > 1 and not base.keep and self.shape.ranks == 1:
            ways.append(replace(base, stream_attention=len(streams) > 1, by_group=True))
        return [way for way in ways if way != base]

    def wide(self, base: Policy) -> list[Policy]:
        """The same with all heads in one launch of attention's backward, where they went by groups; then with dx parked too."""
        groups = head_groups(self.sizes["batch"], self.sizes["tokens"], self.shape)
        if groups == 1 or self.shape.ranks > 1 or self.scarce:
            return []
        parked = (way for way in self.streamed(base) if not way.stream_attention and not way.by_group)
        return [replace(way, wide=True) for way in (base, *parked)]

    # -- the choice --------------------------------------------------------------------------------------------------
    def decide(self, budget: Budget) -> Option:
        """What the settings' aim takes of the budget. ValueError where the host cannot hold what was asked for."""
        if self.settings.aim == "fastest":
            tries = [self] if budget.device is not None else _cautious(self)
            found = next((option for one in tries if (option := one.best(budget))), None)
            if found is not None:
                return found if budget.device is not None else self._larger_loss(found)
        found = self._larger_loss(self.least(budget))
        if not budget.admits_host(found):
            raise ValueError(_host_too_small(self, found, budget))
        return found

    def best(self, budget: Budget) -> Option | None:
        """The fastest that fits, None where nothing does."""
        found = self._fitting(budget, several=False)
        fastest = min(found, key=lambda o: o.seconds, default=None)
        fixed = self.scarce or self.settings.keep not in ("auto", ())  # as asked, which segments do not
        if fastest is None or not fixed and (fastest.wait or not fastest.policy.plain):
            # Fewer inputs are fewer copies too, and room for one more plain layer, where hardly one fits.
            found += self._fitting(budget, several=True)
        if not found:
            return None
        found += self._refined(found, budget)
        least = min(o.seconds for o in found)

        def taste(option: Option):
            policy = option.policy
            # On the device nothing is copied, unless that fills it.
            keeps = policy.offload == "gpu" and policy.plain < self.shape.num_layers
            crowded = keeps and budget.device is not None and 2 * option.device > budget.device
            return (
                crowded,
                option.host,
                policy.offload,
                policy.by_group,
                policy.stream_attention,
                policy.park,
                option.device,
                -policy.tile,
            )

        return min((o for o in found if o.seconds <= SAME * least), key=taste)

    def _fitting(self, budget: Budget, several: bool) -> list[Option]:
        """One option a base, its streamed ways where it does not fit otherwise."""
        found: list = []
        for base in self.bases(several):
            option = self._most_plain(base, budget)
            others = [*(() if option else self.streamed(base)), *self.wide(base)]
            found += [option, *(self._most_plain(way, budget) for way in others)]
        return [option for option in found if option]

    def _refined(self, found: list[Option], budget: Budget) -> list[Option]:
        """The same with more of the logits at a time and, where they wait for copies, with attention run again in more layers:
        those that are shorter than any before."""
        least, more = min(o.seconds for o in found), []
        found = sorted(found, key=lambda o: o.seconds)
        for (nbytes, spared), one in product(list(self.losses.items())[: 1 if self.scarce else None], found):
            if one.seconds - one.wait - spared >= least:
                continue
            policy = _with(one.policy, loss_bytes=nbytes)
            option = self.price(policy)
            option = option if budget.admits(option) else self._most_plain(policy, budget)
            tries = [] if option is None else [option]
            if tries and option.wait and self._may_attend_again(option.policy):
                policy, tiled = option.policy, self.shape.num_layers - option.policy.plain
                tries += [self.price(_with(policy, again=k)) for k in range(policy.again + 1, tiled)]
            for other in tries:
                if other.seconds < least and budget.admits(other):
                    least, more = other.seconds, [*more, other]
        return more

    def _most_plain(self, base: Policy, budget: Budget) -> Option | None:
        """The policy with as many plain layers as fit: each makes the step shorter, and takes more bytes, but for the last one,
        after which no tiled layer needs its working set, and the first ones, where the others keep more than what these add, or
        run attention again for want of room on the host."""
        low, high = self.plains()[0], self.plains()[-1]
        option = lambda plain: self.memory(self._within(_with(base, plain=plain), budget))[1]  # noqa: E731
        admitted = lambda plain: budget.admits_device(option(plain))  # noqa: E731
        # Of segments it falls once a segment.
        nexts = lambda i: (option(k).device for k in {i + 1, min(i + base.every, high - 1)})  # noqa: E731
        falls = lambda i: min(nexts(i)) < option(i).device  # noqa: E731
        beyond = lambda i: not admitted(i) and not (i < high and falls(i))  # noqa: E731
        most = high if admitted(high) or beyond(low) else _first(beyond, low, high) - 1
        fits = admitted(most) and budget.admits_host(option(most))
        return self.price(option(most).policy) if fits else None

    def _may_attend_again(self, policy: Policy) -> bool:
        """Whether settings leave it open how many layers run attention again."""
        saves = policy.save_attention and policy.every == 1 and policy.offload == "host"
        return self.settings.save_attention == "auto" and saves and self.shape.num_layers - policy.plain > 1

    def _within(self, policy: Policy, budget: Budget) -> Policy:
        """The policy with attention outputs of as many layers as there is room for, where settings leave that open."""
        if not self._may_attend_again(policy):
            return policy
        tiled, single = self.shape.num_layers - policy.plain, self.sizes["batch"] * self.sizes["tokens"] <= policy.tile
        admits = lambda again: budget.admits_host(self.memory(_with(policy, again=again))[1])  # noqa: E731
        again = 0 if admits(0) or not admits(tiled - 1) else _first(admits, 1, tiled - 1)
        if single and not budget.admits_device(self.memory(_with(policy, again=again))[1]):
            again = tiled - 1  # then none is on its way beside another
        return _with(policy, again=again)

    def least(self, budget: Budget) -> Option:
        """The fewest bytes on the device that the host admits, nothing kept for speed; seconds decide between equal ones."""

        def priced(several):
            asked = self.settings.keep != "auto"
            bases = (base for base in self.bases(several) if asked or not base.keep)
            ways = [way for base in bases for way in (base, *self.streamed(base))]
            return [self.price(self._within(replace(way, plain=self.plains()[0]), budget)) for way in ways]

        every, several = priced(several=False), ()
        found = [o for o in every if budget.admits(o)]
        if not found:
            several = priced(several=True)
            found = [o for o in several if budget.admits(o)]
        if not found:  # the one that lacks the fewest bytes, of whichever memory
            return min([*every, *several], key=lambda o: (budget.lack(o), o.seconds))
        # Attention twice is dear, and saves nothing that counts.
        found = [o for o in found if o.policy.save_attention] or found
        fewest = min(o.device for o in found)
        return min((o for o in found if o.device <= 1.001 * fewest), key=lambda o: (o.seconds, o.device))

    def _larger_loss(self, option: Option) -> Option:
        """The option with as much of the loss's logits at a time as takes no more, where nobody knows what is free or the least is
        asked for."""
        others = (self.price(replace(option.policy, loss_bytes=nbytes)) for nbytes in self.losses)
        return min((o for o in others if o.device <= option.device), key=lambda o: o.seconds)


def _intervals(num_layers: int) -> list[int]:
    """Layers a checkpoint to try: all up to 8, then a quarter more each time; between those the sums hardly differ."""
    found = [k for k in range(2, num_layers + 1) if k <= 8]
    while found and found[-1] < num_layers:
        found.append(min(num_layers, found[-1] * 5 // 4))
    return found


def _with(policy: Policy, **changes) -> Policy:
    """dataclasses.replace in a quarter of its time: a search makes tens of thousands of policies."""
    found = object.__new__(Policy)
    found.__dict__.update(policy.__dict__, **changes)
    return found


def _first(holds, low: int, high: int) -> int:
    """The first i from low to high for which holds(i), which stays true from there on; high where there is none."""
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low


def choose(checkpointing: Checkpointing, shape: ModelShape, **sizes) -> Policy:
    """The policy that `decide` finds."""
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
    """Resolves every "auto" for one batch shape.

    gpu_free: bytes left for the step on the device, gradients, optimizer states and what the step itself needs taken off
    (memory/free.py: to_come); host_free: on this machine, shared by its n_ranks; None where unknown. sizes: batch, tokens,
    and what else a `Search` takes. Raises ValueError when the host cannot hold what was asked for, naming what would, and for
    tensors to keep that this model's layers cannot.
    """
    search = Search(checkpointing, shape, **sizes)
    return search.decide(search.budget(gpu_free, host_free, n_ranks))


def _cautious(search: Search) -> list[Search]:
    """Where nobody knows what the device has free: what a layer needs and no more, on the host while that has room."""
    settings, sizes = search.settings, search.sizes
    auto = lambda value, other: other if isinstance(value, str) and value == "auto" else value  # noqa: E731
    settings = replace(
        settings, tile=auto(settings.tile, auto_tile(sizes["batch"] * sizes["tokens"])), plain=auto(settings.plain, 0),
        keep=auto(settings.keep, ()),
    )  # fmt: skip
    places = ("host", "gpu") if settings.offload == "auto" else (settings.offload,)
    more = {**sizes, "gpu": search.gpu, "able": search.able, "scarce": True}
    return [Search(replace(settings, offload=place), search.shape, **more) for place in places]


def _host_too_small(search: Search, found: Option, budget: Budget) -> str:
    u = search.sizes["batch"] * search.sizes["tokens"] * search.shape.hidden_size * search.sizes["itemsize"]
    least = best_interval(search.shape.num_layers, u, u)
    fewer = replace(found.policy, save_attention=False, stream_attention=False, by_group=False, keep=(), every=least)
    return (
        f"hfpatch: checkpoints need {found.host / GiB:.1f} GiB of host memory, {budget.host / GiB:.1f} GiB are free to a "
        f"rank; Checkpointing(save_attention=False, every={least}) saves {(found.host - search.price(fewer).host) / GiB:.1f} GiB, "
        "a directory as offload saves all."
    )


def frontier(search: Search, budget: Budget, *, points: int = 8) -> list[Option]:
    """Options of which none is both faster and smaller than another, from the least device memory to the fastest step.

    budget: what there is; points: how many sizes of device memory between those ends are tried.
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
