"""The split of a batch between device and accumulation changes nothing but rounding: every gradient
of the step.
"""

import copy

import numerics
import pytest
import tiny
import torch
from transformers import LlamaForCausalLM, TrainerCallback

import hfpatch
from hfpatch.trainer import dataset
from hfpatch.trainer.arguments import TrainArguments
from hfpatch.trainer.trainer import Trainer


class Gradients(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.found = {name: p.grad.clone() for name, p in model.named_parameters()}


def rows() -> list[dict]:
    """Eight rows with 2 to 23 labels each: a mean of means, or a lost micro-batch, would show."""
    torch.manual_seed(1)
    ids = [torch.randint(3, tiny.VOCAB, (24,)).tolist() for _ in range(8)]
    learned = [[position >= 22 - 3 * n for position in range(24)] for n in range(8)]
    return [dataset.make_row([pair], pad_to=None, pad_id=0) for pair in zip(ids, learned)]


def gradients(tmp_path, model, size: int, steps: int) -> dict:
    noted = Gradients()
    args = TrainArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=size,
        gradient_accumulation_steps=steps, max_steps=1,
        max_grad_norm=0.0, save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    Trainer(
        model=model,
        args=args,
        train_dataset=rows(),
        data_collator=dataset.Collator(),
        callbacks=[noted],
    ).train()
    return noted.found


@pytest.mark.parametrize("patched", [False, True])
def test_gradients_of_one_step(tmp_path, patched):
    stock = tiny.llama(LlamaForCausalLM)
    exact = gradients(tmp_path, copy.deepcopy(stock).double(), 8, 1)
    plain = gradients(tmp_path, copy.deepcopy(stock), 8, 1)
    for size, steps in ((8, 1), (4, 2), (2, 4), (1, 8)):
        model = copy.deepcopy(stock)
        if patched:
            hfpatch.apply(model, checkpointing=tiny.TILED)
        for name, got in gradients(tmp_path, model, size, steps).items():
            numerics.assert_close(got, plain[name], exact[name], f"{name} as {size} x {steps}")
