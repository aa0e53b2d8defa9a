"""float64 models are compared to rounding here, so their loss must not be rounded to float32 as
transformers' is.
"""

import pytest


@pytest.fixture(autouse=True)
def exact_loss(monkeypatch):
    monkeypatch.setattr("hfpatch.loss.causal_model.as_stock", lambda loss: loss)
