"""Packages of kernels for mixers (flash-linear-attention, mamba_ssm, causal_conv1d), which take
nothing on a CPU and no float64.
"""

import copy
import importlib
import inspect

import families
import pytest
import tiny
import torch

import hfpatch
from hfpatch.decoder.verdict import _verdicts
from hfpatch.lab.simulate.simulator import simulate
from tests.decoder.test_families import batch, step

pytestmark = tiny.not_before_transformers((5, 16), "chooses kernels for mixers by other ways")
FUNCTIONS = {  # what may be a package's
    "qwen3_next": ("torch_chunk_gated_delta_rule", "causal_conv1d_fn"),
    "bamba": ("mamba2_split_conv1d_scan_combined", "causal_conv1d_fn"),
    "lfm2": ("causal_conv1d_fn",),
}


def wrapper_in(value):
    """What chooses between a package's kernel and plain code; where `kernels` is installed it is
    inside of a module.
    """
    return (
        value
        if inspect.isfunction(value)
        else wrapper_in(type(value).forward.__closure__[0].cell_contents)
    )


def file_of(family: str):
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


@pytest.fixture
def kernels(monkeypatch):
    """What installs packages' kernels for a family, and the names of those that ran: in float32
    alone.
    """
    ran = []

    def kernel(name, plain):
        def run(*args, **kwargs):
            if any(
                isinstance(x, torch.Tensor) and x.dtype == torch.float64
                for x in (*args, *kwargs.values())
            ):
                raise ValueError(
                    "Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)"
                )
            ran.append(name)
            return plain(*args, **kwargs)

        return run

    def install(family):
        for name in FUNCTIONS[family]:
            chooses = wrapper_in(getattr(file_of(family), name))
            cells = dict(zip(chooses.__code__.co_freevars, chooses.__closure__))
            monkeypatch.setattr(cells["is_new_implementation"], "cell_contents", True)
            monkeypatch.setattr(
                cells["implementation"],
                "cell_contents",
                kernel(name, chooses.__wrapped__),
            )
        return ran

    _verdicts.clear()
    yield install
    _verdicts.clear()


@pytest.mark.parametrize(
    "family", [pytest.param("qwen3_next", marks=pytest.mark.long), "bamba", "lfm2"]
)
def test_layers_are_tiled_and_documents_apart_beside_kernels(family, kernels):
    """Their small instance could not be tried: all layers ran whole, and packed rows were
    refused.
    """
    ran = kernels(family)
    stock = families.small_model(family, torch.float32)
    ours = copy.deepcopy(stock)
    report = hfpatch.apply(ours, checkpointing=hfpatch.Checkpointing(offload="host", tile=16))
    assert not ran and "untiled" not in str(report) and "refused" not in str(report)
    ids = batch()["input_ids"][:1]
    documents = [
        {"input_ids": x, "labels": x, "num_items_in_batch": 38} for x in (ids[:, :17], ids[:, 17:])
    ]
    _, wanted_loss, wanted = step(stock, None, documents)
    positions = torch.cat([torch.arange(17), torch.arange(23)])[None]
    ran.clear()
    labels = ids.masked_fill(positions == 0, -100)
    _, loss, grads = step(ours, {"input_ids": ids, "labels": labels, "position_ids": positions})
    assert ran and abs(loss - wanted_loss) <= 1e-5 * wanted_loss
    for name, value in wanted.items():
        assert (grads[name] - value).norm() <= 1e-3 * value.norm().clamp_min(1e-3), name


def test_a_plan_meets_no_kernel(kernels):
    ran = kernels("lfm2")
    model = families.small_model("lfm2", torch.float32)
    assert simulate(model, 1, 64).peak_bytes > 0 and not ran
