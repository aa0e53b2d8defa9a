"""`hfpatch train` for two gloo processes under ZeRO-3, without the extension that DeepSpeed would
build on a CPU.
"""

import sys

import deepspeed

from hfpatch.cli.train import main

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
