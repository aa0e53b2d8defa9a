"""What each engine's worker shares: one tiny model, one set of rows, one way to train, and the way
out.
"""

import json
import os
import sys
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from peft import LoraConfig, get_peft_model
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
    TrainingArguments,
)
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import numerics
import tiny

import hfpatch
from hfpatch.compat import run_experts_plainly

ROWS, TOKENS, VOCAB = 32, 24, 96
# Adam divides by the root of a running mean square: a large epsilon keeps a gradient element near
# zero, whose sign is a matter of rounding, from moving its weight by a whole learning rate, so that
# weights can be compared.
SETTINGS = dict(
    adam_epsilon=1e-2,
    max_steps=4, save_steps=2, logging_steps=1, gradient_accumulation_steps=2, learning_rate=1e-2,
    weight_decay=0.1,
    warmup_steps=1, max_grad_norm=1.0, report_to="none", disable_tqdm=True, use_cpu=True, seed=5,
)  # fmt: skip


def make_config(tied: bool = False, **overrides) -> LlamaConfig:
    # pad_token_id: zero.Init empties the embedding before its padding row would be set.
    return tiny.config(
        **{"vocab_size": VOCAB, "tie_word_embeddings": tied, "pad_token_id": None, **overrides}
    )


def make_model(tied: bool = False, dtype=torch.float32, **overrides) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(make_config(tied, **overrides)).to(dtype)


def make_experts(dtype=torch.float32) -> MixtralForCausalLM:
    """A small Mixtral."""
    torch.manual_seed(0)
    config = make_config().to_dict()
    given = {n: config[n] for n in ("vocab_size", "hidden_size", "intermediate_size",
                                    "num_hidden_layers", "num_attention_heads",
                                    "num_key_value_heads", "initializer_range",
                                    "pad_token_id")}  # fmt: skip
    experts = {"num_local_experts": 4}
    made = MixtralConfig(**given, **experts, attn_implementation="sdpa")
    run_experts_plainly(made)
    return MixtralForCausalLM(made).to(dtype)


def make_neox(dtype=torch.float32) -> GPTNeoXForCausalLM:
    """A family whose config names neither a head's width nor KV heads."""
    torch.manual_seed(0)
    config = make_config().to_dict()
    given = {n: config[n] for n in ("vocab_size", "hidden_size", "intermediate_size",
                                    "num_hidden_layers", "num_attention_heads",
                                    "initializer_range")}  # fmt: skip
    return GPTNeoXForCausalLM(GPTNeoXConfig(**given, attn_implementation="sdpa")).to(dtype)


def make_rows(positions: bool = False, ignored: int | None = None) -> list[dict]:
    """Rows with a different number of ignored labels each, so that a mean of means would differ
    from the mean.
    """
    generator = torch.Generator().manual_seed(1)
    rows = []
    for i in range(ROWS):
        ids = torch.randint(2, VOCAB, (TOKENS,), generator=generator)
        labels = ids.clone()
        labels[: i % 11 if ignored is None else ignored] = -100
        row = {"input_ids": ids, "labels": labels}
        if positions:
            row["position_ids"] = torch.arange(TOKENS)
        rows.append(row)
    return rows


def train(
    model,
    folder,
    *,
    batch: int,
    resume=None,
    rows=None,
    kinds=(TrainingArguments, Trainer),
    **overrides,
) -> Trainer:
    """Four optimizer steps of two micro-batches of `batch` rows each; a checkpoint after two."""
    args = kinds[0](str(folder), per_device_train_batch_size=batch, **{**SETTINGS, **overrides})
    trainer = kinds[1](model, args, train_dataset=rows or make_rows())
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def pairs() -> int:
    """How many pairs of ranks share rows."""
    return int(os.environ["WORLD_SIZE"]) // 2


def name_ranks_by_group() -> None:
    """torch.distributed.nn's way around gloo's missing reduce-scatter names a group's rank as if it
    were a rank of all.
    """
    scatter = torch.distributed.scatter
    torch.distributed.scatter = lambda out, parts, src, group=None: scatter(
        out, parts, group=group, group_src=src
    )


def as_if_on_gpus() -> dict:
    """Accelerate falls back to DDP where it sees no GPU; this lets FSDP and tensor parallelism
    really run on gloo.

    Returns the TrainingArguments that go with it.
    """
    state = PartialState(backend="gloo")
    state.distributed_type = DistributedType.MULTI_GPU
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
    return {"accelerator_config": {"use_configured_state": True}}


def losses(trainer) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def norms(trainer) -> list[float]:
    return [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]


def refused(run) -> str:
    """The sentence with which a base on the host is refused where its weights are sharded."""
    try:
        run()
    except ValueError as error:
        return str(error)
    return ""


def report(folder, **found) -> None:
    """Writes what this rank found, then leaves without gloo's teardown, which aborts about one run
    in ten.
    """
    rank = int(os.environ.get("RANK", 0))
    (Path(folder) / f"rank{rank}.json").write_text(json.dumps(found))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


KINDS = ("plain", "tied", "lora", "lora-first")


def variant(kind: str, dtype=torch.float32, patched: bool = True) -> torch.nn.Module:
    """plain, tied, lora (apply, then adapters on every projection), lora-host (its base waiting on
    the host) or lora-first (adapters, then apply).
    """
    model = make_model(tied=kind == "tied")

    def patch():
        if patched:
            # Tiles that do not divide the tokens, what every kind of layer can keep, and a layer
            # that keeps everything.
            more = (
                {"frozen_weights": "host"}
                if kind == "lora-host"
                else {"keep": "gate_up", "plain": 1}
            )
            hfpatch.apply(model, checkpointing=hfpatch.Checkpointing(tile=10, **more))

    if kind != "lora-first":
        patch()
    if kind.startswith("lora"):
        torch.manual_seed(7)
        model = get_peft_model(
            model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", lora_dropout=0.0)
        )
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # zero at first, which gives A no gradient
                torch.nn.init.normal_(parameter, std=0.1)
    if kind == "lora-first":
        patch()
    return model.to(dtype).train()


def micro_batches() -> list[dict]:
    """Four micro-batches of two rows: a rank takes every other one, so two ranks accumulate two
    each.
    """
    rows = make_rows()[8:16]
    pairs = [rows[i : i + 2] for i in range(0, 8, 2)]
    return [{key: torch.stack([row[key] for row in pair]) for key in pair[0]} for pair in pairs]


def label_count() -> int:
    return sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in micro_batches())


def reference_gradients(kind: str, dtype) -> dict[str, torch.Tensor]:
    """Of the stock model in this process, over all micro-batches."""
    model = variant(kind, dtype, patched=False)
    for batch in micro_batches():
        model(**batch, num_items_in_batch=torch.tensor(label_count())).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def worst(kind: str, got: dict[str, torch.Tensor], plain=None, dtype=None) -> dict[str, float]:
    """Each gradient's error over its budget (tests/numerics.py); above one, and infinite where
    missing, is a failure.

    plain: what stock gives, where that is not the float32 gradient; dtype: what it was computed in.
    """
    plain, exact = (
        plain or reference_gradients(kind, torch.float32),
        reference_gradients(kind, torch.float64),
    )
    found = {}
    for name in exact:
        if got.get(name) is None or got[name].dtype != plain[name].dtype:
            found[name] = float("inf")
            continue
        error = (got[name].double() - exact[name]).abs().max().item()
        found[name] = error / numerics.budget(plain[name], exact[name], dtype)
    return found


def quiet() -> None:
    logging.set_verbosity_error()
    torch.set_num_threads(1)
