"""Full fine-tuning with the optimizer on the GPU: resume, equality of the fused form, and what is
refused.
"""

from types import SimpleNamespace

import pytest
import tiny
import torch
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

import hfpatch
from hfpatch.budget import free
from hfpatch.trainer import arguments, placement
from hfpatch.trainer.flags import ModelArguments

# torchao's extension libraries and pytree registration complain at import on a CPU machine
pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning:torchao", "ignore::UserWarning:torch.utils._pytree"
)


@pytest.fixture(autouse=True)
def eager_optimizer():
    """torchao compiles its update, a C++ build of seconds per weight shape here; eagerly it is the
    same function.
    """
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def make_model(tied=False, dtype=torch.bfloat16, patched=False):
    torch.manual_seed(0)
    # Sizes that blocks of 256 divide: the optimizer's states are counted.
    config = tiny.config(
        vocab_size=128, intermediate_size=128, tie_word_embeddings=tied, pad_token_id=None
    )
    model = LlamaForCausalLM(config).to(dtype)
    if patched:
        hfpatch.apply(model, checkpointing=hfpatch.Checkpointing(tile=10))
    return model


def make_data(rows=16):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, 128, (rows, 17), generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids]


def train(folder, name, *, steps=4, resume=None, tied=False, patched=False, save_at=2, **overrides):
    """Trains steps steps under a placement. Returns the weights and the losses."""
    model = make_model(tied, patched=patched)
    flags = placement.training_arguments(name) | overrides
    args = TrainingArguments(
        str(folder), per_device_train_batch_size=2, max_steps=steps, save_steps=save_at,
        logging_steps=1, use_cpu=True,
        learning_rate=1e-3, weight_decay=0.1, warmup_steps=2, report_to="none", disable_tqdm=True,
        seed=3,
        **{"max_grad_norm": 0.0, **flags},
    )  # fmt: skip
    trainer = Trainer(
        model, args, train_dataset=make_data(), **placement.trainer_arguments(model, args, name)
    )
    trainer.train(resume_from_checkpoint=resume)
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return {n: p.detach().clone() for n, p in model.named_parameters()}, losses, trainer


def assert_same(got, wanted):
    assert got.keys() == wanted.keys()
    for name in wanted:
        assert torch.equal(got[name], wanted[name]), name


@pytest.mark.parametrize("name", tiny.longer(["gpu8bit", "gpu8bit-fused"], "gpu8bit-fused"))
def test_resume_is_bit_equal_with_stochastic_rounding(tmp_path, name):
    whole, losses, trainer = train(tmp_path / "a", name)
    optimizer = trainer.optimizer.optimizer
    assert optimizer.bf16_stochastic_round
    assert "OptimState8bit" in {
        type(v).__name__ for state in optimizer.state.values() for v in state.values()
    }
    checkpoint = tmp_path / "a" / "checkpoint-2"
    resumed, later, _ = train(tmp_path / "b", name, resume=str(checkpoint))
    assert_same(resumed, whole)
    assert later == losses
    # The random state is what carries it: without it the rounding draws, and so the weights,
    #     differ.
    (checkpoint / "rng_state.pth").unlink()
    other, _, _ = train(tmp_path / "c", name, resume=str(checkpoint))
    assert any(not torch.equal(other[n], whole[n]) for n in whole)


@pytest.mark.parametrize("tied,patched", tiny.longer([(False, False), (True, True)], (True, True)))
def test_fused_is_the_same_optimizer(tmp_path, tied, patched):
    """Without the random rounding, whose draws come in another order, both give the same bits."""
    plain = {"optim_args": "bf16_stochastic_round=False"}
    wanted, losses, _ = train(
        tmp_path / "a", "gpu8bit", tied=tied, patched=patched, save_at=100, **plain
    )
    model = make_model(tied, patched=patched)
    args = TrainingArguments(
        str(tmp_path / "b"), per_device_train_batch_size=2, max_steps=4, save_strategy="no",
        logging_steps=1,
        use_cpu=True, learning_rate=1e-3, weight_decay=0.1, warmup_steps=2, report_to="none",
        disable_tqdm=True,
        seed=3, **placement.training_arguments("gpu8bit-fused"),
    )  # fmt: skip
    found = placement.trainer_arguments(model, args, "gpu8bit-fused")
    cls, settings = found["optimizer_cls_and_kwargs"]
    trainer = Trainer(
        model, args, train_dataset=make_data(),
        optimizer_cls_and_kwargs=(cls, {**settings, "bf16_stochastic_round": False}),
    )  # fmt: skip
    trainer.train()
    assert_same({n: p.detach() for n, p in model.named_parameters()}, wanted)
    assert [row["loss"] for row in trainer.state.log_history if "loss" in row] == losses


