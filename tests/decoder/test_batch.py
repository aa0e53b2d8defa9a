"""`decide` as a table: what a forward over these arguments runs, without a model."""

from types import SimpleNamespace

import pytest
import torch

from hfpatch.decoder.batch import Inputs, StackTraits, decide

B, T = 2, 8
TOKENS = torch.zeros(B, T, dtype=torch.long)
VISIBLE = torch.ones(B, T, dtype=torch.long)
ONE = torch.arange(T)[None]  # one document a row
TWO = torch.cat([torch.arange(3), torch.arange(T - 3)])[None]


def config(attention="sdpa", **settings):
    return SimpleNamespace(_attn_implementation=attention, **settings)


def given(**arguments) -> Inputs:
    training = {"training": True, "trains": True, "makes_cache": True}
    made = {"kind": object, "tiled": True, "config": config(), "tokens": TOKENS, "B": B, "T": T}
    return Inputs(**(made | training | arguments))


def of(arguments: Inputs, traits: StackTraits):
    return decide(arguments, traits, True)


# (what differs from a plain training batch, what differs in the stack, the arguments that change,
#  a word of the line that the user reads)
OURS = {
    "a plain batch": ({}, {}, {"use_cache": False}, None),
    "positions of one document": ({"positions": ONE}, {}, {"use_cache": False}, None),
    "packed rows": ({"positions": TWO}, {}, {"use_cache": False}, None),
    "a mask of tokens": ({"rows_mask": VISIBLE}, {}, {"use_cache": False}, None),
    "use_cache=False": ({"use_cache": False}, {}, {}, None),
    "layers of transformers": ({"tiled": False}, {}, {"use_cache": False}, None),
    "flash attention": (
        {"config": config("flash_attention_2")}, {}, {"use_cache": False}, None
    ),
    "probabilities of eager attention": (
        {"config": config("eager"), "probabilities": True}, {}, {"use_cache": False}, None
    ),
}  # fmt: skip
THEIRS = {
    "a mask of the caller's own": ({"other_mask": True, "mask": torch.ones(B, 1, T, T)}, {}, "mask"),
    "an encoder's states": ({"encoder": True}, {}, "encoder"),
    "another library's attention": ({"config": config("somebody's")}, {}, "another library"),
    "probabilities beside sdpa": ({"probabilities": True}, {}, "output_attentions"),
    "attention that is not causal": ({"config": config(is_causal=False)}, {}, "not causal"),
    "a stack that cannot have ours": ({}, {"ours": False}, None),
    "transformers' own checkpointing": ({"tiled": False, "reruns": True}, {}, None),
    "use_cache=True in training": ({"use_cache": True}, {}, None),
    "generation": (
        {"training": False, "trains": False, "use_cache": True}, {}, None
    ),
}  # fmt: skip
REFUSED = {
    "packed rows beside a cache": (
        {"positions": TWO, "use_cache": True}, {}, "a KV cache needs one document"
    ),
    "layers that mix documents": ({"positions": TWO}, {"isolates": False}, "one document a sequence"),
    "mixers of transformers' layers": (
        {"positions": TWO, "tiled": False}, {"mixers": True}, "pass seq_idx"
    ),
    "mixers of which some take no seq_idx": (
        {"positions": TWO, "tiled": False, "seq_idx": True}, {"mixers": True}, "cu_seq_lens_q"
    ),
    "mixers of transformers' layers, whose convolutions take no offsets": (
        {"offsets": torch.tensor([0, 3, T, B * T]), "tiled": False},
        {"mixers": True}, "pass seq_idx and cu_seq_lens_q"
    ),
    "mixers beside another library's attention": (
        {"offsets": torch.tensor([0, 3, T, B * T]), "config": config("somebody's")},
        {"mixers": True}, "attn_implementation='sdpa'"
    ),
    "a padded, packed row that transformers would mix": (
        {"positions": TWO, "rows_mask": torch.tensor([[0] + [1] * (T - 1)] * B)},
        {"ours": False}, "do not pack padded sequences"
    ),
    "a padded, packed row under transformers' own checkpointing": (
        {"positions": TWO, "rows_mask": torch.tensor([[0] + [1] * (T - 1)] * B), "reruns": True},
        {}, "do not pack padded sequences"
    ),
    "mixers over shared rows": (
        {"row_ranks": SimpleNamespace(size=1)}, {"mixers": True}, "sequence parallelism"
    ),
    "an own mask over shared rows": (
        {"row_ranks": SimpleNamespace(size=1), "other_mask": True}, {}, "an attention mask of the caller"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OURS)
def test_our_attention_runs(name):
    arguments, traits, changes, warning = OURS[name]
    batch, line, changed = of(given(**arguments), StackTraits(**traits))
    assert batch is not None and (batch.B, batch.T) == (B, T)
    assert changed == changes and line is warning


@pytest.mark.parametrize("name", THEIRS)
def test_transformers_attention_runs(name):
    arguments, traits, warning = THEIRS[name]
    batch, line, _ = of(given(**arguments), StackTraits(**traits))
    assert batch is None
    assert warning in line if warning else line is None


@pytest.mark.parametrize("name", REFUSED)
def test_a_forward_is_refused(name):
    arguments, traits, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        of(given(**arguments), StackTraits(**traits))
