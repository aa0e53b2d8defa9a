"""The simulator against the CPU allocator, and its traps one by one."""

import contextlib
import csv
import itertools
import json
import runpy
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hfpatch.budget.limits import GiB
from hfpatch.budget.policy import LEAST
from hfpatch.lab.presets import preset_config
from hfpatch.lab.simulate import follow, kernels_cost
from hfpatch.lab.simulate.follow import Follower
from hfpatch.lab.simulate.implementations import build, prepare
from hfpatch.lab.simulate.scan import scans_by_blocks
from hfpatch.lab.simulate.shadow import Shadows
from hfpatch.lab.simulate.simulator import simulate
from hfpatch.ops.experts import EXPERT_PRODUCT
from tests import tiny
from tests.lab.real_memory import real_peak, train_step

SMALL = preset_config("llama-tiny") | dict(
    hidden_size=256, intermediate_size=704, num_hidden_layers=3, vocab_size=1000, head_dim=64
)


def on_cpu(model):
    """The meta model with real values."""
    model.to_empty(device="cpu").train()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.normal_(std=0.02)
    return model


# Two implementations of the layer loop, stock's two kinds of saving, and each of: tied weights, no
# grouped heads, a batch above one with a length that no tile divides.
@pytest.mark.parametrize("implementation, case", tiny.covering(
    ["hf", "hf-ckpt", "hfpatch"],
    [({}, 1, 512), ({"tie_word_embeddings": True}, 2, 777), ({"num_key_value_heads": 4}, 1, 777)],
))  # fmt: skip
def test_agrees_with_the_allocator(implementation, case):
    change, batch, tokens = case
    model = prepare(build(SMALL | change, torch.float32), implementation)
    policy = replace(LEAST, tile=256)
    found = simulate(model, batch, tokens, cuda=False, policy=policy)
    # Host blocks come from the same allocator here.
    simulated = (
        max(itertools.accumulate(delta for _, delta in found.ledger.events))
        - found.categories["parameters"]
    )

    ids = torch.randint(0, SMALL["vocab_size"], (batch, tokens))
    on_cpu(model)
    with mock.patch("hfpatch.layer.runtime.LayerRuntime._resolve", lambda *args: policy):
        measured = real_peak(lambda: train_step(model, ids))
    assert abs(simulated - measured) <= 0.03 * measured, (simulated, measured)


# Figures measured independently of this simulator for Llama-3.1-8B in bfloat16, GiB beyond
# parameters and gradients.
@pytest.mark.parametrize("implementation, tokens, expected", [
    ("hf", 8192, 61.0), ("hf-ckpt", 131072, 224.0),
    *(pytest.param(*row, marks=pytest.mark.long) for row in [("hf-ckpt", 32768, 56.0), ("hf",
                                                                                        131072, 976.0)]),
])  # fmt: skip
def test_reference_figures(implementation, tokens, expected):
    found = simulate(prepare(build(preset_config("llama-3.1-8b")), implementation), 1, tokens)
    assert found.beyond_bytes / GiB == pytest.approx(expected, rel=0.005)
    assert found.categories["parameters"] == pytest.approx(2 * 8030261248, rel=1e-4)


# Liger rebinds transformers' modules, so each figure has a process of its own.
@pytest.mark.long
@pytest.mark.parametrize("implementation, expected, host", [
    ("liger", 52.6, 0), ("liger-tiled-offload", 12.1, 34.0),
])  # fmt: skip
def test_reference_figures_of_liger(implementation, expected, host):
    pytest.importorskip("liger_kernel")
    depths = (2, 4) if host else (32,)
    code = (
        "from hfpatch.lab.simulate.simulator import simulate; from profiles.plan.rivals import prepare;"
        "from hfpatch.lab.simulate.implementations import build;"
        "from hfpatch.lab.presets import *; import json;"
        "run = lambda n: simulate(prepare(build(preset_config('llama-3.1-8b') | "
        "dict(num_hidden_layers=n)),"
        f"{implementation!r}), 1, 131072); all = [run(n) for n in {depths}]; s = all[-1];"
        "print(json.dumps([s.beyond_bytes, s.host_peak_bytes, [[*s.ledger.traffic.values()][1:] "
        "for s in all]]))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True
    )
    beyond, on_host, moved = eval(done.stdout.splitlines()[-1])
    assert beyond / GiB == pytest.approx(expected, rel=0.01)
    # 4 of the 32 layers keep their inputs; the rest (the norm's input) is the model's, not a
    # layer's
    if host:
        assert on_host / GiB == pytest.approx(host - 28, rel=0.2)
        with open(Path(__file__).parents[2] / "profiles/plan/peers.csv") as file:
            rows = {(r["implementation"], r["tokens"]): r for r in csv.DictReader(file)}
        row = rows[implementation, "131072"]
        carried = [(more + 14 * (more - fewer)) / GiB for fewer, more in zip(*moved)]
        assert carried == pytest.approx(
            [float(row[f"moved_{way}_gib"]) for way in ("forward", "backward")], rel=1e-3
        )


