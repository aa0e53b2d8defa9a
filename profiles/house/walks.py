"""The walks of README on the dry device, with random weights, beside their plans: walks.csv.

    python profiles/house/walks.py          where scripts/test.sh --dry has an environment

full: the ready file of an 8B model at 128k tokens, by `hfpatch train`.
lora: README's script for TRL, at 64k tokens on a card of 24 GB.
ranks: one rank of eight that share a million tokens, with FSDP2's eighth of float32 weights and of
    AdamW; what the others send is missing.

A step's seconds are none: kernels compute nothing.
"""

import csv
import json
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "dry")]
TABLE = Path(__file__).with_name("walks.csv")
GiB = 2**30
READY = ROOT / "hfpatch" / "examples" / "llama-3.1-8b-full-80g.yaml"
STEPS = 4
# Walk: (MiB of the card, GiB of host memory, the plan's words).
WALKS = {
    "full": (81920, 160, str(READY)),
    "lora": (24576, 64, "llama-3.1-8b --seq-len 64k --gpu rtx4090 --host-ram 64GiB --lora-r 16"),
    "ranks": (
        81510, 2000,
        "llama-3.1-8b --gpus 8 --sp-size 8 --seq-len 1M --host-ram 2000GiB --placement fsdp2",
    ),
}  # fmt: skip
# A line may stand behind a progress bar.
POLICY = re.compile(r"hfpatch: \d+ x [\d,]+ tokens: (.*?)(?:; [\w ]*[\d.]+ of .*)?$", re.MULTILINE)


def planned(words: str) -> dict:
    run = [sys.executable, "-W", "ignore", "-m", "hfpatch", "plan", *words.split(), "--json"]
    return json.loads(
        subprocess.run(run, capture_output=True, check=True, text=True, cwd=ROOT).stdout
    )


def row(walk: str) -> dict:
    from tests.dry.conftest import HERE, command, environment

    card, host, words = WALKS[walk]
    env = environment(DRY_MEM_MIB=card, HFPATCH_HOST_MEMORY=host * GiB)
    if walk == "ranks":  # the positions of a million tokens arrive
        env["DRY_COPY_MAX"] = str(8 << 20)
    with TemporaryDirectory() as folder:
        run = subprocess.run(
            command(str(HERE / "program.py"), __file__, walk, folder), env=env, cwd=ROOT,
            capture_output=True, text=True, timeout=900,
        )  # fmt: skip
    said = run.stdout + run.stderr
    assert run.returncode == 0, said[-4000:]
    peaks = next(json.loads(x) for x in run.stdout.splitlines() if x.startswith('{"peaks"'))[
        "peaks"
    ]
    plan = planned(words)
    beside = (plan["gpu"]["peak_bytes"] - plan["gpu"]["parts"]["slack"]) / GiB
    return {
        "walk": walk, "planned_gib": f"{beside:.1f}", "first_step_gib": f"{peaks[0]:.1f}",
        "last_step_gib": f"{peaks[-1]:.1f}", "highest_gib": f"{max(peaks):.1f}",
        "planned_untiled": plan["policy"]["plain"], "planned_tile": plan["policy"]["tile"],
        "policy": POLICY.findall(said)[-1],
    }  # fmt: skip


# --- on the dry device ----------------------------------------------------------------------------


def made_folder(folder: Path) -> str:
    """A folder with the configuration and a tokenizer of few words; the weights are random ones,
    made on the device."""
    import torch
    import trainers_worker
    from transformers import AutoConfig, LlamaForCausalLM

    from hfpatch.lab.made import config_of, model_of

    config_of("llama-3.1-8b", {}).save_pretrained(folder / "model")
    trainers_worker.tokenizer().save_pretrained(folder / "model")

    def made(kind, name, *args, config=None, **options):
        return model_of(config or AutoConfig.from_pretrained(name), "cuda", torch.bfloat16)

    LlamaForCausalLM.from_pretrained = classmethod(made)
    return str(folder / "model")


def peaks_of_steps() -> list[float]:
    """GiB of each step of a trainer, once it has run."""
    import hfpatch

    found, real = [], hfpatch.Callback.on_step_end

    def ends(self, *args, **kwargs):
        real(self, *args, **kwargs)
        note_peak(found)

    hfpatch.Callback.on_step_end = ends
    return found


def note_peak(found: list[float]) -> None:
    import torch

    found.append(torch.cuda.max_memory_allocated() / GiB)
    torch.cuda.reset_peak_memory_stats()


def full(folder: Path) -> list[float]:
    from hfpatch.cli.main import main
    from hfpatch.trainer.trainer import Trainer

    Trainer.save_model = lambda *_: None  # 15 GiB
    data = folder / "data.jsonl"
    text = json.dumps({"text": " ".join(f"w{i % 100}" for i in range(131072))})
    data.write_text("\n".join([text] * (2 * STEPS + 1)))
    found = peaks_of_steps()
    main(
        f"train {READY} --model {made_folder(folder)} --data {data} --max_steps {STEPS} "
        f"--gradient_accumulation_steps 2 --output_dir {folder}/out --save_strategy no "
        "--logging_steps 1 --report_to none --nan_steps 0".split()
    )
    return found


def lora(folder: Path) -> list[float]:
    import trainers_worker
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    import hfpatch

    ids = [{"input_ids": r["input_ids"]} for r in trainers_worker.rows(2 * STEPS, 65536)]
    found = peaks_of_steps()
    SFTTrainer(
        model=made_folder(folder),
        args=SFTConfig(
            f"{folder}/out", max_length=65536, packing=True, max_steps=STEPS,
            gradient_accumulation_steps=2, model_init_kwargs={"dtype": "bfloat16"},
            **trainers_worker.COMMON,
        ),
        peft_config=LoraConfig(r=16, target_modules="all-linear"),
        train_dataset=Dataset.from_list(ids),
        callbacks=[hfpatch.Callback(apply=True)],
    ).train()  # fmt: skip
    return found


def ranks(folder: Path) -> list[float]:
    import steps
    import torch

    import hfpatch
    from hfpatch.context.ranks import sharded
    from hfpatch.lab.made import config_of, model_of
    from hfpatch.lab.simulate.sequence import LoneRank

    class Rank(LoneRank):
        def whole(self, *xs):
            """On the host: nothing is computed on the device."""
            return [x.cuda() for x in super().whole(*(x.cpu() for x in xs))]

    tokens, found = 1 << 17, []
    model = model_of(config_of("llama-3.1-8b", {}, 8 * tokens), "cuda", torch.float32)
    hfpatch.apply(model)
    steps.sharded(model, 8)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    positions = torch.arange(tokens)[None].cuda()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(STEPS):
        ids = torch.randint(3, 90, (1, tokens)).cuda()
        with sharded(Rank(8)):
            model(ids, labels=ids, position_ids=positions, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        note_peak(found)
    return found


def main() -> None:
    if len(sys.argv) == 3:
        walk, folder = sys.argv[1:]
        found = {"full": full, "lora": lora, "ranks": ranks}[walk](Path(folder))
        print("\n" + json.dumps({"peaks": found}))
        return
    rows = {}
    if TABLE.exists():
        with TABLE.open() as file:
            rows = {one["walk"]: one for one in csv.DictReader(file)}
    for walk in sys.argv[1:] or WALKS:
        rows[walk] = row(walk)
        print(rows[walk], flush=True)
    with TABLE.open("w", newline="") as file:
        table = csv.DictWriter(file, list(next(iter(rows.values()))), lineterminator="\n")
        table.writeheader()
        table.writerows(rows.values())


if __name__ == "__main__":
    main()
