"""What the simulator says of a plan: the planned step run on fake tensors."""

from hfpatch.memory.formula import STOCK, STOCK_CHECKPOINTING, UNTILED, Policy
from hfpatch.simulate.rivals import build, prepare
from hfpatch.simulate.simulator import simulate

IMPLEMENTATIONS = {STOCK: "hf", STOCK_CHECKPOINTING: "hf-ckpt", UNTILED: "hfpatch-off"}


def simulated_beyond(config: dict, plan, *, at_peak: bool) -> int:
    """Bytes beyond parameters and gradients that a step of the plan's batch and policy takes: at the moment of the highest
    total, or the most at any moment."""
    tiled = isinstance(plan.policy, dict)
    policy = Policy(**plan.policy) if tiled else None
    model = prepare(build(config), "hfpatch" if tiled else IMPLEMENTATIONS[plan.policy])
    result = simulate(model, plan.batch, plan.seq_len, policy=policy)
    return result.beyond_bytes if at_peak else result.most_beyond_bytes