def followed(run):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        with Follower(cuda=False, shadows=Shadows(mode)) as follower:
            run()
    return follower.ledger


def test_attention_is_never_quadratic():
    found = simulate(build(SMALL | {"num_hidden_layers": 1, "vocab_size": 16}), 1, 1 << 16)
    assert max(block.nbytes for block in found.ledger.blocks) < (1 << 32)
    assert found.attention_calls == {"forward": 1, "backward": 1}


def test_attention_backward_scratch_and_causal_flops():
    q, k = torch.empty(1, 4, 1024, 64, device="meta"), torch.empty(1, 2, 1024, 64, device="meta")
    lse = torch.empty(1, 4, 1024, device="meta")
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    args = (q.bfloat16(), q.bfloat16(), k.bfloat16(), k.bfloat16(), q.bfloat16(), lse, 0.0, True)
    accumulator, softmax_d, expanded = 4 * q.numel(), 4 * 4 * 1024, 2 * 2 * q.numel()
    assert kernels_cost.scratch_bytes(op, args) == accumulator + softmax_d + expanded
    assert kernels_cost.attention(op, args, {}) == ("backward", 5 * 4 * 1024 * 1024 * 64)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    rows = torch.empty(1, 1024, 8, 64, device="meta", dtype=torch.bfloat16).transpose(
        1, 2
    )  # a group of their heads is copied
    whole, cut = (
        kernels_cost.scratch_bytes(flash, (rows, rows, *args[2:4], out))
        for out in (rows, rows[:, :4])
    )
    assert cut - whole == 4 * 1024 * 64 * 2
    full = (*args[:-1], False)
    assert kernels_cost.attention(op, full, {}) == ("backward", 10 * 4 * 1024 * 1024 * 64)


@pytest.mark.parametrize("more", [[], ["--checkpointing", "off"]])
def test_the_developers_script_needs_no_checkpointing(more, capsys):
    path = Path(__file__).parents[2] / "profiles/plan/simulate.py"
    script = runpy.run_path(str(path))
    asked = ["--model", "llama-tiny", "--seq-len", "512", "--json", *more]
    assert script["run"](script["parser_of"]().parse_args(asked)) == 0
    host = json.loads(capsys.readouterr().out)["host_gib"]
    assert (host > 0) == (not more)  # only layers in tiles send their inputs to the host


def test_grouped_products_count_every_row_once():
    op = torch.ops.aten._grouped_mm
    count = lambda a, b: kernels_cost.matmul_flops(op.default, (torch.empty(a), torch.empty(b)))  # noqa: E731
    assert count((96, 16), (4, 16, 8)) == 2 * 96 * 16 * 8  # rows by experts' weights
    # a weight's gradient: sums over each expert's rows
    assert count((16, 96), (96, 8)) == 2 * 96 * 16 * 8
    assert count((4, 16, 8), (8, 96)) == 2 * 96 * 16 * 8
    ours = (torch.empty(96, 16), torch.empty(4, 16, 8), torch.empty(4))
    assert kernels_cost.matmul_flops(EXPERT_PRODUCT, ours) == 2 * 96 * 16 * 8


