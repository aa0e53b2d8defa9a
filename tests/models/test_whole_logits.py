"""Under a real Trainer no tensor of a step has a row of the vocabulary for every token."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, Qwen3Config, Trainer, TrainingArguments

import hfpatch
from hfpatch.models.loss import FusedCausalLM

TOKENS, VOCAB = 320, 1009


class LargestLogits(TorchDispatchMode):
    """The most rows of VOCAB numbers that any tensor has, in forward and backward."""

    rows = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.dim() and x.shape[-1] == VOCAB:
                self.rows = max(self.rows, x.numel() // VOCAB)
        return out


@pytest.fixture(scope="module")
def stock():
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=512,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("patched", [True, False], ids=["ours", "stock"])
def test_a_qwen3_step_never_holds_whole_logits(patched, stock, tmp_path, monkeypatch):
    """A workspace of 128 rows stands for one that is small beside 131,072 tokens; transformers' own step is the control."""
    monkeypatch.setattr(FusedCausalLM, "_workspace", lambda self: 128 * VOCAB * 5)
    model = copy.deepcopy(stock)
    if patched:
        hfpatch.apply(model, checkpointing=hfpatch.Checkpointing(offload="host", tile=64))
    ids = torch.randint(VOCAB, (2, TOKENS // 2), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    args = TrainingArguments(tmp_path, max_steps=1, per_device_train_batch_size=2, use_cpu=True, report_to=[], save_strategy="no",
                             disable_tqdm=True)  # fmt: skip
    with LargestLogits() as seen:
        Trainer(model=model, args=args, train_dataset=rows).train()
    assert 0 < seen.rows <= 128 if patched else seen.rows >= TOKENS - 2
