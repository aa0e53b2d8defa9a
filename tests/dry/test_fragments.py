"""apply() makes torch's allocator grow its segments, also where the model is on the GPU already."""

import json
import subprocess

import pytest

from tests.dry.conftest import command, environment

SCRIPT = """
import json, sys
sys.modules["torchao"] = None  # its import starts CUDA, and transformers imports it
import torch, hfpatch
from hfpatch.lab.made import made
model = made("llama-tiny", {}, torch.device(sys.argv[1]), torch.bfloat16)
hfpatch.apply(model)
new = torch.empty(1 << 28, dtype=torch.uint8, device="cuda").data_ptr()
segments = torch.cuda.memory_snapshot()
print(json.dumps({
    "expandable": [s["is_expandable"] for s in segments if s["address"] <= new][-1],
}))
"""


@pytest.mark.parametrize(
    "where, allocator, grows",
    [
        pytest.param("cpu", None, True, marks=pytest.mark.long),
        ("cuda", None, True),
        # The user's own choice stays.
        pytest.param("cuda", "max_split_size_mb:128", False, marks=pytest.mark.long),
    ],
)
def test_segments_grow(where, allocator, grows):
    env = environment()
    del env["PYTORCH_ALLOC_CONF"]
    if allocator is not None:
        env["PYTORCH_ALLOC_CONF"] = allocator
    words = command("-c", SCRIPT, where)
    run = subprocess.run(words, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    assert json.loads(run.stdout.splitlines()[-1])["expandable"] == grows
