"""Takes a tiny model from 512 to 4,096 tokens with `hfpatch train`, stock and patched, and measures
whether it uses them.

    python profiles/longer-context/measure.py --out profiles/longer-context

A document is a fixed cycle of words. In its first quarter it names a key; at its end it asks for
it. The long run raises the rotary base and mixes long documents with short ones. Measured in plain
transformers, over several seeds: how often the key is found, and the loss by position of the
answer. Writes results.csv, picture.png and README.md. One CPU core, some minutes.
"""

import contextlib
import csv
import io
import json
import platform
import random
import shlex
import sys
import tempfile
import time
from argparse import RawDescriptionHelpFormatter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # a clone that was not installed

import torch  # noqa: E402
import transformers  # noqa: E402

from hfpatch.cli import train  # noqa: E402
from hfpatch.cli.failures import Parser, guarded  # noqa: E402
from hfpatch.planner.limits import check_ranges  # noqa: E402

FILLER, KEYS = 16, 16  # words of the cycle, and different keys
SHORT, LONG = 512, 4096  # tokens before and after
LENGTHS = (512, 1024, 2048, 4096)
MODEL = (
    "hidden_size=64,intermediate_size=128,num_hidden_layers=2,num_attention_heads=2,"
    f"num_key_value_heads=2,head_dim=32,max_position_embeddings={SHORT},initializer_range=0.08,"
    f"tie_word_embeddings=false,vocab_size={FILLER + KEYS + 5}"
)
THETA = {"rope_type": "default", "rope_theta": 10000.0}
LARGER = {"rope_type": "default", "rope_theta": 80000.0}  # by the factor of the lengths
YARN = {"rope_type": "yarn", "factor": LONG / SHORT, "original_max_position_embeddings": SHORT}
NAMES = {
    "base": ("trained at 512", "#bab0ac"),
    "larger": ("larger base, not trained", "#f28e2b"),
    "yarn": ("YaRN, not trained", "#59a14f"),
    "hf": ("trained on, stock", "#000000"),
    "hfpatch": ("trained on, hfpatch", "#d62728"),
}


def document(length: int, asks: int, rng: random.Random) -> list[str]:
    """The words of one document: the key within its first quarter; questions behind that, the last
    at the end.
    """
    within = length // 4
    begin, key = rng.randrange(FILLER), f"v{rng.randrange(KEYS)}"
    words = [f"f{(begin + i) % FILLER}" for i in range(length)]
    at = rng.randrange(max(1, within - 1))
    words[at : at + 2] = ["KEY", key]
    places = [rng.randrange(within + 1, length - 4) for _ in range(asks - 1)]
    for place in [length - 2, *places]:
        words[place : place + 2] = ["ASK", key]
    return words


def written(file: Path, lengths, tokens: int, seed: int, asks: int) -> Path:
    """A file of documents whose lengths are drawn from `lengths`, so many tokens in all. With more
    than one question in a document a late one may copy the answer of one before.
    """
    rng, total = random.Random(seed), 0
    with open(file, "w") as out:
        while total < tokens:
            words = document(rng.choice(lengths) - 1, asks, rng)  # </s> ends it
            out.write(json.dumps({"text": " ".join(words)}) + "\n")
            total += len(words) + 1
    return file


