"""The state that a model's tiled layers share: the resolved policy, the copies under way, and the order of the calls."""

import dataclasses
import os
import weakref

import torch
from torch import Tensor, nn

from hfpatch.checkpoint.layer import LayerCall, tile_bounds
from hfpatch.checkpoint.offload import FetchQueue, Transfers
from hfpatch.checkpoint.privacy import private_holders
from hfpatch.checkpoint.quantised import as_trained
from hfpatch.checkpoint.shards import Shards, tensor_parallel_group
from hfpatch.checkpoint.weights import is_sharded
from hfpatch.memory import free as memory
from hfpatch.memory.formula import ModelShape, Policy
from hfpatch.memory.policy import Checkpointing, auto_tile, choose
from hfpatch.ops.attention import deterministic_scratch, heads_per_group


class Session:
    """One per patched model. A copy or a pickle of it starts with the same settings and nothing under way.

    checkpointing: the user's settings; shape: the model's, None where its layers are not Llama's (their inputs are
    kept whole); n_layers: how many layers share this session.
    """

    def __init__(self, checkpointing: Checkpointing, shape: ModelShape | None, n_layers: int):
        self.checkpointing, self.shape, self.n_layers = checkpointing, shape, n_layers
        self.policies: dict[tuple, Policy] = {}
        self.queues: dict[tuple, FetchQueue] = {}  # by (device, tier): each with transfers of its own
        self.shards: Shards | None = None
        self._private: dict[type, tuple] = {}
        self._last_call = lambda: None
        self._last_output = lambda: None
        self.last_held = None  # checkpoint/whole.py: the input saved before, and what its layer gave

    def __deepcopy__(self, memo):
        return Session(self.checkpointing, self.shape, self.n_layers)

    def __reduce__(self):
        return Session, (self.checkpointing, self.shape, self.n_layers)

    # -- policy ------------------------------------------------------------------------------------------------------
    def policy(self, layer: nn.Module | None, x_BTD: Tensor) -> Policy:
        """The policy for this batch shape; chosen, and host memory reserved, when the shape is first seen.

        Raises ValueError where the host cannot hold what was asked for.
        """
        for queue in self.queues.values():
            queue.begin()
        B, T, _ = x_BTD.shape
        whole = layer is None or self.shape is None
        key = (B, T, x_BTD.dtype, x_BTD.device, whole)
        policy = self.policies.get(key)
        if policy is None:
            self.shape = as_trained(self.shape, layer)
            policy = self._resolve(B, T, x_BTD, whole, layer is not None and is_sharded(layer))
            if x_BTD.device.type == "cuda" and torch.are_deterministic_algorithms_enabled() and not whole:
                processors = torch.cuda.get_device_properties(x_BTD.device).multi_processor_count
                self._refuse_large_splits(B, T, processors, memory.gpu_free(x_BTD.device))
            if policy.every > 1 and is_sharded(layer):
                raise ValueError(
                    f"hfpatch: every={policy.every} runs several layers at once, which parameters sharded layer by layer "
                    "do not allow; use Checkpointing(every=1) with a directory as offload where host memory is short."
                )
            # Layers that run again from one input keep what they are given; only a layer of its own gives x in parts.
            group = tensor_parallel_group(layer) if not whole and policy.every == 1 else None
            if group is not None and self.shards is None:
                self.shards = Shards(group)
            if torch.is_grad_enabled():
                self._open(policy, whole, B, T, x_BTD)
            self.policies[key] = policy  # last: what failed before is tried again
        elif torch.is_grad_enabled() and (x_BTD.device, policy.offload) not in self.queues:
            self._open(policy, whole, B, T, x_BTD)
        return policy

    def _resolve(self, B: int, T: int, x: Tensor, whole: bool, sharded: bool) -> Policy:
        settings = self.checkpointing
        if sharded and settings.every == "auto":
            settings = dataclasses.replace(settings, every=1)
        if x.device.type != "cuda" and settings.offload == "auto":
            # The device is the host: a copy would only take memory.
            settings = dataclasses.replace(settings, offload="gpu")
        if self.shape is None:
            # Sizes that no closed form describes: everything that is worth keeping goes to the host.
            tier = "disk" if settings.directory else "host" if settings.offload == "auto" else settings.offload
            every = 1 if whole or settings.every == "auto" else settings.every
            save = not whole and (every == 1 if settings.save_attention == "auto" else settings.save_attention)
            tile = auto_tile(B * T) if settings.tile == "auto" else settings.tile
            return Policy(offload=tier, every=every, save_attention=save, tile=tile)
        if whole:
            settings = dataclasses.replace(
                settings, every=1, save_attention=False
            )  # each layer keeps its input, no more
        return choose(
            settings, self.shape, batch=B, tokens=T, itemsize=x.element_size(),
            gpu_free=memory.gpu_free(x.device) if x.device.type == "cuda" else None,
            host_free=self._host_free(),
            n_ranks=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        )  # fmt: skip

    def _host_free(self) -> int | None:
        """Free host memory, what this session's own pool holds in wait counted as free."""
        free = memory.host_free()
        return None if free is None else free + sum(q.transfers.pool.bytes_free for q in self.queues.values())

    def _refuse_large_splits(self, B: int, T: int, processors: int, free: int) -> None:
        """Deterministic attention backward at long lengths: its scratch is said before the step, not by an out-of-memory error."""
        s = self.shape
        heads = heads_per_group(B, T, s.num_heads, s.num_kv_heads) * (s.num_heads // s.num_kv_heads)
        scratch = deterministic_scratch(B, T, heads, s.head_dim, processors)
        activations = 6 * B * T * s.hidden_size * 2
        if scratch + activations > free:
            raise ValueError(
                f"hfpatch: expected {(scratch + activations) / 2**30:.1f} GiB for a layer's deterministic backward at {T} tokens "
                f"({scratch / 2**30:.1f} GiB of them split dq sums), {free / 2**30:.1f} GiB are free; "
                "call torch.use_deterministic_algorithms(False) or shorten the sequence."
            )

    def _open(self, policy: Policy, whole: bool, B: int, T: int, x: Tensor) -> None:
        """Copies for this policy; blocks of another length are given back first."""
        key = (x.device, policy.offload)
        if key not in self.queues:
            self.queues[key] = FetchQueue(Transfers(x.device, policy.offload, self.checkpointing.directory))
        transfers = self.queues[key].transfers
        if policy.offload != "host" or self.shape is None:
            return
        sizes = self._block_sizes(policy, whole, B, T, x.element_size())
        transfers.pool.keep_only(sizes)
        if transfers.pool.pinned:
            transfers.pool.reserve(sizes)

    @property
    def transfers(self) -> Transfers | None:
        """The copies of the first device, None before the first step."""
        return next((queue.transfers for queue in self.queues.values()), None)

    def _block_sizes(self, policy: Policy, whole: bool, B: int, T: int, itemsize: int) -> dict[int, int]:
        """How many host blocks of which size one step takes: {bytes: count}."""
        n, s, rows = -(-self.n_layers // policy.every), self.shape, B * T
        kept = rows
        if self.shards is not None and not whole:
            kept = B * self.shards.bounds(tile_bounds(B, T, policy.tile))[-1][1]
        sizes = {kept * s.hidden_size * itemsize: n}
        if policy.park:
            u = rows * s.hidden_size * itemsize
            sizes[u] = sizes.get(u, 0) + 1
        if policy.save_attention and policy.every == 1:
            groups = s.num_kv_heads // heads_per_group(B, T, s.num_heads, s.num_kv_heads)
            for nbytes in (rows * s.q_size // groups * itemsize, rows * s.num_heads // groups * max(4, itemsize)):
                sizes[nbytes] = sizes.get(nbytes, 0) + n * groups
        return sizes

    # -- the order of calls ------------------------------------------------------------------------------------------
    def private(self, x: Tensor) -> tuple:
        kind = type(x)
        if kind not in self._private:
            self._private[kind] = private_holders(x)
        return self._private[kind]

    def link(self, call: LayerCall, x: Tensor) -> None:
        """Notes which call came before this one, where x is that one's output; every > 1 forms its segments here."""
        call.queue = self.queues[x.device, call.policy.offload]
        before = self._last_call() if self._last_output() is x else None
        if before is not None:
            call.previous = weakref.ref(before)
            # Segments end where the policy does: their inputs are kept by another one's transfers.
            if before.policy == call.policy and before.position + 1 < call.policy.every:
                call.earlier, call.position = before, before.position + 1

    def linked(self, call: LayerCall, y: Tensor) -> None:
        self._last_call, self._last_output = weakref.ref(call), weakref.ref(y)

    def close(self) -> None:
        """Gives back host memory, streams and files; what a graph still holds stays until that goes."""
        for queue in self.queues.values():
            queue.reset()
            queue.drop_ring()
            queue.transfers.close()
        self.queues.clear()
        self.policies.clear()
