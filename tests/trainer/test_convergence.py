"""From scratch on real text, stock and patched learn the same: every step's loss, fp32 and bf16."""

import copy

import numerics
import pytest
import tiny
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import hfpatch
from hfpatch.trainer import data as sources
from hfpatch.trainer.arguments import DataArguments

STEPS = 60


def losses(
    tmp_path, tokenizer, texts, *, patched=False, dtype=torch.float32, bf16=False
) -> torch.Tensor:
    data = sources.load_datasets(
        DataArguments(seq_len=64, packing=True, cache_dir=str(tmp_path)),
        sources.Rows(lambda: (("json", {"text": text}) for text in texts), "json"), tokenizer,
        LlamaConfig(vocab_size=300), seed=0, say=print,
    ).train  # fmt: skip
    model = copy.deepcopy(
        tiny.llama(LlamaForCausalLM, vocab_size=300, tie_word_embeddings=True)
    ).to(dtype)
    # transformers 4 makes a cache in training, and with one no mask parts documents
    model.config.use_cache = False
    if patched:
        # does not divide the row
        hfpatch.apply(model, checkpointing=hfpatch.Checkpointing(tile=24))
    args = TrainingArguments(
        str(tmp_path / "run"), max_steps=STEPS, per_device_train_batch_size=4, learning_rate=5e-3,
        logging_steps=1,
        warmup_steps=5, save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True,
        bf16=bf16,
        dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = Trainer(model, args, train_dataset=data)
    trainer.train()
    return torch.tensor(
        [e["loss"] for e in trainer.state.log_history if "loss" in e], dtype=torch.float64
    )


@pytest.mark.parametrize("bf16", tiny.longer([False, True]))
def test_learns_the_same(tmp_path, tokenizer, texts, bf16):
    """At no step further from exact arithmetic than twice what stock is at most: Adam amplifies
    rounding.
    """
    run = (tmp_path, tokenizer, texts)
    exact = losses(*run, dtype=torch.float64)
    stock, ours = losses(*run, bf16=bf16), losses(*run, bf16=bf16, patched=True)
    assert exact[-10:].mean() < exact[:5].mean() - 1.0, "it does learn"
    numerics.assert_close(
        ours, stock, exact, "losses", dtype=torch.bfloat16 if bf16 else torch.float32
    )
