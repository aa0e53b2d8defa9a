"""The learning rate over steps, and which tensors decay."""

import math

import pytest
import tiny
import torch
import transformers

from hfpatch.training import schedule
from hfpatch.training.arguments import TrainArguments
from hfpatch.training.trainer import Trainer


def test_without_floor_and_restarts_it_is_transformers_cosine():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    stock = transformers.get_cosine_schedule_with_warmup(optimizer, 5, 50).lr_lambdas[0]
    for step in range(51):
        assert schedule.cosine(step, warmup=5, total=50) == pytest.approx(stock(step), abs=1e-15)


def test_restarts_are_transformers_hard_restarts():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    stock = transformers.get_cosine_with_hard_restarts_schedule_with_warmup(optimizer, 5, 50, num_cycles=3).lr_lambdas[
        0
    ]
    for step in range(51):
        assert schedule.cosine(step, warmup=5, total=50, restarts=2) == pytest.approx(stock(step), abs=1e-15)


def test_floor_is_reached_and_never_undercut():
    values = [schedule.cosine(step, warmup=10, total=110, floor=0.1, restarts=1) for step in range(10, 200)]
    assert values[0] == values[50] == 1.0, "each arc begins at the peak"
    assert values[25] == pytest.approx(0.1 + 0.9 / 2 * (1 + math.cos(math.pi / 2)))
    assert min(values) == values[100] == values[-1] == 0.1


def make_trainer(tmp_path, **flags):
    args = TrainArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", **flags)
    return Trainer(model=tiny.llama(num_hidden_layers=1, attention_bias=True), args=args)


def test_decay_touches_matrices_alone_and_is_decoupled(tmp_path):
    trainer = make_trainer(tmp_path, weight_decay=0.1, learning_rate=0.5)
    trainer.create_optimizer()
    model = trainer.model
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    trainer.optimizer.step()
    for name, p in model.named_parameters():
        # With no gradient Adam itself stands still: what is left is the decay, 1 - lr * decay.
        expected = before[name] * (1 - 0.5 * 0.1) if before[name].ndim >= 2 else before[name]
        torch.testing.assert_close(p.detach(), expected, rtol=1e-6, atol=0)
    assert before["model.embed_tokens.weight"].abs().sum() > 0


def test_wrapped_names_decay_as_the_plain_ones(tmp_path):
    trainer = make_trainer(tmp_path)

    class Flat(torch.nn.Module):  # FSDP1 hands over flattened parameters under names of its own
        def __init__(self, model):
            super().__init__()
            self._fsdp_wrapped_module = model
            for p in model.parameters():
                p.data = p.data.flatten()

    plain = trainer.get_decay_parameter_names(trainer.model)
    wrapped = trainer.get_decay_parameter_names(Flat(trainer.model))
    assert [schedule.plain_name(name) for name in wrapped] == plain
    assert "lm_head.weight" in plain and not any("norm" in name or "bias" in name for name in plain)


def test_trainer_uses_floor_and_restarts(tmp_path):
    trainer = make_trainer(tmp_path, lr_floor=0.2, lr_restarts=1, warmup_steps=2, learning_rate=1.0)
    trainer.create_optimizer_and_scheduler(22)
    rates = []
    for _ in range(23):
        rates.append(trainer.optimizer.param_groups[0]["lr"])
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
    expected = [schedule.cosine(step, warmup=2, total=22, floor=0.2, restarts=1) for step in range(23)]
    assert rates == pytest.approx(expected) and rates[12] == 1.0 and rates[-1] == pytest.approx(0.2)


@pytest.mark.parametrize("name", ["linear", "constant_with_warmup"])
def test_other_schedules_are_transformers_own(tmp_path, name):
    trainer = make_trainer(tmp_path, lr_scheduler_type=name, learning_rate=1.0)
    trainer.create_optimizer_and_scheduler(10)
    for _ in range(5):
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.5 if name == "linear" else 1.0)
