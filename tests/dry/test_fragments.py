"""apply() makes torch's allocator grow its segments, also where the model is on the GPU already, and
says what to set where it cannot.
"""

import json
import subprocess

import pytest

from tests.dry.conftest import command, environment

SCRIPT = """
import json, os, sys
sys.modules["torchao"] = None  # its import starts CUDA, and transformers imports it
import torch, hfpatch
from hfpatch import compat
if sys.argv[2] == "old":
    compat.set_allocator = None
from hfpatch.lab.made import made
model = made("llama-tiny", {}, torch.device(sys.argv[1]), torch.bfloat16)
report = hfpatch.apply(model)
new = torch.empty(1 << 28, dtype=torch.uint8, device="cuda").data_ptr()
segments = torch.cuda.memory_snapshot()
print(json.dumps({
    "notes": [note for note in report.notes if "PYTORCH_ALLOC_CONF" in note],
    "expandable": [s["is_expandable"] for s in segments if s["address"] <= new][-1],
    "set": os.environ.get("PYTORCH_ALLOC_CONF"),
}))
"""
GROWS = "expandable_segments:True"


@pytest.mark.parametrize(
    "where, torchs, allocator, grows, said",
    [
        ("cpu", "new", None, True, False),
        ("cuda", "new", None, True, False),
        # A torch whose allocator can be set by its environment alone.
        pytest.param("cuda", "old", None, False, True, marks=pytest.mark.long),
        # The user's own choice stays.
        pytest.param("cuda", "new", "max_split_size_mb:128", False, False, marks=pytest.mark.long),
    ],
)
def test_segments_grow_or_the_report_says_how(where, torchs, allocator, grows, said):
    env = environment()
    del env["PYTORCH_ALLOC_CONF"]
    if allocator is not None:
        env["PYTORCH_ALLOC_CONF"] = allocator
    words = command("-c", SCRIPT, where, torchs)
    run = subprocess.run(words, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["expandable"] == grows
    assert len(found["notes"]) == said
    assert not said or GROWS in found["notes"][0]
