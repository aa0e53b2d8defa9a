"""hfpatch bench: its lines name what was measured, its stock formulas are transformers', its bytes
the least needed.
"""

import json

import pytest
import torch
import torch.nn.functional as F
from numerics import assert_close
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from hfpatch.cli import bench
from hfpatch.cli.main import main
from hfpatch.lab import elementwise
from hfpatch.lab.presets import preset_config


def test_every_op_both_ways_as_json(capsys):
    assert (
        main(
            "bench --model llama-tiny --tokens 16 33 --seconds 0 --dtype fp32 --device cpu --json".split()
        )
        == 0
    )
    report = json.loads(capsys.readouterr().out)
    rows = {(r["op"], r["direction"], r["tokens"]) for r in report["rows"]}
    simple = {(op, d, t) for op in bench.OPS[:-1] for d in ("fwd", "bwd") for t in (16, 33)}
    assert rows == simple | {("linear_cross_entropy", "both", t) for t in (16, 33)}
    for r in report["rows"]:
        assert r["ms"] > 0 and r["stock_ms"] > 0
        assert r["speedup"] == pytest.approx(r["stock_ms"] / r["ms"])
        rate = report["copy_bytes_per_second" if r["unit"] == "B/s" else "matmul_flops_per_second"]
        assert r["share"] == pytest.approx(r["rate"] / rate)


def test_the_table_and_a_choice_of_ops(capsys):
    assert (
        main("bench --model llama-tiny --tokens 16 --seconds 0 --device cpu --ops rope".split())
        == 0
    )
    out = capsys.readouterr().out
    assert "copy" in out and out.count("rope") == 2 and "swiglu" not in out


def test_wrong_numbers_are_refused(capsys):
    assert main("bench --model llama-tiny --tokens 0 --device cpu".split()) == 2
    assert "hfpatch: argument --tokens: a length is tokens" in capsys.readouterr().err


def made(name, dtype):
    return bench.case(name, preset_config("llama-tiny"), 9, dtype, torch.device("cpu"))


@pytest.mark.parametrize("name", bench.OPS)
def test_both_sides_compute_the_same(name):
    case = made(name, torch.float32)

    def run(function, dtype=torch.float32):
        wide = [x.detach().to(dtype).requires_grad_() for x in case.inputs]
        fixed = [x.to(dtype) if x.is_floating_point() else x for x in case.fixed]
        outs = function(*wide, *fixed)
        total = sum(o.double().square().sum() for o in outs)
        return [*outs, *torch.autograd.grad(total, wide)]

    sides = [run(case.fused), run(case.stock)]
    if name in elementwise.OPS:
        exact = run(elementwise.OPS[name].exact, torch.float64)
    else:
        exact = run(lambda h, w, y: (F.cross_entropy(F.linear(h, w), y),), torch.float64)
    for i, (got, plain, true) in enumerate(zip(*sides, exact, strict=True)):
        assert_close(got, plain, true, f"{name} {i}")


def test_the_stock_rotation_is_transformers():
    case = made("rope", torch.float32)
    for ours, theirs in zip(
        case.stock(*case.inputs, *case.fixed), apply_rotary_pos_emb(*case.inputs, *case.fixed)
    ):
        assert torch.equal(ours, theirs)


def test_bytes_are_what_the_tensors_weigh():
    sizes = {"rms_norm": (2, 3), "add_rms_norm": (4, 4), "swiglu": (3, 5), "rope": (2, 2)}
    for name, times in sizes.items():
        case = made(name, torch.bfloat16)
        one = sum(x.nbytes for x in case.inputs) if name == "rope" else case.inputs[0].nbytes
        assert case.bytes == tuple(n * one for n in times)
