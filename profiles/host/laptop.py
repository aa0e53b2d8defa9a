"""One training step on a CPU: seconds and memory of stock, stock with checkpointing and hfpatch,
each in a process of its own. The table of README.md; it needs quiet cores.

python profiles/host/laptop.py              # 2,048 and 8,192 tokens, some ten minutes on two cores
python profiles/host/laptop.py 2048         # one length
"""

import json
import os
import resource
import subprocess
import sys
import time

WAYS = ("stock", "stock, checkpointing", "hfpatch", 'hfpatch, "least"')
MODEL = dict(  # 110M parameters
    vocab_size=32000, hidden_size=768, intermediate_size=2048, num_hidden_layers=12,
    num_attention_heads=12, num_key_value_heads=4, max_position_embeddings=16384,
)  # fmt: skip


def peak() -> float:
    """GiB of the largest resident set so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)


def step(way: str, tokens: int) -> dict:
    """Seconds of a forward and backward after a short one, and GiB above the idle process."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import hfpatch

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**MODEL))
    if way == "stock, checkpointing":
        model.gradient_checkpointing_enable()
    elif way != "stock":
        hfpatch.apply(model, checkpointing="least" if "least" in way else "auto")
    ids = torch.randint(0, MODEL["vocab_size"], (1, tokens))
    model.train()
    model(ids[:, :64], labels=ids[:, :64]).loss.backward()  # gradients exist, code is loaded
    idle, begin = peak(), time.perf_counter()
    model(ids, labels=ids).loss.backward()
    return {"seconds": time.perf_counter() - begin, "gib": peak() - idle}


def main(lengths: list[int]) -> None:
    environment = os.environ | {"OMP_WAIT_POLICY": "passive"}
    print("| tokens | | seconds | GiB |\n| ---: | --- | ---: | ---: |")
    for tokens in lengths:
        for way in WAYS:
            done = subprocess.run(
                [sys.executable, __file__, way, str(tokens)], env=environment, text=True,
                stdout=subprocess.PIPE, check=True,
            )  # fmt: skip
            found = json.loads(done.stdout.splitlines()[-1])
            print(
                f"| {tokens:,} | {way} | {found['seconds']:.1f} | {found['gib']:.2f} |", flush=True
            )


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in WAYS:
        print(json.dumps(step(sys.argv[1], int(sys.argv[2]))))
    else:
        main([int(n) for n in sys.argv[1:]] or [2048, 8192])
