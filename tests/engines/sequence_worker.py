"""Ranks that share each sequence, without an engine: gradients summed over the ranks against those
of one process, in float64.

Two contracts: DeepSpeed's Ulysses (chunk p of a row) and torch's context_parallel (chunks p and
2P-1-p). Each case is a tiny model and a batch; it reports the worst error of the gradients relative
to the largest value. Attention's backward takes one KV head at a time unless a case says otherwise:
of so few tokens it would take all at once.
"""

import os
import sys
import tempfile
from pathlib import Path
from unittest import mock

os.environ["DS_ACCELERATOR"] = "cpu"

import common
import deepspeed
import parts_cases
import torch
import torch.distributed as dist
import trl.trainer.utils
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.experimental import context_parallel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import families
import tiny

import hfpatch
from hfpatch.attention import heads as groups
from hfpatch.budget import free as memory
from hfpatch.context.ranks import row_ranks_of, sharded
from hfpatch.parallel.exchange import ExchangedAttention, RowRanks

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
STOCK_SDPA = ALL_ATTENTION_FUNCTIONS["sdpa"]
T = 24
SHORT = 30_000  # bytes for two inputs and a gradient of one, not for attention outputs beside them
PACKED = ("mistral", "gpt_oss")
SHORT_FAMILIES = ("qwen3", "gemma2", *PACKED)


def batch(kind: str, B: int) -> dict:
    """Whole rows. plain, packed, padded (left and right), or without a label in the second half."""
    ids = tiny.ids(B, T)
    positions, labels, given = torch.arange(T).expand(B, -1).clone(), ids.clone(), {}
    labels[0, :7] = -100
    if kind == "packed":
        positions[0] = torch.cat([torch.arange(9), torch.arange(8), torch.arange(7)])
        labels[:, 0] = -100
    elif kind == "padded":
        given["attention_mask"] = torch.ones(B, T, dtype=torch.long)
        given["attention_mask"][0, -5:], labels[0, -5:] = 0, -100
        if B > 1:
            given["attention_mask"][1, :4] = 0
            labels[1, :4] = -100  # and what sees nobody predicts the first token
    elif kind == "half":
        labels[:, T // 2 :] = -100
    shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
    if kind == "packed":
        starts = torch.nn.functional.pad((positions == 0)[:, 1:], (0, 1))
        shifted[starts] = -100
    labels = torch.nn.functional.pad(shifted, (1, 0), value=-100)[:, :-1]
    return {
        "input_ids": ids,
        "position_ids": positions,
        "labels": labels,
        "shift_labels": shifted,
        **given,
    }


def lora(model):
    torch.manual_seed(7)
    made = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.0))
    for name, p in made.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.1)
    return made.double().train()


def gradients(model) -> dict:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


class Ranks:
    def __init__(self):
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.mesh = init_device_mesh("cpu", (self.size,))
        self.group = parallel_state_sp.get_sequence_parallel_group()

    def run(self, model, given: dict, contract: str, passes: int = 1) -> dict:
        """Loss and gradients of whole rows, summed over the ranks, after `passes` accumulated
        backward passes.
        """
        items = (given["shift_labels"] != -100).sum() * passes
        for _ in range(passes):
            total = torch.zeros((), dtype=torch.float64)
            if contract == "zigzag":
                mine = {n: x.clone() for n, x in given.items()}
                with context_parallel(
                    self.mesh, buffers=list(mine.values()), buffer_seq_dims=[1] * len(mine)
                ):
                    loss = model(**mine, num_items_in_batch=items, use_cache=False).loss
                    loss.backward()
            else:
                t = T // self.size
                mine = {
                    n: x[:, self.rank * t : (self.rank + 1) * t].contiguous()
                    for n, x in given.items()
                }
                with sharded(row_ranks_of(self.group) if contract == "sharded" else None):
                    loss = model(**mine, num_items_in_batch=items, use_cache=False).loss
                    loss.backward()
            total += loss.detach().double() * passes
        dist.all_reduce(total)
        found = {"loss": total}
        for name, grad in gradients(model).items():
            dist.all_reduce(grad)
            found[name] = grad
        return found


def with_own_attention(model):
    """The model with transformers' own sdpa, which Ulysses replaces for all."""
    forward = model.forward

    def run(*args, **kwargs):
        ulysses, ALL_ATTENTION_FUNCTIONS["sdpa"] = ALL_ATTENTION_FUNCTIONS["sdpa"], STOCK_SDPA
        try:
            return forward(*args, **kwargs)
        finally:
            ALL_ATTENTION_FUNCTIONS["sdpa"] = ulysses

    model.forward = run
    return model


def worst(found: dict, wanted: dict) -> float:
    """The worst error of any gradient, relative to its largest value; infinite where the loss, a
    float32, differs too.
    """
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    errors = {
        n: ((found[n] - x).abs().max() / x.abs().max().clamp_min(1e-12)).item()
        for n, x in wanted.items()
    }
    return float("inf") if errors.pop("loss") > 2e-7 else max(errors.values())


