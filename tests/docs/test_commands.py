"""What the site tells people to type, typed: at tiny size, without a GPU, a network or a hub."""

import dataclasses
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import warnings
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from blocks import PAGES, REASONS, ROOT, blocks
from transformers import TrainingArguments

import hfpatch
from hfpatch.cli.main import COMMANDS, main

# What the plain suite runs; `scripts/test.sh --docs` runs all.
PLAIN = (
    "docs/guides/keep.md:0", "docs/guides/lora.md:0", "docs/guides/packing.md:0",
    "docs/start/existing-script.md:1",
)  # fmt: skip
BLOCKS = {block.name: block for block in blocks()}
TINY = ["--max_steps", "2", "--use_cpu", "true", "--report_to", "none", "--disable_tqdm", "true",
        "--per_device_train_batch_size", "1", "--seq-len", "64", "--save_steps", "1",
        "--config_overrides", "num_hidden_layers=1,hidden_size=64,intermediate_size=64"]  # fmt: skip


def test_blocks_are_found_and_their_reasons_known():
    assert len(BLOCKS) > 40 and set(PLAIN) <= set(BLOCKS)
    assert {block.reason for block in BLOCKS.values()} <= {"", *REASONS}
    assert len([b for b in BLOCKS.values() if not b.reason]) > 25


@cache
def helps() -> str:
    """The site's page of all commands."""
    return runpy.run_path(str(ROOT / "scripts/docs.py"))["cli"]()


@pytest.mark.parametrize("name", BLOCKS)
def test_commands_name_what_there_is(name):
    """Commands of every block, whether it runs or not: each is a command, each flag is one."""
    block = BLOCKS[name]
    for line in block.commands if block.language == "bash" else ():
        words = shlex.split(line, comments=True)
        if words[:1] == ["hfpatch"] and words[1] != "run":
            assert words[1] in COMMANDS, line
            page = helps()
            help_text = page[page.index(f"## hfpatch {words[1]}\n") :]
            for word in words[2:]:
                flag = word.partition("=")[0]
                theirs = {f"--{field.name}" for field in dataclasses.fields(TrainingArguments)}
                # train's page has each flag with underscores, and both spellings work.
                spellings = {flag, "--" + flag[2:].replace("-", "_")}
                known = any(one in help_text or one in theirs for one in spellings)
                assert not flag.startswith("--") or known, line


# A reader's own script, which knows nothing of hfpatch.
TRAIN = """
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
args.max_steps, args.report_to, args.use_cpu = 1, [], True
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                     num_attention_heads=2)
data = [{"input_ids": list(range(64)), "labels": list(range(64))}] * 8
Trainer(LlamaForCausalLM(config), args, train_dataset=data).train()
print("trained")
"""


