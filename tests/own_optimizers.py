"""Optimizers that people bring, over a tiny Llama, as their authors split its weights."""

import pytest
import torch


def split(model):
    """(the layers' matrices, all else)"""
    matrices = [p for p in model.model.layers.parameters() if p.dim() == 2]
    taken = {id(p) for p in matrices}
    return matrices, [p for p in model.parameters() if id(p) not in taken]


def made(name: str, model) -> list:
    """The optimizers that train a model under this name."""
    matrices, rest = split(model)
    if name == "muon":
        return [torch.optim.Muon(matrices), torch.optim.AdamW(rest)]
    if name == "adafactor":
        return [torch.optim.Adafactor(model.parameters())]
    if name == "schedule-free":
        free = pytest.importorskip("schedulefree")
        return [free.AdamWScheduleFree(model.parameters())]
    if name in ("apollo", "galore"):
        module = pytest.importorskip(f"{name}_torch")
        more = {"proj": "random", "scale_type": "channel"} if name == "apollo" else {}
        low = {"params": matrices, "rank": 128, "update_proj_gap": 200, "scale": 1.0,
               "proj_type": "std", **more}  # fmt: skip
        kind = module.APOLLOAdamW if name == "apollo" else module.GaLoreAdamW
        return [kind([{"params": rest}, low])]
    return [torch.optim.AdamW(model.parameters())]
