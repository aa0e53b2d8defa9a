"""Bad input: one sentence, exit code 2, before a model is loaded, and nothing written or
overwritten.
"""

import re
from types import SimpleNamespace
from unittest import mock

import pytest
from transformers.integrations import integration_utils

import hfpatch.trainer.loading
from hfpatch.lab.hardware import GPUS
from hfpatch.trainer import arguments, checks, data


@pytest.fixture
def refused(run_train, monkeypatch):
    """refused(words, **flags): train.py refuses with these words, having loaded no model and made
    no folder.
    """

    def check(words, *extra, name="refused", **flags):
        def loaded(*args, **kwargs):
            raise AssertionError("a model was loaded before the refusal")

        monkeypatch.setattr(hfpatch.trainer.loading, "load_model", loaded)
        code, out, err, folder = run_train(name, *extra, **flags)
        lines = re.sub(
            r"hfpatch: [a-z ]+, \d+ s\n", "", err
        ).splitlines()  # what takes long is said
        sentences = [line for line in lines if line.startswith("hfpatch:")]
        assert (
            code == 2
            and len(sentences) == 1
            and words in sentences[0]
            and sentences[0].endswith((".", ")", "?"))
        ), err
        if name == "refused":
            assert not folder.exists(), "nothing is written"
        return folder

    return check


FLASH = "flash_attention_2"  # no machine without a GPU has it


