"""`hfpatch train` for two gloo processes under ZeRO-3, without the extension that DeepSpeed would
build on a CPU. NO_TOKENIZER=1: a tokenizer that cannot be written.
"""

import os
import sys

import deepspeed
from transformers import PreTrainedTokenizerBase

from hfpatch.cli.train import main

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def fails(*args, **kwargs):
    raise ValueError("no tokenizer today")


if os.environ.get("NO_TOKENIZER"):
    PreTrainedTokenizerBase.save_pretrained = fails

if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