def tokenizer(folder: Path) -> Path:
    """A tokenizer with a token a word, saved."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<s>", "</s>", "<pad>", *(f"f{i}" for i in range(FILLER)),
             *(f"v{i}" for i in range(KEYS)), "KEY", "ASK"]  # fmt: skip
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(folder)
    return folder


def trained(model, data: Path, out: Path, words: Path, seq_len: int, steps: int, **flags) -> Path:
    """`hfpatch train` in this process; its output folder, at once if an earlier run filled it."""
    if (out / "model.safetensors").exists():
        return out
    flags = {
        "model": model, "tokenizer": words, "data": data, "seq-len": seq_len, "packing": "true",
        "max_steps": steps, "learning_rate": 3e-3, "warmup_steps": min(20, steps // 3),
        "adam_beta2": 0.98, "per_device_train_batch_size": 1, "logging_steps": 10,
        "save_strategy": "no", "report_to": "none", "disable_tqdm": "true", "use_cpu": "true",
        "output_dir": out, "cache_dir": out / "cache",
    } | flags  # fmt: skip
    argv = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = train.main(argv)
    if code:
        raise ValueError(f"hfpatch: a run ended with exit code {code}; its output is above.")
    return out


@torch.no_grad()
def measured(folder: Path, words: Path, documents: int, config=None) -> dict:
    """{"found": {length: share of keys found}, "loss": {length: nats an answer}} in plain
    transformers. The one question ends the document, so its length is the answer's position.
    """
    vocabulary = transformers.AutoTokenizer.from_pretrained(words).get_vocab()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, config=config).eval()
    rng, found, loss = random.Random(99), {}, {}
    for length in LENGTHS:
        right, nats = 0, 0.0
        for _ in range(documents):
            ids = torch.tensor([[vocabulary[w] for w in document(length, 1, rng)]])
            logits, answer = model(ids[:, :-1], logits_to_keep=1).logits[0], ids[0, -1:]
            right += int(logits.argmax() == answer)
            nats += torch.nn.functional.cross_entropy(logits, answer).item()
        found[length], loss[length] = right / documents, nats / documents
    return {"found": found, "loss": loss}


def rows(base: Path, words: Path, scratch: Path, args) -> list[dict]:
    """A row a model: name, seed, and what was measured."""
    config = transformers.AutoConfig.from_pretrained(base)
    table = [{"name": "base", "seed": 0, **measured(base, words, args.documents)}]
    config.max_position_embeddings = LONG
    for name, rope in (("larger", LARGER), ("yarn", YARN)):
        config.rope_parameters = {"rope_theta": THETA["rope_theta"]} | rope
        table.append({"name": name, "seed": 0, **measured(base, words, args.documents, config)})
    for seed in range(args.seeds):
        # Long documents and short ones, half of the tokens each.
        data = written(scratch / f"long{seed}.jsonl", (64, 128, 256, 512, 1024, 2048, 4096),
                       (args.steps + 1) * LONG, 1000 + seed, asks=1)  # fmt: skip
        for impl in ("hf", "hfpatch"):
            out = trained(
                base, data, scratch / f"{impl}{seed}", words, LONG, args.steps, impl=impl,
                seed=seed, learning_rate=2e-3, max_position_embeddings=LONG,
                rope_scaling=json.dumps(LARGER),
            )  # fmt: skip
            print(f"{impl}, seed {seed}: trained", flush=True)
            table.append({"name": impl, "seed": seed, **measured(out, words, args.documents)})
    return table


def summary(table: list[dict]) -> list[dict]:
    """A row a name: the mean over seeds, and the spread where there are several."""
    found = []
    for name in NAMES:
        runs = [row for row in table if row["name"] == name]
        line = {"model": NAMES[name][0], "seeds": len(runs)}
        for kind, title in (("found", "found at"), ("loss", "loss at")):
            for at in runs[0][kind]:
                values = [row[kind][at] for row in runs]
                spread = f" ± {(max(values) - min(values)) / 2:.2f}" if len(values) > 1 else ""
                line[f"{title} {at:,}"] = f"{sum(values) / len(values):.2f}{spread}"
        found.append(line)
    return found


def draw(table: list[dict], path: Path) -> None:
    """Above: keys found by length. Below: the loss of an answer by position. A line a model, a
    point a seed.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 1, figsize=(5, 7), layout="constrained")
    for name, (label, colour) in NAMES.items():
        runs = [row for row in table if row["name"] == name]
        # Stock's line is broken and on top: both are seen where they are the same.
        style, above = ("--", 3) if name == "hf" else ("-", 2)
        for axis, kind in zip(axes, ("found", "loss")):
            at = list(runs[0][kind])
            means = [sum(row[kind][n] for row in runs) / len(runs) for n in at]
            ticks = range(len(at))
            axis.plot(ticks, means, style, color=colour, label=label, lw=2, zorder=above)
            for row in runs:
                axis.plot(ticks, list(row[kind].values()), ".", color=colour, ms=5)
            axis.set_xticks(ticks, [f"{n:,}" for n in at])
    axes[0].set(xlabel="tokens of the document", ylabel="keys found, share", ylim=(-0.03, 1.03))
    axes[1].set(xlabel="position of the answer", ylabel="loss, nats an answer", ylim=(-0.1, None))
    axes[0].legend(frameon=False)
    figure.savefig(path, dpi=120)


