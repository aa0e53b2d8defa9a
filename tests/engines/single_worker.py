"""The same run of the stock model in one process, in float32 and float64, for the engines to be compared with."""

import sys
from pathlib import Path

import common
import torch


def main(folder: str) -> None:
    common.quiet()
    found = {}
    for dtype in (torch.float32, torch.float64):
        name = str(dtype).removeprefix("torch.")
        trainer = common.train(common.make_model(dtype=dtype), Path(folder) / name, batch=2)
        trainer.save_model(str(Path(folder) / f"{name}-final"))
        found[name] = common.losses(trainer)
    common.report(folder, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
