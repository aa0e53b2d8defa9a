"""What the simulator says of a plan: the planned step run on fake tensors, and whole plans of models that no closed form
describes."""

from dataclasses import dataclass, replace

import torch
from torch import nn

from hfpatch.memory.adapters import Adapters
from hfpatch.memory.formula import STOCK, STOCK_CHECKPOINTING, UNTILED, Flops, Moment, Policy, StepMemory
from hfpatch.memory.policy import auto_tile
from hfpatch.memory.seconds import StepTime, optimizer_seconds
from hfpatch.memory.shape import ModelShape
from hfpatch.planner.models import config_of
from hfpatch.planner.placements import PLACEMENTS, candidates, resident
from hfpatch.planner.plan import WHOLE, Plan, assembled, make_run
from hfpatch.simulate.rivals import build, prepare
from hfpatch.simulate.simulator import simulate

IMPLEMENTATIONS = {STOCK: "hf", STOCK_CHECKPOINTING: "hf-ckpt", UNTILED: "hfpatch-off"}


def simulated_bytes(config: dict, plan, *, at_peak: bool) -> tuple[int, int]:
    """Bytes that a step of the plan's batch and policy takes: beyond parameters and gradients, at the moment of the highest
    total, with the gradients that the plan counts then, or the most at any moment; and on the host, beyond what the placement
    keeps there."""
    tiled = isinstance(plan.policy, dict)
    policy = Policy(**plan.policy) if tiled else None
    wide = PLACEMENTS[plan.placement].itemsize == 4  # under autocast
    adapters = Adapters(**plan.adapters) if plan.adapters else None
    built = build(config, torch.float32 if wide else torch.bfloat16, adapters)
    model = prepare(built, "hfpatch" if tiled else IMPLEMENTATIONS[plan.policy])
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=wide):
        result = simulate(model, plan.batch, -(-plan.seq_len // plan.sp_size), policy=policy, ranks=plan.sp_size)
    # Autocast's copies of the weights, which the placement counts.
    shape = replace(ModelShape.from_config(config), adapters=adapters)
    stays = resident(plan.placement, shape, plan.gpus, policy or plan.policy)
    copies = stays.parameters - 4 * shape.parameters if wide else 0
    on_host = result.host_peak_bytes - stays.host // plan.gpus * bool(adapters)
    if at_peak:
        beyond = result.peak_bytes - copies - result.categories["parameters"] - plan.gpu_bytes["gradients"]
        return beyond, on_host
    # A tied weight's gradient, until it is whole, is the simulator's activation and the plan's gradient.
    head = model.get_output_embeddings().weight
    tied = head is model.get_input_embeddings().weight
    beyond = result.most_beyond_bytes - copies - (head.numel() * head.element_size() if tied else 0)
    return beyond, on_host


@dataclass(frozen=True)
class Counted:
    """What a placement asks of a model, counted on the model itself: its parameters, those of its largest layer and of its
    embedding, and its layers."""

    parameters: int
    layer_parameters: int
    embedding_parameters: int
    num_layers: int
    adapters: None = None

    @classmethod
    def of(cls, model: nn.Module) -> "Counted":
        count = lambda module: sum(p.numel() for p in module.parameters())  # noqa: E731
        lists = (m for m in model.modules() if isinstance(m, nn.ModuleList))
        layers = max((m for m in lists if hasattr(m[0], "gradient_checkpointing")), key=len)
        largest = max(count(layer) for layer in layers)
        return cls(count(model), largest, count(model.get_input_embeddings()), len(layers))


def simulated_plan(model, *, seq_len: int, placement: str = "auto", **arguments) -> Plan:
    """plan() of a model type that no closed form describes: memory and FLOPs are a simulated step's, with inputs and
    attention outputs on the host where layers run tile by tile; seconds are matmuls, attention and the optimizer alone.

    Arguments as plan()'s. Raises ValueError for what is unknown.
    """
    built = build(config_of(model)[1])
    run = make_run(model, seq_len=seq_len, shape=Counted.of(built), **arguments)
    policy = run.checkpointing
    if policy not in WHOLE:
        policy = Policy("host", tile=auto_tile(run.batch * run.seq_len))
    tiled = isinstance(policy, Policy)
    found = simulate(prepare(built, "hfpatch" if tiled else IMPLEMENTATIONS[policy]), run.batch, run.seq_len,
                     policy=policy if tiled else None)  # fmt: skip
    gradients = 2 * run.shape.parameters
    moments = (
        Moment("simulated, of the highest total", found.categories.get("gradients", 0), layer=found.beyond_bytes),
        Moment("simulated, of the most activations", 0, layer=found.most_beyond_bytes),
    )
    memory = StepMemory(2 * run.shape.parameters, gradients, moments, found.host_peak_bytes)
    matmul, attention = sum(found.flops["matmul"].values()), found.flops["attention"]
    forward, backward = attention.get("forward", 0), attention.get("backward", 0)
    least = 3 * found.flops["matmul"].get("forward", 0), 3 * backward / 2.5
    flops = Flops(matmul, forward, backward, sum(least), least[1])

    def under(name):
        stays = resident(name, run.shape, run.gpus, policy)
        attend = forward / run.gpu.attention_forward + backward / run.gpu.attention_backward
        time = StepTime(
            matmul / run.gpu.matmul_flops, attend, *(0.0,) * 6, optimizer=optimizer_seconds(run.gpu, memory, stays)
        )
        why = "simulated: no closed form describes this model type; norms, activations and copies take longer still"
        return assembled(run, name, policy, why, memory, flops, time, stays.link)

    plans = [under(name) for name in candidates(placement, run.gpus)]
    return next((p for p in plans if p.fits), min(plans, key=lambda p: p.gpu_peak_bytes))