def reference(stock, given: dict) -> dict:
    """Of the whole rows in this process."""
    stock.zero_grad(set_to_none=True)
    plain = {n: x for n, x in given.items() if n != "shift_labels"}
    loss = stock(
        **plain, num_items_in_batch=(given["shift_labels"] != -100).sum(), use_cache=False
    ).loss
    loss.backward()
    return {"loss": loss.detach().double(), **gradients(stock)}


def case(
    ranks: Ranks, kind="plain", B=1, contract="ulysses", wrap=lambda m: m, passes=1, heads=(8, 2),
    group=1, tiled=True, **settings,
) -> float:  # fmt: skip
    base = tiny.llama(
        dtype=torch.float64,
        num_hidden_layers=3,
        hidden_size=8 * heads[0],
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        head_dim=8,
    )
    ours = wrap(tiny.with_exact_norms(base))
    checkpointing = (
        hfpatch.Checkpointing(**{"tile": 5 * B, "offload": "host", **settings}) if tiled else "off"
    )
    hfpatch.apply(ours, checkpointing=checkpointing)
    given = batch(kind, B)
    plain = with_own_attention(wrap(tiny.exact(base)))
    with mock.patch.object(groups, "heads_per_group", lambda *sizes: group):
        return worst(ranks.run(ours, given, contract, passes), reference(plain, given))


def family(ranks: Ranks, name: str, contract: str = "sharded", kind: str = "plain") -> float:
    """Against the same patched model over whole rows: what a float64 model still rounds to float32
    is the same.
    """
    given = batch(kind, 2)
    given = {
        n: x % 60 + (n == "input_ids") if n in ("input_ids",) else x.clamp(max=60)
        for n, x in given.items()
    }
    model = families.small_model(name)
    if hasattr(model.config, "output_router_logits"):
        model.config.output_router_logits = False  # refused where ranks share rows
    hfpatch.apply(model, checkpointing=hfpatch.Checkpointing(tile=10, offload="host"))
    with sharded(False):  # whole rows
        wanted = {n: x.clone() for n, x in reference(model, given).items()}
    model.zero_grad(set_to_none=True)
    with mock.patch.object(groups, "heads_per_group", lambda *sizes: 1):
        return worst(ranks.run(model, given, contract), wanted)


def evaluation(ranks: Ranks) -> list[float]:
    """A row of its own each, of a length of its own that does not go evenly over the ranks, the
    last without a label: whole on each rank.
    """
    base = tiny.llama(dtype=torch.float64)
    ours, stock = (
        tiny.patched(tiny.with_exact_norms(base)).eval(),
        with_own_attention(tiny.exact(base).eval()),
    )
    if ranks.rank == 0:  # no engine gathers its weights from the others, who need not come
        ours(input_ids=tiny.ids(1, T), labels=tiny.ids(1, T), skip_logits=True)
    fully_shard(ours, mesh=ranks.mesh)
    ids = tiny.ids(1, T - 1 - ranks.rank, seed=3 + ranks.rank)
    given, last = {"input_ids": ids, "labels": ids}, ranks.rank == ranks.size - 1
    unlabelled = {"input_ids": ids, "labels": torch.full_like(ids, -100) if last else ids}
    with torch.no_grad():
        wanted, found = stock(**given), ours(**given)
        errors, n = (
            [found.loss - wanted.loss, (found.logits - wanted.logits).abs().max()],
            ids.shape[1] - 1,
        )
        errors.append(ours(**given, skip_logits=True).loss - wanted.loss)
        errors.append(
            ours(**given, skip_logits=True, num_items_in_batch=torch.tensor(5)).loss
            - wanted.loss * n / 5
        )
        one = ours(**unlabelled, skip_logits=True).loss
        errors.append(one - wanted.loss if not last else 1 - one.isnan().double())
    return [error.abs().item() for error in errors]


def scores(ranks: Ranks) -> float:
    """TRL's fused head in evaluation: every field of this rank's tokens."""
    if not hasattr(trl.trainer.utils, "add_fused_lm_head"):
        return 0.0
    stock = tiny.llama(num_hidden_layers=1)
    ours = tiny.patched(stock)
    for model in (ours.eval(), with_own_attention(stock.eval())):
        trl.trainer.utils.add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    fully_shard(ours, mesh=ranks.mesh)
    ids = tiny.ids(2, T - 1 - ranks.rank, seed=3 + ranks.rank)
    labels = torch.where(ids % 3 == 0, -100, ids)
    with torch.no_grad():
        found, wanted = (m(input_ids=ids, labels=labels, fused_lm_head=True) for m in (ours, stock))
    assert found.keys() == wanted.keys() and all(
        found[n].shape == x.shape for n, x in wanted.items()
    )
    return max((found[n].double() - x.double()).abs().max().item() for n, x in wanted.items())


