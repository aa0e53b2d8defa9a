"""A run is one file, which plan, profile and train read alike."""

import json

import pytest

from hfpatch.cli.main import main
from hfpatch.trainer import arguments, run_file

READY = sorted(path.name for path in run_file.READY.glob("*.yaml"))
SHORT = ("qwen3-8b-qlora-24g.yaml",)
SLOW = [n if n in SHORT else pytest.param(n, marks=pytest.mark.long) for n in READY]


def planned(capsys, *words) -> dict:
    assert main(["plan", *words, "--json"]) in (0, 3)
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", SLOW)
def test_a_ready_file_fits_its_card(name, capsys):
    found = planned(capsys, name)
    assert found["fits"] and found["host"]["peak_bytes"] <= found["host"]["usable_bytes"]
    assert f"{found['run']['gpu'][:2]}g.yaml" in name


@pytest.mark.parametrize("name", READY)
def test_train_runs_what_a_ready_file_plans(name):
    model, data, args = arguments.parse([name, "--data", "my.jsonl", "--use_cpu"])
    words = run_file.words(name, run_file.FLAGS.values())
    said = dict(zip(words[::2], words[1::2]))
    assert (model.model, str(data.seq_len)) == (said["--model"], said["--seq-len"])
    assert args.per_device_train_batch_size == 1 and args.gradient_accumulation_steps == 8
    assert str(model.lora_r) == said.get("--lora-r", "0")
    assert model.load_in_4bit == (said.get("--base") == "4bit")
    assert (model.placement or "auto") == said.get("--placement", "auto")


def test_a_flag_wins_over_the_file_and_a_model_needs_no_flag(tmp_path, capsys):
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: llama-tiny\nmax_length: 131,072\nper_device_train_batch_size: 2\ngpu: a10g\n"
        "checkpointing: [host, tile=4k]\nlearning_rate: 1e-5\ndataset_text_field: text\n"
    )
    found = planned(capsys, str(file))
    assert [found["run"][name] for name in ("seq_len", "batch", "gpu")] == [131072, 2, "a10g"]
    assert found["policy"]["tile"] == 4096 and found["policy"]["offload"] == "host"
    assert found["run"]["positions"] == 4096, "which a plan compares with the sequence"
    file.write_text(file.read_text() + "rope_scaling: {rope_type: yarn, factor: 32.0}\n")
    assert planned(capsys, str(file))["run"]["positions"] is None, "the run extends them"
    assert planned(capsys, str(file), "--seq-len", "8k")["run"]["seq_len"] == 8192
    assert planned(
        capsys, *"llama-tiny --max_length 8k --lora_r 8 --load_in_4bit --engine auto".split()
    ) == planned(capsys, *"llama-tiny --seq-len 8k --lora-r 8 --base 4bit --placement auto".split())


@pytest.mark.parametrize("text, words", [
    ("model: llama-tiny\nseq_le: 8k\n", "unknown key 'seq_le'. Did you mean seq_len?"),
    ("model: llama-tiny\ndat: my.jsonl\n", "unknown key 'dat'. Did you mean data?"),
    ("- model\n", "must hold keys and values"), ("a: [", "must be YAML"),
    ("seq_len: 8k\n", "--model is missing"),
])  # fmt: skip
def test_a_file_that_is_none_is_one_sentence(text, words, tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(text)
    assert main(["plan", str(tmp_path / "run.yaml")]) == 2
    assert words in capsys.readouterr().err
    assert main(["plan", "lama-3.1-8b-lora-24g.yaml"]) == 2
    assert "Did you mean llama-3.1-8b-lora-24g.yaml?" in capsys.readouterr().err
