"""sentence-transformers' own trainer over a decoder: its model holds the one of transformers, and
takes its features as one positional dict.
"""

import host_runs
import pytest
import torch
from transformers import LlamaModel

import hfpatch

st = pytest.importorskip("sentence_transformers")


def trained(folder, tmp_path, callbacks):
    from datasets import Dataset
    from sentence_transformers import losses, models

    torch.manual_seed(0)
    word = models.Transformer(str(folder), max_seq_length=32)
    word.tokenizer.pad_token = word.tokenizer.eos_token or word.tokenizer.convert_ids_to_tokens(0)
    model = st.SentenceTransformer(modules=[word, models.Pooling(64, "lasttoken")])
    args = st.SentenceTransformerTrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to="none", max_steps=4, logging_steps=1,
        per_device_train_batch_size=4, learning_rate=1e-3, save_strategy="no", disable_tqdm=True,
        dataloader_pin_memory=False,
    )  # fmt: skip
    rows = Dataset.from_dict(
        {"anchor": host_runs.TEXTS, "positive": [t[::-1] for t in host_runs.TEXTS]}
    )
    loss = losses.MultipleNegativesRankingLoss(model)
    trainer = st.SentenceTransformerTrainer(
        model=model, args=args, train_dataset=rows, loss=loss, callbacks=callbacks
    )
    trainer.train()
    return trainer


def test_against_stock(tmp_path):
    folder = host_runs.saved_llama(tmp_path / "model", LlamaModel)
    ours = hfpatch.Callback(apply={"checkpointing": hfpatch.Checkpointing(tile=8)})
    patched = trained(folder, tmp_path, [ours])
    stock = trained(folder, tmp_path, [])
    host_runs.assert_tiled(patched.model)
    mine, theirs = (host_runs.losses(t.state.log_history) for t in (patched, stock))
    assert len(theirs) == 4 and mine == pytest.approx(theirs, rel=1e-4)
    host_runs.assert_same_training(patched.model, stock.model)
    assert all("tokens_per_second" in e for e in patched.state.log_history if "loss" in e)
