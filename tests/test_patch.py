"""apply, undo and the report: what changes, what comes back, what is refused."""

import copy
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import pytest
import tiny
import torch
from torch import nn
from transformers import AutoModel, LlamaForCausalLM, LlamaModel
from transformers.models.llama import modeling_llama as hf

import hfpatch
from hfpatch.context.classes import is_patched
from hfpatch.layer.condition import look
from hfpatch.layer.function import tiled_layer
from hfpatch.layer.layer import TiledLayer
from hfpatch.loss.causal_model import TellsPositions


def counts(report):
    return {
        option: report.count(option)
        for option in ("rope", "rms_norm", "mlp", "loss", "checkpointing")
    }


def test_report_counts_every_swap():
    report = hfpatch.apply(tiny.llama())
    assert counts(report) == {"rope": 2, "rms_norm": 5, "mlp": 2, "loss": 1, "checkpointing": 2}
    assert not report.skipped
    text = str(report)
    for line in (
        "LlamaForCausalLM",
        "2 x LlamaAttention",
        "5 x LlamaRMSNorm",
        "2 x LlamaMLP",
        "2 x LlamaDecoderLayer",
    ):
        assert line in text


@pytest.mark.parametrize(
    "option, name",
    [
        ("rope", "LlamaAttention"),
        ("rms_norm", "LlamaRMSNorm"),
        ("mlp", "LlamaMLP"),
        ("loss", "LlamaForCausalLM"),
    ],
)
def test_option_turned_off_leaves_its_class_and_is_reported(option, name):
    model = tiny.llama()
    report = hfpatch.apply(model, checkpointing=tiny.TILED, **{option: False})
    kind = getattr(hf, name)
    # A model that keeps its own loss still hands on its labels and positions.
    left = {getattr(type(m), "_hfpatch_part", None) for m in model.modules() if isinstance(m, kind)}
    assert left == {TellsPositions if option == "loss" else None}
    assert (option, "not asked for") in report.skipped and report.count(option) == 0
    tiny.assert_as_good(model, tiny.llama(), tiny.labelled())


def test_checkpointing_off_leaves_layers_and_transformers_own_checkpointing():
    model = tiny.llama()
    report = hfpatch.apply(model, checkpointing="off")
    assert not any(isinstance(layer, TiledLayer) for layer in model.model.layers)
    assert ("checkpointing", "not asked for") in report.skipped
    tiny.checkpoint(model)
    runs = []
    model.model.layers[0].input_layernorm.register_forward_hook(lambda *_: runs.append(1))
    tiny.assert_as_good(model, tiny.llama(), tiny.labelled())
    assert len(runs) == 2, "transformers runs a checkpointed layer twice"


@pytest.mark.parametrize("way", tiny.WAYS)
def test_exact_in_float64(way):
    """The whole model, every gradient: algebra without rounding (transformers' own norm and loss
    round to float32).
    """
    stock = tiny.llama(dtype=torch.float64, num_hidden_layers=3)
    tiny.assert_equal_in_double(
        tiny.patched(stock, checkpointing=tiny.WAYS[way]), stock, tiny.labelled()
    )


def snapshot(model):
    return [(name, type(m), sorted(vars(m))) for name, m in model.named_modules()]


@pytest.mark.parametrize("trained", [False, True])
def test_undo_is_bit_identical(trained):
    """Outputs, gradients, classes and __dict__ keys; also after steps, when engines and caches have
    been in use.
    """
    stock = tiny.llama()
    ours, batch = copy.deepcopy(stock), tiny.labelled()
    keys = list(ours.state_dict())
    hfpatch.apply(ours, checkpointing=tiny.TILED)
    assert list(ours.state_dict()) == keys
    if trained:
        tiny.step(ours, batch)
        ours.zero_grad()
        ours.eval()
        ours(**batch)
        ours.train()
    hfpatch.undo(ours)
    assert snapshot(ours) == snapshot(stock)
    got, expected = tiny.step(ours, batch), tiny.step(stock, batch)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[n], expected[n]) for n in got)
    assert torch.equal(ours(batch["input_ids"]).logits, stock(batch["input_ids"]).logits)


