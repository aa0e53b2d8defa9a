"""The same run of the stock model in one process, in float32 and float64, for the engines to be
compared with.
"""

import sys
from pathlib import Path

import common
import torch


def main(folder: str, neox: str = "") -> None:
    common.quiet()
    found = {}
    for dtype in (torch.float32, torch.float64):
        name = str(dtype).removeprefix("torch.")
        if neox:
            rows, settings = (
                common.make_rows(positions=True, ignored=13),
                {"max_steps": 2, "save_strategy": "no"},
            )
            trainer = common.train(
                common.make_neox(dtype), Path(folder) / name, batch=1, rows=rows, **settings
            )
            found[f"{name}-neox"], found[f"{name}-neox-norms"] = (
                common.losses(trainer),
                common.norms(trainer),
            )
            continue
        trainer = common.train(common.make_model(dtype=dtype), Path(folder) / name, batch=2)
        trainer.save_model(str(Path(folder) / f"{name}-final"))
        found[name] = common.losses(trainer)
        # As many labels in each row, none of them with the first of two ranks.
        rows, folder_rows = (
            common.make_rows(positions=True, ignored=13),
            Path(folder) / f"{name}-rows",
        )
        trainer = common.train(common.make_model(dtype=dtype), folder_rows, batch=1, rows=rows)
        trainer.save_model(str(Path(folder) / f"{name}-rows-final"))
        found[f"{name}-rows"] = common.losses(trainer)
        found[f"{name}-norms"] = common.norms(trainer)
        found[f"{name}-evaluation"] = [trainer.evaluate(rows[:4])["eval_loss"]]
        rows = common.make_rows(positions=True)
        trainer = common.train(
            common.make_experts(dtype=dtype),
            Path(folder) / f"{name}-uneven",
            batch=1,
            rows=rows,
            max_steps=2,
        )
        found[f"{name}-uneven"], found[f"{name}-uneven-norms"] = (
            common.losses(trainer),
            common.norms(trainer),
        )
    common.report(folder, **found)


if __name__ == "__main__":
    main(sys.argv[-1], *sys.argv[1:-1])