def page(table: list[dict], args, seconds: float) -> str:
    lines = summary(table)
    took = "" if args.scratch else f"; {seconds / 60:.0f} minutes"  # of which a part may be older
    head = [
        "# A longer context that is used", "",
        f"**Measured** on a CPU ({torch.get_num_threads()} thread), with a tiny model; it says that "
        "the parts work, not how a large model learns.", "",
        "Question: does a model that was trained at 512 tokens use 4,096 after `hfpatch train`, and "
        "does it learn the same as with stock transformers?", "",
        f"    {shlex.join(['python', *sys.argv])}", "",
        f"Python {platform.python_version()}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}{took}. A Llama of 2 layers and 64 "
        f"columns learns in {args.base_steps} steps to find a key that its document named. It then "
        f"trains {args.steps} steps of 4,096 tokens with a rotary base of "
        f"{LARGER['rope_theta']:,.0f} in place of {THETA['rope_theta']:,.0f}, on long and short "
        f"documents of one question each, packed. {args.documents} documents a point; ± is half of the spread "
        "over seeds.", "",
        "| " + " | ".join(lines[0]) + " |", "|" + " --- |" * len(lines[0]),
    ]  # fmt: skip
    head += ["| " + " | ".join(map(str, line.values())) + " |" for line in lines]
    return "\n".join([*head, "", "![keys found, and the loss by position](picture.png)", ""])


def main(argv=None) -> int:
    return guarded(_main, sys.argv[1:] if argv is None else argv)


def _main(argv) -> int:
    parser = Parser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, default=ROOT / "runs/longer-context", help="folder of the results")
    add("--base-steps", type=int, default=400, help="steps at 512 tokens (400)")
    add("--steps", type=int, default=50, help="steps at 4,096 tokens (50)")
    add("--seeds", type=int, default=3, help="runs of each implementation (3)")
    add("--documents", type=int, default=20, help="documents a point (20)")
    add("--scratch", type=Path, help="folder of data and models, to go on in (a temporary one)")
    args = parser.parse_args(argv)
    check_ranges(vars(args))
    args.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        scratch = args.scratch or Path(name)
        scratch.mkdir(parents=True, exist_ok=True)
        words = tokenizer(scratch / "words")
        tokens = args.base_steps * SHORT * 4
        data = written(scratch / "short.jsonl", (32, 64, 128, 256, 512), tokens, 1, asks=2)
        base = trained(
            "llama-tiny", data, scratch / "base", words, SHORT, args.base_steps, impl="hf",
            config_overrides=MODEL, rope_scaling=json.dumps(THETA),
            per_device_train_batch_size=4, logging_steps=max(1, args.base_steps // 4),
        )  # fmt: skip
        print("trained at 512 tokens", flush=True)
        table = rows(base, words, scratch, args)
    with open(args.out / "results.csv", "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["model", "seed", "kind", "at", "value"])
        for row in table:
            for kind in ("found", "loss"):
                for at, value in row[kind].items():
                    writer.writerow([row["name"], row["seed"], kind, at, f"{value:.4f}"])
    draw(table, args.out / "picture.png")
    text = page(table, args, time.monotonic() - began)
    (args.out / "README.md").write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