@pytest.mark.parametrize(
    "words, flags",
    [
        ("--model is missing", {"model": None, "config_overrides": None}),
        ("works with a preset only, got --model x", {"model": "x"}),
        ("is no file or folder here", {"data": "/nowhere/data.jsonl"}),
        ("none.txt is no file or folder here. Check the path", {"data": "none.txt"}),
        (
            "its config.json could not be fetched",
            {"model": "nobody/nothing", "config_overrides": None},
        ),
        ("no tokenizer loads", {"tokenizer": "/nowhere/tokenizer"}),
        ("must be at most the model's 4096 positions", {"seq_len": 5000}),
        ("no placement 'zero9'", {"engine": "zero9"}),
        ("no placement 'nowhere.json'", {"deepspeed": "nowhere.json"}),
        ("cannot set 'hidden': LlamaConfig has no such size", {"config_overrides": "hidden=3"}),
        (
            "the tokenizer must have at most 299 tokens",
            {"config_overrides": "vocab_size=299"},
        ),
        ("--impl liger needs a GPU", {"impl": "liger"}),
        ("flash_attention_2 needs flash-attn", {"attn_implementation": FLASH}),
        ("both patch the model", {"use_liger_kernel": True}),
        ("--gradient_checkpointing and hfpatch", {"gradient_checkpointing": True}),
        ("works with --impl hfpatch only", {"impl": "hf", "checkpointing": "tile=64"}),
        ('checkpointing "off" takes no fields', {"checkpointing": ["off", "tile=64"]}),
        ("offload twice, got 'gpu' and 'host'", {"checkpointing": ["gpu", "host"]}),
        ("--shuffle_buffer works with --streaming", {"shuffle_buffer": 5}),
        ("--eval_split works with --eval_data", {"eval_split": "test"}),
        (
            "--early_stopping_delta works with --early_stopping_patience",
            {"early_stopping_delta": 0.1},
        ),
        ("--lora_alpha works with --lora_r", {"lora_alpha": 8}),
        (
            "--bnb_4bit_quant_type works with --load_in_4bit",
            {"bnb_4bit_quant_type": "fp4", "lora_r": 4},
        ),
        (
            "every must be \"auto\" or a positive number of layers, got 'many'",
            {"checkpointing": "every=many"},
        ),
        ("--eval_strategy needs --eval_data", {"eval_strategy": "steps", "eval_steps": 1}),
        ("needs --eval_strategy", {"early_stopping_patience": 1, "validation_split": 0.2}),
        ("--streaming needs --max_steps", {"streaming": True, "max_steps": None}),
        ("--validation_split and --streaming cannot", {"streaming": True, "validation_split": 0.1}),
        ("no checkpoint", {"resume_from_checkpoint": True}),
        ("trainer_state.json is missing. Check the path", {"resume_from_checkpoint": "/nowhere"}),
        ("cannot be combined with --optim sgd", {"placement": "gpu8bit", "optim": "sgd"}),
        ("no placement 'gpu8bits'. Did you mean gpu8bit?", {"placement": "gpu8bits"}),
        (
            "--train_tokenizer must be 260",
            {"tokenizer": None, "train_tokenizer": 100, "config_overrides": None},
        ),
        ("--impl must be one of ", {"impl": "ours"}),
        ("cannot set 'to_dict'", {"config_overrides": "to_dict=3"}),
        ("cannot set 'model_type'", {"config_overrides": "model_type=bert"}),
        (
            "cannot set 'pad_token_id': the tokenizer decides it",
            {"config_overrides": "pad_token_id=999"},
        ),
        (
            "cannot set 'vocab_size': the tokenizer decides it",
            {"config_overrides": "vocab_size=9", "tokenizer": None, "train_tokenizer": 300},
        ),
        (
            "cannot set 'num_hidden_layer': LlamaConfig has no such size. Leave it out. Did you "
            "mean num_hidden_layers?",
            {"config_overrides": "num_hidden_layer=2"},
        ),
        ("num_attention_heads must be a whole", {"config_overrides": "num_attention_heads=0"}),
        ("from 'llama-tiny': Validation error", {"config_overrides": "rms_norm_eps=x"}),
        ("cannot set 'dtype'", {"config_overrides": "dtype=bfloat16"}),
        ("--eval_on_start needs --eval_data", {"eval_on_start": True}),
        ("--metric_for_best_model needs --eval_data", {"metric_for_best_model": "loss"}),
        ("--save_strategy best needs --eval_data", {"save_strategy": "best"}),
        (
            "--save_strategy best needs --eval_strategy",
            {"save_strategy": "best", "validation_split": 0.2, "metric_for_best_model": "loss"},
        ),
        (
            "--load_best_model_at_end needs --eval_data",
            {"load_best_model_at_end": True, "save_strategy": "no"},
        ),
        (
            "found - Evaluation strategy",
            {"load_best_model_at_end": True, "save_strategy": "steps"},
        ),
        (
            "--dataloader_persistent_workers works with --dataloader_num_workers",
            {"dataloader_persistent_workers": True},
        ),
        (
            "--optim_args works with another optimizer than adamw_torch",
            {"optim_args": "bf16_stochastic_round=True"},
        ),
        ("--cache_dir has no value", {"cache_dir": ""}),
        ("--pad_multiple must be", {"pad_multiple": 2**31 - 1}),
        ("--learning_rate must be more than 0, got 0", {"learning_rate": 0.0}),
        (
            "--dataloader_prefetch_factor must be",
            {"dataloader_prefetch_factor": 2**31 - 1, "dataloader_num_workers": 1},
        ),
        (
            "--dataloader_num_workers must be",
            {"dataloader_num_workers": 100000},
        ),
    ],
)
def test_contradictions_and_what_is_missing(refused, words, flags):
    if words == "no checkpoint":
        words = "there is no whole checkpoint in"
    refused(words, **flags)


def test_unknown_flag_and_key(refused, tmp_path):
    refused("unknown flag '--learning_rat'. Did you mean --learning_rate", "--learning_rat", "1")
    refused("unknown flag '--max_lenght=1'. Did you mean --max_length", "--max_lenght=1")
    tokens = "a length must be tokens such as 8192, 128k or 1M, got '0'. Write such a number. See"
    refused(f"--seq_len: {tokens}", "--seq-len", "0")
    (tmp_path / "run.json").write_text('{"a": 1,}')
    refused("unknown key 'a'", str(tmp_path / "run.json"))
    refused("cannot be read", str(tmp_path / "none.yaml"))
    refused("the first argument must be a flag or a config file", "train")


