"""Ways in which a forward over rows that ranks share comes back to transformers' own attention, or
to a layer nobody knows: whole rows in the end, or a sentence. A part of a row is never taken for
the whole.
"""

from contextlib import contextmanager
from dataclasses import replace

import tiny
import torch
from torch import nn
from torch.distributed.tensor.experimental import context_parallel
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hfpatch
from hfpatch.attention.attention import CAUSAL
from hfpatch.context.attention import _Attention
from hfpatch.context.current import AttentionOptions
from hfpatch.context.ranks import row_ranks_of, sharded

STOCK_SDPA = ALL_ATTENTION_FUNCTIONS["sdpa"]  # before any engine replaces it
T = 24
HARDLY = 1e-15  # dropout that is one, and drops nothing


class Mean(nn.Module):
    """An MLP of the user's own, which takes the mean over a row's tokens away."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) - x.mean(1, keepdim=True)


def llama(**config):
    return tiny.llama(dtype=torch.float64, num_hidden_layers=1, **config)


def _mixing(model):
    model.model.layers[0].mlp = Mean(model.model.layers[0].mlp)


def _more_than_hidden_states(model):
    """Layers that return a tensor behind them, as those that hand on what routers said do, and mix
    tokens.
    """
    _mixing(model)
    kind = type(model.model.layers[0])

    class Layer(kind):
        def forward(self, *args, **kwargs):
            y = super().forward(*args, **kwargs)
            return y, y.mean(-1)

    Layer.__name__ = kind.__name__
    forward = model.model.norm.forward
    model.model.norm.forward = lambda x: forward(x[0] if isinstance(x, tuple) else x)
    model.model.layers[0].__class__ = Layer


def _compiled(model):
    _mixing(model)
    model.model.layers[0].compile(backend="eager")


def _replaced(model):
    layer = model.model.layers[0]
    forward = layer.forward
    layer.forward = lambda x, **kwargs: forward(x, **kwargs) - x.mean(1, keepdim=True)


def _mine(module, query, key, value, attention_mask, scaling=None, **kwargs):
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    p = (query @ key.transpose(2, 3) * scaling + attention_mask).softmax(-1)
    return (p @ value).transpose(1, 2), p


ALL_ATTENTION_FUNCTIONS.register("mine", _mine)


def named(name: str):
    def change(model):
        model.config._attn_implementation = name

    return change


def _not_ours(model):
    model.model._hfpatch.traits = replace(model.model._hfpatch.traits, ours=False)


def whole(kind: str) -> dict:
    """One row."""
    ids = tiny.ids(1, T // 3 if kind == "short" else T)
    positions = torch.arange(ids.shape[1])[None].clone()
    given = {"input_ids": ids, "position_ids": positions, "labels": ids.clone()}
    if kind == "packed":
        positions[0, 9:] -= 9
        given["labels"][0, 9] = -100
    elif kind in ("hole", "padded"):
        given["attention_mask"] = torch.ones(1, T, dtype=torch.long)
        given["attention_mask"][0, slice(5, 7) if kind == "hole" else slice(19, T)] = 0
        given["labels"][given["attention_mask"] == 0] = -100
    given["shift_labels"] = torch.nn.functional.pad(given["labels"], (0, 1), value=-100)[
        :, 1:
    ].contiguous()
    return given


def _ring(group):
    """What torch's context_parallel makes of transformers' sdpa on GPUs; on a CPU it has none."""

    def sdpa(module, q, k, v, attention_mask, scaling=None, **kwargs):
        assert attention_mask is None, "a mask of a part of each row"
        heads = (x.transpose(1, 2) for x in (q, k, v))
        options = AttentionOptions(scaling, CAUSAL, None)
        return _Attention.apply(*heads, None, options, row_ranks_of(group, True)), None

    sdpa.__module__ = STOCK_SDPA.__module__
    return sdpa


@contextmanager
def _zigzag(ranks, given):
    """torch's context_parallel, where no Ulysses was before it."""
    ulysses, ALL_ATTENTION_FUNCTIONS["sdpa"] = (
        ALL_ATTENTION_FUNCTIONS["sdpa"],
        _ring(ranks.mesh.get_group()),
    )
    try:
        with context_parallel(
            ranks.mesh, buffers=list(given.values()), buffer_seq_dims=[1] * len(given)
        ):
            yield
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = ulysses


def _parts(ranks, kind: str, contract: str):
    """(this rank's part of a row, within what it is to be run)."""
    given = whole(kind)
    if contract == "zigzag":
        return given, _zigzag(ranks, given)
    t = given["input_ids"].shape[1] // ranks.size
    given = {n: x[:, ranks.rank * t : (ranks.rank + 1) * t].contiguous() for n, x in given.items()}
    return given, sharded(row_ranks_of(ranks.group) if contract == "sharded" else None)


