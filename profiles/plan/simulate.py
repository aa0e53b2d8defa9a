"""Memory and work of one implementation of one model, its code run on fake tensors, for developers.

    python profiles/plan/simulate.py --model llama-3.1-8b --impl hfpatch --seq-len 131072 --json

`rivals.py` takes the same arguments and knows Liger's and TRL's implementations as well. Users have
`hfpatch profile --simulate`.
"""

import argparse
import json
import time
from dataclasses import replace

import torch

from hfpatch.budget.first import first_policy
from hfpatch.budget.limits import parse_length, parse_word
from hfpatch.budget.policy import LEAST, Checkpointing, auto_tile, parse_checkpointing
from hfpatch.cli.flags import add_checkpointing
from hfpatch.lab.models import config_of
from hfpatch.lab.simulate.implementations import IMPLEMENTATIONS, build, prepare
from hfpatch.lab.simulate.simulator import simulate


def parser_of(implementations=IMPLEMENTATIONS) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--impl", choices=implementations, default="hfpatch")
    parser.add_argument("--seq-len", type=parse_length, default=131072)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--sp-size", type=int, default=1, help="GPUs that share each row")
    parser.add_argument("--layers", type=int, help="fewer layers than the model's")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16")
    add_checkpointing(parser.add_argument)
    parser.add_argument(
        "--policy", nargs="+", default=[], metavar="FIELD=VALUE",
        help="fields of the policy, over those that --checkpointing gives",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true")
    return parser


def run(args, prepare=prepare) -> int:
    """Simulates and prints. prepare: turns the stock model into the one of --impl."""
    config = config_of(args.model)[1]
    if args.layers:
        n = config.get("num_hidden_layers")
        lists = {k: v for k, v in config.items() if isinstance(v, list) and len(v) == n}
        config = config | {k: v[: args.layers] for k, v in lists.items()}
        config["num_hidden_layers"] = args.layers
    settings = parse_checkpointing(args.checkpointing)
    tokens = args.seq_len // args.sp_size
    policy = _policy(args, settings, config, tokens)
    started = time.perf_counter()
    impl = "hfpatch-off" if settings.offload == "off" else args.impl
    model = prepare(build(config, getattr(torch, args.dtype)), impl)
    how = {"steps": args.steps, "policy": policy, "ranks": args.sp_size}
    found = simulate(model, args.batch, tokens, **how)
    told = {name: value for name, value in vars(found).items() if name != "ledger"}
    result = told | {
        "beyond_gib": found.beyond_bytes / 2**30,
        "host_gib": found.host_peak_bytes / 2**30,
        "seconds": time.perf_counter() - started,
    }
    if args.json:
        print(json.dumps(result, indent=1))
        return 0
    print(f"{args.model} {args.impl} [{args.batch}, {tokens}] in {result['seconds']:.1f} s")
    print(f"beyond parameters and gradients {result['beyond_gib']:.2f} GiB")
    print(f"host {result['host_gib']:.2f} GiB")
    peak = found.peak_bytes / 2**30
    print(f"highest total {peak:.2f} GiB in {found.peak_phase}")
    return 0


def _policy(args, settings, config: dict, tokens: int) -> Checkpointing:
    """The policy of --checkpointing and --policy. By default every layer's input and attention
    output go to the host.
    """
    pairs = dict(pair.split("=", 1) for pair in args.policy)
    fields = {name: parse_word(value) for name, value in pairs.items()}
    rows = args.batch * tokens
    if settings.offload == "off":
        return replace(LEAST, **({"tile": auto_tile(rows)} | fields))
    layers, width = config.get("num_hidden_layers", 1), config.get("hidden_size", 0)
    return replace(first_policy(settings, tokens=rows, width=width, layers=layers), **fields)


if __name__ == "__main__":
    raise SystemExit(run(parser_of().parse_args()))
