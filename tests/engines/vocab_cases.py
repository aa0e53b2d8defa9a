"""A head whose vocabulary the ranks have between them: every output and gradient against the whole
head, in float64.

Run by tp_worker.py on two ranks, and as a worker of its own on any number.
"""

import sys

import common
import torch
import torch.distributed as dist

from hfpatch import ops
from hfpatch.ops.linear_cross_entropy import linear_cross_entropy_ref
from hfpatch.ops.linear_log_prob import linear_log_prob_ref

N, D = 300, 6
LOSSES = {
    "plain": {}, "bias": {"with_bias": True}, "softcap": {"softcap": 2.0}, "one word": {"V": 1},
    "a rank without words": {"V": 5, "with_bias": True}, "even": {"V": 16},
    "a word is ignored": {"ignore_index": 7},
    "z-loss": {"z_loss": 0.1, "reduction": "sum"},
    "num_items": {"num_items": 77, "alone": True}, "by token": {"reduction": "none",
                                                                "softcap": 3.0},
    "no label": {"nothing": True, "num_items": 5}, "frozen head": {"frozen": True},
    "one chunk": {"workspace_bytes": 1 << 20},
    "words ruled out": {"V": 16, "with_bias": True, "ruled_out": 8},
}  # fmt: skip


def make(V: int = 13, ignore_index: int = -100, nothing: bool = False, ruled_out: int = 0):
    """ruled_out: so many of the last words, all that the last ranks have."""
    torch.manual_seed(V)
    hidden, weight, bias = (
        torch.randn(N, D).double(),
        torch.randn(V, D).double(),
        torch.randn(V).double(),
    )
    labels = torch.randint(0, V - ruled_out, (N,))
    bias[V - ruled_out :] = -torch.inf
    labels[::3] = ignore_index
    labels[: N if nothing else 0] = ignore_index
    weight[:, 0] *= 3
    return hidden, weight, bias, labels


def part(shard, x):
    return x[shard.start : shard.stop].clone().requires_grad_(True)


def worst(triples) -> float:
    """The largest error of (got, wanted, whole), relative to the largest value of `whole`.

    Infinite for another shape or where a nan is on one side. whole: of all ranks, since the sum of
    a gradient over tokens may nearly vanish for the one word that a rank has.
    """
    found = 0.0
    for got, wanted, whole in triples:
        if got.shape != wanted.shape or not torch.equal(got.isnan(), wanted.isnan()):
            return float("inf")
        error = (got - wanted).nan_to_num().abs().max().item() if got.numel() else 0.0
        found = max(
            found,
            error / max(1e-12, whole.nan_to_num().abs().max().item() if whole.numel() else 1.0),
        )
    return found


def loss_case(
    V=13, with_bias=False, nothing=False, ruled_out=0, frozen=False,
    workspace_bytes=1 << 15, alone=False,
    **options,
) -> float:  # fmt: skip
    """alone: evaluation gives the same loss."""
    hidden, weight, bias, labels = make(V, options.get("ignore_index", -100), nothing, ruled_out)
    shard = ops.VocabShard(None, V)
    upstream = (
        torch.randn(N).double()
        if options.get("reduction") == "none"
        else torch.tensor(1.7).double()
    )
    grads, wholes = [], []
    for mine in (False, True):
        x = hidden.clone().requires_grad_(True)
        w, b = (part(shard, t) if mine else t.clone().requires_grad_(True) for t in (weight, bias))
        w.requires_grad_(not frozen)
        more = {"bias": b} if with_bias else {}
        if mine:
            more |= {"shard": shard, "workspace_bytes": workspace_bytes}
        loss = (ops.linear_cross_entropy if mine else linear_cross_entropy_ref)(
            x * 1, w, labels, **options, **more
        )
        if mine and alone:
            with torch.no_grad():
                assert torch.equal(loss, ops.linear_cross_entropy(x, w, labels, **options, **more))
        (loss * upstream).sum().backward()
        rows = slice(None) if mine else slice(shard.start, shard.stop)
        found = [loss.detach(), x.grad]
        whole = [t.grad for t in (w, b) if t.grad is not None]
        grads.append(found + [g[rows] for g in whole])
        wholes.append(found + whole)
    assert len(grads[0]) == len(grads[1])
    return worst(zip(grads[1], grads[0], wholes[0]))


def log_prob_case(V=13, ruled_out=0, softcap=4.0) -> float:
    hidden, weight, bias, labels = make(V, ruled_out=ruled_out)
    shard, found = ops.VocabShard(None, V), []
    names = ("log_prob", "entropy", "lse", "mean_logit", "sum_sq_prob", "is_top1")
    for mine in (False, True):
        x = hidden.clone().requires_grad_(True)
        w, b = (part(shard, t) if mine else t.clone().requires_grad_(True) for t in (weight, bias))
        options = {
            "bias": b,
            "softcap": None if ruled_out else softcap,
            "temperature": 0.7,
            "scale": 1.2,
        }
        if mine:
            out = ops.linear_log_prob(
                x,
                w,
                labels,
                outputs=names,
                workspace_bytes=(1 << 15) + 56 * N,
                shard=shard,
                **options,
            )
        else:
            out = linear_log_prob_ref(x, w, labels, **options)
        sum((t * torch.linspace(-1, 1 + i, N)).sum() for i, t in enumerate(out[:5])).backward()
        rows = slice(None) if mine else slice(shard.start, shard.stop)
        found.append([*(t.detach().double() for t in out), x.grad, w.grad[rows], b.grad[rows]])
    return worst(zip(found[1], found[0], found[0]))


def main() -> dict[str, float]:
    found = {name: loss_case(**settings) for name, settings in LOSSES.items()}
    return found | {
        "a cap that many logits reach": log_prob_case(softcap=0.02),
        **{
            f"log-probabilities of {V}, {n} ruled out": log_prob_case(V, n)
            for V, n in ((13, 0), (5, 0), (16, 8))
        },
    }


if __name__ == "__main__":
    common.quiet()
    dist.init_process_group("gloo")
    common.report(sys.argv[1], worst=main())
