"""Under a real Trainer no tensor of a step has a row of the vocabulary for every token."""

import copy
from dataclasses import replace

import pytest
import tiny
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoModelForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Trainer,
    TrainingArguments,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

import hfpatch
from hfpatch import ops
from hfpatch.budget.policy import LEAST
from hfpatch.lab.presets import preset_config
from hfpatch.lab.simulate.implementations import build
from hfpatch.lab.simulate.simulator import simulate

TOKENS, VOCAB = 320, 1009


class LargestLogits(TorchDispatchMode):
    """The most rows of VOCAB numbers (or `width`) that any tensor has, in forward and backward."""

    rows, width = 0, VOCAB

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.dim() and x.shape[-1] == self.width:
                self.rows = max(self.rows, x.numel() // self.width)
        return out


@pytest.fixture(scope="module")
def stock():
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=512,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def within(workspace_bytes: int, monkeypatch) -> None:
    """The model's loss has this workspace."""
    loss = ops.linear_cross_entropy
    given = lambda *args, **options: loss(*args, **options | {"workspace_bytes": workspace_bytes})  # noqa: E731
    monkeypatch.setattr(ops, "linear_cross_entropy", given)


@pytest.mark.parametrize("patched", [True, False], ids=["ours", "stock"])
def test_a_qwen3_step_never_holds_whole_logits(patched, stock, tmp_path, monkeypatch):
    """A workspace of 128 rows stands for one that is small beside 131,072 tokens; transformers' own
    step is the control.
    """
    within(128 * VOCAB * 5, monkeypatch)
    model = copy.deepcopy(stock)
    if patched:
        hfpatch.apply(model, checkpointing=hfpatch.Checkpointing(offload="host", tile=64))
    ids = torch.randint(VOCAB, (2, TOKENS // 2), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    args = TrainingArguments(tmp_path, max_steps=1, per_device_train_batch_size=2, use_cpu=True,
                             report_to=[], save_strategy="no",
                             disable_tqdm=True)  # fmt: skip
    with LargestLogits() as seen:
        Trainer(model=model, args=args, train_dataset=rows).train()
    assert 0 < seen.rows <= 128 if patched else seen.rows >= TOKENS - 2


class Padded(Qwen3ForCausalLM):
    """A head with more rows than words, as Inkling's: the loss is over the first ones."""

    words: int | None = VOCAB - 9
    rounds = "float"  # as transformers does, which is all that rounds beside a model in float64

    def forward(self, input_ids=None, labels=None, **kwargs):
        logits = getattr(self.lm_head(self.model(input_ids).last_hidden_state), self.rounds)()
        logits = (torch.tanh(logits / 3) * 3)[..., : self.words]
        loss = self.loss_function(
            logits=logits, labels=labels, vocab_size=logits.shape[-1], **kwargs
        )
        return CausalLMOutputWithPast(loss=loss, logits=logits)


@pytest.mark.parametrize("words", [VOCAB - 9, VOCAB + 9, None])
def test_a_heads_padding_is_no_part_of_the_loss(words, stock, monkeypatch):
    """Nor does it make logits: who leaves words out asks for fewer rows of the head."""
    monkeypatch.setattr(Padded, "words", words)
    within(16 * VOCAB * 5, monkeypatch)
    theirs, ours = Padded(stock.config).double(), Padded(stock.config).double()
    theirs.load_state_dict(stock.state_dict())
    ours.load_state_dict(stock.state_dict())
    hfpatch.apply(ours, checkpointing="off")
    ids = torch.randint(VOCAB - 9, (1, 64), generator=torch.Generator().manual_seed(2))
    batch = {"input_ids": ids, "labels": ids}
    with LargestLogits() as seen:
        seen.width = min(words or VOCAB, VOCAB)
        got = tiny.step(ours, batch)
    assert seen.rows <= 32
    plain = tiny.step(theirs, batch)
    monkeypatch.setattr(Padded, "rounds", "double")
    tiny.assert_within(got, plain, tiny.step(tiny.exact(theirs), batch), torch.float32)


@pytest.mark.parametrize("tokens", [8192, pytest.param(32768, marks=tiny.LONG), 131072])
def test_the_loss_is_not_the_peak(tokens):
    """Of Llama-3.1-8B's sizes: the gradient of the hidden states has a buffer of its own, and the
    most that a step takes beyond parameters and gradients is still in the layers' backward.
    """
    model = build(preset_config("llama-3.1-8b") | {"num_hidden_layers": 2}).train()
    hfpatch.apply(model)
    found = simulate(model, 1, tokens, policy=replace(LEAST, tile=8192))
    assert found.peak_phase == "backward"
    assert found.most_beyond_bytes / 2**30 <= {8192: 1.8, 32768: 3.3, 131072: 6.3}[tokens]
