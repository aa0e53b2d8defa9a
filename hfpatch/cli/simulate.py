"""`hfpatch simulate`: one implementation of one model, simulated, as a table or as JSON."""

import json
import sys
import time
from dataclasses import replace

import torch

from hfpatch.budget.choice import choose
from hfpatch.budget.formula import ModelShape
from hfpatch.budget.first import first_policy
from hfpatch.budget.limits import parse_length, parse_word
from hfpatch.budget.policy import KEEPABLE, Checkpointing, Policy, auto_tile, parse_checkpointing
from hfpatch.budget.shape import UnknownFamily
from hfpatch.cli.flags import add_checkpointing, checkpointing_of
from hfpatch.lab.models import config_of
from hfpatch.lab.presets import MODELS, PRESETS
from hfpatch.lab.simulate.implementations import IMPLEMENTATIONS, build, prepare
from hfpatch.planner.limits import flag

_TAKES = {int: "a number of 1 or more", bool: "true or false"}
_WORDS = {"offload": ("gpu", "host", "disk"), "frozen_weights": ("gpu", "host"), "keep": KEEPABLE}
_NONE = ("plain", "again", "time_tile")  # numbers that may be 0


def add_arguments(parser, implementations=IMPLEMENTATIONS) -> None:
    parser.add_argument(
        "--model",
        default="llama-3.1-8b",
        help=f"{', '.join((*PRESETS, *MODELS))}; or a config.json, a folder, a hub id",
    )
    add_checkpointing(parser.add_argument, " (host memory as large as it must be)")
    parser.add_argument("--impl", choices=implementations, default="hfpatch")
    parser.add_argument("--seq-len", type=flag(parse_length), default=131072)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument(
        "--sp-size", type=int, default=1,
        help="GPUs that share each row of --seq-len tokens (cp_size too); one of them is simulated",
    )  # fmt: skip
    parser.add_argument("--layers", type=int, help="fewer layers than the model's")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument(
        "--policy", nargs="+", default=[], metavar="FIELD=VALUE",
        help="for experts, fields of the policy as it is resolved, over what --checkpointing makes of it: "
        "offload=host every=1 save_attention=true stream_attention=false tile=8192 (the default)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true")


def main(args, prepare=prepare) -> int:
    """Returns the exit code. prepare: turns the stock model into the one of --impl."""
    # This import loads all of hfpatch and transformers, which --help does not need.
    from hfpatch.lab.simulate.simulator import simulate

    config = config_of(args.model)[1]
    if args.layers:
        n = config.get("num_hidden_layers")
        lists = {k: v for k, v in config.items() if isinstance(v, list) and len(v) == n}
        config = config | {k: v[: args.layers] for k, v in lists.items()}
        config["num_hidden_layers"] = args.layers
    settings = _settings(args)
    try:
        shape = ModelShape.from_config(config)
    except UnknownFamily:  # the simulator needs no closed form
        shape = None
    tokens = _tokens_of_a_rank(args)
    if shape is not None:
        shape = replace(shape, ranks=args.sp_size)
    policy = _policy(args, settings, shape, config.get("hidden_size", 0), tokens)
    started = time.perf_counter()
    impl = "hfpatch-off" if settings == "off" else args.impl
    model = prepare(build(config, getattr(torch, args.dtype)), impl)
    how = {"steps": args.steps, "policy": policy, "ranks": args.sp_size}
    found = simulate(model, args.batch, tokens, **how)
    result = found.to_dict() | {
        "beyond_gib": found.beyond_bytes / 2**30,
        "host_gib": found.host_peak_bytes / 2**30,
        "seconds": time.perf_counter() - started,
    }
    if args.json:
        print(json.dumps(result, indent=1))
        return 0
    print(
        f"simulated {args.model} {args.impl} [{args.batch}, {tokens}] in {result['seconds']:.1f} s"
    )
    print(
        f"beyond parameters and gradients {result['beyond_gib']:.2f} GiB, host {result['host_gib']:.2f} GiB"
    )
    print(
        f"highest total {found.peak_bytes / 2**30:.2f} GiB in {found.peak_phase} at {found.peak_module or '-'}"
    )
    for name, nbytes in found.operations[:16]:
        print(f"  {nbytes / 2**30:8.3f} GiB  {name}")
    print(
        f"attention calls {found.attention_calls}, FLOPs {found.flops['total']:.4g} {found.flops}"
    )
    return 0


def _settings(args) -> Checkpointing | str | None:
    """The value of --checkpointing, None by default. ValueError if --impl is not hfpatch."""
    words = checkpointing_of(args)
    if words and args.impl != "hfpatch":
        raise ValueError(
            f"hfpatch: --checkpointing is for hfpatch, --impl {args.impl} came; drop one of them."
        )
    return parse_checkpointing(words) if words else None


def _tokens_of_a_rank(args) -> int:
    """The tokens of one rank. ValueError if ranks cannot share these rows."""
    if args.sp_size < 1 or args.seq_len % args.sp_size:
        raise ValueError(
            f"hfpatch: --sp-size divides --seq-len, {args.sp_size} and {args.seq_len} came; pass a "
            f"divisor of {args.seq_len}."
        )
    if args.sp_size > 1 and not args.impl.startswith("hfpatch"):
        raise ValueError(
            f"hfpatch: --sp-size is for hfpatch, --impl {args.impl} came; drop one of them."
        )
    return args.seq_len // args.sp_size


def _policy(args, settings, shape: ModelShape | None, width: int, tokens: int) -> Policy:
    """The policy of --checkpointing and --policy. By default every layer's input and attention
    output go to the host.
    """
    if args.policy and not args.impl.startswith("hfpatch"):
        raise ValueError(
            f"hfpatch: --policy is hfpatch's, --impl {args.impl} came; drop one of them."
        )
    fields = {}
    for pair in args.policy:
        name, equals, value = pair.partition("=")
        if not equals or name not in Policy.__dataclass_fields__:
            known = ", ".join(Policy.__dataclass_fields__)
            raise ValueError(
                f"hfpatch: --policy takes FIELD=VALUE of {known}, {pair!r} came; write such a pair."
            )
        words = tuple(value.split(","))
        fields[name] = words if name == "keep" else parse_word(value)
        wanted, among = type(Policy.__dataclass_fields__[name].default), _WORDS.get(name)
        number = wanted is not int or fields[name] or name in _NONE
        if type(fields[name]) is not wanted or not number or among and not set(words) <= {*among}:
            takes = ", ".join(among) if among else _TAKES[wanted]
            raise ValueError(
                f"hfpatch: --policy {name}= takes {takes}, {value!r} came; write such a value."
            )
    if isinstance(settings, Checkpointing) and shape is None:
        rows = args.batch * tokens
        return replace(first_policy(settings, rows=rows, width=width), **fields)
    if isinstance(settings, Checkpointing):
        return replace(choose(settings, shape, batch=args.batch, tokens=tokens), **fields)
    fields.setdefault("tile", auto_tile(args.batch * tokens))
    return Policy(**fields)


if __name__ == "__main__":
    from hfpatch.cli.main import main as hfpatch

    raise SystemExit(hfpatch(["simulate", *sys.argv[1:]]))
