"""The learning-rate schedule, built and read before training.

Trainer builds it when training begins and never looks at its values: with NaN among its settings the
rate is 0 in every step, and the run ends with exit code 0.
"""

import math

import torch
from transformers import get_scheduler

READ = 64  # the rate is read at about as many steps


def steps_of(args, rows, share: int) -> int:
    """The steps of the run. rows: the dataset. share: processes that share each row."""
    if args.max_steps > 0:
        return args.max_steps
    batch = args.per_device_train_batch_size * (args.world_size // share)
    batches = math.ceil(len(rows) / batch)
    return math.ceil(args.num_train_epochs * math.ceil(batches / args.gradient_accumulation_steps))


def check(args, steps: int, say) -> None:
    """Says where the warm-up or a later phase is longer than the run.

    Raises:
        ValueError: the schedule cannot be built or read, a rate is negative or not finite, or the
            rate is 0 in every step.
    """
    warmup = args.get_warmup_steps(steps)
    rates = _rates(args, steps, warmup)
    name = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
    for step, rate in rates.items():
        if not math.isfinite(rate) or rate < 0:
            raise ValueError(
                f"hfpatch: the learning rate must be 0 or more, got {rate:g} at step {step} of "
                f"{steps} from --lr_scheduler_type {name}. Change --lr_scheduler_kwargs."
            )
    if not any(rate for step, rate in rates.items() if step < steps):
        raise ValueError(
            f"hfpatch: the learning rate of --lr_scheduler_type {name} is 0 in each of {steps} "
            "steps. Change --warmup_steps or --lr_scheduler_kwargs."
        )
    if warmup >= steps:
        say(f"hfpatch: the warm-up of {warmup} steps is as long as the run of {steps} or longer.")
    settings = args.lr_scheduler_kwargs or {}
    phases = ("num_stable_steps", "num_decay_steps")
    later = sum(settings.get(phase) or 0 for phase in phases)
    if later > steps - warmup:
        say(
            f"hfpatch: the schedule has {later} steps after its warm-up, and the run {steps - warmup}."
        )


def _rates(args, steps: int, warmup: int) -> dict[int, float]:
    """step -> rate, from the first to the one after the last."""
    # A rate of 0 that was asked for is no fault of the schedule.
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], args.learning_rate or 1.0)
    try:
        schedule = get_scheduler(
            args.lr_scheduler_type,
            optimizer,
            num_warmup_steps=warmup,
            num_training_steps=steps,
            scheduler_specific_kwargs=args.lr_scheduler_kwargs,
        )
        factors = getattr(schedule, "lr_lambdas", None)
        if factors is None:  # it goes by the loss
            return {0: args.learning_rate or 1.0}
        at = sorted({steps * i // READ for i in range(READ + 1)} | {steps - 1})
        return {step: schedule.base_lrs[0] * factors[0](step) for step in at}
    except (TypeError, ValueError, ArithmeticError, KeyError) as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"hfpatch: the learning-rate schedule does not work: {why.rstrip('.')}. Change "
            "--lr_scheduler_kwargs."
        ) from error
