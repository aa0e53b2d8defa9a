"""hfpatch bench: its lines name what was measured, its stock formulas are transformers', its bytes
the least needed.
"""

import json

import pytest
import torch
from numerics import assert_close

from hfpatch.cli import bench
from hfpatch.cli.main import main
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


@pytest.mark.parametrize(
    "name, make", bench.cases(preset_config("llama-tiny"), 9, torch.float32, "cpu")
)
def test_both_sides_compute_the_same(name, make):
    case = make()
    assert case.op == name

    def run(function, inputs):
        outs = function(*inputs)
        outs = outs if isinstance(outs, tuple) else (outs,)
        total = sum(o.double().square().sum() for o in outs)
        return [*outs, *torch.autograd.grad(total, inputs)]

    sides = [run(case.fused, case.inputs), run(case.stock, case.inputs)]
    exact = run(case.stock, [x.detach().double().requires_grad_() for x in case.inputs])
    for i, (got, plain, true) in enumerate(zip(*sides, exact, strict=True)):
        assert_close(got, plain, true, f"{name} {i}")


def test_bytes_are_what_the_tensors_weigh():
    sizes = {"rms_norm": (2, 3), "add_rms_norm": (4, 4), "swiglu": (3, 5), "rope": (2, 2)}
    for name, make in bench.cases(preset_config("llama-tiny"), 9, torch.bfloat16, "cpu"):
        if name in sizes:
            case = make()
            one = sum(x.nbytes for x in case.inputs) if name == "rope" else case.inputs[0].nbytes
            assert case.bytes == tuple(n * one for n in sizes[name])