@pytest.fixture(scope="session")
def place(tmp_path_factory) -> Path:
    """A folder as a reader's: data, a tiny model under the name of a large one, the repository's
    files.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("docs")
    texts = sorted((Path(sysconfig.get_path("stdlib")) / "json").glob("*.py"))
    for name in ("my_texts", "books"):
        (folder / name).mkdir()
        for file in texts:
            shutil.copy(file, folder / name / f"{file.stem}.txt")
    (folder / "train.py").write_text(TRAIN)
    for name in ("scripts", "ds_configs", "fsdp_configs"):
        (folder / name).symlink_to(ROOT / name)
    model = folder / "meta-llama" / "Llama-3.1-8B"
    config = LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(model)
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    made.train_from_iterator([file.read_text() for file in texts], trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>"
    ).save_pretrained(model)
    return folder


def marked(name: str):
    block = BLOCKS[name]
    return pytest.param(name, marks=[] if name in PLAIN else pytest.mark.docs, id=block.name)


@pytest.mark.parametrize("name", [marked(name) for name, b in BLOCKS.items() if not b.reason])
@pytest.mark.filterwarnings("ignore")  # of the stack's libraries about each other
def test_a_block_runs(name, place, monkeypatch, capfd):
    block = BLOCKS[name]
    monkeypatch.chdir(place)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if block.language == "python":
        with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
            warnings.simplefilter("ignore")
            exec(compile(block.text, block.name, "exec"), {"__name__": "docs"})
        return
    for line in block.commands:
        words = shlex.split(line, comments=True)
        if words[0] == "hfpatch":
            tiny = TINY if words[1] == "train" else []
            assert main([*words[1:], *tiny]) in (0, 3), line
        else:
            variables = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path()}
            done = subprocess.run(["bash", "-c", line], capture_output=True, text=True,
                                  env=variables)  # fmt: skip
            assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
            print(done.stdout)
    assert capfd.readouterr().out.strip()


def path() -> str:
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


@pytest.mark.docs
def test_answers_on_pages_are_those_of_the_commands(capsys):
    """The plan that the page explains line by line, the first line of the QLoRA page, and lines of
    README's.
    """
    for page, kept in (("docs/guides/plan.md", None), ("docs/guides/lora.md", 1), ("README.md", 0)):
        text = (ROOT / page).read_text()
        command, answer = text.split("```bash\nhfpatch plan", 1)[1].split("```", 1)
        answer = answer.split("```text\n", 1)[1].split("```", 1)[0].splitlines()
        assert main(["plan", *shlex.split(command)]) == 0
        out = capsys.readouterr().out.splitlines()
        assert answer == ([line for line in out if line in answer] if kept == 0 else out[:kept])


@pytest.mark.skipif(torch.cuda.is_available(), reason="the report of a CPU")
@pytest.mark.filterwarnings("ignore")  # of the stack's libraries about each other
@pytest.mark.parametrize("page", ["docs/start/first-run.md"])
def test_a_printed_report_is_that_of_the_script_above_it(page, tmp_path, monkeypatch, capsys):
    text = (ROOT / page).read_text()
    script = next(
        b.text for b in BLOCKS.values() if b.name.startswith(page) and "made text" in b.text
    )
    printed = text.split(script)[1].split("```text\n", 1)[1].split("```", 1)[0].splitlines()
    monkeypatch.chdir(tmp_path)
    script = script.replace("max_steps=40", "max_steps=1").replace("_steps=10", "_steps=1")
    exec(compile(script, page, "exec"), {"__name__": "docs"})
    out = capsys.readouterr().out.splitlines()
    report = [line for line in printed if not line.startswith("{")]
    assert len(report) == 10 and out[: len(report)] == report
    keys = {word for line in printed if line.startswith("{") for word in line.split("'")[1::4]}
    assert all(key in "\n".join(out) for key in keys), "what a log line holds"


def test_commands_are_in_fences():
    """What is indented only, the tests above do not see."""
    for page in PAGES:
        text = re.sub(r"(?ms)^ *```.*?^ *```", "", page.read_text())
        assert not re.search(r"(?m)^    +(hfpatch|pip|python|bash|accelerate) ", text), page


def test_configs_in_yaml_name_what_there_is():
    text = (ROOT / "docs/guides/lora.md").read_text()
    assert "hfpatch.trainer.plugins.axolotl.HFPatchPlugin" in text
    assert (ROOT / "hfpatch/trainer/plugins/axolotl.py").read_text().count("class HFPatchPlugin")
    assert json.dumps(text)  # no stray surrogates


class _Seen(Exception):
    """Raised in place of training, with the trainer."""


@pytest.mark.parametrize("index, length", [(0, 131072), (1, 65536)])
@pytest.mark.filterwarnings("ignore")  # of the stack's libraries about each other
def test_a_snippet_of_the_first_page_trains_what_stands_beside_it(
    index, length, place, monkeypatch
):
    """Rows of one sequence, bfloat16 weights, and the stated length, read from the trainer that the
    snippet makes: of a tiny model under the name of the large one.
    """
    import transformers
    import trl
    from datasets import Dataset
    from peft import LoraConfig

    monkeypatch.chdir(place)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def seen(self, *_, **__):
        raise _Seen(self)

    monkeypatch.setattr(transformers.Trainer, "train", seen)
    rows = [{"input_ids": list(range(64)), "labels": list(range(64))}] * 16
    names = {"SFTTrainer": trl.SFTTrainer, "LoraConfig": LoraConfig}
    names["SFTConfig"] = partial(trl.SFTConfig, use_cpu=True)
    names |= {"torch": torch, "hfpatch": hfpatch}
    for name in ("AutoModelForCausalLM", "Trainer", "TrainingArguments"):
        names[name] = getattr(transformers, name)
    names["data"] = Dataset.from_list(rows)
    fragments = [b for n, b in BLOCKS.items() if n.startswith("README") and b.reason == "fragment"]
    with pytest.raises(_Seen) as caught:
        exec(compile(fragments[index].text, "README.md", "exec"), names)
    (trainer,) = caught.value.args
    assert trainer.args.per_device_train_batch_size == 1
    assert next(trainer.model.parameters()).dtype == torch.bfloat16
    assert f"{length:,}" in fragments[index].text or f"max_length={length}" in fragments[index].text
    if index:
        assert trainer.args.max_length == length
    batch = next(iter(trainer.get_train_dataloader()))
    assert batch["input_ids"].shape[0] == 1
