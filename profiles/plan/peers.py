"""What users have today, beside hfpatch, in seconds of the step model. Nothing here is timed.

    python profiles/plan/peers.py liger-selective >> profiles/plan/peers.csv    # counts one of them, at all lengths, in minutes
    python profiles/plan/peers.py                                               # the table of seconds, from peers.csv

Counted of Llama-3.1-8B in bfloat16, batch 1, while the real code of each runs on fake tensors:
matmul FLOPs, attention forwards, bytes that other operations read and write (Liger's kernels: each
of their tensors once, the least there is), memory.
"""

import csv
import sys
from pathlib import Path

PEERS = {
    "hf": "transformers, no checkpointing",
    "hf-ckpt": "transformers' checkpointing",
    "trl-offload": "the same with `offload` and TRL's fused head",
    "trl-selective": "the same with TRL's `selective`",
    "liger-off": "Liger's kernels and head, no checkpointing",
    "liger": "Liger's kernels and head, checkpointing",
    "liger-selective": "Liger's kernels and head, `selective`, `offload`",
    "liger-second": "Liger's kernels and head, `selective` in every second layer",
    "liger-tiled-offload": "Liger, its tiled MLP, `offload` (the ALST recipe)",
    "mixture": "Axolotl: selective, inputs and attention offloaded, tiled MLP, Liger",
}
# Their copies wait: torch's save_on_cpu copies to the host with a blocking `copy_`, and back on the
# stream that computes. Axolotl's go on streams of their own.
ON_COMPUTE = ("trl-offload", "trl-selective", "liger-selective", "liger-tiled-offload")
LENGTHS = (4096, 8192, 16384, 32768, 131072)
HOST_AT = (8192, 32768, 131072)
FIELDS = "implementation,tokens,peak_gib,most_gib,host_gib,matmul_flops,attention_forwards,moved_forward_gib,moved_backward_gib"
MODEL, PLACEMENT, HOST = "llama-3.1-8b", "gpu8bit", "256GiB"
GPUS = ("a100-80gb", "h100")
GiB = 2**30
PROCESS_BYTES = 4 * GiB  # of the planner, which no peer's host bytes have


def count(implementation: str) -> None:
    from rivals import prepare

    from hfpatch.lab.presets import preset_config
    from hfpatch.lab.simulate.implementations import build
    from hfpatch.lab.simulate.simulator import simulate

    model = prepare(build(preset_config(MODEL)), implementation)
    for tokens in LENGTHS:
        found = simulate(model, 1, tokens)
        sizes = (found.peak_bytes, found.most_beyond_bytes, found.host_peak_bytes)
        moved = (found.ledger.traffic[phase] for phase in ("forward", "backward"))
        forwards = found.attention_calls["forward"] / model.config.num_hidden_layers
        figures = [f"{n / GiB:.3f}" for n in sizes]
        figures += [
            f"{sum(found.flops['matmul'].values()):.6g}",
            f"{forwards:.0f}",
            *(f"{n / GiB:.2f}" for n in moved),
        ]
        print(implementation, tokens, *figures, sep=",", flush=True)


def counted() -> dict:
    """Rows of peers.csv by (implementation, tokens), figures as numbers."""
    with open(Path(__file__).with_name("peers.csv")) as file:
        rows = list(csv.DictReader(file))
    return {
        (r["implementation"], int(r["tokens"])): {
            k: v if k == "implementation" else float(v) for k, v in r.items()
        }
        for r in rows
    }


def seconds(row: dict, gpu: str) -> float | None:
    """A peer's planned step, by its counts; None where it does not fit. Copies of ON_COMPUTE are
    waited for, others hide behind the work as hfpatch's do. Python takes no time.
    """
    from hfpatch.budget.policy import Checkpointing
    from hfpatch.lab.hardware import gpu_row
    from hfpatch.lab.models import text_config_of
    from hfpatch.lab.rates import attention_ramp
    from hfpatch.lab.shallow import Values, model_of
    from hfpatch.planner.answer import RESERVE_SHARE
    from hfpatch.planner.limits import parse_bytes
    from hfpatch.planner.placements import resident

    gpu, config = gpu_row(gpu), text_config_of(MODEL)[1]
    stays = resident(PLACEMENT, model_of(Values(config)).sizes, 1, Checkpointing("off"))
    peak = (1 + RESERVE_SHARE) * (row["peak_gib"] * GiB + stays.optimizer)
    host, tokens = row["host_gib"] * GiB, int(row["tokens"])
    if peak > gpu.usable_bytes or host > 0.9 * parse_bytes(HOST):
        return None
    # Causal attention of all layers, once forward.
    once = 2 * config["num_hidden_layers"] * config["hidden_size"] * tokens**2
    once *= attention_ramp(tokens)
    fore, back = (
        row[f"moved_{way}_gib"] * GiB / gpu.memory_rate for way in ("forward", "backward")
    )
    work = row["matmul_flops"] / gpu.matmul_flops + fore + back
    work += row["attention_forwards"] * once / gpu.attention_forward
    work += 2.5 * once / gpu.attention_backward
    copies = 2 * host / gpu.link_rate
    waits = copies if row["implementation"] in ON_COMPUTE else max(0.0, copies - work)
    optimizer = 4 * stays.parameters + 2 * (stays.parameters + stays.optimizer)
    return work + waits + optimizer / gpu.memory_rate


def ours(tokens: int, gpu: str):
    """hfpatch's plan of the same step."""
    from hfpatch.planner.answer import make_run
    from hfpatch.planner.evaluate import evaluate

    return evaluate(make_run(MODEL, seq_len=tokens, gpu=gpu, host_ram=HOST), PLACEMENT)


def cells(values) -> list[str]:
    return ["-" if s is None else f"{s:.2f}" if s < 10 else f"{s:.1f}" for s in values]


def table(gpu: str) -> str:
    """Markdown: a row an implementation, planned seconds on `gpu` at each length, and what is on
    the host at 8,192, 32,768 and 131,072 tokens.
    """
    rows, found = [], counted()
    hosts = lambda sizes: ", ".join(f"{n:.0f}" for n in sizes)  # noqa: E731
    for name, said in PEERS.items():
        times = cells(seconds(found[name, T], gpu) for T in LENGTHS)
        rows.append([said, *times, hosts(found[name, T]["host_gib"] for T in HOST_AT)])
    plans = {T: ours(T, gpu) for T in LENGTHS}
    times = cells(p.time.step_seconds if p.fits else None for p in plans.values())
    on_host = ((plans[T].host.peak_bytes - PROCESS_BYTES) / GiB for T in HOST_AT)
    rows.append(["hfpatch, `auto`", *times, hosts(on_host)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        count(sys.argv[1])
    else:
        print("\n\n".join(table(gpu) for gpu in GPUS))
