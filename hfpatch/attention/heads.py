"""Attention of one layer's call over whole rows: forward in one launch, backward by groups of KV
heads.

Only the backward has scratch, and the size of a group bounds it.

The layer's mixers (layer/mixers.py) come after the attention calls. They run in forward and again
in backward.

B batch, T tokens, H query heads, K key-value heads, E head dim; G query heads of a group.
"""

from collections import namedtuple

import torch
from torch import Tensor

from hfpatch.attention.attention import attention_backward, attention_forward, pick
from hfpatch.budget.cuts import heads_per_group

# Of a group's q: some versions of FA2 compute offsets into their dq, of rows in blocks of 128 and of
# 128 columns or more, in 64s, in 32 bits, and cuDNN may too.
MOST_ELEMENTS = 1 << 31


# One attention call in a layer's forward: this process's groups (query heads and KV heads of each),
# its sinks, the kernel's options, and the kernel's state for the backward.
Heads = namedtuple("Heads", "groups sinks_H options state")


def groups_of(q_BTHE: Tensor, K: int, all_heads: bool) -> list[tuple[slice, slice]]:
    """The query heads and the KV heads of each group. all_heads: one group, up to MOST_ELEMENTS.

    Raises:
        ValueError: the queries of one group would have more than MOST_ELEMENTS elements.
    """
    B, T, H, E = q_BTHE.shape
    elements = B * -(-T // 128) * 128 * H * -(-max(E, 128) // 64) * 64
    width = heads_per_group(B, T, H, K)
    if all_heads and elements <= MOST_ELEMENTS:
        width = K
    if elements // K * width > MOST_ELEMENTS:
        raise ValueError(
            "hfpatch: the queries of a KV head, padded to 128 rows and columns, must have at most "
            f"2^31 elements, got {elements // K * width:,}. Share each row between GPUs."
        )
    repeat = H // K
    return [
        (slice(a * repeat, (a + width) * repeat), slice(a, a + width)) for a in range(0, K, width)
    ]


class Attention:
    """Every attention call of a layer's forward: its groups, and the kernels' state for the
    backward.

    all_heads: all heads form one group, up to MOST_ELEMENTS.
    """

    def __init__(self, all_heads: bool = False):
        self.all_heads = all_heads
        self.heads: list[Heads] = []
        self.mixers: list = []

    def forward(
        self, calls: list, mixers: list, parts: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Runs every call and mixer.

        Args:
            calls: the context.current.AttentionOptions (scale, pattern, sinks) of each attention
                call.
            mixers: the layer's mixers.
            parts: q [B, T, H, E], k and v [B, T, K, E] of each call, then each mixer's input
                [B, T, D].

        Returns:
            outs: out [B, T, H, E] of every call, then the mixers' outputs [B, T, D].
            lses: one per call.
        """
        self.heads = []
        self.mixers = mixers
        outs = []
        lses = []
        for call, q, k, v in zip(calls, parts[::3], parts[1::3], parts[2::3]):
            groups = groups_of(q, k.shape[2], self.all_heads)
            options = {"scale": call.scale, "pattern": call.pattern, "backend": pick(q)}
            out, lse, state = attention_forward(q, k, v, sinks_H=call.sinks_H, **options)
            self.heads.append(Heads(groups, call.sinks_H, options, state))
            outs.append(out)
            lses.append(lse)
        for mixer, x in zip(mixers, parts[3 * len(calls) :]):
            outs.append(mixer.forward(x))
        return outs, lses

    def backward(self, parts, douts, outs, lses, into) -> list:
        """Writes dq, dk, dv of every call and dx of every mixer into the list `into`.

        Args:
            parts: as in forward.
            douts: the gradient of each call's or mixer's output.
            outs: each outs() returns forward's next output, which is freed after its use.
            lses: forward's; each entry becomes None after its use.
            into: tensors to write to (they may be `parts`), or None to allocate. An entry is
                replaced if the kernel's own result fits unchanged.

        Returns:
            The gradient of each call's sinks, None without sinks.
        """
        dsinks = []
        for n in range(len(self.heads)):
            dsinks.append(self._backward_of(n, parts, douts, outs, lses, into))
        n = len(self.heads)
        for i, mixer in enumerate(self.mixers, 3 * n):
            if into[i] is None:
                into[i] = torch.empty_like(parts[i])
            mixer.backward(parts[i], douts[i - 2 * n], into[i])
        return dsinks

    def _backward_of(self, n: int, parts, douts, outs, lses, into) -> Tensor | None:
        """The backward of attention call n. Returns the gradient of its sinks, or None.

        A long row's q, out or gradient takes GiB. The names that hold one are local to this function
        and to _group_backward, so none lives through the next call's or the next group's kernel.
        """
        heads = self.heads[n]
        at = slice(3 * n, 3 * n + 3)
        whole = [douts[n], *parts[at], outs(), lses[n]]
        lses[n] = None
        grads = into[at]
        of_sinks = []
        for group in heads.groups:
            of_sinks += _group_backward(heads, group, whole, grads)
        into[at] = grads
        return torch.cat(of_sinks) if of_sinks else None


def _group_backward(heads: Heads, group: tuple, whole: list, into: list) -> list:
    """The backward of one group of an attention call. Returns a list of the gradient of its sinks,
    empty without sinks.

    group: its query heads and its KV heads, as slices. whole: dout, q, k, v, out and lse of all
    heads. into: takes dq, dk and dv.

    With one group, the kernel gets whole tensors, and its results may enter `into` as they are.
    With several groups it gets views of the group's heads, and its results are copied.
    """
    hs, ks = group
    dout, q, k, v, out, lse = whole
    # One group needs no views: a view costs the host as much as a small op.
    one = len(heads.groups) == 1
    given = whole
    if not one:
        # [B, G, T] or [G, N]. Kernels assume that it is contiguous; a copy has the strides of a new
        # tensor, by which torch 2.14 keeps cuDNN's plans.
        part = lse[hs] if lse.dim() == 2 else lse[:, hs]
        lse = part.clone(memory_format=torch.contiguous_format)
        given = [dout[:, :, hs], q[:, :, hs], k[:, :, ks], v[:, :, ks], out[:, :, hs], lse]
    sinks = None if heads.sinks_H is None else heads.sinks_H[hs]
    grads = attention_backward(*given, heads.state, sinks_H=sinks, **heads.options)
    del given, lse
    for i, (like, part, grad) in enumerate(zip((q, k, v), (hs, ks, ks), grads)):
        if one and grad.is_contiguous() and grad.dtype is like.dtype:
            into[i] = grad
            continue
        if into[i] is None:
            into[i] = torch.empty_like(like)
        (into[i] if one else into[i][:, :, part]).copy_(grad)
    return grads[3:]
