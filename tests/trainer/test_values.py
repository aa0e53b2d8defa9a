"""Values of a YAML or JSON file mean what they mean behind their flags, and are refused as those
are.
"""

import json

import pytest

from hfpatch.trainer import arguments


@pytest.fixture
def read(tmp_path):
    """read(text, *argv, name=): what arguments.parse makes of a file with this text."""

    def parse(text, *argv, name="run.yaml"):
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        return arguments.parse([str(tmp_path / name), "--use_cpu", *argv])

    return parse


def test_yaml_values_are_the_flags_words(read, monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    model, data, args = read(
        "checkpointing: off\nsave_strategy: no\npacking: on\ndisable_tqdm: yes\nlearning_rate: "
        "1e-5\nmax-steps: 7\n"
        "resume_from_checkpoint: yes\ndata: [~/texts, 1.0, no]\ndata_exclude: []\ncache_dir: "
        "~/cache\nseed: 010\n"
        "lr_scheduler_kwargs: {min_lr: 1e-6}\ngradient_checkpointing_kwargs: {use_reentrant: no}\n",
        "--tokenizer=~/tok",
    )
    assert (model.checkpointing, args.save_strategy, data.packing, args.disable_tqdm) == (
        ["off"],
        "no",
        True,
        True,
    )
    assert (args.learning_rate, args.max_steps, args.resume_from_checkpoint, args.seed) == (
        1e-5,
        7,
        "true",
        10,
    )
    assert data.data == ["/home/somebody/texts", "1.0", "no"] and data.data_exclude == []
    assert data.cache_dir == "/home/somebody/cache" and model.tokenizer == "/home/somebody/tok"
    assert args.lr_scheduler_kwargs == {"min_lr": 1e-6}
    assert args.gradient_checkpointing_kwargs == {"use_reentrant": False}


def test_spellings_of_trl_mean_our_flags(read, monkeypatch):
    names = {"seq_len": ("seq-len", "seq_length", "max_length"),
             "text_field": ("dataset_text_field",),
             "chat_template": ("chat_template_path",),
             "pad_multiple": ("pad_to_multiple_of",)}  # fmt: skip
    for field, spellings in names.items():
        for spelling in spellings:
            in_file = read(f"{spelling}: 64\n")[1]
            assert str(getattr(in_file, field)) == "64", spelling
            for flag in (spelling, spelling.replace("_", "-")):
                typed = arguments.parse(["--use_cpu", f"--{flag}", "64"])[1]
                assert str(getattr(typed, field)) == "64", flag
    assert read("max_length: 2k\n", "--seq-len", "1k")[1].seq_len == 1024, "the flag wins"


def test_json_values_and_flags_that_win(read):
    values = {
        "packing": False,
        "learning_rate": 1e-5,
        "data": "a",
        "max_steps": -1,
        "checkpointing": "off",
    }
    model, data, args = read(json.dumps(values), "--max_steps", "3", "--packing", name="run.JSON")
    assert (model.checkpointing, data.data, data.packing, args.max_steps) == (
        ["off"],
        ["a"],
        True,
        3,
    )
    assert args.learning_rate == 1e-5


@pytest.mark.parametrize(
    "text, words",
    [
        ("impl: ours", "run.yaml: --impl must be one of "),
        (
            "max_steps: many",
            "run.yaml: --max_steps must be of type int, got 'many'",
        ),
        ("max_steps: 2.5", "must be of type int, got '2.5'"),
        ("packing: maybe", "--packing"),
        ("seq_length: null", "'seq_length' has no value"),
        ("cache_dir: ~", "'cache_dir' has no value"),
        ("seq_length: [1, 2]", "unrecognized arguments: 2"),
        ("1: 2", "unknown key '1'"),
        ("- a", "must hold keys and values"),
        ("", "must hold keys and values"),
        ("seq_length: !!python/name:os.system", "must be YAML"),
        ("eval_delay: 2026-99-99", "must be YAML"),
        (b"run_name: \xff", "in position 10"),
        ("data: " + "[" * 5000, "recursion"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_values_that_a_flag_would_refuse(read, text, words):
    with pytest.raises(ValueError) as caught:
        read(text)
    sentence = str(caught.value)
    assert sentence.startswith("hfpatch: ") and words in sentence and "\n" not in sentence


def test_a_byte_order_mark_is_no_text(read):
    for name, text in (("run.json", '{"seed": 7}'), ("run.yaml", "seed: 7")):
        assert read(b"\xef\xbb\xbf" + text.encode(), name=name)[2].seed == 7
