"""Attention of one layer's call over whole rows, a group of KV heads at a time, forward and backward.

Behind the attention calls come the layer's mixers (models/mixers.py), which run forward, and again in backward, themselves.

B batch, T tokens, H query heads, K key-value heads, E head dim; G query heads of a group.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hfpatch.ops.attention import attention_backward, attention_forward, heads_per_group, pick


@dataclass
class Heads:
    """One call of attention: how its heads are grouped (this process's alone), and what it was asked (scale, pattern, sinks)."""

    asked: object
    groups: list[tuple[slice, slice]]  # of query heads and of KV heads
    backend: str = ""

    def part(self, hs: slice) -> dict:
        """attention_forward's and attention_backward's keywords for a group."""
        sinks = self.asked.sinks_H
        return {
            "scale": self.asked.scale, "pattern": self.asked.pattern, "backend": self.backend,
            "sinks_H": None if sinks is None else sinks[hs],
        }  # fmt: skip


def groups_of(B: int, T: int, H: int, K: int) -> list[tuple[slice, slice]]:
    """The query heads and the KV heads that go through attention together."""
    group, repeat = heads_per_group(B, T, H, K), H // K
    return [(slice(i * repeat, (i + group) * repeat), slice(i, i + group)) for i in range(0, K, group)]


class Attention:
    """Every attention call of a layer's forward: its groups, and what the kernels keep between forward and backward."""

    def __init__(self):
        self.heads: list[Heads] = []
        self.states: list = []
        self.mixers: list = []

    def counts(self) -> list[int]:
        """How many groups, hence outputs, each call has."""
        return [len(heads.groups) for heads in self.heads] + [1] * len(self.mixers)

    def join(self, outs: list[Tensor]) -> list[Tensor]:
        """Each call's out [B, t, H, E] from those of its groups."""
        joined, outs = [], list(outs)
        for n in self.counts():
            mine, outs = outs[:n], outs[n:]
            joined.append(mine[0] if n == 1 else torch.cat(mine, 2))
        return joined

    def forward(
        self, asked: list, mixers: list, parts: list[Tensor], keep: bool = False
    ) -> tuple[list[Tensor], list[Tensor]]:
        """out [B, T, G, E] and lse of every group, behind them the mixers' outs [B, T, D].

        asked: one a call; parts: q [B, T, H, E], k and v [B, T, K, E] of each, then each mixer's input [B, T, D]; keep: whether
        `backward` comes next, with nothing but other tiles in between. What is read of them may be no tensors, but
        checkpoint.groups.Grouped; then so is each out, an InTier.
        """
        self.heads, self.mixers, results = [], mixers, []
        for ask, q, k, v in zip(asked, parts[::3], parts[1::3], parts[2::3]):
            B, T, H, _ = q.shape
            groups = groups_of(B, T, H, k.shape[2])
            heads = Heads(ask, groups)
            self.heads.append(heads)
            for hs, ks in groups:
                part = q[:, :, hs], k[:, :, ks], v[:, :, ks]
                heads.backend = heads.backend or pick(*part[:2])
                out, *rest = attention_forward(*part, **heads.part(hs))
                results.append((out if isinstance(q, Tensor) else q.beside(out), *rest))
                del part, out
        outs, lses, self.states = (list(r) for r in zip(*results)) if results else ([], [], [])
        outs += [mixer.forward(x, keep) for mixer, x in zip(mixers, parts[3 * len(asked) :])]
        return outs, lses

    def backward(self, parts, douts, outs, lses, into) -> list:
        """dq, dk, dv of every call, dx of every mixer into the tensors `into`, which may be `parts`.

        outs: a function giving a group's out.

        Returns the gradients of each call's sinks (None where it has none).
        """
        g, dsinks = 0, []
        for n, (heads, dout) in enumerate(zip(self.heads, douts)):
            q, k, v = parts[3 * n : 3 * n + 3]
            dsinks.append([])
            for hs, ks in heads.groups:
                grads = attention_backward(
                    dout[:, :, hs],
                    q[:, :, hs],
                    k[:, :, ks],
                    v[:, :, ks],
                    outs(g),
                    lses[g],
                    self.states[g],
                    **heads.part(hs),
                )
                lses[g] = None
                for whole, part, grad in zip(into[3 * n : 3 * n + 3], (hs, ks, ks), grads):
                    whole[:, :, part] = grad
                    del grad
                dsinks[-1] += grads[3:]
                del grads
                g += 1
        n = len(self.heads)
        for mixer, x, dout, dx in zip(self.mixers, parts[3 * n :], douts[n:], into[3 * n :]):
            mixer.backward(x, dout, dx)
        return [torch.cat(d) if d else None for d in dsinks]
