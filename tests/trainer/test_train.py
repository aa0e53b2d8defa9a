"""scripts/train.py end to end on a tiny Llama: what it logs, saves, resumes and stops at."""

import os
import re
import subprocess

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from workbench import JSON_SOURCES, history

LOSSES = ("loss", "eval_loss")


def losses(folder):
    return [
        (entry["step"], entry[name])
        for entry in history(folder)
        for name in LOSSES
        if name in entry
    ]


def test_trains_evaluates_saves_and_says_so(run_train):
    flags = {
        "max_steps": 30,
        "validation_split": 0.2,
        "eval_on_start": True,
        "save_strategy": "steps",
        "save_steps": 30,
    }
    code, out, err, folder = run_train(**flags)
    assert code == 0, err
    before, after = map(
        float, re.search(r"([\d.]+) before, ([\d.]+) after, in nats a byte", out).groups()
    )
    assert after < before - 0.3
    assert re.search(
        r"train: 4 documents of ([\d,]+) tokens; \1 tokens, 9\d\.\d% of them labels, in .*packing fill (99|100)",
        out,
    )
    assert re.search(r"30 steps, total training time 0:\d\d:\d\d", out)
    assert "LlamaRMSNorm" in err, "apply's report"
    lines = [entry for entry in history(folder) if "loss" in entry]
    wanted = {"loss", "grad_norm", "learning_rate", "tokens_per_second", "peak_host_gib"}
    # of a CPU
    assert len(lines) == 30 and all(
        wanted <= entry.keys() and "mfu" not in entry for entry in lines
    )
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    prompt = tokenizer("import", return_tensors="pt")
    text = tokenizer.decode(model.generate(**prompt, max_new_tokens=8, do_sample=False)[0])
    assert len(text) > len("import")
    assert not list(folder.glob("pytorch_model*")), "safetensors alone"


def test_impls_agree_and_padding_runs_too(run_train):
    found = {}
    for impl in ("hf", "hfpatch"):
        flags = {
            "impl": impl,
            "packing": False,
            "max_steps": 4,
            "save_strategy": "steps",
            "save_steps": 4,
            "pad_multiple": 8,
        }
        code, _, err, folder = run_train(impl, **flags)
        assert code == 0, err
        found[impl] = [loss for _, loss in losses(folder)]
    assert found["hfpatch"] == pytest.approx(found["hf"], rel=1e-5)


@pytest.mark.parametrize("streaming", [False, True])
def test_resume_in_the_middle_of_an_epoch_is_bit_equal(run_train, streaming):
    flags = {
        "max_steps": 6, "save_strategy": "steps", "save_steps": 3, "gradient_accumulation_steps": 2,
        "seed": 3,
        "streaming": streaming, "warmup_steps": 2, **({"shuffle_buffer": 20} if streaming else {}),
    }  # fmt: skip
    assert run_train("whole", **flags)[0] == 0
    code, _, err, folder = run_train("parts", **flags)
    for late in ("checkpoint-6", "model.safetensors"):
        path = folder / late
        subprocess.run(["rm", "-r", str(path)], check=True)
    code, _, err, _ = run_train("parts", "--resume_from_checkpoint", "True", **flags)
    assert code == 0, err
    whole = folder.parent / "whole"
    assert losses(folder) == losses(whole) and len(losses(whole)) == 6
    ours, theirs = load_file(folder / "model.safetensors"), load_file(whole / "model.safetensors")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_stream_is_not_resumed_over_a_file_that_changed(run_train, tmp_path):
    """Refused in a sentence; a new time alone, as of data copied to another machine, is no change."""
    data = tmp_path / "rows"
    data.mkdir()
    for name in ("a", "b"):
        (data / f"{name}.txt").write_text(f"{name} and {name} again. " * 8000)
    flags = {
        "data": data, "data_glob": None, "streaming": True, "max_steps": 4, "save_steps": 2,
        "save_strategy": "steps",
    }  # fmt: skip
    assert run_train("stream", **flags)[0] == 0
    os.utime(data / "a.txt", (1, 1))
    resumed = ("--resume_from_checkpoint", "True")
    flags["max_steps"] = 5
    code, out, err, _ = run_train("stream", *resumed, **flags)
    assert code == 0 and "resuming from" in out, err
    text = (data / "b.txt").read_text()
    for changed in (text + "More.", text[:-1] + "!", "B" + text[1:]):
        (data / "b.txt").write_text(changed)
        code, out, err, _ = run_train("stream", *resumed, **flags)
        assert code == 2 and "does not match this run: data " in err, out + err
        assert len(err.strip().splitlines()) == 1


def test_early_stopping_with_patience_and_delta(run_train):
    flags = {
        "max_steps": 20, "validation_split": 0.2, "eval_strategy": "steps", "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2, "early_stopping_patience": 2,
    }  # fmt: skip
    code, out, _, folder = run_train("delta", **flags, early_stopping_delta=100.0)
    assert code == 0 and "6 steps, total" in out, (
        "the first evaluation counts, the next two do not improve by 100"
    )
    code, out, _, folder = run_train(
        "still", **flags, learning_rate=1e-3, load_best_model_at_end=True
    )
    assert code == 0 and "20 steps, total" in out, "it improves all the way"


