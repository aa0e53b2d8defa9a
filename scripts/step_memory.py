"""Draws the memory of one training step: transformers with checkpointing, the same with hfpatch's
fused loss alone, and hfpatch: `python scripts/step_memory.py FILE.png`.

The sequence is long against the model's width, and the head is small: what tiles save is seen, not
the fused loss. On a CPU nothing leaves the memory that is drawn, so offloading is not seen.
"""

import os
import sys

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from transformers import LlamaConfig, LlamaForCausalLM

import hfpatch

TOKENS, MIB = 8192, 1 << 20
LOSS_ALONE = {"rope": False, "rms_norm": False, "mlp": False, "checkpointing": "off"}
# A curve's name -> the options of hfpatch.apply, None for a stock model.
WAYS = {
    "transformers, checkpointing": None,
    "the same, fused loss alone": LOSS_ALONE,
    "hfpatch": {"checkpointing": "least"},
}


def step(options: dict | None) -> tuple[list[float], list[float]]:
    """The seconds and the MiB of one step, weights included."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=512, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=TOKENS,
    )  # fmt: skip
    model = LlamaForCausalLM(config).train()
    if options is None or options is LOSS_ALONE:
        model.gradient_checkpointing_enable()
    if options is not None:
        hfpatch.apply(model, **options)
    ids = torch.randint(512, (1, TOKENS))

    def run():
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad(set_to_none=True)

    run()  # what happens once a run happens here
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU],
                                profile_memory=True) as recorded:  # fmt: skip
        run()
    level = sum(p.nbytes for p in model.parameters())
    times, levels = [], []
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            level += event.nbytes()
            times.append(event.start_ns() / 1e9)
            levels.append(level / MIB)
    return [at - times[0] for at in times], levels


def main(path: str) -> None:
    figure = Figure(figsize=(4.6, 3.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axis, most = figure.subplots(), 0.0
    for (name, options), colour in zip(WAYS.items(), ("#7d8a99", "#d8a800", "#3f9f6b")):
        times, levels = step(options)
        peak, most = max(levels), max(most, *levels)
        print(f"hfpatch: {name}: peak {peak:.0f} MiB in a step of {TOKENS:,} tokens", flush=True)
        shares = [at / times[-1] for at in times]
        axis.plot(shares, levels, colour, drawstyle="steps-post", label=f"{name}: {peak:.0f} MiB")
    axis.set(xlim=(0, 1), ylim=(0, 1.5 * most), xlabel="share of the step", ylabel="MiB")
    axis.legend(loc="upper right", frameon=False, fontsize=9)
    axis.set_title(f"memory of a step of {TOKENS:,} tokens, Llama of width 128", fontsize=10)
    figure.savefig(path)


if __name__ == "__main__":
    main(*sys.argv[1:]) if len(sys.argv) == 2 else sys.exit(__doc__)
