"""Frozen weights on the host: the same bits as with weights that stay, wherever the step takes
them, and host memory at rest.
"""

import copy
import sys
from pathlib import Path

import pytest
import tiny
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import hfpatch
from hfpatch.layer import streamed_weights as streamed
from hfpatch.layer.traits import runtimes_in
from hfpatch.store.transfers import Transfers
from tests.layer.devices import Told, on_device

pytestmark = pytest.mark.usefixtures("exact_loss")

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts" / "gpu"))
LAYERS = 4
HOST = {"tile": 8, "frozen_weights": "host"}


def adapted(model: nn.Module, **settings) -> nn.Module:
    torch.manual_seed(1)
    return get_peft_model(
        model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, **settings)
    )


def streams(model: nn.Module) -> streamed.StreamedWeights:
    return runtimes_in(model)[0].weights


def patched(model: nn.Module, **settings) -> nn.Module:
    hfpatch.apply(model, checkpointing=hfpatch.Checkpointing(**{**HOST, **settings}))
    return model


def at_rest(model: nn.Module) -> bool:
    """Whether nothing that waits on the host, nor a parameter, shares memory with a slot."""
    slots = {slot.bytes.untyped_storage().data_ptr() for slot in streams(model).ring.slots}
    plain = [p for p in model.parameters() if not hasattr(p, "__tensor_flatten__")]
    pieces = [piece.tensor for packed in streams(model).packed.values() for piece in packed.pieces]
    return bool(slots) and not slots & {t.untyped_storage().data_ptr() for t in (*pieces, *plain)}


def values(tensor: torch.Tensor) -> torch.Tensor:
    """Of a weight that is made of several tensors: what they stand for."""
    return tensor.dequantize() if hasattr(tensor, "__tensor_flatten__") else tensor


def assert_same_steps(model: nn.Module, steps: int = 2, **settings) -> nn.Module:
    """Two steps of AdamW, with weights that stay and with weights that are streamed: equal to the
    bit.
    """
    resident, ours = (
        patched(copy.deepcopy(model), **settings, frozen_weights="gpu"),
        patched(model, **settings),
    )
    taken = [
        torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=0.1)
        for m in (resident, ours)
    ]
    for _ in range(steps):
        found = [tiny.step(m, tiny.labelled()) for m in (resident, ours)]
        assert found[0].keys() == found[1].keys() and len(found[0]) > 1
        assert all(torch.equal(found[0][n], found[1][n]) for n in found[0])
        assert at_rest(ours)
        for optimizer in taken:
            optimizer.step()
    theirs = resident.state_dict()
    assert all(
        torch.equal(values(value), values(theirs[n])) for n, value in ours.state_dict().items()
    )
    return ours


@pytest.mark.parametrize("settings", [
    {"offload": "host"}, {"offload": "gpu", "every": 2},
    {"offload": "host", "every": 3, "tile": 4096},
], ids=str)  # fmt: skip
def test_steps_are_those_of_weights_that_stay(settings):
    model = adapted(tiny.llama(num_hidden_layers=LAYERS), modules_to_save=["lm_head"])
    # trained in the base
    model.base_model.model.model.layers[1].input_layernorm.weight.requires_grad_(True)
    ours = assert_same_steps(model, **settings)
    weights = streams(ours)
    frozen = [p for p in ours.base_model.model.model.layers.parameters() if not p.requires_grad]
    assert weights.host_bytes >= sum(p.numel() * p.element_size() for p in frozen) > LAYERS * 1000
    assert weights.slot_bytes * LAYERS < 1.1 * weights.host_bytes


def test_a_fetch_that_is_cut_short_loses_no_slot(monkeypatch):
    """Memory runs out as a slot is filled; the caller goes on, twice."""
    ours = patched(adapted(tiny.llama(num_hidden_layers=LAYERS)))
    wanted = tiny.step(ours, tiny.labelled())
    for _ in range(2):
        ours.zero_grad()
        with monkeypatch.context() as context, pytest.raises(torch.OutOfMemoryError):
            fetch, calls = Transfers.fetch, []

            def short(self, pieces, slot=None, free=None, fetch=fetch, calls=calls):
                calls.append(slot)
                if len([slot for slot in calls if slot is not None]) == 3:
                    raise torch.OutOfMemoryError("as a slot is filled")
                return fetch(self, pieces, slot, free)

            context.setattr(Transfers, "fetch", short)
            tiny.step(ours, tiny.labelled())
    ours.zero_grad()
    got = tiny.step(ours, tiny.labelled())
    assert all(torch.equal(got[name], value) for name, value in wanted.items())


