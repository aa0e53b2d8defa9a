"""Two gloo processes that share each sequence, through Trainer: DeepSpeed's Ulysses, or FSDP2's
context parallelism.
"""

import os
import sys
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"

import common
from accelerate import ParallelismConfig
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedSequenceParallelConfig
from transformers import Trainer, TrainingArguments
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hfpatch
from hfpatch.parallel.exchange import ExchangedAttention
from hfpatch.trainer import trainer as ours
from hfpatch.trainer.arguments import TrainArguments

STOCK_SDPA = ALL_ATTENTION_FUNCTIONS["sdpa"]


def ulysses(stage: int = 3, **more) -> dict:
    import deepspeed
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    ALL_ATTENTION_FUNCTIONS["sdpa"] = STOCK_SDPA  # as a new process finds it
    parallel_state_sp._release_sequence_parallel_groups()
    config = {
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True,
                              **more},
        "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    sp = DeepSpeedSequenceParallelConfig(
        sp_seq_length_is_variable=True, sp_attn_implementation="sdpa"
    )
    return {
        "deepspeed": config,
        "parallelism_config": ParallelismConfig(
            sp_backend="deepspeed", sp_size=2, dp_shard_size=common.pairs(), sp_handler=sp
        ),
    }


def context(**_) -> dict:
    before = AcceleratorState._shared_state.get("fsdp_plugin")
    if before is not None:  # of the run before, whose model may be another
        before.transformer_cls_names_to_wrap = None
    fsdp = {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "reshard_after_forward": True,
            "state_dict_type": "SHARDED_STATE_DICT"}  # fmt: skip
    return {
        "fsdp": True,
        "fsdp_config": fsdp,
        "parallelism_config": ParallelismConfig(cp_size=2, dp_shard_size=common.pairs()),
    }


def main(engine: str, folder: str) -> None:
    common.quiet()
    shim = common.as_if_on_gpus() if engine == "context" else {}
    settings = {"ulysses": ulysses, "neox": ulysses, "context": context}[engine]
    # Under Ulysses the first rank has no label at all.
    out, rows = Path(folder), common.make_rows(positions=True, ignored=13)
    seen, exchanged = set(), []
    inner = ExchangedAttention.forward
    ExchangedAttention.forward = lambda self, *args, **known: (
        exchanged.append(1) or inner(self, *args, **known)
    )

    def run(
        where,
        kinds=(TrainingArguments, Trainer),
        engine_settings=None,
        make=common.make_model,
        **extra,
    ):
        model = make()
        hfpatch.apply(model, checkpointing=hfpatch.Checkpointing(tile=10), logits=False)
        if engine != "neox":
            model.model.norm.register_forward_pre_hook(lambda _, args: seen.add(args[0].shape[1]))
        extra = {"rows": rows, **(engine_settings or settings()), **shim, **extra}
        return common.train(model, out / where, batch=1, kinds=kinds, **extra)

    def called(*given, **known):
        callback = hfpatch.Callback()
        trainer = Trainer(*given, **known, callbacks=[callback])
        callback.attach(trainer)
        return trainer

    if engine == "neox":
        given = {
            "make": common.make_neox,
            "rows": rows,
            "max_steps": 2,
            "save_strategy": "no",
        }
        trainer = run("neox", (TrainingArguments, called), **given)
        return common.report(
            folder, losses=common.losses(trainer), norms=common.norms(trainer), calls=len(exchanged)
        )

    whole = run("whole")
    train_calls, tokens = len(exchanged), sorted(seen)
    whole.save_model(str(out / "final"))

    # In the middle of an epoch: hfpatch train's Trainer, which is evaluated too, and transformers'
    # own with our callback.
    more = {"resume": str(out / "whole" / "checkpoint-2"), "save_strategy": "no"}
    resumed = [
        run(
            "resumed",
            (TrainArguments, ours.Trainer),
            lr_scheduler_type="linear",
            **more,
        ),
        run("called", (TrainingArguments, called), **more),
    ]
    evaluated = resumed[0].evaluate(rows[:4])["eval_loss"]

    # With another number of labels in each row, which weigh by token in the Trainer of hfpatch
    # train, and experts. Their config does not say how wide a head is.
    rows = common.make_rows(positions=True)
    both = [(TrainArguments, ours.Trainer, {})]
    uneven = [
        run(
            "uneven",
            (kind, trainer),
            make=common.make_experts,
            rows=rows,
            max_steps=2,
            save_strategy="no",
            **more,
        )
        for kind, trainer, more in both
    ]

    refused = []
    if engine == "ulysses":
        for more in ({"stage": 2}, {"reduce_scatter": False}):
            try:
                run("refused", engine_settings=ulysses(**more))
            except ValueError as error:
                refused.append(str(error))
    common.report(
        folder, losses=common.losses(whole), resumed=[common.losses(t) for t in resumed],
        tokens=tokens, refused=refused,
        norms=common.norms(whole), calls=train_calls, evaluation=evaluated,
        uneven=[(common.losses(t), common.norms(t)) for t in uneven],
    )  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
