"""apply() makes torch's allocator grow its segments where it still can, and says what to set where it
cannot.
"""

import json
import subprocess

import pytest

from tests.dry.conftest import command, environment

SCRIPT = """
import json, os, sys
sys.modules["torchao"] = None  # its import starts CUDA, and transformers imports it
import torch, hfpatch
from hfpatch.lab.made import made
model = made("llama-tiny", {}, torch.device(sys.argv[1]), torch.bfloat16)
report = hfpatch.apply(model)
model.cuda()
segments = torch.cuda.memory_snapshot()
print(json.dumps({
    "notes": [note for note in report.notes if "PYTORCH_ALLOC_CONF" in note],
    "expandable": all(segment["is_expandable"] for segment in segments),
    "set": os.environ.get("PYTORCH_ALLOC_CONF"),
}))
"""
GROWS = "expandable_segments:True"


@pytest.mark.parametrize(
    "where, allocator, grows, said",
    [
        ("cpu", None, True, False),  # CUDA has not started: apply sets it
        ("cuda", None, False, True),
        # The user's own choice stays.
        pytest.param("cuda", "max_split_size_mb:128", False, False, marks=pytest.mark.long),
    ],
)
def test_segments_grow_or_the_report_says_how(where, allocator, grows, said):
    env = environment()
    del env["PYTORCH_ALLOC_CONF"]
    if allocator is not None:
        env["PYTORCH_ALLOC_CONF"] = allocator
    run = subprocess.run(command("-c", SCRIPT, where), env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["expandable"] == grows
    assert len(found["notes"]) == said
    assert not said or GROWS in found["notes"][0]
