"""What comes in the midst of a forward or a backward: Ctrl-C, a signal's handler or a hook that
runs a model.
"""

import pytest
import tiny
import torch

import hfpatch

WAYS = {
    "host": hfpatch.Checkpointing(offload="host", tile=8, plain=0),
    "segments": hfpatch.Checkpointing(offload="host", tile=8, plain=0, every=2),
    "off": "off",
}


def gradients_of(model) -> dict:
    model.zero_grad()
    model(**tiny.labelled(), use_cache=False).loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters()}


def assert_same(got: dict, wanted: dict) -> None:
    for name, gradient in wanted.items():
        assert torch.equal(got[name], gradient), name


# --- Ctrl-C ---------------------------------------------------------------------------------------


# --- models that run in the midst of it -----------------------------------------------------------


@pytest.mark.parametrize("place", ["layers.0", "layers.1.mlp", "embed_tokens"])
@pytest.mark.parametrize("way", WAYS)
def test_a_hook_that_runs_its_own_model_is_refused(way, place):
    ours = tiny.patched(tiny.llama(), checkpointing=WAYS[way])
    wanted = gradients_of(ours)
    handle = ours.model.get_submodule(place).register_forward_hook(lambda *_: ours(tiny.ids()))
    with pytest.raises(RuntimeError, match="Set a flag there"):
        gradients_of(ours)
    handle.remove()
    assert_same(gradients_of(ours), wanted)
