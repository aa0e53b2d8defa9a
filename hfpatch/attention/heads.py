"""Attention of one layer's call over whole rows: forward in one launch, backward by groups of KV
heads.

Only the backward has scratch, and the size of a group bounds it. Forward uses the same groups if a
kernel copies its inputs.

The layer's mixers (layer/mixers.py) come after the attention calls. They run in forward and again
in backward.

B batch, T tokens, H query heads, K key-value heads, E head dim; G query heads of a group.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from hfpatch.attention.attention import attention_backward, attention_forward, copies_inputs, pick
from hfpatch.attention.backends import packed
from hfpatch.budget.cuts import heads_per_group

ALL = slice(None)
# Of a group's q: some versions of FA2 compute offsets into their dq, of 128 columns or more, in 32
# bits, and cuDNN may too.
MOST_ELEMENTS = 1 << 31


@dataclass
class Heads:
    """One attention call in a layer's forward: its scale, pattern and sinks (context.current.Call),
    and this process's groups of heads.
    """

    call: object
    groups: tuple[tuple[slice, slice], ...]  # of query heads and of KV heads
    backend: str

    def part(self, hs: slice) -> dict:
        """attention_forward's and attention_backward's keywords for a group."""
        sinks = self.call.sinks_H
        return {
            "scale": self.call.scale, "pattern": self.call.pattern, "backend": self.backend,
            "sinks_H": None if sinks is None else sinks[hs],
        }  # fmt: skip


def groups_of(B: int, T: int, H: int, K: int) -> tuple[tuple[slice, slice], ...]:
    """The query heads and the KV heads of each group."""
    width, repeat, groups = heads_per_group(B, T, H, K), H // K, []
    for a in range(0, K, width):
        groups.append((slice(a * repeat, (a + width) * repeat), slice(a, a + width)))
    return tuple(groups)


@dataclass(eq=False)
class Attention:
    """Every attention call of a layer's forward: its groups, and the kernels' state for the
    backward.

    wide: all heads form one group, below MOST_ELEMENTS. (ExchangedAttention returns an output a
    round: `join`.)
    """

    wide: bool = False
    heads: list[Heads] = field(default_factory=list)
    states: list = field(default_factory=list)
    mixers: list = field(default_factory=list)

    def join(self, outs: list[Tensor]) -> list[Tensor]:
        """Each call's out [B, t, H, E] of a tile, from the outputs of `forward`."""
        return outs

    def forward(
        self, asked: list, mixers: list, parts: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Runs every call and mixer.

        Args:
            asked: one Call (scale, pattern, sinks) per attention call.
            mixers: the layer's mixers.
            parts: q [B, T, H, E], k and v [B, T, K, E] of each call, then each mixer's input
                [B, T, D].

        Returns:
            outs: out [B, T, H, E] of every call, then the mixers' outputs [B, T, D].
            lses: one per call.
        """
        self.heads, self.mixers, self.states, outs, lses = [], mixers, [], [], []
        for ask, q, k, v in zip(asked, parts[::3], parts[1::3], parts[2::3]):
            B, T, H, _ = q.shape
            groups = groups_of(B, T, H, k.shape[2])
            elements = B * T * H * max(q.shape[3], 128)
            if self.wide and elements < MOST_ELEMENTS:
                groups = [(slice(0, H), slice(0, k.shape[2]))]
            if elements // len(groups) >= MOST_ELEMENTS:
                raise ValueError(
                    f"hfpatch: the queries of a KV head must have fewer than 2^31 elements, got "
                    f"{elements // len(groups):,}. Share each row between GPUs."
                )
            heads = Heads(ask, groups, pick(q))
            self.heads.append(heads)
            several = len(groups) > 1
            whole, by_group = None, several and copies_inputs(q, v, ask.pattern)
            for hs, ks in groups if by_group else [(ALL, ALL)]:
                part = (q[:, :, hs], k[:, :, ks], v[:, :, ks]) if by_group else (q, k, v)
                out, lse, state = attention_forward(*part, **heads.part(hs))
                if by_group:
                    whole = whole or _room_for(out, lse, H)
                    whole[0][:, :, hs], _heads_of(whole[1], hs)[...] = out, lse
                else:
                    whole = out, lse
                del part, out, lse
            outs.append(whole[0])
            lses.append(whole[1])
            self.states.append(state)
        return outs + self.mixed(parts) if mixers else outs, lses

    def mixed(self, parts) -> list[Tensor]:
        """The mixers' outputs."""
        given = parts[3 * len(self.heads) :]
        return [mixer.forward(x) for mixer, x in zip(self.mixers, given)]

    def backward(self, parts, douts, outs, lses, into) -> list:
        """Writes dq, dk, dv of every call and dx of every mixer into the list `into`.

        Args:
            parts: as in forward.
            douts: the gradient of each call's or mixer's output.
            outs: outs(i) returns forward's i-th output; called in order.
            lses: forward's; each entry becomes None after its use.
            into: tensors to write to (they may be `parts`), or None to allocate. An entry is
                replaced if the kernel's own result fits unchanged.

        Returns:
            The gradient of each call's sinks, None without sinks.
        """
        dsinks = []
        for n, (heads, dout) in enumerate(zip(self.heads, douts)):
            q, k, v = parts[3 * n : 3 * n + 3]
            of_sinks, plain = [], len(heads.groups) == 1
            out, lse, state, lses[n] = outs(n), lses[n], self.states[n], None
            for hs, ks in heads.groups:
                # Kernels assume a contiguous lse.
                mine = (out, lse) if plain else (out[:, :, hs], packed(_heads_of(lse, hs)))
                # Avoids views of all heads: a view costs the host as much as a small op.
                given = (
                    (dout, q, k, v)
                    if plain
                    else (dout[:, :, hs], q[:, :, hs], k[:, :, ks], v[:, :, ks])
                )
                grads = attention_backward(*given, *mine, state, **heads.part(hs))
                del mine, given
                for j, like, part, grad in zip(
                    range(3 * n, 3 * n + 3), (q, k, v), (hs, ks, ks), grads
                ):
                    if plain and grad.is_contiguous() and grad.dtype is like.dtype:
                        into[j] = grad
                        continue
                    if into[j] is None:
                        into[j] = torch.empty_like(like)
                    if plain:
                        into[j].copy_(grad)
                    else:
                        into[j][:, :, part] = grad
                like = grad = None
                of_sinks += grads[3:]
                del grads
            dsinks.append(torch.cat(of_sinks) if of_sinks else None)
            q = k = v = out = lse = None
        if self.mixers:
            self.mixed_backward(parts, douts, into)
        return dsinks

    def mixed_backward(self, parts, douts, into) -> None:
        """Writes each mixer's dx into `into`, for `backward`."""
        n = len(self.heads)
        for i, mixer in enumerate(self.mixers, 3 * n):
            into[i] = torch.empty_like(parts[i]) if into[i] is None else into[i]
            mixer.backward(parts[i], douts[i - 2 * n], into[i])


def _heads_of(lse: Tensor, hs: slice) -> Tensor:
    """lse of the heads `hs`. lse: [B, H, T] or, from packed kernels, [H, N]."""
    return lse[hs] if lse.dim() == 2 else lse[:, hs]


def _room_for(out: Tensor, lse: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Memory for out and lse of all heads. out, lse: those of one group."""
    shape = (heads, *lse.shape[1:]) if lse.dim() == 2 else (lse.shape[0], heads, *lse.shape[2:])
    return out.new_empty(*out.shape[:2], heads, out.shape[3]), lse.new_empty(shape)