def test_undo_leaves_a_stock_model_as_it_is():
    model = tiny.llama()
    before = snapshot(model)
    hfpatch.undo(model)
    assert snapshot(model) == before


def test_apply_twice_is_apply_once_and_the_second_settings_count():
    stock = tiny.llama()
    once, twice = copy.deepcopy(stock), copy.deepcopy(stock)
    first = hfpatch.apply(once, checkpointing=tiny.TILED)
    hfpatch.apply(twice, loss=False, checkpointing="off")
    second = hfpatch.apply(twice, checkpointing=tiny.TILED)
    assert (second.swaps, second.skipped, second.notes) == (first.swaps, first.skipped, first.notes)
    assert snapshot(once) == snapshot(twice)
    a, b = tiny.step(once, tiny.labelled()), tiny.step(twice, tiny.labelled())
    assert all(torch.equal(a[n], b[n]) for n in a)
    hfpatch.undo(twice)
    assert snapshot(twice) == snapshot(stock)


def test_only_this_instance_changes():
    """Naive: rebinding module-level names or class methods (Liger's `model=` does) changes every
    model in the process.
    """
    functions = {n: v for n, v in vars(hf).items() if callable(v)}
    methods = {
        (k, n): v
        for k, kind in functions.items()
        if isinstance(kind, type)
        for n, v in vars(kind).items()
    }
    before, ours = tiny.llama(), tiny.llama()
    expected = tiny.step(before, tiny.labelled())
    hfpatch.apply(ours, checkpointing=tiny.TILED)
    tiny.step(ours, tiny.labelled())
    after = tiny.llama()
    for other in (before, after):
        assert not any(map(is_patched, other.modules()))
        got = tiny.step(other, tiny.labelled())
        assert all(torch.equal(got[n], expected[n]) for n in expected)
    assert {n: v for n, v in vars(hf).items() if callable(v)} == functions
    assert {
        (k, n): v
        for k, kind in functions.items()
        if isinstance(kind, type)
        for n, v in vars(kind).items()
    } == methods


# --- refused, with the fix named ------------------------------------------------------------------


def refused(model, *words, **options):
    before = snapshot(model)
    with pytest.raises(ValueError, match="^hfpatch: ") as error:
        hfpatch.apply(model, **options)
    for word in words:
        assert word in str(error.value), str(error.value)
    assert snapshot(model) == before, "a refused apply leaves the model alone"


def test_layers_that_peft_hands_its_own_states_refused():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny.llama(), peft.ShadowConfig(task_type="CAUSAL_LM"))
    refused(model, "ShadowLayer", "Call apply() before get_peft_model()")


@pytest.mark.parametrize("value", ["on", 3])
def test_unknown_checkpointing_refused(value):
    refused(tiny.llama(), "checkpointing must be", repr(value), checkpointing=value)


def test_a_misspelt_keyword_names_the_nearest():
    """Of every public entry; Checkpointing's are in tests/budget."""
    refused(tiny.llama(), "an argument of apply() must be one of model, rope, ",
            "got checkpoint. Did you mean checkpointing?", checkpoint="least")  # fmt: skip
    with pytest.raises(ValueError, match=r"^hfpatch: .* plan\(\) .* Did you mean seq_len\?$"):
        hfpatch.plan("llama-3.1-8b", seqlen=8192)
    with pytest.raises(ValueError, match=r"^hfpatch: .* Callback\(\) .* Did you mean apply\?$"):
        hfpatch.Callback(aply=True)


def test_unknown_logits_refused():
    refused(tiny.llama(), "logits must be", "'maybe'", logits="maybe")


@pytest.mark.parametrize("option", ["rope", "rms_norm", "mlp", "loss"])
def test_options_that_are_no_yes_or_no_refused(option):
    refused(tiny.llama(), f"{option} must be True or False", "'fused'", **{option: "fused"})


@pytest.mark.parametrize(
    "model, word",
    [("gpt2", "str"), (None, "NoneType"), (LlamaForCausalLM, "the class LlamaForCausalLM")],
)
def test_what_is_no_model_refused(model, word):
    with pytest.raises(
        ValueError, match=f"^hfpatch: model must be a transformers model .*, got {word}. Pass"
    ):
        hfpatch.apply(model)
    with pytest.raises(
        ValueError, match=f"^hfpatch: model must be a transformers model .*, got {word}. Pass"
    ):
        hfpatch.undo(model)


