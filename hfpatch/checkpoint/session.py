"""The state that a model's tiled layers share: the resolved policy, the copies under way, and the order of the calls."""

import dataclasses
import os
import weakref

import torch
from torch import Tensor, nn

from hfpatch.checkpoint.layer import LayerCall, tile_bounds
from hfpatch.checkpoint.offload import FetchQueue, Transfers
from hfpatch.checkpoint.privacy import private_holders
from hfpatch.checkpoint.shards import Shards, tensor_parallel_group
from hfpatch.memory import free as memory
from hfpatch.memory.formula import ModelShape, Policy
from hfpatch.memory.policy import Checkpointing, choose
from hfpatch.ops.attention import deterministic_scratch, heads_per_group


def is_sharded(module: nn.Module) -> bool:
    """Whether an engine gathers this module's parameters around its calls (ZeRO-3, FSDP)."""
    names = {c.__name__ for c in type(module).__mro__}
    return "FSDPModule" in names or any(
        hasattr(p, "ds_id") or hasattr(p, "_is_flat_param") for p in module.parameters()
    )


class Session:
    """One per patched model. A copy or a pickle of it starts with the same settings and nothing under way.

    checkpointing: the user's settings; shape: the model's, None where its layers are not Llama's (their inputs are
    kept whole); n_layers: how many layers share this session.
    """

    def __init__(self, checkpointing: Checkpointing, shape: ModelShape | None, n_layers: int):
        self.checkpointing, self.shape, self.n_layers = checkpointing, shape, n_layers
        self.policies: dict[tuple, Policy] = {}
        self.transfers: Transfers | None = None
        self.queue: FetchQueue | None = None
        self.shards: Shards | None = None
        self._private: dict[type, tuple] = {}
        self._last_call = lambda: None
        self._last_output = lambda: None
        self.last_held = lambda: None  # checkpoint/whole.py: the input saved before

    def __deepcopy__(self, memo):
        return Session(self.checkpointing, self.shape, self.n_layers)

    def __reduce__(self):
        return Session, (self.checkpointing, self.shape, self.n_layers)

    # -- policy ------------------------------------------------------------------------------------------------------
    def policy(self, layer: nn.Module | None, x_BTD: Tensor) -> Policy:
        """The policy for this batch shape; chosen, and host memory reserved, when the shape is first seen.

        Raises ValueError where the host cannot hold what was asked for.
        """
        B, T, _ = x_BTD.shape
        key = (B, T, x_BTD.dtype, x_BTD.device)
        policy = self.policies.get(key)
        if policy is None:
            policy = self._resolve(B, T, x_BTD, layer is not None and is_sharded(layer))
            if x_BTD.device.type == "cuda" and torch.are_deterministic_algorithms_enabled() and self.shape is not None:
                processors = torch.cuda.get_device_properties(x_BTD.device).multi_processor_count
                self._refuse_large_splits(B, T, processors, memory.gpu_free(x_BTD.device))
            if policy.every > 1 and is_sharded(layer):
                raise ValueError(
                    f"hfpatch: every={policy.every} runs several layers at once, which parameters sharded layer by layer "
                    "do not allow; use Checkpointing(every=1) with a directory as offload where host memory is short."
                )
            self.policies[key] = policy
            # Layers that run again from one input keep what they are given; only a layer of its own gives x in parts.
            group = tensor_parallel_group(layer) if self.shape is not None and policy.every == 1 else None
            if group is not None and self.shards is None:
                self.shards = Shards(group)
            if torch.is_grad_enabled():
                self._open(policy, B, T, x_BTD)
        elif self.transfers is None and torch.is_grad_enabled():
            self._open(policy, B, T, x_BTD)
        return policy

    def _resolve(self, B: int, T: int, x: Tensor, sharded: bool) -> Policy:
        settings = self.checkpointing
        if sharded and settings.every == "auto":
            settings = dataclasses.replace(settings, every=1)
        if x.device.type != "cuda" and settings.offload == "auto":
            # The device is the host: a copy would only take memory.
            settings = dataclasses.replace(settings, offload="gpu")
        if self.shape is None:
            tier = "disk" if settings.directory else "host" if settings.offload == "auto" else settings.offload
            return Policy(offload=tier, every=1, save_attention=False, stream_attention=False, tile=T)
        return choose(
            settings, self.shape, batch=B, tokens=T, itemsize=x.element_size(),
            gpu_free=memory.gpu_free(x.device) if x.device.type == "cuda" else None,
            host_free=self._host_free(),
            n_ranks=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        )  # fmt: skip

    def _host_free(self) -> int | None:
        """Free host memory, what this session's own pool holds in wait counted as free."""
        free = memory.host_free()
        return free if free is None or self.transfers is None else free + self.transfers.pool.bytes_free

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

    def _open(self, policy: Policy, B: int, T: int, x: Tensor) -> None:
        """Copies for this policy; blocks of another length are given back first."""
        tier = policy.offload
        if self.transfers is not None and (self.transfers.tier, self.transfers.device) != (tier, x.device):
            self.close()
        if self.transfers is None:
            self.transfers = Transfers(x.device, tier, self.checkpointing.directory)
            self.queue = FetchQueue(self.transfers)
        if tier != "host" or self.shape is None:
            return
        sizes = self._block_sizes(policy, B, T, x.element_size())
        pool = self.transfers.pool
        if pool.blocks:
            self.transfers.finish()
            pool.keep_only(sizes)
        if pool.pinned:
            pool.reserve(sizes)

    def _block_sizes(self, policy: Policy, B: int, T: int, itemsize: int) -> dict[int, int]:
        """How many host blocks of which size one step takes: {bytes: count}."""
        n, s, rows = -(-self.n_layers // policy.every), self.shape, B * T
        kept = rows
        if self.shards is not None:
            kept = B * self.shards.bounds(tile_bounds(B, T, policy.tile))[-1][1]
        sizes = {kept * s.hidden_size * itemsize: n}
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
        before = self._last_call() if self._last_output() is x else None
        if before is not None:
            call.previous = weakref.ref(before)
        if call.policy.every > 1:
            segment = before.segment if before is not None else []
            if segment and len(segment) < call.policy.every:
                call.base, call.segment = segment[0], segment
                segment.append(call)
            else:
                call.segment = [call]

    def linked(self, call: LayerCall, y: Tensor) -> None:
        self._last_call, self._last_output = weakref.ref(call), weakref.ref(y)

    def close(self) -> None:
        """Gives back host memory, streams and files."""
        if self.transfers is not None:
            self.queue.reset()
            self.transfers.close()
        self.transfers = self.queue = None
        self.policies.clear()
