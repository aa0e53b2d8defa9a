"""Every causal language model of transformers: exact, tiled or whole with a reason or left alone
with a sentence, and no error that transformers does not raise.
"""

import copy

import families
import pytest
import torch
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
            pytest.skip("a wrapper: tests/decoder/test_vision.py")
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


def errors_of(grads, wanted):
    """Of each parameter's gradient, relative to its norm."""
    assert grads.keys() == wanted.keys()
    return {
        n: ((grads[n] - value).norm() / value.norm().clamp_min(1e-3)).item()
        for n, value in wanted.items()
    }


def moved(stock, wanted):
    """By parameter, how far transformers' own gradients move where what is embedded does by
    float32's rounding, of three tries. Their eager attention rounds its probabilities to float32 in
    a float64 model too, ours does not; most families keep such a difference as small as it is,
    Gemma 3n makes it ten thousand times larger.
    """
    found = dict.fromkeys(wanted, 0.0)
    for seed in range(3):
        other = copy.deepcopy(stock)
        weight = other.get_input_embeddings().weight
        weight.data *= 1 + torch.finfo(torch.float32).eps * torch.randn(
            weight.shape, generator=torch.Generator().manual_seed(seed), dtype=weight.dtype
        )
        errors = errors_of(step(other, batch())[2], wanted)
        found = {n: max(found[n], errors[n]) for n in found}
    return found


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:hfpatch. the loss runs through whole logits")  # BART, say
@pytest.mark.parametrize("name", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
def test_exact_or_as_it_was(name):
    """Fused losses at the accuracy of float32; gradients where only what runs is ours, not how it
    is rounded.
    """
    stock = stock_model(name)
    _, wanted_loss, wanted = step(stock, batch())
    ours = copy.deepcopy(stock)
    hfpatch.apply(ours, checkpointing=TILE)
    _, loss, _ = step(ours, batch())
    assert abs(loss - wanted_loss) <= 1e-5 * abs(wanted_loss)
    report = hfpatch.apply(ours, checkpointing=TILE, **UNFUSED)
    assert len(str(report).splitlines()) <= 11
    _, _, grads = step(ours, batch())
    errors, budget = (
        errors_of(grads, wanted),
        3e-4 if next(iter(wanted.values())).element_size() == 8 else 3e-3,
    )
    if max(errors.values()) > budget:
        moves = moved(stock, wanted)
        errors = {
            parameter: error for parameter, error in errors.items() if error > 3 * moves[parameter]
        }
    assert not errors or max(errors.values()) <= budget, {
        n: f"{e:.1e}" for n, e in errors.items() if e > budget
    }