def test_four_bits():
    """The NF4 of our GPU scripts: codes, and scales in buffers."""
    import nf4

    model = tiny.llama(dtype=torch.bfloat16, num_hidden_layers=2)
    nf4.quantise(model)
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.post_attention_layernorm.weight.requires_grad_(True)
    assert_same_steps(model)


@pytest.mark.parametrize("bits", ["int8", pytest.param("float8", marks=pytest.mark.long)])
def test_torchao(bits):
    """Weights that are made of several tensors."""
    quantization = pytest.importorskip("torchao.quantization")
    config = {"int8": "Int8WeightOnlyConfig", "float8": "Float8WeightOnlyConfig"}[bits]
    model = tiny.llama(dtype=torch.bfloat16)
    quantization.quantize_(model.model.layers, getattr(quantization, config)())
    for layer in model.requires_grad_(False).model.layers:
        layer.input_layernorm.weight.requires_grad_(True)
    ours = assert_same_steps(model)
    weights = (p for p in ours.model.layers.parameters() if type(p) is not nn.Parameter)
    small = [n for w in weights for n in w.__tensor_flatten__()[0]]
    assert small and len(streams(ours).packed[0].pieces) > len(
        list(ours.model.layers[0].parameters())
    )


def test_experts():
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        **{**tiny.config().to_dict(), "num_local_experts": 4, "model_type": "mixtral"}
    )
    model = get_peft_model(
        MixtralForCausalLM(config).train(), LoraConfig(r=4, target_modules=["q_proj", "o_proj"])
    )
    assert_same_steps(model, steps=1)


def test_what_runs_twice_or_out_of_order():
    model = adapted(tiny.llama(num_hidden_layers=LAYERS))
    resident, ours = patched(copy.deepcopy(model), frozen_weights="gpu"), patched(model)
    found = []
    for m in (resident, ours):
        with torch.inference_mode():
            m(tiny.ids())
        one, two = (m(**tiny.labelled(tokens=n)).loss for n in (24, 19))
        with torch.no_grad():
            evaluated = m(tiny.ids()).logits
        one.backward()
        two.backward()
        text = m.eval().generate(tiny.ids(tokens=5), max_new_tokens=3, do_sample=False)
        found.append([evaluated, text, *(p.grad for p in m.parameters() if p.grad is not None)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)) and at_rest(ours)


def test_weights_written_to_at_rest_are_those_of_the_next_forward():
    model = adapted(tiny.llama())
    resident, ours = patched(copy.deepcopy(model), frozen_weights="gpu"), patched(model)
    for m in (resident, ours):
        tiny.step(m, tiny.labelled())
        m.merge_adapter()
    assert torch.equal(ours(tiny.ids()).logits, resident(tiny.ids()).logits)
    other = {n: v + 0.5 for n, v in resident.state_dict().items()}
    for m in (resident, ours):
        m.unmerge_adapter()
        m.load_state_dict(other)
    assert torch.equal(ours(tiny.ids()).logits, resident(tiny.ids()).logits)
    for m in (resident, ours):
        m.merge_adapter(safe_merge=True)  # which gives weights other values by their .data
    assert torch.equal(ours(tiny.ids()).logits, resident(tiny.ids()).logits)
    loss = ours(**tiny.labelled()).loss
    weight = ours.base_model.model.model.layers[0].mlp.up_proj.base_layer.weight
    weight.data = weight.data / 2
    with pytest.raises(RuntimeError, match="between a layer's forward and its backward"):
        loss.backward()
    assert tiny.step(ours, tiny.labelled()) and at_rest(ours)  # packed anew


def test_an_exception_leaves_weights_on_the_host():
    model = patched(adapted(tiny.llama()))
    whole = tiny.step(model, tiny.labelled())

    def stop(*args):
        raise RuntimeError("stopped")

    last = model.base_model.model.model.layers[1].mlp.down_proj
    for register in (last.register_forward_hook, last.lora_A["default"].weight.register_hook):
        handle = register(tiny.OfAnEngine(stop))
        with pytest.raises(RuntimeError, match="stopped"):
            tiny.step(model, tiny.labelled())
        assert at_rest(model)
        handle.remove()
        assert all(
            torch.equal(value, whole[n]) for n, value in tiny.step(model, tiny.labelled()).items()
        )


def test_saving_takes_each_weight_alone(tmp_path):
    model = patched(adapted(tiny.llama()))
    tiny.step(model, tiny.labelled())
    weight = model.base_model.model.model.layers[0].mlp.up_proj.base_layer.weight
    torch.save(weight, tmp_path / "one")
    assert (tmp_path / "one").stat().st_size < 2 * weight.numel() * weight.element_size()
    hfpatch.undo(model)
    plain = model.merge_and_unload()
    plain.save_pretrained(tmp_path)
    again = type(plain).from_pretrained(tmp_path)
    assert all(torch.equal(value, again.state_dict()[n]) for n, value in plain.state_dict().items())