@pytest.mark.parametrize(
    "content, words",
    [
        ("", "there are no rows"),
        ('{"text": "a"\n', "all 1 rows are malformed"),
        ('{"body": "a"}\n', "a row needs a column 'text'"),
        ('{"instruction": "a", "output": "b"}\n', "rename Alpaca's"),
        ('{"prompt": "a", "chosen": "b", "rejected": "c"}\n', "hfpatch run trl dpo"),
        (
            '{"prompt": "a very long prompt that fills the whole row of tokens", "completion": '
            '"a"}\n',
            "has a label left",
        ),
    ],
)
def test_data_without_a_row_to_learn(refused, tmp_path, content, words):
    file = tmp_path / "data.jsonl"
    file.write_text(content)
    refused(words, data=file, data_glob=None, long_rows="truncate", seq_len=16)


def test_a_reporter_that_is_missing_is_named_before_tokenizing(refused, monkeypatch):
    monkeypatch.setattr(integration_utils, "is_wandb_available", lambda: False)
    monkeypatch.setattr(data, "load_data", lambda *args, **kwargs: pytest.fail("tokenized"))
    refused("--report_to wandb: WandbCallback requires wandb", report_to="wandb")


@pytest.mark.parametrize("words, kind, settings", [
    ("got 0 from", "cosine_with_min_lr", '{"min_lr": NaN}'),
    ("got -0.", "polynomial", '{"lr_end": -1}'),
    ("ZeroDivisionError", "polynomial", '{"power": -1}'),
    ("'nothing'", "cosine", '{"nothing": 1}'),
    ("num_decay_steps", "warmup_stable_decay", "{}"),
])  # fmt: skip
def test_a_schedule_that_does_not_train_is_refused(refused, words, kind, settings):
    refused(words, lr_scheduler_type=kind, lr_scheduler_kwargs=settings)


