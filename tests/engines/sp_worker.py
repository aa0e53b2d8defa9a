"""Two gloo processes that share each sequence: DeepSpeed Ulysses through accelerate's ParallelismConfig(sp_size=2)."""

import os
import sys
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"

import common
import deepspeed
import torch
from accelerate import ParallelismConfig
from accelerate.utils import DeepSpeedSequenceParallelConfig
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from transformers import Trainer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hfpatch
from hfpatch.models.documents import find_rows
from hfpatch.models.parallel import refuse_packed_shards, replaced_attention

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def train(model, folder, **overrides) -> Trainer:
    sp = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
    config = {
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
        "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
        "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    parallel = ParallelismConfig(sp_backend="deepspeed", sp_size=2, sp_handler=sp)
    rows = common.make_rows(positions=True, ignored=5)
    return common.train(model, folder, batch=1, rows=rows, deepspeed=config, parallelism_config=parallel, **overrides)


def main(folder: str) -> None:
    common.quiet()
    deepspeed.init_distributed("gloo")
    out, rank = Path(folder), int(os.environ["RANK"])
    seen = set()

    def run(where, **extra):
        model = common.make_model()
        hfpatch.apply(model, checkpointing=hfpatch.Checkpointing(tile=10))
        model.model.norm.register_forward_pre_hook(lambda _, args: seen.add(args[0].shape[1]))
        return train(model, out / where, **extra)

    stock = ALL_ATTENTION_FUNCTIONS["sdpa"]
    whole = run("whole")
    whole.save_model(str(out / "final"))
    ALL_ATTENTION_FUNCTIONS["sdpa"] = stock  # as a new process finds it
    parallel_state_sp._release_sequence_parallel_groups()
    # accelerate cannot skip into the middle of an epoch under sequence parallelism: the rows start again
    resumed = run("resumed", resume=str(out / "whole" / "checkpoint-2"), ignore_data_skip=True)

    # Packed documents: this rank's shard restarts, or starts where a document does.
    config, half = resumed.model.config, torch.arange(common.TOKENS // 2)[None]
    documents = find_rows(1, 12, torch.device("cpu"), None, half % 7).documents
    refused = [says(config, documents, half % 7), says(config, None, half + 12 * rank), says(config, None, half)]
    common.report(
        folder, losses=common.losses(whole), resumed=common.losses(resumed), tokens=sorted(seen), refused=refused,
        replaced=replaced_attention(config),
    )  # fmt: skip


def says(*args) -> str:
    try:
        refuse_packed_shards(*args)
    except ValueError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    main(*sys.argv[1:])
