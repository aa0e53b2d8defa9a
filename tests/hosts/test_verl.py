"""verl's own FSDP2 engine on one CPU process: an actor that trains and a reference that scores, with
the plugin beside stock.

verl knows CUDA and NPU; its own registry of platforms takes a CPU here.
"""

import contextlib
import importlib
import json
import os
import types
from importlib import metadata

import host_runs
import pytest
import torch

from hfpatch.context.classes import is_patched
from hfpatch.trainer import marks

verl = pytest.importorskip("verl")
engines = pytest.importorskip("verl.workers.engine")
transformer_impl = pytest.importorskip("verl.workers.engine.fsdp.transformer_impl")
PLUGIN = "hfpatch.trainer.plugins.verl"
ROWS = [[5, 9, 30, 31, 7], list(range(40, 52)), [3, 4]]


@pytest.fixture(scope="module", autouse=True)
def one_cpu(tmp_path_factory):
    """A process group of one rank, and verl's platform for it."""
    from verl.plugin.platform import platform_cuda, set_platform

    def nothing(*_, **__):
        return 0

    idle = dict.fromkeys(
        ("memory_allocated", "memory_reserved", "empty_cache", "synchronize"), nothing
    )
    module = types.SimpleNamespace(
        **idle, mem_get_info=lambda: (0, 1), current_device=lambda: "cpu"
    )
    kind = type("PlatformCPU", (platform_cuda.PlatformCUDA,), {
        "device_name": "cpu", "device_module": module, "current_device": lambda self: "cpu",
        "empty_cache": nothing, "synchronize": nothing,
        "nvtx_range": lambda self, text: contextlib.nullcontext(),
    })  # fmt: skip
    set_platform(kind())
    os.environ["VERL_ENGINE_DEVICE"] = "cuda"  # the engines are registered under that name
    store = tmp_path_factory.mktemp("store") / "file"
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def engine_of(folder, external_lib=None, *, backend="fsdp2", forward_only=False, sp=1, **model):
    """verl's engine for a tiny Llama in float32, its model made and sharded."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig

    settings = {"use_fused_kernels": True, "external_lib": external_lib} | model
    config = HFModelConfig(
        path=str(folder), load_tokenizer=False,
        override_config={"attn_implementation": "sdpa"}, **settings,
    )  # fmt: skip
    engine = engines.EngineRegistry.new(
        model_type="language_model", backend=backend, model_config=config,
        engine_config=FSDPEngineConfig(
            strategy=backend, forward_only=forward_only, use_torch_compile=False,
            ulysses_sequence_parallel_size=sp,
            mixed_precision=dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32"),
        ),
        optimizer_config=FSDPOptimizerConfig(lr=1e-3, total_training_steps=4, clip_grad=1.0),
        checkpoint_config=CheckpointConfig(),
    )  # fmt: skip
    engine.initialize()
    return engine


def batch_of(engine, **more):
    """ROWS as verl packs them, and what its worker says beside them."""
    from verl.utils import tensordict_utils as tu

    def nested(rows):
        return torch.nested.as_nested_tensor([torch.tensor(r) for r in rows], layout=torch.jagged)

    tensors = {
        "input_ids": nested(ROWS), "position_ids": nested([list(range(len(r))) for r in ROWS]),
        "loss_mask": nested([[1] * len(r) for r in ROWS]),
    }  # fmt: skip
    return tu.get_tensordict(tensors, {
        "use_remove_padding": True, "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": len(ROWS), "temperature": 0.7, "calculate_entropy": True,
        "global_batch_size": len(ROWS), "return_model_output": True,
        "use_fused_kernels": engine.model_config.use_fused_kernels, **more,
    })  # fmt: skip


def loss_of(model_output, data, dp_group):
    """Of every token's log-probability and entropy."""
    scores, entropies = model_output["log_probs"].values(), model_output["entropy"].values()
    weights = torch.linspace(-1, 1, len(scores))
    return (scores * weights).sum() + 0.1 * entropies.mean(), {}


def scored(engine, **more) -> list[torch.Tensor]:
    """Log-probabilities and entropies of all tokens but the last of a row, whose next is none."""
    with engine.eval_mode():
        out = engine.infer_batch(batch_of(engine, **more), loss_function=None)["model_output"]
    return [
        torch.cat([row[:-1] for row in out[name].unbind()]) for name in ("log_probs", "entropy")
    ]