@pytest.mark.parametrize("words, flags", [
    ("warm-up of 10 steps is longer than the 4", {"warmup_steps": 10}),
    ("decay of 10 steps is longer than the 3", {"warmup_steps": 1, "lr_scheduler_kwargs":
     '{"num_decay_steps": 10}'}),
    ("stable part of 9 steps is longer than the 3", {"warmup_steps": 1, "lr_scheduler_kwargs":
     '{"num_decay_steps": 1, "num_stable_steps": 9}'}),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:Both num_training_steps and num_stable_steps")
def test_what_is_longer_than_the_run_is_said(run_train, words, flags):
    flags = {"lr_scheduler_type": "warmup_stable_decay" if len(flags) > 1 else "linear"} | flags
    code, out, err, _ = run_train(max_steps=4, **flags)
    assert code == 0 and words in out, err


def test_strict_stops_at_the_first_malformed_row(refused, tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_text('{"text": "a = 1"}\n{"text": \n')
    refused(f"{file}:2: not JSON", data=file, data_glob=None, strict=True)


@pytest.mark.long
def test_a_run_is_planned_before_its_weights_load(refused, monkeypatch, capsys):
    """llama-3.2-1b at 128k in bf16 on 80 GB: stock's activations do not fit, hfpatch's do."""
    monkeypatch.setattr("hfpatch.trainer.footprint.this_gpu", lambda args: GPUS["a100-80gb"])
    monkeypatch.setattr("hfpatch.trainer.footprint.host_limit", lambda: 200 << 30)
    flags = {"model": "llama-3.2-1b", "config_overrides": None, "dtype": "bfloat16",
             "seq_len": 131072,
             "per_device_train_batch_size": 1}  # fmt: skip
    refused("of 79.0 GiB on the GPU", **flags, impl="hf", gradient_checkpointing=True)
    with pytest.raises(AssertionError, match="a model was loaded"):
        refused("", **flags, placement="gpu8bit")
    said = [x for x in capsys.readouterr().out.splitlines() if x.startswith("hfpatch: planned: ")]
    assert len(said) == 3 and "131,072 tokens on a100-80gb (gpu8bit): fits" in said[0]
    monkeypatch.setattr("hfpatch.trainer.footprint.host_limit", lambda: 4 << 30)
    refused("of 3.6 GiB of host memory", **flags, checkpointing="host", placement="gpu8bit")


def test_ways_to_fit_are_flags_of_this_command(refused, monkeypatch):
    changes = "--gpu h200", "--lora-r 16 --base 4bit", "--gpus 4", "--batch 1", "--seq-len 4096"
    found = mock.Mock(fits=False, **{
        "gpu.peak_bytes": 1, "gpu.usable_bytes": 1, "host.peak_bytes": 1, "host.usable_bytes": 1,
        "advice.suggestions": [{"change": change} for change in changes],
    })  # fmt: skip
    monkeypatch.setattr("hfpatch.trainer.footprint.this_gpu", lambda args: GPUS["a100-80gb"])
    monkeypatch.setattr("hfpatch.trainer.footprint.plan", lambda *args, **kwargs: found)
    ways = "--lora-r 16 --load_in_4bit; --per_device_train_batch_size 1; --seq-len 4096."
    refused(f"for example by {ways}")


def test_a_model_larger_than_the_machine_is_refused_before_it_loads(refused, monkeypatch):
    """Linux kills the process without a word while weights are made or read."""
    monkeypatch.setattr("hfpatch.trainer.footprint.host_limit", lambda: 24 << 30)
    flags = {"model": "llama-3.1-8b", "config_overrides": None}
    refused("must fit this machine's 24.0 GiB, got 119.7 GiB", **flags)
    refused("got 29.9 GiB", **flags, placement="gpu8bit")
    with pytest.raises(AssertionError, match="a model was loaded"):
        refused("", **flags, dtype="bfloat16", lora_r=8)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")  # accelerate launch shards it
    with pytest.raises(AssertionError, match="a model was loaded"):
        refused("", **flags)


def test_a_model_that_cannot_be_planned_trains(refused, monkeypatch, capsys):
    """A line says why there is no plan."""

    def fails(*args, **kwargs):
        raise KeyError("layer_types")

    monkeypatch.setattr("hfpatch.trainer.footprint.this_gpu", lambda args: GPUS["a100-80gb"])
    monkeypatch.setattr("hfpatch.trainer.footprint.plan", fails)
    with pytest.raises(AssertionError, match="a model was loaded"):
        refused("")
    assert "hfpatch: not planned: KeyError: 'layer_types'" in capsys.readouterr().out


@pytest.mark.parametrize("error", [TypeError("in apply"), KeyError()])
def test_a_bug_keeps_its_error_inside_trainer(error):
    """What transformers raises for a flag is a sentence."""
    with pytest.raises(ValueError, match="^hfpatch: transformers does not take these flags"):
        with arguments.refusals():
            raise error
    with pytest.raises(type(error)), arguments.refusals():
        hfpatch.planner.limits.flag(mock.Mock(side_effect=error))("a")


def test_folder_of_another_run_is_left_alone(refused, run_train):
    code, _, err, folder = run_train("first", max_steps=2, save_strategy="steps", save_steps=2)
    assert code == 0, err
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    refused("holds another run (checkpoint-2)", name="first")
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*")} == before
    (folder.parent / "file").touch()
    refused("file, a file", name="file")


def test_checkpoint_that_does_not_match(refused, run_train, tmp_path):
    code, _, err, folder = run_train("first", max_steps=2, save_strategy="steps", save_steps=2)
    assert code == 0, err
    resume = ("--resume_from_checkpoint", "True")
    refused(
        "hidden_size 64 there, 32 here",
        *resume,
        name="first",
        config_overrides="vocab_size=300,hidden_size=32,head_dim=8",
    )
    refused("seq_len 32 there, 64 here", *resume, name="first", seq_len=64)
    refused("batch 2 there, 4 here", *resume, name="first", per_device_train_batch_size=4)
    refused("seed 42 there, 7 here", *resume, name="first", seed=7)
    refused("data ", *resume, name="first", data_glob="decoder.py")


def test_pickled_weights_load_only_when_asked(run_train, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    code, _, err, folder = run_train("first", max_steps=1)
    assert code == 0, err
    torch.save(
        AutoModelForCausalLM.from_pretrained(folder).state_dict(), folder / "pytorch_model.bin"
    )
    (folder / "model.safetensors").unlink()
    flags = {"config_overrides": None, "model": folder, "max_steps": 1}
    code, _, err, _ = run_train("second", **flags)
    assert (
        code == 2
        and "safetensors alone unless --allow_pickle" in err
        and not (tmp_path / "second").exists()
    )
    code, _, err, _ = run_train("third", **flags, allow_pickle=True)
    assert code == 0, err


def test_deepspeed_that_accelerate_left_out_is_refused():
    asked = SimpleNamespace(deepspeed="zero3.json")
    with pytest.raises(
        ValueError, match="and runs NO. Launch with `accelerate launch --use_deepspeed"
    ):
        checks.engine_is_on(asked, SimpleNamespace(distributed_type="DistributedType.NO"))
    checks.engine_is_on(asked, SimpleNamespace(distributed_type="DistributedType.DEEPSPEED"))
    checks.engine_is_on(
        SimpleNamespace(deepspeed=None), SimpleNamespace(distributed_type="DistributedType.NO")
    )


def test_fsdp_that_accelerate_left_out_is_refused(monkeypatch):
    """On a CPU, or under `accelerate launch --cpu`, accelerate shards nothing and says nothing."""
    alone, sharded = (
        SimpleNamespace(distributed_type=f"DistributedType.{kind}")
        for kind in ("MULTI_CPU", "FSDP")
    )
    asked, none = (
        SimpleNamespace(deepspeed=None, fsdp=True),
        SimpleNamespace(deepspeed=None, fsdp=None),
    )
    checks.engine_is_on(none, alone)
    with pytest.raises(
        ValueError, match="^hfpatch: accelerate must run FSDP.*, and runs MULTI_CPU: [^\n]*$"
    ):
        checks.engine_is_on(asked, alone)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match="^hfpatch: accelerate must run FSDP"):
        checks.engine_is_on(none, alone)
    checks.engine_is_on(none, sharded)


def test_processes_that_would_train_apart_are_refused(monkeypatch):
    """`accelerate launch --config_file fsdp2.yaml` without a GPU: each was told that the other
    writes to its folder.
    """
    for name, value in {
        "WORLD_SIZE": "2",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "localhost",
    }.items():
        monkeypatch.setenv(name, value)
    flags = SimpleNamespace(world_size=1, dataloader_num_workers=0)
    with pytest.raises(
        ValueError,
        match=(
            "^hfpatch: the 2 processes of this launch must train together, .*. Pass --use_cpu True and no "
            "engine, or launch"
        ),
    ):
        checks.flags(SimpleNamespace(), SimpleNamespace(), flags)


@pytest.mark.parametrize("saved, now", [("FSDP", "NO"), ("NO", "FSDP")])
def test_a_checkpoint_of_another_layout_is_refused(saved, now, tmp_path):
    """A single process is under no FSDP, whatever its flags say."""
    args = SimpleNamespace(deepspeed=None, world_size=1)
    (tmp_path / ("pytorch_model_fsdp_0" if saved == "FSDP" else "model.safetensors")).mkdir()
    checks.engine_is_on(
        args, SimpleNamespace(distributed_type=f"DistributedType.{saved}"), str(tmp_path)
    )
    with pytest.raises(
        ValueError,
        match="^hfpatch: .* was saved .* FSDP, and this run of 1 processes is .* it. Launch[^\n]*$",
    ):
        checks.engine_is_on(
            args, SimpleNamespace(distributed_type=f"DistributedType.{now}"), str(tmp_path)
        )
