"""Two gloo processes under ZeRO-3 or FSDP2: TRL's DPO, KTO, GRPO and RLOO, patched and not, on the
same engine.
"""

import json
import os
import sys
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"

import common
import deepspeed
import test_trl_trainers
import torch.distributed as dist
from accelerate.state import AcceleratorState

from hfpatch.context.classes import is_patched
from hfpatch.trainer import configs

# else it builds an extension, half a minute of C++
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
ZERO3 = {
    "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 3},
}  # fmt: skip


def main(engine: str, lora: str, folder: str) -> None:
    common.quiet()
    if engine == "fsdp2":
        given = common.as_if_on_gpus() | configs.training_arguments(configs.load("fsdp2"))
    else:
        given = {"deepspeed": ZERO3}
        deepspeed.init_distributed("gloo")
    ran, references = [], 0
    for name in ("DPO", "KTO", "GRPO", "RLOO"):
        runs = []
        for order in ("apply first", "stock"):
            if engine == "zero3":
                AcceleratorState._reset_state(reset_partial_state=False)
            settings = json.loads(json.dumps(given))  # filled in place
            # RLOO's rewards hold the difference to its reference, which stays TRL's own here: whether
            # they are all equal, which it logs, would depend on the last bit.
            settings |= {"beta": 0.1} if name == "GRPO" else {}
            where = Path(folder) / f"{name}, {order}"
            if dist.get_rank() == 0:
                test_trl_trainers.base(name).save_pretrained(where / "model")
            dist.barrier()
            runs.append(
                test_trl_trainers.trained(name, where, order, lora=bool(int(lora)), **settings)
            )
            assert any(
                hasattr(p, "ds_id") or hasattr(p, "full_tensor")
                for p in runs[-1][0].model.parameters()
            )
        test_trl_trainers.assert_same_run(*runs)
        reference = getattr(runs[0][0], "ref_model", None)
        references += reference is not None and is_patched(getattr(reference, "module", reference))
        ran.append(name)
    common.report(folder, ran=ran, references=references)


if __name__ == "__main__":
    main(*sys.argv[1:])
