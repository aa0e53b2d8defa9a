"""How long the road of a training step is, and how large the package.

    python profiles/house/road.py                  a Llama of two layers
    python profiles/house/road.py --model moe-lora a Qwen3-MoE with LoRA
    python profiles/house/road.py --static         sizes alone, no model

The road: distinct functions of hfpatch that run in the third training step on a CPU, forward and
backward, and those that run inside a layer beside ops and kernels. Comprehensions and lambdas count
as functions where Python gives them a frame (up to 3.11). Sizes: statements without docstrings, of
the core (what a step and `apply` need) and of the package; lines over 100 columns; comment lines.
`--forward N`, `--inside N`, `--backward N`, `--core N`, `--statements N`, `--wide PERCENT` make it
exit with 1 where a limit is passed; `--list` prints the functions.
"""

import argparse
import ast
import io
import os
import pathlib
import sys
import threading
import tokenize

ROOT = pathlib.Path(__file__).resolve().parents[2]
NEIGHBOURS = {"planner", "trainer", "lab", "cli", "examples", "__main__"}
LIMITS = ("forward", "inside", "backward", "core", "statements", "wide")


def sizes() -> dict:
    """Statements, of the core and of all; percent of lines over 100 columns, and of comments."""
    found = dict.fromkeys(("files", "lines", "statements", "core", "wide", "comments"), 0)
    for path in sorted((ROOT / "hfpatch").rglob("*.py")):
        text = path.read_text()
        count = sum(map(is_statement, ast.walk(ast.parse(text))))
        found["files"] += 1
        found["statements"] += count
        first = path.relative_to(ROOT / "hfpatch").parts[0].removesuffix(".py")
        found["core"] += 0 if first in NEIGHBOURS else count
        lines = [line for line in text.splitlines() if line.strip()]
        found["lines"] += len(lines)
        found["wide"] += sum(len(line) > 100 for line in lines)
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        found["comments"] += sum(token.type == tokenize.COMMENT for token in tokens)
    for name in ("wide", "comments"):
        found[name] = round(100 * found[name] / found["lines"], 1)
    return found


def is_statement(node) -> bool:
    """A statement that is no docstring."""
    text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return isinstance(node, ast.stmt) and not text


def model_of(name: str):
    """(a patched model, its layers)."""
    import transformers

    import hfpatch

    common = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 128,
              "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}  # fmt: skip
    tiles = hfpatch.Checkpointing(offload="host", tile=512)
    if name == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**common)).train()
        layers = model.model.layers
    else:
        from peft import LoraConfig, get_peft_model

        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        config = transformers.Qwen3MoeConfig(**common, **experts)
        model = transformers.Qwen3MoeForCausalLM(config).train()
        layers = model.model.layers
        asked = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "o_proj"])
        model = get_peft_model(model, asked)
    hfpatch.apply(model, checkpointing=tiles)
    return model, layers


class Road:
    """Notes which functions of the package run, while its hook is set."""

    def __init__(self, layers):
        import hfpatch

        self.root = str(pathlib.Path(hfpatch.__file__).parent) + os.sep
        self.layers = {id(layer) for layer in layers}
        self.seen, self.inside, self.depth = set(), set(), []

    def note(self, frame, event, arg) -> None:
        code = frame.f_code
        if event == "return" and self.depth and self.depth[-1] is frame:
            self.depth.pop()
        if event != "call":
            return
        called = code.co_name in ("__call__", "_wrapped_call_impl")
        if called and id(frame.f_locals.get("self")) in self.layers:
            self.depth.append(frame)
        if code.co_filename.startswith(self.root):
            name = code.co_filename[len(self.root) :], getattr(code, "co_qualname", code.co_name)
            self.seen.add(name)
            if self.depth:
                self.inside.add(name)

    def of(self, run) -> tuple[set, set]:
        """run()'s functions, and those of them inside a layer."""
        self.seen, self.inside = set(), set()
        sys.setprofile(self.note)
        threading.setprofile(self.note)
        try:
            run()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
        return self.seen, self.inside


def road(name: str) -> dict:
    import torch

    torch.autograd.set_multithreading_enabled(False)
    model, layers = model_of(name)
    watch, ids = Road(layers), torch.randint(0, 128, (1, 256))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    for _ in range(3):
        losses = []
        forward, inside = watch.of(
            lambda: losses.append(model(input_ids=ids, labels=ids).loss)  # noqa: B023
        )
        backward, _ = watch.of(lambda: losses[0].backward())  # noqa: B023
        optimizer.step()
        optimizer.zero_grad()
    alone = {f for f in inside if not f[0].startswith(("ops" + os.sep, "kernels" + os.sep))}
    return {"forward": forward, "inside": alone, "backward": backward}


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("llama", "moe-lora"), default="llama")
    parser.add_argument("--static", action="store_true", help="sizes alone, no model")
    parser.add_argument("--list", action="store_true", help="print the functions")
    for limit in LIMITS:
        parser.add_argument(f"--{limit}", type=float)
    args = parser.parse_args(argv)
    found = sizes()
    if not args.static:
        functions = road(args.model)
        if args.list:
            for part, names in functions.items():
                print(*(f"{part} {file} {name}" for file, name in sorted(names)), sep="\n")
        found |= {part: len(names) for part, names in functions.items()}
    print(", ".join(f"{name} {value}" for name, value in found.items()))
    asked = {name: getattr(args, name) for name in LIMITS}
    passed = [n for n, limit in asked.items() if limit is not None and found.get(n, 0) > limit]
    if passed:
        print(f"over the limit: {', '.join(passed)}", file=sys.stderr)
    return 1 if passed else 0


if __name__ == "__main__":
    sys.exit(main())