def refusals(ranks: Ranks) -> list[str]:
    """What is said where a shard would be taken for a row, one sentence a case."""
    said = []
    for change, given in (({}, {"position_ids": None}), ({"attention_dropout": 0.1}, {})):
        ours = tiny.patched(tiny.llama(num_hidden_layers=1, head_dim=8, **change))
        mine = {n: x[:, : T // ranks.size] for n, x in batch("packed", 1).items()}
        try:
            ours(**{**mine, **given})
            said.append("")
        except ValueError as error:
            said.append(str(error))
    return said


def uneven(ranks: Ranks) -> list[str]:
    """What each rank is told where the last one has fewer labels, none, or fewer tokens; then a
    step that all can take.
    """
    ours, said = tiny.patched(tiny.llama(num_hidden_layers=1, head_dim=8)), []
    mine = {
        n: x[:, : T // ranks.size]
        for n, x in batch("plain", 1).items()
        if n in ("input_ids", "position_ids", "labels")
    }
    wrong = (
        {"labels": mine["labels"][:, 2:]},
        {"labels": None},
        {n: x[:, 2:] for n, x in mine.items()},
    )
    for change in wrong if ranks.size == 2 else wrong[:1]:
        try:
            ours(**{**mine, **(change if ranks.rank == ranks.size - 1 else {})}, use_cache=False)
        except ValueError as error:
            said.append(str(error))
    ours(**mine, use_cache=False).loss.backward()
    return said


def one_for_all(ranks: Ranks, host: list[int]) -> str:
    """What a step's layers keep. host: bytes that are free to the first rank and to the others."""
    ours = tiny.patched(
        tiny.llama(num_hidden_layers=2, head_dim=8),
        checkpointing=hfpatch.Checkpointing(offload="host", every=1),
    )
    mine = {n: x[:, : T // ranks.size] for n, x in batch("plain", 1).items()}
    free = mock.patch.object(memory, "host_free", lambda: host[min(ranks.rank, 1)])
    with free, sharded(row_ranks_of(ranks.group)):
        ours(**mine, use_cache=False).loss.backward()
    (shape,) = ours.model.layers[0]._hfpatch.runtime.shapes.values()
    return f"attention of {2 * shape.policy.saves_attention} layers"


def main(chosen: str, folder: str) -> None:
    common.quiet()
    deepspeed.init_distributed("gloo")
    P = dist.get_world_size()
    UlyssesSPAttentionHF.register_with_transformers(
        tiny.llama(num_hidden_layers=1),
        "sdpa",
        P,
        1,
        seq_length_is_variable=True,
        disable_in_eval=True,
    )
    ranks = Ranks()

    exchanged = []
    inner = ExchangedAttention.forward
    ExchangedAttention.forward = lambda self, *args, **known: (
        exchanged.append(1) or inner(self, *args, **known)
    )

    disk = tempfile.mkdtemp()
    cases = {
        "plain": {}, "batch 2, packed": {"B": 2, "kind": "packed"},
        "batch 2, padded": {"B": 2, "kind": "padded"},
        "one KV head": {"heads": (8, 1), "offload": "gpu"},
        "as many KV heads": {"heads": (8, 8), "every": 3, "group": 2},
        "zigzag": {"contract": "zigzag", "kind": "packed"},
        "zigzag, batch 2, padded": {"contract": "zigzag", "kind": "padded", "B": 2, "every": 2},
        "lora, accumulated": {"wrap": lora, "passes": 2},
        "no label on the last rank": {"kind": "half", "keep": "input"},
        "one tile, disk": {"tile": 64, "offload": disk},
        "layers run untiled": {"tiled": False, "kind": "packed"},
        "attention again": {"heads": (8, 4), "keep": "input"},
    }  # fmt: skip
    if chosen == "all":
        for contract in ("ulysses", "zigzag"):
            for heads in ((8, 1), (8, 4), (8, 8)):
                for kind in ("plain", "packed", "padded"):
                    for i, settings in enumerate(
                        ({}, {"keep": "input"}, {"every": 2}, {"every": 3, "tile": 99})
                    ):
                        more = {
                            "contract": contract,
                            "heads": heads,
                            "kind": kind,
                            "B": 1 + i % 2,
                            **settings,
                        }
                        cases[repr(more)] = more
    found = {name: case(ranks, **settings) for name, settings in cases.items()}
    calls, evaluated = len(exchanged), evaluation(ranks)
    for name in families.TILED if chosen == "all" else SHORT_FAMILIES:
        found[name] = family(ranks, name, kind="packed" if name in PACKED else "plain")
    for name in ("mixtral", "qwen3_moe", "olmoe") if chosen == "all" else ("mixtral",):
        found[f"{name}, zigzag"] = family(ranks, name, "zigzag", "padded")
    said = refusals(ranks)
    lengths = uneven(ranks)
    parts = parts_cases.found(
        ranks, lambda given: reference(with_own_attention(tiny.exact(parts_cases.llama())), given)
    )
    both = RowRanks(ranks.group)
    least = both.least([10 + ranks.rank, 20 - ranks.rank, None if ranks.rank else 3])
    common.report(
        folder, worst=found, calls=calls, said=said, evaluation=evaluated,
        scores=scores(ranks),
        least=least, lengths=lengths, parts=parts,
        short=one_for_all(ranks, [1 << 40, SHORT]),
    )  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