def test_evaluation_is_the_mean_over_tokens(run_train):
    """Lines of different length one by one: a mean over batches is another number than over all of
    them at once.
    """
    flags = {
        "packing": False,
        "max_steps": 1,
        "validation_split": 0.2,
        "text_unit": "line",
        "learning_rate": 1e-30,
    }
    found = []
    for size in (1, 8, 64):
        code, _, err, folder = run_train(
            f"eval{size}", **flags | {"per_device_eval_batch_size": size}
        )
        assert code == 0, err
        found += [entry["eval_loss"] for entry in history(folder) if "eval_loss" in entry]
    assert found[1:] == pytest.approx(found[:1] * 2, rel=1e-6)


def test_adapters_of_a_saved_model_begin_alike_in_each_run(run_train):
    """Ranks that share a weight each make its adapters."""
    _, _, _, model = run_train("model", max_steps=1)
    made = []
    for seed in (3, 4):
        torch.manual_seed(seed)  # as far as the process has come
        flags = {"lora_r": 4, "max_steps": 1, "model": model, "config_overrides": None}
        _, _, _, folder = run_train(f"lora-{seed}", **flags)
        made.append(load_file(folder / "adapter_model.safetensors"))
    assert all(torch.equal(made[1][name], weight) for name, weight in made[0].items())


def test_lora_trains_and_saves_adapters_alone(run_train):
    code, _, err, folder = run_train("lora", lora_r=4, save_strategy="steps", save_steps=6)
    assert code == 0, err
    names = set(load_file(folder / "adapter_model.safetensors"))
    assert (
        names
        and all("lora_" in name for name in names)
        and not (folder / "model.safetensors").exists()
    )
    assert any("down_proj" in name for name in names) and not any(
        "lm_head" in name for name in names
    )
    assert [loss for _, loss in losses(folder)][-1] < [loss for _, loss in losses(folder)][0]
    code, _, err, _ = run_train("lora", "--resume_from_checkpoint", "True", lora_r=8)
    assert code == 2 and "lora_r 4 there, 8 here" in err


def test_model_from_a_folder_with_chat_and_a_template_file(
    run_train, chat_file, tmp_path, tokenizer
):
    assert run_train("base", max_steps=1)[0] == 0
    stripped = AutoTokenizer.from_pretrained(tmp_path / "base")
    stripped.chat_template = None
    stripped.save_pretrained(tmp_path / "plain")
    template = tmp_path / "chat.jinja"
    template.write_text(tokenizer.chat_template)
    flags = {
        "config_overrides": None, "model": tmp_path / "base", "tokenizer": tmp_path / "plain",
        "data": chat_file, "data_glob": None, "seq_len": 128,
    }  # fmt: skip
    code, _, err, _ = run_train("no-template", **flags)
    assert code == 2 and "Give --chat_template FILE" in err
    code, out, err, folder = run_train("chat", **flags, chat_template=template)
    assert code == 0, err
    share = float(re.search(r"([\d.]+)% of them labels", out).group(1))
    assert 10 < share < 60
    assert (folder / "chat_template.jinja").read_text() == tokenizer.chat_template


def test_show_batch_prints_and_stops(run_train, chat_file):
    code, out, _, folder = run_train(
        "shown", data=chat_file, data_glob=None, show_batch=1, seq_len=128
    )
    assert code == 0 and not folder.exists()
    learned = re.findall(r"\x1b\[32m(.*?)\x1b\[0m", out)
    text = "".join(learned)
    assert "Yes!" in text and "It is" in text and "What" not in text and "Sure" not in text


def test_time_limit_stops_and_saves(run_train):
    code, out, err, folder = run_train(max_steps=100_000, time_limit=0.02)
    assert "of 100000 steps, stopped after 0.02 minutes (--time_limit), total" in out
    assert code == 0, err
    assert (
        0 < int(re.search(r"(\d+) of 100000 steps", out).group(1)) < 100_000
        and (folder / "model.safetensors").exists()
    )


def test_config_file_with_flags_over_it(run_train, tmp_path, saved_tokenizer):
    config = tmp_path / "run.yaml"
    config.write_text(
        "model: llama-tiny\nconfig_overrides: vocab_size=300\ntokenizer: "
        f"{saved_tokenizer}\ndata: {JSON_SOURCES}\n"
        "data-glob: '*.py'\npacking: true\nmax_length: 32\nmax_steps: 50\nlearning_rate: 1e-2\n"
        "report_to: none\ndisable_tqdm: true\nuse_cpu: true\ncache_dir: "
        f"{tmp_path / 'cache'}\nsave_strategy: 'no'\n"
        f"output_dir: {tmp_path / 'run'}\n"
    )
    nothing = dict.fromkeys(
        "model config_overrides tokenizer data data_glob packing seq_len learning_rate report_to "
        "disable_tqdm use_cpu cache_dir save_strategy per_device_train_batch_size logging_steps".split()
    )
    code, out, err, _ = run_train("run", str(config), **nothing | {"max_steps": 2})
    assert code == 0 and "2 steps, total" in out, err