def test_gradients_never_exist_together():
    from hfpatch.trainer.step_in_backward import AdamW8bitInBackward

    model = make_model()
    alive = []
    optimizer = AdamW8bitInBackward(model.parameters(), lr=1e-2)
    for parameter in model.parameters():  # after the optimizer's hook: what is left standing
        parameter.register_post_accumulate_grad_hook(
            lambda _: alive.append(sum(p.grad is not None for p in model.parameters()))
        )
    before = [p.detach().clone() for p in model.parameters()]
    row = make_data(1)[0]["input_ids"][None]
    model(input_ids=row, labels=row).loss.backward()
    optimizer.step()
    assert len(alive) == len(before) and max(alive) == 0
    assert all(p.grad is None for p in model.parameters())
    assert sum(not torch.equal(p, b) for p, b in zip(model.parameters(), before)) == len(before)

    model(input_ids=row, labels=row).loss.backward()
    with pytest.raises(RuntimeError, match="a second before optimizer.step"):
        model(input_ids=row, labels=row).loss.backward()


@pytest.mark.parametrize(
    "name,flags,message",
    [
        ("gpu8bit-fused", {"max_grad_norm": 1.0}, "no global norm"),
        ("gpu8bit-fused", {"gradient_accumulation_steps": 4}, "updates in every backward"),
        ("gpu8bit", {"deepspeed": "zero3"}, "Keep one"),
        ("gpu8bit", {"optim": "adafactor"}, "brings its optimizer"),
    ],
)
def test_contradictions_are_one_sentence(name, flags, message):
    with pytest.raises(ValueError, match=message) as caught:
        placement.training_arguments(name, flags=flags)
    assert str(caught.value).startswith("hfpatch: ") and "\n" not in str(caught.value)


def test_deepspeeds_own_flag_names_an_engine(monkeypatch):
    monkeypatch.setattr(placement, "single_process_environment", lambda: None)
    values = {"deepspeed": "zero3", "nvme_path": None}
    arguments._place(ModelArguments(), values, dict(values))
    assert values["deepspeed"]["zero_optimization"]["stage"] == 3


def test_what_only_the_built_arguments_show_is_refused():
    args = SimpleNamespace(
        max_grad_norm=0.0, gradient_accumulation_steps=1, world_size=2, learning_rate=1e-3,
        adam_beta1=0.9,
        adam_beta2=0.99, adam_epsilon=1e-8,
    )  # fmt: skip
    with pytest.raises(ValueError, match="runs in one process"):
        placement.trainer_arguments(make_model(), args, "gpu8bit-fused")
    args.world_size, args.max_grad_norm = 1, 1.0
    with pytest.raises(ValueError, match="no global norm"):
        placement.trainer_arguments(make_model(), args, "gpu8bit-fused")
    with pytest.raises(ValueError, match="Load the model in bfloat16"):
        placement.trainer_arguments(make_model(dtype=torch.float32), args, "gpu8bit")
    assert placement.trainer_arguments(make_model(), args, "gpu8bit") == {}


def test_engines_are_the_shipped_configs():
    zero = placement.engine_of("zero3-offload").values["zero_optimization"]
    assert zero["stage"] == 3
    assert zero["offload_optimizer"]["device"] == zero["offload_param"]["device"] == "cpu"
    assert placement.engine_of("zero3_cpu_offload").values["zero_optimization"] == zero
    assert placement.engine_of("fsdp2").engine == "fsdp" and placement.engine_of("gpu8bit") is None
    with pytest.raises(ValueError, match=r"no placement 'zero33'. Did you mean zero3\?"):
        placement.engine_of("zero33")


@pytest.mark.long
def test_auto_takes_the_most_faithful_plan_that_fits():
    config, gib = "llama-3.1-8b", 1 << 30

    sizes = dict(seq_len=32768, batch=1, gpu_free=78 * gib)
    assert placement.fitting(config, host_free=256 * gib, **sizes) == "zero3-offload"
    assert placement.fitting(config, host_free=100 * gib, **sizes) == "gpu8bit"
    small = {**sizes, "gpu_free": 40 * gib}
    assert placement.fitting(config, host_free=100 * gib, **small) == "gpu8bit-fused"
    with pytest.raises(
        ValueError, match=r"no placement fits 40.0 GiB .*: gpu8bit-fused needs \d\d.\d GiB and"
    ):
        placement.fitting(config, host_free=100 * gib, fused=False, **small)


def test_auto_plans_the_run_that_was_launched(monkeypatch):
    """Its ranks, those that share a sequence, and what layers keep."""
    planned = {}
    monkeypatch.setattr(free, "gpu_free", lambda: 78 << 30)
    monkeypatch.setattr(placement, "fitting", lambda config, **run: planned.update(run))
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    model = ModelArguments(model="llama-3.2-1b", sp_size=2, checkpointing=["tile=1024"])
    values = {
        "seq_len": 4096, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8,
    }  # fmt: skip
    arguments._fitting(model, values, {})
    assert planned["gradient_accumulation_steps"] == 8
    assert planned["gpus"] == 1  # no launcher: a scheduler's number of machines
    monkeypatch.setenv("LOCAL_RANK", "0")
    arguments._fitting(model, values, {})
    assert planned["gpus"] == 4 and planned["sp_size"] == 2
    assert planned["checkpointing"].tile == 1024
