"""The parameters of a decoder: their number, the trained ones, and their bytes. Standard library
only.
"""

from collections.abc import Callable
from functools import cached_property

from hfpatch.budget.adapters import attention_linears, layer_linears


class Parameters:
    """The parameter counts of a ModelShape (shape.py), in elements unless called bytes."""

    # -- weights of matmuls, for FLOPs -------------------------------------------------------------
    @property
    def qkv_weights(self) -> int:
        """Weights of the projections before attention."""
        D = self.hidden_size
        if not self.kv_rank:
            return D * (self.q_size + self.kv_size + self.v_size)
        queries = self.q_rank * (D + self.q_size) if self.q_rank else D * self.q_size
        columns = self.q_size - self.num_heads * self.rope_dim + self.v_size
        return queries + D * (self.kv_rank + self.rope_dim) + self.kv_rank * columns

    @property
    def o_weights(self) -> int:
        """Weights of the projection after attention."""
        return self.out_size * self.hidden_size

    @property
    def _matrices(self) -> int:
        return 3 if self.gated else 2

    def mlp_weights(self, layer: int) -> int:
        """Weights of a layer's MLP that one token meets: the router, the token's experts and the
        shared ones.
        """
        D = self.hidden_size
        if not self.is_sparse(layer):
            return self._matrices * D * self.intermediate_size
        return D * (
            self.experts
            + self._matrices * (self.experts_per_token * self.expert_size + self.shared_size)
        )

    def dead_after(self, layer: int) -> int:
        """Weights whose matmul is unread when a layer's part after attention runs again: the last
        projections, unless a norm follows them; in parallel blocks the attention's projection too.
        """
        if self.norm_after:
            return 0
        routed = self.experts_per_token * self.expert_size
        mlp = routed + self.shared_size if self.is_sparse(layer) else self.intermediate_size
        return self.hidden_size * mlp + (self.o_weights if self.parallel else 0)

    @property
    def dead_before(self) -> int:
        """Weights whose matmul is unread when the part before attention runs again although q, k
        and v exist: a rotation reads no values, but norms do.
        """
        if self.kv_rank:
            queries = (self.q_rank or self.hidden_size) * self.q_size
            return queries + self.kv_rank * (
                self.q_size - self.num_heads * self.rope_dim + self.v_size
            )
        return self.hidden_size * self.v_size if self.qk_norm else self.qkv_weights

    # -- parameters --------------------------------------------------------------------------------
    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm over the hidden size."""
        return self.hidden_size * (2 if self.norm_bias else 1)

    @property
    def attention_parameters(self) -> int:
        """Parameters of one layer's attention: projections, biases, norms of q and k, sinks."""
        count = self.qkv_weights + self.o_weights
        if self.kv_rank:
            count += self.q_rank + self.kv_rank  # norms of the latents
            count += (self.q_rank + self.kv_rank + self.rope_dim) if self.qkv_bias else 0
        elif self.qkv_bias:
            count += self.q_size + self.kv_size + self.v_size
        count += self.hidden_size if self.o_bias else 0
        count += {"": 0, "head": 2 * self.head_dim, "full": self.q_size + self.kv_size}[
            self.qk_norm
        ]
        return count + (self.num_heads if self.sinks else 0)

    def _mlp(self, width: int) -> int:
        biases = (self._matrices - 1) * width + self.hidden_size if self.mlp_bias else 0
        return self._matrices * self.hidden_size * width + biases

    def mlp_parameters_of(self, layer: int) -> int:
        """Parameters of one layer's MLP, all experts and the router included."""
        if not self.is_sparse(layer):
            return self._mlp(self.intermediate_size)
        D, size = self.hidden_size, self.expert_size
        biases = self.experts * (2 * size + D + 1) if self.expert_bias else 0
        shared = self._mlp(self.shared_size) if self.shared_size else 0
        return self.experts * (self._matrices * D * size + D) + biases + shared

    def layer_parameters_of(self, layer: int) -> int:
        """Parameters of one decoder layer, its norms included."""
        return self._layer_parameters[self.is_sparse(layer)]

    @cached_property
    def _layer_parameters(self) -> dict[bool, int]:
        beside = self.attention_parameters + self.norms * self.norm_parameters
        return {self.is_sparse(i): beside + self.mlp_parameters_of(i) for i in self.kinds}

    @cached_property
    def _sparse_before(self) -> list:
        """How many of the first i layers are sparse, for i from 0 to all."""
        counts = [0]
        for i in range(self.num_layers):
            counts.append(counts[-1] + self.is_sparse(i))
        return counts

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """One layer of each kind of MLP."""
        return tuple({self.is_sparse(i): i for i in reversed(range(self.num_layers))}.values())

    def over(self, of: Callable[[int], int], first: int = 0, last: int | None = None) -> int:
        """The sum of `of` over layers first to last (not included). Layers with the same kind of
        MLP must have the same value.
        """
        last = self.num_layers if last is None else last
        if last <= first:
            return 0
        if len(self.kinds) == 1:
            return (last - first) * of(self.kinds[0])
        sparse = self._sparse_before[last] - self._sparse_before[first]
        count = {True: sparse, False: last - first - sparse}
        return sum(count[self.is_sparse(i)] * of(i) for i in self.kinds)

    @cached_property
    def body_parameters(self) -> int:
        """Parameters of all decoder layers."""
        return self.over(self.layer_parameters_of)

    @property
    def layer_parameters(self) -> int:
        """Parameters of the largest decoder layer."""
        return max(self.layer_parameters_of(i) for i in self.kinds)

    # -- trained parameters, and bytes -------------------------------------------------------------
    def trained_before(self, layer: int) -> int:
        """Trained parameters of a layer that act before its attention, its first norm included."""
        return self._trained[self.is_sparse(layer)][0]

    def trained_after(self, layer: int) -> int:
        """Trained parameters of a layer that act on the attention's output or after it."""
        return self._trained[self.is_sparse(layer)][1]

    @cached_property
    def _trained(self) -> dict[bool, tuple[int, int]]:
        """(before, after) by whether the layer is sparse. Cached: a search for a policy needs it
        thousands of times."""
        found, linears = {}, attention_linears(self)
        for i in self.kinds:
            if self.adapters is None:
                after = self.mlp_parameters_of(i) + self.o_weights + self.hidden_size
                before = self.layer_parameters_of(i) - after
            else:
                before = self.adapters.over(
                    {n: size for n, size in linears.items() if n != "o_proj"}
                )
                after = self.adapters.over(self.adaptable(i)) - before
            found[self.is_sparse(i)] = before, after
        return found

    @cached_property
    def trained_body(self) -> int:
        """Trained parameters of all layers."""
        return self.over(self.trained_of)

    def trained_of(self, layer: int) -> int:
        """Trained parameters of one layer."""
        return self.trained_before(layer) + self.trained_after(layer)

    @property
    def trained_head(self) -> int:
        """Trained parameters of the head."""
        return 0 if self.adapters else self.embedding_parameters

    @cached_property
    def trained_parameters(self) -> int:
        """The number of all trained parameters."""
        return self.trained_body if self.adapters else self.parameters

    def trained_itemsize(self, itemsize: int) -> int:
        """Bytes of a trained element, in a model whose own elements have `itemsize` bytes."""
        return (self.adapters and self.adapters.itemsize) or itemsize

    def layer_bytes_of(self, layer: int, itemsize: int = 2) -> int:
        """Bytes of one layer's parameters, adapters included."""
        own = self.layer_parameters_of(layer)
        if self.adapters is None:
            return own * itemsize
        linears = layer_linears(self, layer)
        rest = (own - sum(i * o for i, o in linears.values())) * itemsize
        trained = self.trained_of(layer) * self.trained_itemsize(itemsize)
        return rest + trained + self.adapters.packed_bytes(linears, itemsize)

    def frozen_bytes_of(self, layer: int, itemsize: int = 2) -> int:
        """Bytes of one layer's frozen parameters."""
        return self.layer_bytes_of(layer, itemsize) - self.trained_of(
            layer
        ) * self.trained_itemsize(itemsize)

    def parameter_bytes(self, itemsize: int = 2) -> int:
        """Bytes of all parameters."""
        return (self.parameters - self.body_parameters) * itemsize + self.over(
            lambda i: self.layer_bytes_of(i, itemsize)
        )

    def dense_bytes(self, linears: dict, itemsize: int = 2, together: bool = False) -> int:
        """Bytes of the dense weight that a matmul makes of the largest of these quantised Linear
        layers, or of all of them together; 0 if none is quantised.
        """
        if self.adapters is None or self.adapters.base == "bf16":
            return 0
        return (sum if together else max)([i * o for i, o in linears.values()] or [0]) * itemsize

    def dequantised_bytes(self, layer: int, itemsize: int = 2) -> int:
        """Bytes read and written when a layer dequantises all its quantised weights once."""
        if self.adapters is None or self.adapters.base == "bf16":
            return 0
        linears = layer_linears(self, layer)
        return (
            self.adapters.packed_bytes(linears, itemsize)
            + sum(i * o for i, o in linears.values()) * itemsize
        )

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the token embedding, and of a tied head."""
        return self.vocab_size * self.hidden_size

    @property
    def parameters(self) -> int:
        """The number of all parameters, tied ones counted once."""
        ends = self.embedding_parameters * (1 if self.tied else 2) + self.norm_parameters
        return self.body_parameters + ends