class Fabric(nn.Module):
    """As Lightning's Fabric wraps a model: what it lacks it takes from the model inside, its config
    too.
    """

    def __init__(self, model):
        super().__init__()
        self._forward_module = model

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_forward_module"), name)


Fabric.__module__ = "lightning.fabric.wrappers"


def test_another_librarys_module_is_refused():
    for outer in (Fabric(tiny.llama()), nn.Sequential(tiny.llama())):
        refused(outer, f"got {type(outer).__name__}", "before another library wraps")


def test_plain_torch_module_refused():
    refused(nn.DataParallel(tiny.llama()), "Call apply() before DataParallel")
    refused(nn.Sequential(nn.Linear(2, 2)), "Sequential", "from_pretrained")


def test_model_without_decoder_layers_refused():
    from transformers import ResNetConfig, ResNetModel

    refused(
        ResNetModel(ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1])),
        "ResNetModel",
        "list of decoder layers",
    )


def test_compiled_model_refused():
    refused(torch.compile(tiny.llama(), backend="eager"), "Call apply() before torch.compile()")
    model = tiny.llama()
    model.model.layers[0].mlp.act_fn = torch.jit.script(nn.SiLU())
    refused(model, "Call apply() before torch.jit.script()")


def test_layer_compiled_on_its_own_refused():
    model = tiny.llama()
    model.model.layers[0] = torch.compile(model.model.layers[0], backend="eager")
    refused(model, "Call apply() before torch.compile()")


@pytest.fixture
def one_process(tmp_path):
    """A gloo group of this process alone."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(str(tmp_path / "s"), 1), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def test_ddp_refused(one_process):
    refused(
        nn.parallel.DistributedDataParallel(tiny.llama()),
        "DistributedDataParallel",
        "Call apply() before",
    )


@pytest.mark.parametrize("where", ["root", "layer"])
def test_fully_sharded_refused(one_process, where):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = tiny.llama()
    fully_shard(
        model if where == "root" else model.model.layers[0], mesh=init_device_mesh("cpu", (1,))
    )
    refused(model, "FSDPLlama", "Call apply() before fully_shard()")


@tiny.not_before_transformers((5, 16), "has no DistributedConfig that does so")
def test_sharded_as_it_was_loaded(one_process):
    """transformers' DistributedConfig leaves no moment before fully_shard(): its classes go over
    ours, and stay after undo().
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    stock, mesh = tiny.llama(dtype=torch.float64), init_device_mesh("cpu", (1,))
    ours = copy.deepcopy(stock)
    for layer in ours.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard([ours.model.norm, ours.lm_head], mesh=mesh, reshard_after_forward=False)
    fully_shard(ours, mesh=mesh)
    ours.config.distributed_config = SimpleNamespace(fsdp_size=2)
    names = [type(m).__name__ for m in ours.modules()]
    report = hfpatch.apply(ours, checkpointing=tiny.TILED)
    assert not report.skipped and report.swaps[3][0] == "loss"
    wanted = tiny.step(tiny.exact(stock), tiny.labelled())
    with mock.patch("hfpatch.layer.layer.tiled_layer", side_effect=tiled_layer) as tiles:
        got = tiny.step(ours, tiny.labelled())
    got = {n: v.full_tensor() if hasattr(v, "full_tensor") else v for n, v in got.items()}
    tiny.assert_same_in_double(got, wanted)
    assert tiles.call_count == 2 and look(ours.model.layers[0]).reason is None
    assert [type(m).__name__ for m in ours.modules()] == names
    hfpatch.undo(ours)
    assert [type(m).__name__ for m in ours.modules()] == names
    assert not any(is_patched(m) for m in ours.modules())
    assert tiny.step(ours, tiny.labelled()).keys() == wanted.keys()


