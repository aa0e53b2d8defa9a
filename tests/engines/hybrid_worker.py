"""Hybrids whose rows ranks share.

Gradients summed over the ranks against transformers' own in one process, document by document, in
float64 with the modeling file's float32 lifted: rows of 528 tokens in tiles of 64, two and more on
each of four ranks. And a run of Trainer under both engines.
"""

import os
import sys
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"

import common
import deepspeed
import families
import numerics
import sequence_worker as shared
import sp_worker
import tiny
import torch
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from transformers import Trainer, TrainingArguments

import hfpatch
from hfpatch.context.ranks import row_ranks_of, sharded

T = shared.T = 528
B = 2
RUN = 160  # tokens of a row that Trainer is given
TILES = {"rms_norm": False, "rope": False, "mlp": False, "loss": False}  # what rounds otherwise
LAYER = "Qwen3_5DecoderLayer"
KINDS = ("plain", "packed", "padded")
CONTRACTS = ("sharded", "zigzag")


def cuts(P: int, kind: str) -> list[list[int]]:
    """Where documents begin and end in each row: on borders between ranks, a token before and
    behind them, on others; one over all ranks.
    """
    t = T // P
    if kind != "packed":
        return [[0, T]] * B
    at = {0, 1, 70, t - 1, t, t + 1, t + 2, T // 2 + 1, T - t // 2 + 1, T}
    return [sorted(at), [0, 3, T - 1, T]]


def batch(P: int, kind: str) -> tuple[dict, list[dict]]:
    """Whole rows, and what transformers is given alone. kind: plain, packed, or padded, on the left
    of one row and over the whole last rank of the other.
    """
    ids, rows = tiny.ids(B, T) % 60 + 1, cuts(P, kind)
    positions = torch.stack(
        [torch.cat([torch.arange(b - a) for a, b in zip(row, row[1:])]) for row in rows]
    )
    labels, given = ids.masked_fill(positions == 0, -100), {}
    if kind == "padded":
        mask = torch.ones_like(ids)
        mask[0, -(T // P) - 5 :], mask[1, :70] = 0, 0
        labels.masked_fill_(mask == 0, -100)
        labels[1, 70] = -100
        given["attention_mask"] = mask
    shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
    whole = {"input_ids": ids, "labels": labels, **given}
    items = {"num_items_in_batch": (labels[:, 1:] != -100).sum()}
    alone = [whole | items]
    if kind == "packed":
        spans = [(r, a, b) for r, row in enumerate(rows) for a, b in zip(row, row[1:]) if b - a > 1]
        alone = [{n: x[r : r + 1, a:b] for n, x in whole.items()} | items for r, a, b in spans]
    return whole | {"position_ids": positions, "shift_labels": shifted}, alone


def stock(model, alone: list[dict]) -> dict:
    total = torch.zeros((), dtype=torch.float64)
    for given in alone:
        loss = model(**given, use_cache=False).loss
        loss.backward()
        total += loss.detach().double()
    found = {"loss": total, **{n: g.clone() for n, g in shared.gradients(model).items()}}
    model.zero_grad(set_to_none=True)
    return found


def case(ranks, name: str, contract: str, kind: str, wrap=lambda m: m, **settings) -> float:
    given, alone = batch(ranks.size, kind)
    model = wrap(families.small_model(name))
    how = hfpatch.Checkpointing(**{"tile": 64 * B, "offload": "host", **settings})
    with numerics.lifted():
        wanted = stock(model, alone)
        hfpatch.apply(model, checkpointing=how, **TILES)
        return shared.worst(ranks.run(model, given, contract), wanted)


def refusals(ranks) -> list[str]:
    """What is said of mixers that take whole rows: transformers' own, one that was not seen to hand
    its states on, and parts of too few tokens.
    """
    said = []
    for name, tokens, how in (
        ("lfm2", T, "off"),
        ("jamba", T, None),
        ("lfm2", ranks.size * 3, None),
    ):
        model = families.small_model(name)
        hfpatch.apply(model, checkpointing=how or hfpatch.Checkpointing(tile=64))
        t, whole = tokens // ranks.size, batch(ranks.size, "plain")[0]
        mine = {n: x[:, ranks.rank * t : (ranks.rank + 1) * t] for n, x in whole.items()}
        with sharded(row_ranks_of(ranks.group)):
            try:
                model(**mine, use_cache=False)
                said.append("")
            except ValueError as error:
                said.append(str(error))
    return said


def rows() -> list[dict]:
    """Rows of several documents."""
    found, generator = [], torch.Generator().manual_seed(1)
    for i in range(8):
        ids, cut = torch.randint(1, 60, (RUN,), generator=generator), 11 + 17 * i
        positions = torch.cat([torch.arange(cut), torch.arange(RUN - cut)])
        labels = ids.masked_fill(positions == 0, -100)
        found.append({"input_ids": ids, "labels": labels, "position_ids": positions})
    return found


def made(name: str, dtype=torch.float32):
    model = families.small_model(name, dtype)
    model.set_attn_implementation("sdpa")
    hfpatch.apply(model, checkpointing=hfpatch.Checkpointing(tile=64), logits=False)
    return model


def trained(engine: str, name: str, model, folder: str) -> tuple:
    """Losses of two steps, and norms."""
    more = (
        {}
        if engine == "one"
        else {"ulysses": sp_worker.ulysses, "context": sp_worker.context}[engine]()
    )
    if engine == "context":
        more |= common.as_if_on_gpus()
        more["fsdp_config"]["transformer_layer_cls_to_wrap"] = [LAYER]  # its class names others

    def trainer_of(*args, **known):
        callback = hfpatch.Callback()
        trainer = Trainer(*args, **known, callbacks=[callback])
        if engine != "one":
            callback.attach(trainer)
        return trainer

    kinds = TrainingArguments, trainer_of
    given = {"rows": rows(), "kinds": kinds, "max_steps": 2, "save_strategy": "no", **more}
    trainer = common.train(model, Path(folder) / f"{engine}-{name}", batch=1, **given)
    return common.losses(trainer), common.norms(trainer)


def main(chosen: str, folder: str) -> None:
    common.quiet()
    if chosen in ("one", "ulysses", "context"):
        model = made("qwen3_5_text")  # before an engine is on, which would spread it as it is made
        found = trained(chosen, "qwen3_5_text", model, folder)
        with numerics.lifted():
            exact = made("qwen3_5_text", torch.float64) if chosen == "one" else None
            exact = exact and trained(chosen, "qwen3_5_text", exact, folder)
        common.report(folder, found=found, exact=exact)
    deepspeed.init_distributed("gloo")
    parallel_state_sp.initialize_sequence_parallel(torch.distributed.get_world_size())
    ranks = shared.Ranks()
    cases = [
        ("qwen3_5_text", "sharded", "packed", {}),
        ("qwen3_5_text", "zigzag", "plain", {"every": 2}),
        ("falcon_h1", "sharded", "packed", {"keep": "input"}),
        ("lfm2", "zigzag", "padded", {"wrap": shared.lora}),
    ]
    if chosen == "all":
        names = (
            "qwen3_5_text",
            "nemotron_h",
            "granitemoehybrid",
            "lfm2",
            "falcon_h1",
            "kimi_linear",
        )
        more = ({}, {"offload": "gpu", "tile": 4096}, {"plain": 1})
        cases += [
            (n, c, k, more[i % 3]) for i, n in enumerate(names) for c in CONTRACTS for k in KINDS
        ]
    found = {f"{i} {one[:3]}": case(ranks, *one[:3], **one[3]) for i, one in enumerate(cases)}
    common.report(folder, worst=found, said=refusals(ranks))


if __name__ == "__main__":
    main(*sys.argv[1:])
