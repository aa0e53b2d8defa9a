"""AdamW with 8-bit moments that steps inside backward: each gradient is used and freed at once.

Each weight is updated as by the optimizer it derives from. No gradient outlives its weight's hook,
so the 15 GiB of gradients of 8B parameters never exist. A global norm, which needs all gradients,
and accumulation over several backward passes are refused.
"""

from torchao.optim import AdamW8bit


class AdamW8bitInBackward(AdamW8bit):
    """Takes the arguments of torchao.optim.AdamW8bit.

    step() updates nothing: it marks the end of a step, so that a second backward before it is
    noticed. A weight used several times in one backward (a tied head) is updated once, by the
    summed gradient.
    """

    def __init__(self, params, **settings):
        super().__init__(params, **settings)
        self._updated = set()
        self._place = {}
        for index, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                self._place[parameter] = index
                parameter.register_post_accumulate_grad_hook(self._update)

    def step(self, closure=None):
        """Ends the step; returns closure() where one is given, whose backward does the updates."""
        loss = None if closure is None else closure()
        self._updated.clear()
        return loss

    def _update(self, parameter) -> None:
        if parameter in self._updated:
            raise RuntimeError(
                "hfpatch: gpu8bit-fused allows one backward a step, got a second before "
                "optimizer.step(). Set gradient_accumulation_steps to 1 or use gpu8bit."
            )
        self._updated.add(parameter)
        groups = self.param_groups
        # The parent's step walks param_groups: for the moment it sees this weight alone, with its
        # group's settings (lr is a tensor shared with the group, so the scheduler's value counts).
        self.param_groups = [{**groups[self._place[parameter]], "params": [parameter]}]
        try:
            super().step()
        finally:
            self.param_groups = groups
        parameter.grad = None