@pytest.mark.parametrize("around", [True, False], ids=["layers too", "inside alone"])
def test_modules_sharded_inside_a_layer(one_process, around, capsys):
    """FSDP2 reduces the gradients of such a module at the first backward through it, which would be
    a tile's: such layers run untiled.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    stock, mesh = tiny.llama(dtype=torch.float64), init_device_mesh("cpu", (1,))
    ours = tiny.patched(stock)
    for layer in ours.model.layers:
        fully_shard(layer.mlp, mesh=mesh)
        if around:
            fully_shard(layer, mesh=mesh)
    fully_shard(ours, mesh=mesh)
    wanted = tiny.step(tiny.exact(stock), tiny.labelled())
    for _ in range(2):
        got = {
            n: v.full_tensor() if hasattr(v, "full_tensor") else v
            for n, v in tiny.step(ours, tiny.labelled()).items()
        }
        tiny.assert_same_in_double(got, wanted)
    said = capsys.readouterr().err
    assert "run untiled, their inputs offloaded: modules in it are sharded by themselves" in said


@contextmanager
def with_liger(function: str, model):
    """A context in which this function of Liger has changed the model."""
    liger = pytest.importorskip("liger_kernel.transformers.monkey_patch", exc_type=ImportError)
    kept = {n: getattr(hf, n) for n in dir(hf)}
    try:
        getattr(liger, function)(model=model)
        yield
    except ImportError as error:
        pytest.skip(str(error))  # this Liger wants another transformers
    finally:
        for name, value in kept.items():
            setattr(hf, name, value)


def test_liger_refused():
    """Liger binds its forwards on the instance: a class swap under them would do nothing, so it is
    not done.
    """
    with with_liger("apply_liger_kernel_to_llama", model := tiny.llama()):
        refused(model, "Liger", "use_liger_kernel")


def test_liger_after_apply_is_refused():
    """As TrainingArguments(use_liger_kernel=True) does when a Trainer is made of a patched model."""
    model = tiny.patched(tiny.llama())
    with (
        with_liger("_apply_liger_kernel_to_instance", model),
        pytest.raises(ValueError, match="^hfpatch: .*Liger's .*Drop use_liger_kernel"),
    ):
        model(**tiny.labelled())


# --- models other than LlamaForCausalLM -----------------------------------------------------------


def test_base_model_gets_the_parts_it_has():
    model = AutoModel.from_config(tiny.config())
    assert type(model) is LlamaModel
    report = hfpatch.apply(model)
    assert counts(report) == {"rope": 2, "rms_norm": 5, "mlp": 2, "loss": 0, "checkpointing": 2}
    assert report.skipped == [("loss", "no head with labels around its layers")]


def test_base_model_trains_exactly():
    stock = tiny.llama(LlamaModel)
    tiny.assert_as_good(
        tiny.patched(stock),
        stock,
        {"input_ids": tiny.ids()},
        loss=lambda out: out.last_hidden_state.pow(2).mean(),
    )


@pytest.mark.parametrize("head", ["LlamaForSequenceClassification", "LlamaForTokenClassification"])
def test_classification_trains_exactly(head):
    stock = tiny.llama(getattr(hf, head), num_labels=3, classifier_dropout=0.0)
    ours = copy.deepcopy(stock)
    report = hfpatch.apply(ours, checkpointing=tiny.TILED)
    assert ("loss", "no head with labels around its layers") in report.skipped and report.count(
        "rms_norm"
    ) == 5
    rows = head == "LlamaForSequenceClassification"
    labels = torch.arange(8) % 3 if rows else tiny.ids(8) % 3
    batch = {
        "input_ids": tiny.ids(8),
        "attention_mask": torch.ones(8, tiny.TOKENS, dtype=torch.long),
        "labels": labels,
    }
    tiny.assert_as_good(ours, stock, batch)


@pytest.mark.filterwarnings("ignore")  # torch's own, of a package that it will drop
def test_what_quantises_by_the_range_of_its_input_runs_whole():
    plain = tiny.llama().eval()
    model = torch.ao.quantization.quantize_dynamic(plain, {torch.nn.Linear}, dtype=torch.qint8)
    assert "rounds several tokens by one scale" in "".join(hfpatch.apply(model).notes)
    assert "by one scale" not in "".join(hfpatch.apply(plain).notes)
