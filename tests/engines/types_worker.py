"""Pairs of gloo ranks that share each row, through Trainer: families that accelerate refuses by the
types of their layers, against the stock model in one process.
"""

import sys
from pathlib import Path

import common
import sp_worker

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import families
import torch
from transformers import Trainer, TrainingArguments

import hfpatch
from hfpatch.parallel.exchange import ExchangedAttention

ROWS, STEPS = 4, 2  # each step trains on all rows, in whichever order
APPLY = {"checkpointing": hfpatch.Checkpointing(tile=10)}


def rows() -> list[dict]:
    """Two documents a row, longer than a window, with another number of labels in each row."""
    found = common.make_rows(positions=True)[:ROWS]
    for i, row in enumerate(found):
        row["input_ids"] = row["input_ids"] % 60
        row["labels"] = row["labels"].where(row["labels"] < 0, row["input_ids"])
        row["labels"][13 + i] = -100
        row["position_ids"] = torch.cat([torch.arange(13 + i), torch.arange(11 - i)])
    return found


def labels_in(row: dict) -> int:
    return int((row["labels"][1:] != -100).sum())


def documents(by_rows: bool) -> list[dict]:
    """The documents of all rows, each with the number of labels that its loss is divided by.

    by_rows: Trainer takes the mean over each row, and then that of the rows, as under Ulysses;
    else the mean over all labels.
    """
    found, labels = [], sum(map(labels_in, rows()))
    for row in rows():
        second = int((row["position_ids"] == 0).nonzero()[1])
        items = torch.tensor(ROWS * labels_in(row) if by_rows else labels)
        for part in (slice(second), slice(second, None)):
            found.append({n: x[None, part] for n, x in row.items()} | {"num_items_in_batch": items})
    return found


def made(name: str, dtype=torch.float32):
    model = families.small_model(name, dtype)
    if model._supports_sdpa:
        model.set_attn_implementation("sdpa")
    return model


def alone(model, by_rows: bool) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of Trainer's steps, of the model as it is, document by document."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-2, weight_decay=0.0)
    losses, norms = [], []
    for _ in range(STEPS):
        parts = []
        for given in documents(by_rows):
            parts.append(model(**given, use_cache=False).loss)
            parts[-1].backward()
        losses.append(sum(parts).item())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def train(model, folder: Path, settings: dict, **callback) -> Trainer:
    args = TrainingArguments(
        str(folder), **settings, per_device_train_batch_size=1, max_steps=STEPS, logging_steps=1,
        gradient_accumulation_steps=ROWS // common.pairs(), save_strategy="no", warmup_steps=0,
        lr_scheduler_type="constant", learning_rate=1e-2, adam_epsilon=1e-2, max_grad_norm=1.0,
        report_to="none", disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    called = hfpatch.Callback(**callback)
    trainer = Trainer(model, args, train_dataset=rows(), callbacks=[called])
    called.attach(trainer)
    trainer.train()
    return trainer


def main(engine: str, names: str, folder: str) -> None:
    common.quiet()
    common.name_ranks_by_group()
    more = common.as_if_on_gpus() if engine == "context" else {}
    settings = getattr(sp_worker, engine)
    exchanged, inner = [], ExchangedAttention.forward
    ExchangedAttention.forward = lambda self, *args, **known: (
        exchanged.append(1) or inner(self, *args, **known)
    )
    found = {}
    # Before an engine is on, which spreads a model as it is made and replaces its attention.
    both, by_rows = (torch.float32, torch.float64), engine == "ulysses"
    models = {n: [alone(made(n, dtype), by_rows) for dtype in both] for n in names.split(",")}
    models = {n: (*found, made(n)) for n, found in models.items()}
    for name, (plain, exact, ours) in models.items():
        named, before = ours.config._attn_implementation, len(exchanged)
        trainer = train(ours, Path(folder), settings() | more, apply=APPLY)
        got = common.losses(trainer), common.norms(trainer)
        found[name] = {
            "got": got, "plain": plain, "exact": exact, "calls": len(exchanged) - before,
            "named": named, "attention": trainer.model.config._attn_implementation,
        }  # fmt: skip
    common.report(folder, found=found)


if __name__ == "__main__":
    main(*sys.argv[1:])