def test_moving_the_model_leaves_them():
    """A device that is not the host is enough here: meta tensors have no values, which nobody asks
    for.
    """
    model = patched(adapted(tiny.llama()))
    model.to("meta")
    devices = {n: p.device.type for n, p in model.named_parameters()}
    layers = {n for n in devices if ".layers." in n}
    assert {devices[n] for n in layers if "lora_" not in n} == {"cpu"}
    assert {device for n, device in devices.items() if n not in layers or "lora_" in n} == {"meta"}
    model = patched(adapted(tiny.llama()))
    model.to(torch.float64)  # not on the host yet
    tiny.step(model, tiny.labelled())
    assert model.base_model.model.model.layers[0].input_layernorm.weight.dtype == torch.float64


def test_a_weight_of_two_layers_is_refused():
    model = tiny.llama(num_hidden_layers=3)
    model.model.layers[2].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    ours = patched(adapted(model))
    with pytest.raises(
        ValueError, match="weight of a LlamaDecoderLayer is shared with another layer"
    ):
        ours(**tiny.labelled())


def test_deepspeed_does_not_send_them(monkeypatch):
    """NCCL has no way for tensors in host memory: rank 0's are every rank's already."""
    engine = pytest.importorskip("deepspeed.runtime.engine")
    sent = []
    monkeypatch.setattr(
        engine.dist, "broadcast", lambda tensor, *a, **k: sent.append(tensor.device.type)
    )
    monkeypatch.setattr(engine.groups, "_get_broadcast_src_rank", lambda: 0)
    waits = type("Engine", (), {"dist_backend": "nccl", "seq_data_parallel_group": None})()
    for step in (False, True):
        model = patched(adapted(tiny.llama()))
        if step:
            tiny.step(model, tiny.labelled())
        waits.module = model.to("meta")
        engine.DeepSpeedEngine._broadcast_model(waits)
        assert sent and set(sent) == {"meta"}, sent
    waits.module = hfpatch.undo(model) or model
    engine.DeepSpeedEngine._broadcast_model(waits)
    assert "cpu" in sent


def test_several_processes_exchange_adapters_alone(tmp_path):
    from torch import distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model, resident = (
            patched(adapted(tiny.llama())),
            patched(adapted(tiny.llama()), frozen_weights="gpu"),
        )
        found = [nn.parallel.DistributedDataParallel(m) for m in (model, resident)]
        left = found[0].parameters_to_ignore
        assert {
            n for n, p in model.named_parameters() if ".layers." in n and not p.requires_grad
        } <= left
        assert (
            not any("lora_" in n or "embed" in n or "lm_head" in n for n in left)
            and not found[1].parameters_to_ignore
        )
        steps = [tiny.step(m, tiny.labelled()) for m in found]
        assert all(torch.equal(steps[0][n], steps[1][n]) for n in steps[0])
    finally:
        found = None  # before the group, as in test_layer.py
        dist.destroy_process_group()
    hfpatch.undo(model)
    assert not nn.Module.__getattribute__(model.base_model.model, "__dict__").get(
        "_ddp_params_and_buffers_to_ignore"
    )


def test_auto_takes_the_host_where_the_step_has_no_room(monkeypatch, capfd):
    model = adapted(tiny.llama())
    resident, ours = (
        patched(copy.deepcopy(model), frozen_weights="gpu"),
        patched(model, frozen_weights="auto"),
    )
    on_device(monkeypatch, Told, free=1 << 40)
    # of a length at which layers keep everything, weights too
    tiny.step(ours, tiny.labelled(tokens=8))
    assert not streams(ours).on
    monkeypatch.setattr(Told, "free", 1 << 20)
    found = [tiny.step(m, tiny.labelled()) for m in (resident, ours)]
    assert streams(ours).on and at_rest(ours) and not streams(resident).on
    assert all(torch.equal(found[0][n], found[1][n]) for n in found[0])
    assert "frozen weights" in capfd.readouterr().err
    tiny.step(ours, tiny.labelled(tokens=8))
    assert at_rest(ours)


def test_layers_that_run_untiled_cannot_be_trained():
    model = patched(adapted(tiny.llama()))
    model.base_model.model.model.layers[0].self_attn.register_forward_hook(lambda *args: None)
    with pytest.raises(ValueError, match="^hfpatch: [^\n]*needs layers that run tiled[^\n]*$"):
        tiny.step(model, tiny.labelled())


@pytest.mark.parametrize(
    "settings", [{"frozen_weights": "disk"}, {"frozen_weights": "host", "plain": 2}]
)
def test_settings_out_of_range(settings):
    with pytest.raises(ValueError, match="^hfpatch: [^\n]*$"):
        hfpatch.Checkpointing(**settings)
