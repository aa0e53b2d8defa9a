"""Every causal language model of transformers: exact, tiled or whole with a reason or left alone with a sentence, and no error
that transformers does not raise."""

import copy

import families
import pytest
from test_families import batch, step
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import hfpatch

TILE = hfpatch.Checkpointing(offload="host", tile=16)
NOT_SMALL = ("blt",)  # parts of it take no sizes from its config: 23 GiB
UNFUSED = {"rms_norm": False, "rope": False, "mlp": False, "loss": False}


def stock_model(name):
    """A small model that transformers itself can train here, else a skip with its reason."""
    if name in NOT_SMALL:
        pytest.skip("no small one")
    try:
        config = CONFIG_MAPPING[name](**families.CHANGES.get(name, {}))
        if hasattr(config, "text_config"):
            pytest.skip("a wrapper: tests/models/test_vision.py")
        model = families.small_model(name)
    except (Exception, SystemError) as error:
        pytest.skip(f"no small one: {type(error).__name__}")
    for dtype in ("double", "float"):  # some families write float32 into what they compute
        try:
            stock = getattr(model, dtype)()
            step(stock, batch())
            return copy.deepcopy(stock)
        except Exception as error:
            reason = f"transformers' own raises {type(error).__name__}"
    pytest.skip(reason)


@pytest.mark.long
@pytest.mark.parametrize("name", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
def test_exact_or_as_it_was(name):
    """Fused losses at the accuracy of float32; gradients where only what runs is ours, not how it is rounded."""
    stock = stock_model(name)
    _, wanted_loss, wanted = step(stock, batch())
    ours = copy.deepcopy(stock)
    hfpatch.apply(ours, checkpointing=TILE)
    _, loss, _ = step(ours, batch())
    assert abs(loss - wanted_loss) <= 1e-5 * abs(wanted_loss)
    report = hfpatch.apply(ours, checkpointing=TILE, **UNFUSED)
    assert len(str(report).splitlines()) <= 10
    _, _, grads = step(ours, batch())
    assert grads.keys() == wanted.keys()
    for parameter, value in wanted.items():
        error = (grads[parameter] - value).norm() / value.norm().clamp_min(1e-3)
        assert error <= (3e-4 if value.element_size() == 8 else 3e-3), f"{parameter}: {error:.1e}"
