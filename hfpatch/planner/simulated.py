"""What the simulator says of a plan: the planned step run on fake tensors."""

from hfpatch.memory.formula import STOCK, STOCK_CHECKPOINTING, UNTILED, Policy
from hfpatch.simulate.rivals import build, prepare
from hfpatch.simulate.simulator import simulate

IMPLEMENTATIONS = {STOCK: "hf", STOCK_CHECKPOINTING: "hf-ckpt", UNTILED: "hfpatch-off"}


def simulated_beyond(config: dict, plan, *, at_peak: bool) -> int:
    """Bytes beyond parameters and gradients that a step of the plan's batch and policy takes: at the moment of the highest
    total, with the gradients that the plan counts then, or the most at any moment."""
    tiled = isinstance(plan.policy, dict)
    policy = Policy(**plan.policy) if tiled else None
    model = prepare(build(config), "hfpatch" if tiled else IMPLEMENTATIONS[plan.policy])
    result = simulate(model, plan.batch, plan.seq_len, policy=policy)
    if at_peak:
        return result.peak_bytes - result.categories["parameters"] - plan.gpu_bytes["gradients"]
    # A tied weight's gradient, until it is whole, is the simulator's activation and the plan's gradient.
    head = model.get_output_embeddings().weight
    tied = head is model.get_input_embeddings().weight
    return result.most_beyond_bytes - (head.numel() * head.element_size() if tied else 0)
