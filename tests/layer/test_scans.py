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
import torch.utils.checkpoint
from numerics import lifted

import hfpatch
from hfpatch.decoder.find import find_decoder
from hfpatch.decoder.verdict import _verdict
from hfpatch.lab.simulate.simulator import simulate
from hfpatch.layer import time_trial
from hfpatch.layer.mixers import Mixer
from tests.decoder.test_families import batch, step
from tests.layer.test_time import assert_same

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

    def install(family, change=lambda kernel: kernel):
        for name in FUNCTIONS[family]:
            chooses = wrapper_in(getattr(file_of(family), name))
            cells = dict(zip(chooses.__code__.co_freevars, chooses.__closure__))
            monkeypatch.setattr(cells["is_new_implementation"], "cell_contents", True)
            monkeypatch.setattr(
                cells["implementation"],
                "cell_contents",
                kernel(name, change(chooses.__wrapped__)),
            )
        return ran

    _verdict.cache_clear()
    yield install
    _verdict.cache_clear()


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


def takes_no_state(rule):
    def run(*args, initial_state=None, **kwargs):
        return rule(*args, initial_state=None, **kwargs)

    return run if "initial_state" in inspect.signature(rule).parameters else rule


def cuts_the_graph_of_a_state(rule):
    def run(*args, initial_state=None, **kwargs):
        state = None if initial_state is None else initial_state.detach()
        return rule(*args, initial_state=state, **kwargs)

    return run if "initial_state" in inspect.signature(rule).parameters else rule


@pytest.mark.parametrize("change", [takes_no_state, cuts_the_graph_of_a_state])
def test_a_kernel_that_drops_states_is_seen_where_it_runs(change, kernels, monkeypatch, capsys):
    """The small instance is tried with transformers' plain code, which does not."""
    ran, runs = kernels("qwen3_next", change), []
    stock = families.small_model("qwen3_next", torch.float32)
    ours = copy.deepcopy(stock)
    hfpatch.apply(ours, checkpointing=hfpatch.Checkpointing(offload="host", tile=64))
    assert find_decoder(ours).layers[0]._hfpatch.traits.timed
    call = Mixer.call
    monkeypatch.setattr(
        Mixer, "call", lambda mixer, x, *args: runs.append(x.shape) or call(mixer, x, *args)
    )
    _, loss, grads = step(ours, batch(200))
    _, wanted_loss, wanted = step(stock, batch(200))
    assert ran and {(2, 200), (1, 133), (1, 64), (1, 69)} == {tuple(shape[:2]) for shape in runs}
    assert abs(loss - wanted_loss) <= 1e-5 * wanted_loss
    for name, value in wanted.items():
        assert (grads[name] - value).norm() <= 1e-3 * value.norm().clamp_min(1e-3), name
    said = capsys.readouterr().err
    assert said.count("take all tokens at once: with this device's kernels tiles differ") == 1


def test_the_trial_is_no_part_of_the_callers_graph():
    """Somebody's checkpoint around the model counts what its forward saves, and runs that twice."""
    stock = families.small_model("qwen3_5_text")
    ours = copy.deepcopy(stock)
    hfpatch.apply(ours, checkpointing=hfpatch.Checkpointing(offload="gpu", tile=64), loss=False)
    given, found = batch(165), []
    labels = given.pop("labels")
    for model in (ours, stock):
        embeds = model.get_input_embeddings()(given["input_ids"])

        def loss(x, model=model):
            return model(inputs_embeds=x, labels=labels, use_cache=False).loss

        with lifted():
            torch.utils.checkpoint.checkpoint(loss, embeds, use_reentrant=False).backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert_same(*found, 1e-12)


def test_a_trial_that_raises_names_the_mixer(monkeypatch, capsys):
    monkeypatch.setattr(time_trial, "_tried", lambda *given: 1 / 0)
    model = families.small_model("qwen3_5_text").float()
    hfpatch.apply(model, checkpointing=hfpatch.Checkpointing(offload="gpu", tile=64))
    step(model, batch(165))
    assert "Qwen3_5GatedDeltaNets take all tokens at once" in capsys.readouterr().err


def test_a_plan_meets_no_kernel(kernels):
    ran = kernels("lfm2")
    model = families.small_model("lfm2", torch.float32)
    assert simulate(model, 1, 64).peak_bytes > 0 and not ran
