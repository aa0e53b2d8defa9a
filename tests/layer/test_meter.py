"""What a run's own steps teach it, on simulated devices: no step takes more than there is, and what
is left is used.
"""

import pytest
import torch

import hfpatch
from hfpatch.lab.presets import preset_config
from hfpatch.lab.simulate import simulator
from hfpatch.lab.simulate.implementations import build
from tests.layer.devices import GiB, OfLedger, on_device

pytestmark = pytest.mark.usefixtures("exact_loss")

GLM = {
    "model_type": "glm4_moe", "hidden_size": 1024, "intermediate_size": 4096,
    "moe_intermediate_size": 512, "num_hidden_layers": 5, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 64, "n_routed_experts": 8, "num_experts_per_tok": 4,
    "first_k_dense_replace": 1, "vocab_size": 8192,
}  # fmt: skip
LLAMA = preset_config("llama-3.2-1b") | {"num_hidden_layers": 6, "vocab_size": 8192}


class Run:
    """Steps of a model on a device of `size` GiB. policies: of each step; peaks: the
    most bytes up to then."""

    def __init__(self, monkeypatch, size: float, config=LLAMA, **settings):
        self.model = build(config)
        hfpatch.apply(self.model, **settings)  # its trials run on the CPU
        on_device(monkeypatch, OfLedger, size=int(size * GiB))
        self.model._hfpatch_logits = False
        self.patch, self.policies, self.peaks = monkeypatch, [], []

    def step(self, ids, rows: int):
        ids = ids[:, :rows]
        self.model(input_ids=ids, labels=ids).loss.backward()
        (self.meter,) = self.model.model._hfpatch_runtime.meters.values()
        self.policies.append(self.meter.step.policy)
        self.peaks.append(self.meter.gauge.read().peak)

    def run(self, work, rows: int) -> list:
        """work(run, ids): called in a simulation."""
        self.patch.setattr(simulator, "train_step", lambda model, follower, ids, labels: work(self, ids))
        simulator.simulate(self.model, 1, rows)
        return self.policies


def clear(run):
    run.model.zero_grad(set_to_none=True)


def test_layers_come_to_keep_what_there_is_room_for(monkeypatch, capfd):
    def work(run, ids):
        for _ in range(5):
            run.step(ids, 16384)
            clear(run)

    run = Run(monkeypatch, 8.0)
    plain = [policy.plain for policy in run.run(work, 16384)]
    assert plain[:2] == [0, 1] and plain[2] > 1 and plain == sorted(plain)
    assert 0 < plain[-1] < 6 and plain[-1] == plain[-2]
    size = 8.0 * GiB
    assert 0.85 * size < run.peaks[-1] <= 0.97 * size
    said = capfd.readouterr().err
    assert said.count("1 x 16,384 tokens") == len(dict.fromkeys(run.policies)), said