def run(ranks, before=None, after=None, kind="plain", contract="ulysses", more=None,
        checkpointing="off", config=None,
        by_hand=False, theirs=False, compiled=False) -> str | list:  # fmt: skip
    """The sentence that it ends with, or the loss of both ranks and a gradient."""
    model = tiny.with_exact_norms(llama(**config or {})).train()
    if before:
        before(model)
    hfpatch.apply(model, checkpointing=checkpointing)
    if theirs:
        tiny.checkpoint(model)
    if after:
        after(model)
    given, within = _parts(ranks, kind, contract)
    with within:
        given |= {"labels": given["shift_labels"]} | (more() if more else {})
        try:
            if by_hand:
                x = model.model.embed_tokens(given["input_ids"])
                angles = model.model.rotary_emb(x, given["position_ids"])
                model.model.layers[0](
                    x, position_embeddings=angles, position_ids=given["position_ids"]
                )
                return ""
            items = (whole(kind)["shift_labels"] != -100).sum()
            forward = torch.compile(model, backend="eager") if compiled else model
            loss = forward(**given, num_items_in_batch=items, use_cache=False).loss
            loss.backward()
        except ValueError as error:
            return str(error)
    grad = model.model.layers[0].self_attn.k_proj.weight.grad
    torch.distributed.all_reduce(grad), torch.distributed.all_reduce(loss := loss.detach().clone())
    return [loss.item(), grad.norm().item()]


OFF, ON = {"checkpointing": "off"}, {"checkpointing": hfpatch.Checkpointing(tile=5)}
DROPOUT, WINDOW = {"attention_dropout": HARDLY}, {"attention_dropout": HARDLY, "sliding_window": 4}
own_mask = lambda: {"attention_mask": torch.zeros(1, 1, T // 2, T // 2, dtype=torch.float64)}  # noqa: E731
cache = lambda: {"past_key_values": DynamicCache()}  # noqa: E731

REFUSED = {
    "dropout, a masked token": {"config": DROPOUT, "kind": "hole"},
    "dropout, a window": {"config": WINDOW},
    "dropout in eager, zigzag": {"config": DROPOUT, "after": named("eager"), "contract": "zigzag"},
    "eager beside Ulysses' sdpa": {"after": named("eager")},
    "a mask of the caller's": {"more": own_mask},
    "a mask of the caller's, zigzag": {"more": own_mask, "contract": "zigzag"},
    "attention of the caller's, zigzag": {"after": named("mine"), "contract": "zigzag"},
    "a family whose attention cannot be ours": {"after": _not_ours},
    "dropout": {"config": DROPOUT},
    "dropout, zigzag": {"config": DROPOUT, "contract": "zigzag"},
    "dropout, padded behind": {"config": DROPOUT, "kind": "padded"},
    "checkpointed by transformers": {"theirs": True},
    "checkpointed by transformers, zigzag": {"theirs": True, "contract": "zigzag"},
    "checkpointed by transformers, padded behind, zigzag": {"theirs": True, "kind": "padded",
                                                            "contract": "zigzag"},
    "a cache": {"more": cache},
    "attention weights": {"more": lambda: {"output_attentions": True}},
    "checkpointed by transformers, eager, zigzag": {"theirs": True, "after": named("eager"),
                                                    "contract": "zigzag"},
    "a module of the user's": {"before": _mixing},
    "a module of the user's, put in later": {"after": _mixing},
    "a module of the user's, dropout": {"before": _mixing, "config": DROPOUT, **ON},
    "a module of the user's, checkpointed by transformers": {"before": _mixing, "theirs": True},
    "a module of the user's, few tokens": {"before": _mixing, "kind": "short", **ON},
    "a module of the user's in a compiled layer": {"after": _compiled, **ON},
    "a layer's forward of the user's": {"after": _replaced, **ON},
    "more than hidden states": {"before": _more_than_hidden_states, **ON},
    "a layer by hand, eager, zigzag": {"after": named("eager"), "contract": "zigzag",
                                       "by_hand": True, **ON},
}  # fmt: skip
EXACT = {
    "few tokens": {"kind": "short", **ON},
    "documents, in a graph": {"kind": "packed", "compiled": True},
}  # fmt: skip


def found(ranks, one_process) -> tuple[dict, dict]:
    """(what each of REFUSED says, each of EXACT's errors, of loss and a gradient). one_process: the
    same of whole rows.
    """
    said, errors = {name: run(ranks, **case) for name, case in REFUSED.items()}, {}
    for name, case in EXACT.items():
        got, wanted = run(ranks, **case), one_process(whole(case.get("kind", "plain")))
        wanted = (
            wanted["loss"].item(),
            wanted["model.layers.0.self_attn.k_proj.weight"].norm().item(),
        )
        errors[name] = [abs(a / b - 1) for a, b in zip(got, wanted)]
    return said, errors