def trained(engine) -> list[torch.Tensor]:
    """The scores after each of four steps."""
    found = []
    for _ in range(4):
        with engine.train_mode():
            engine.train_batch(batch_of(engine), loss_function=loss_of)
        found += scored(engine)
    return found


def weights(engine) -> dict[str, torch.Tensor]:
    """As verl hands them to the engine that generates."""
    return dict(engine.get_per_tensor_param(base_sync_done=True)[0])


def layers_of(engine) -> list:
    return [m for m in engine.module.modules() if type(m).__name__.endswith("LlamaDecoderLayer")]


def assert_tiled(engine) -> None:
    layers = layers_of(engine)
    assert len(layers) == 2 and all(is_patched(layer) for layer in layers)
    assert all(layer._hfpatch.condition.reason is None for layer in layers)
    assert all(layer._hfpatch.runtime.checkpointing.tile == 4 for layer in layers)


def assert_equal(ours, stock) -> None:
    assert len(ours) == len(stock) > 0
    for mine, theirs in zip(ours, stock):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A saved model, and options as `hfpatch run --checkpointing tile=4` hands them on."""
    run = {
        "folder": str(tmp_path),
        "options": {"checkpointing": "tile=4"},
        "trained": [marks.TRAINED],
    }
    monkeypatch.setenv(marks.VARIABLE, json.dumps(run))
    return host_runs.saved_llama(tmp_path / "model")


@pytest.mark.parametrize("lora", [0, 4])
def test_actor_against_stock(folder, lora, tmp_path):
    """Stock with whole logits: the same scores after each step, and the same weights."""
    torch.manual_seed(0)  # of the adapter
    ours = engine_of(folder, PLUGIN, lora_rank=lora)
    torch.manual_seed(0)
    stock = engine_of(folder, lora_rank=lora, use_fused_kernels=False)
    before = [weight.clone() for weight in weights(stock).values()]
    assert_equal(trained(ours), trained(stock))
    assert_tiled(ours)
    mine, theirs = weights(ours), weights(stock)
    assert mine.keys() == theirs.keys() and (tmp_path / marks.TRAINED).exists()
    assert_equal(list(mine.values()), list(theirs.values()))
    assert any(not torch.equal(a, b) for a, b in zip(before, theirs.values())), "it did train"


@pytest.mark.parametrize("packed", [True, False])
def test_reference_against_stock(folder, packed, monkeypatch):
    """A CPU has nothing to pin; verl keeps the reference's weights in pinned host memory."""
    policy = transformer_impl.CPUOffloadPolicy
    monkeypatch.setattr(transformer_impl, "CPUOffloadPolicy", lambda pin_memory: policy(False))
    settings = {"forward_only": True, "use_remove_padding": packed}
    ours = engine_of(folder, PLUGIN, **settings)
    stock = engine_of(folder, use_fused_kernels=False, **settings)
    for temperature in (1.0, 0.7):
        more = {"use_remove_padding": packed, "temperature": temperature}
        assert_equal(scored(ours, **more), scored(stock, **more))
    assert_tiled(ours)


def test_a_model_that_does_not_name_it_stays_stock(folder):
    importlib.import_module(PLUGIN)
    engine = engine_of(folder, use_fused_kernels=False)
    assert not any(is_patched(layer) for layer in layers_of(engine))


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"backend": "fsdp"}, "verl's engine must be fsdp2, got fsdp"),
        ({"use_fused_kernels": False}, "use_fused_kernels must be True, got False"),
        ({"use_liger": True}, "use_liger and hfpatch cannot be combined"),
        (
            {"enable_activation_offload": True},
            "enable_activation_offload and hfpatch cannot be combined",
        ),
    ],
)
def test_what_is_refused(folder, settings, words):
    with pytest.raises(ValueError, match=f"^hfpatch: .*{words}"):
        engine_of(folder, PLUGIN, **settings)


def test_the_entry_point_turns_it_on(folder, monkeypatch):
    found = [e for e in metadata.entry_points(group="verl.plugins") if e.name == "hfpatch"]
    if not found:
        pytest.skip("hfpatch is not installed as a package here")
    assert found[0].value == PLUGIN
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "hfpatch")
    assert all(is_patched(layer) for layer in layers_of(engine_of(folder)))
