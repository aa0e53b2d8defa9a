"""`hfpatch train` on gloo processes; the lines before it only make the engine real on a CPU."""

import json
import os
import sys
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"

import common
import deepspeed
import torch
import transformers

from hfpatch.attention import heads
from hfpatch.cli.train import main

# else it builds an extension, half a minute of C++
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
torch.set_num_threads(1)
arguments = sys.argv[1:]
common.name_ranks_by_group()
if "FAILS" in os.environ and os.environ["RANK"] == "1":
    backward, checkpoint = heads.attention_backward, Path(os.environ["FAILS"])

    def failing(*args, **known):
        if checkpoint.exists():  # the other rank waits for this one's exchange
            raise RuntimeError("a kernel failed")
        return backward(*args, **known)

    heads.attention_backward = failing
if "SAVES_NO_CONFIG" in os.environ:

    def unsaved(self, *args, **kwargs):
        raise ValueError("hfpatch: no config today.")

    transformers.PreTrainedConfig.save_pretrained = unsaved
if int(os.environ.get("WORLD_SIZE", "1")) > 1:
    if "fsdp2" in arguments:
        arguments += [
            "--accelerator_config",
            json.dumps(common.as_if_on_gpus()["accelerator_config"]),
        ]
    else:
        deepspeed.init_distributed("gloo")
sys.exit(main(arguments))
