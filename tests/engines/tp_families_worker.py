"""Gloo ranks share the weights of families whose norms stand between split projections
(transformers sums their gradients by a hook that their forward puts on the parameter), or their
experts, which FSDP2 shards as the model is loaded: every gradient against one rank's.
"""

import gc
import sys
import warnings
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common
import torch
import torch.distributed as dist
from families import small_model
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import hfpatch
from hfpatch.compat import exchanges_tokens, run_experts_plainly
from hfpatch.layer.condition import look
from hfpatch.layer.traced import Traced
from hfpatch.layer.traits import layers_in
from hfpatch.parts import experts as parts

TILED = hfpatch.Checkpointing(tile=8, plain=0, offload="gpu")
WAYS = {
    "tiled": {"checkpointing": TILED},
    "one tile": {"checkpointing": hfpatch.Checkpointing(tile=64, plain=0, offload="gpu")},
    "auto": {},
}
TENSORS, EXPERTS = {"tp_size": 2}, {"tp_size": 2, "ep_size": 2}
SHARDED = {"fsdp_size": 2, "ep_size": 2}  # a batch a rank
# family, what the ranks share, ways to run, whether a stock step comes before apply()
CASES = [
    ("qwen3", TENSORS, ["tiled", "one tile"], False),
    ("qwen3", TENSORS, ["tiled"], True),
    ("gemma3_text", TENSORS, ["tiled"], False),
    ("qwen3_5_text", TENSORS, ["tiled"], True),
    ("qwen3_moe", TENSORS, ["tiled"], False),
    ("qwen3_moe", EXPERTS, ["tiled"], True),
    ("gpt_oss", EXPERTS, ["tiled"], False),
    ("mixtral", EXPERTS, ["tiled"], False),
    ("qwen3_moe", SHARDED, ["tiled"], True),
    ("gpt_oss", SHARDED, ["tiled"], False),
    ("mixtral", SHARDED, ["tiled", "auto"], False),
]
OF_FOUR = [
    ("qwen3_moe", {"fsdp_size": 4, "ep_size": 2}, ["tiled"], False),
    ("gpt_oss", {"fsdp_size": 4, "ep_size": 4}, ["tiled"], False),
    ("mixtral", {"tp_size": 2, "fsdp_size": 2, "ep_size": 2}, ["tiled"], False),
    ("qwen3_moe", {"tp_size": 2, "fsdp_size": 2, "ep_size": 4}, ["tiled"], False),
]


def batch(index: int = 0) -> dict:
    """The batch of ranks that share one."""
    ids = torch.randint(3, 60, (2, 24), generator=torch.Generator().manual_seed(index))
    return {"input_ids": ids, "labels": ids}


def step(model, *given) -> dict[str, torch.Tensor]:
    model(**batch(*given), use_cache=False).loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in found.items()}


def mean_step(model, batches: int) -> dict[str, torch.Tensor]:
    found = [step(model, index) for index in range(batches)]
    return {n: sum(grads[n] for grads in found) / batches for n in found[0]}


def load(folder: Path, shared: dict):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            distributed_config=DistributedConfig(**shared),
        ).train()
    run_experts_plainly(model.config)
    return model


def worst(got: dict, plain: dict, exact: dict) -> tuple[float, str]:
    """The largest error over twice what one process loses anywhere, of a value's size, and whose: a
    bias of keys, which a softmax hardly reads, loses nothing by luck."""
    assert got.keys() == exact.keys()
    size = {n: exact[n].abs().max().item() for n in exact}
    error = lambda of: {n: (of[n] - exact[n]).abs().max().item() / size[n] for n in exact}  # noqa: E731
    allowed = 2 * (max(error(plain).values()) + torch.finfo(torch.float32).eps)
    return max((e / allowed, n) for n, e in error(got).items())


def errors(out: Path, family: str, shared: dict, ways: list[str], stock_first: bool) -> dict:
    folder, found = out / family, {}
    if dist.get_rank() == 0 and not folder.exists():
        small_model(family, torch.float32).save_pretrained(folder)
    dist.barrier()
    single = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    run_experts_plainly(single.config)
    batches = shared.get("fsdp_size", 1)
    for way in ways:
        plain = mean_step(single.float(), batches)
        exact = mean_step(single.double(), batches)
        model = load(folder, shared)
        mine = model._mesh_manager.get_mesh("fsdp").get_local_rank() if batches > 1 else 0
        if stock_first:
            step(model, mine)
        hfpatch.apply(model, **WAYS[way])
        layers = layers_in(model)
        # A second step has what the first left behind.
        with (
            mock.patch.object(Traced, "after", autospec=True, side_effect=Traced.after) as tiles,
            mock.patch.object(parts, "experts", side_effect=parts.experts) as op,
        ):
            steps = [worst(step(model, mine), plain, exact) for _ in range(2)]
        whole = [look(m).reason for m in layers if look(m).reason]
        hfpatch.undo(model)
        found[way] = {"steps": steps, "undone": worst(step(model, mine), plain, exact),
                      "whole": whole,
                      "exchanges": exchanges_tokens(model),
                      "layers": len(layers),
                      "tiles": tiles.call_count, "op": op.call_count}  # fmt: skip
    return found


def main(folder: str, kind: str = "") -> None:
    common.quiet()
    dist.init_process_group("gloo")
    out, found = Path(folder), {}
    for family, shared, ways, stock_first in OF_FOUR if kind else CASES:
        name = f"{family} {'+'.join(shared)}{' after a stock step' if stock_first else ''}"
        found |= {
            f"{name}, {way}": row
            for way, row in errors(out, family, shared, ways, stock_first).items()
        }
        gc.collect()
    common.report(out, found=found)


if __name__ == "__main__":
    main(sys.argv[-1], *sys.argv[1:-1])
