"""Whole steps on sequences that all GPUs of a machine share, FSDP2 and AdamW on the GPUs, beside
the plan.

torchrun --standalone --nproc_per_node 8 scripts/gpu/14_sequence.py --tokens 1048576 --out $OUT
"""

import math
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import common
import step
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import hfpatch
from hfpatch.context.ranks import sequence_of, sharded
from hfpatch.trainer.shared_rows import part_of

WORDS = """
Each row is one sequence over all GPUs: a rank has its part of the tokens, attention exchanges heads
for tokens. A step is forward, backward, clip and AdamW; parameters, gradients and moments are
float32 shards, computing is bfloat16. `plan_step_s` and `plan_peak_gib` are what `hfpatch plan
--sp-size` says of the same run.
"""
COLUMNS = "gpus tokens step_s tokens_s peak_gib plan_step_s plan_peak_gib loss".split()


def make(case: dict, device: torch.device, world: int):
    """The patched model, sharded before its weights exist; each rank fills its own."""
    model = step.build(case, "meta", torch.float32)
    hfpatch.apply(model, rope_float64=True, checkpointing=case.get("checkpointing", "auto"))
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if world > 1:
        for layer in model.model.layers:
            fully_shard(layer, mp_policy=mixed)
        fully_shard(model, mp_policy=mixed)
    model.to_empty(device=device)
    generator = torch.Generator(device=device).manual_seed(dist.get_rank())
    with torch.no_grad():
        for p in model.parameters():
            local = p.to_local() if hasattr(p, "to_local") else p
            local.fill_(1.0) if p.dim() == 1 else local.normal_(std=0.02, generator=generator)
    rotary = model.model.rotary_emb
    fresh = type(rotary)._hfpatch_base(model.config)
    for name, buffer in fresh.named_buffers():
        rotary.get_buffer(name).copy_(buffer)
    return model


def main(argv=None) -> int:
    made = common.parser("14_sequence", __doc__)
    made.add_argument(
        "--tokens", type=int, nargs="+", default=[131072, 1 << 20], help="of whole sequences"
    )
    made.add_argument("--model", default="Qwen/Qwen3-8B")
    made.add_argument(
        "--steps", type=int, default=2, help="the first is not timed where there are more"
    )
    made.add_argument("--gpu", default="h100", help="row of the planner's table")
    args = common.parse(made, argv)
    for name, value in (
        ("RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "29513"),
    ):
        os.environ.setdefault(name, value)
    alone = not dist.is_initialized()
    if alone:
        dist.init_process_group("nccl" if args.cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank) if args.cuda else torch.device("cpu")
    if args.cuda:
        torch.cuda.set_device(device)
    if rank:
        args.out = str(Path(args.out) / f"rank{rank}")
    sheet, sequence = common.Sheet(args), sequence_of(dist.group.WORLD) if world > 1 else None
    for tokens in args.tokens[:1] if args.small else args.tokens:
        case = {"preset": args.model, "tokens": tokens, "layers": None}
        if args.small:
            (case,) = step.small(sheet, [case | {"checkpointing": {}}])
            case["checkpointing"] = hfpatch.Checkpointing(tile=16)
        tokens = case["tokens"]
        model = make(case, device, world)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        generator, seconds = torch.Generator().manual_seed(0), []
        for _ in range(args.steps):
            ids = torch.randint(0, model.config.vocab_size, (1, tokens), generator=generator)
            batch = {"input_ids": ids, "labels": ids}
            if sequence is not None:
                batch = part_of(sequence, batch)
                batch["labels"] = batch["shift_labels"]
            batch = {name: x.to(device) for name, x in batch.items()}
            dist.barrier()
            began = time.perf_counter()
            with sharded(sequence):
                # FSDP averages over ranks what is a sum over their tokens.
                loss = model(
                    **batch, num_items_in_batch=torch.tensor((tokens - 1) / world, device=device)
                ).loss
                loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            total = loss.detach() / world
            dist.all_reduce(total)
            value = total.item()  # waits for the step
            seconds.append(time.perf_counter() - began)
        plan = hfpatch.plan(
            model.config.to_dict() if args.small else args.model, seq_len=tokens, gpu=args.gpu,
            gpus=world, sp_size=world,
            **({"placement": "fsdp2"} if world > 1 else {}),
        )  # fmt: skip
        step_s = min(seconds[1:] or seconds)
        peak = torch.cuda.max_memory_allocated(device) / common.GiB if args.cuda else math.nan
        sheet.add(
            gpus=world, tokens=tokens, step_s=step_s, tokens_s=tokens / step_s, peak_gib=peak,
            plan_step_s=plan.step_seconds, plan_peak_gib=plan.gpu_peak_bytes / common.GiB,
            loss=value,
        )  # fmt: skip
        del model, optimizer
        common.clean()
    draw = lambda axes: common.lines(  # noqa: E731
        axes[0], sheet.rows, "tokens", "step_s", "gpus", title="seconds a step by length"
    )
    sheet.page(f"One sequence on {world} GPUs", WORDS, COLUMNS, sheet.picture(draw))
    if alone:
        dist.barrier()
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