def test_a_window_counts_its_band():
    q, k = torch.empty(1, 64, 4, 8), torch.empty(1, 64, 2, 8)
    op = torch.ops.aten._flash_attention_forward.default
    causal = (q, k, k, None, None, 64, 64, 0.0, True, False)
    whole = kernels_cost.attention(op, causal, {})
    assert whole == ("forward", 4 * 4 * 8 * 64 * 64 // 2)
    assert (
        kernels_cost.attention(op, causal, {"window_size_left": -1, "window_size_right": -1})
        == whole
    )
    band = kernels_cost.attention(op, causal, {"window_size_left": 15, "window_size_right": 0})
    assert band == ("forward", 4 * 4 * 8 * (64 * 16 - 16 * 16 // 2))


def test_flops_of_stock_llama():
    # 6 per parameter of the matmuls and token, attention counted over its causal half: the usual
    #     count.
    found = simulate(build(preset_config("llama-3.1-8b")), 1, 8192)
    weights = 8030261248 - 128256 * 4096 - 65 * 4096
    # Some versions of transformers make the rotary angles by a matmul of [64, 1] and [1, T].
    angles = 2 * 64 * 8192
    assert sum(found.flops["matmul"].values()) - 6 * weights * 8192 in (0, angles)
    assert found.flops["attention"] == {
        "forward": 32 * 2 * 8192**2 * 4096,
        "backward": 32 * 5 * 8192**2 * 4096,
    }


def test_model_is_itself_again_afterwards():
    model = on_cpu(build(SMALL, torch.float32)).eval()
    before = dict(model.named_parameters())
    simulate(model, 1, 64)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert not model.training and all(p.grad is None for p in model.parameters())
    assert not nn.modules.module._global_forward_hooks


# the config, tokens, how many more bytes blocks may take: of slices that a matmul copies where it
# had views
SCANS = {
    "jamba": ({"num_experts": 1, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_expand": 4,
               "mamba_dt_rank": 8}, 512, 1.02),
    "qwen3_next": (
        {"layer_types": ["linear_attention", "full_attention"], "num_experts": 2,
         "num_experts_per_tok": 1, "head_dim": 16,
         "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
         "linear_key_head_dim": 16,
         "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4}, 2048,
         1.1),
}  # fmt: skip


@tiny.not_before_transformers((5, 17), "writes these scans in another way")
@pytest.mark.parametrize(
    "family, implementation",
    tiny.longer(
        [("jamba", "hf"), ("jamba", "hfpatch"), ("qwen3_next", "hfpatch")],
        ("qwen3_next", "hfpatch"),
    ),
)
def test_a_scan_by_blocks_takes_what_one_by_tokens_takes(family, implementation, monkeypatch):
    """Plain code goes through tokens, or chunks of 64, one by one: at 131,072 plans of Jamba and
    Qwen3-Next did not end.
    """
    changes, tokens, most = SCANS[family]
    config = {"model_type": family, "pad_token_id": None, "hidden_size": 64,
              "intermediate_size": 128, "num_hidden_layers": 2,
              "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256,
              **changes}  # fmt: skip
    if family == "qwen3_next":
        monkeypatch.setattr("hfpatch.lab.simulate.scan.BLOCKS", 4)
    ours = simulate(prepare(build(config), implementation), 1, tokens)
    monkeypatch.setattr("hfpatch.lab.simulate.simulator.scans_by_blocks", contextlib.nullcontext)
    theirs = simulate(prepare(build(config), implementation), 1, tokens)
    assert ours.flops["total"] == pytest.approx(theirs.flops["total"], rel=1e-3)
    assert len(ours.ledger.events) < len(theirs.ledger.events) / 2
    assert 0.98 <= ours.most_beyond_bytes / theirs.most_beyond_bytes <= most
    assert ours.host_peak_bytes == theirs.host_peak_bytes


def test_a_step_asks_no_lazy_module_for_names(monkeypatch):
    """Their __getattr__ imports what may have the name: seconds, or an error of what is missing."""
    lazy, asked = types.ModuleType("transformers.models.lazy"), []

    def answer(name):
        asked.append(name)
        raise AttributeError(name)

    lazy.__getattr__ = answer
    monkeypatch.setitem(sys.modules, lazy.__name__, lazy)
    simulate(prepare(build(SMALL), "hfpatch"), 1, 64)
    assert not asked


@pytest.mark.parametrize(
    "implementation",
    [
        pytest.param(
            "hf-ckpt",
            marks=pytest.mark.skipif(
                torch.__version__ < "2.12", reason="torch's own hooks stay on with the error"
            ),
        ),
        "hfpatch",
        None,
    ],
)
def test_a_step_that_raises_leaves_nothing_on(implementation):
    model = prepare(build(SMALL), implementation or "hf")
    model.model.layers[0].mlp.act_fn.register_forward_pre_hook(
        mock.Mock(side_effect=ArithmeticError)
    )
    begins = mock.patch.object(
        Follower, "_calibrate", **({} if implementation else {"side_effect": ArithmeticError})
    )
    with begins, pytest.raises(ArithmeticError) as held:
        simulate(
            model, 1, 64, policy=replace(LEAST, tile=32) if implementation == "hfpatch" else None
        )
    x = torch.ones(2, requires_grad=True)
    x.sin().sum().backward()
    assert type(x.grad) is torch.Tensor and follow.current() is None and held


def test_chunks_that_count_from_padding_are_known():
    """Llama 4's masks ask a tensor where rows begin, which has no values here: its layers ran whole
    in plans alone.
    """
    config = {
        "model_type": "llama4_text", "hidden_size": 64, "intermediate_size": 64,
        "intermediate_size_mlp": 64, "head_dim": 16,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_local_experts": 2,
        "attention_chunk_size": 32, "vocab_size": 128,
    }  # fmt: skip
    kept, tiled = (
        simulate(prepare(build(config), "hfpatch"), 1, 128, policy=policy)
        for policy in (replace(LEAST, offload="gpu", plain=4, tile=128), replace(LEAST, tile=32))
    )
    # A layer that runs untiled computes attention forward twice, and is not what its policy says.
    assert tiled.flops["attention"]["forward"] == kept.flops["attention"]["forward"]
    assert tiled.host_peak_bytes > 4 * 2 * 128 * 64


def test_a_module_that_needs_what_is_not_there_stops_no_plan(monkeypatch):
    """As transformers' image processors do without torchvision: they import on demand."""

    class Lazy(type(sys)):
        def __getattr__(self, name):
            raise ModuleNotFoundError("No module named 'torchvision'")

    name = "transformers.models.pictures"
    monkeypatch.setitem(sys.modules, name, Lazy(name))
    with scans_by_blocks():
        pass
