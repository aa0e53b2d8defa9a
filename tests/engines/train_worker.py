"""`hfpatch train` on gloo processes under DeepSpeed; the lines before it only make the engine real on a CPU."""

import os
import sys

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch

from hfpatch.commands.train import main

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it builds an extension, half a minute of C++
torch.set_num_threads(1)
if int(os.environ.get("WORLD_SIZE", "1")) > 1:
    deepspeed.init_distributed("gloo")
sys.exit(main(sys.argv[1:]))
