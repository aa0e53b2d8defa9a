"""The learning-rate schedule, built and read before training.

Trainer never looks at its values: with NaN among its settings the rate is 0 in every step, and the
run ends with exit code 0.
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
    """Says which part of the schedule is longer than the run has room for.

    Raises:
        ValueError: the schedule cannot be built or read, a rate is negative or not finite, or the
            rate is 0 in every step.
    """
    warmup = args.get_warmup_steps(steps)
    name = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], args.learning_rate)
    try:
        schedule = get_scheduler(
            args.lr_scheduler_type,
            optimizer,
            num_warmup_steps=warmup,
            num_training_steps=steps,
            scheduler_specific_kwargs=args.lr_scheduler_kwargs,
        )
        # One that goes by the loss has no function of the step.
        (factor,) = getattr(schedule, "lr_lambdas", [lambda step: 1.0])
        at = [*range(0, steps, max(1, steps // READ)), steps - 1, steps]
        rates = [args.learning_rate * factor(step) for step in at]
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise ValueError(
            f"hfpatch: --lr_scheduler_type {name} and --lr_scheduler_kwargs must give a rate for "
            f"every step, got {type(error).__name__}: {error}. Change them."
        ) from error
    wrong = [rate for rate in rates if not math.isfinite(rate) or rate < 0]
    if wrong or not any(rates[:-1]):
        raise ValueError(
            f"hfpatch: the learning rate must be 0 or more in every step, and more in some, got "
            f"{(wrong or rates)[0]:g} from --lr_scheduler_type {name} in {steps} steps. Change "
            "--warmup_steps or --lr_scheduler_kwargs."
        )
    settings = args.lr_scheduler_kwargs or {}
    left = steps
    parts = {
        "warm-up": warmup,
        "stable part": settings.get("num_stable_steps") or 0,
        "decay": settings.get("num_decay_steps") or 0,
    }
    for name, length in parts.items():
        if length > left:
            say(f"hfpatch: the {name} of {length} steps is longer than the {left} the run has.")
            return
        left -= length
