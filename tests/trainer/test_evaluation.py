"""The loss of `hfpatch train`'s evaluation is the mean over tokens, over ranks too."""

import functools

import pytest
import tiny
import torch
from accelerate.data_loader import prepare_data_loader

import hfpatch
from hfpatch.trainer import dataset, trainer
from hfpatch.trainer.arguments import TrainArguments

T, V = 40, 64


def rows():
    """A row of one document, and one of two documents and padding; some labels are not learned."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, V, (2, T), generator=generator).tolist()
    learned = (torch.rand(2, T, generator=generator) > 0.2).tolist()
    whole = dataset.make_row([(ids[0], learned[0])], pad_to=T, pad_id=0)
    two = [(ids[1][:25], learned[1][:25]), (ids[1][25:34], learned[1][25:34])]
    return [whole, dataset.make_row(two, pad_to=T, pad_id=0)]


@pytest.mark.parametrize("ranks", [2, 3])
def test_rows_that_fill_the_last_batch_count_once(tmp_path, monkeypatch, ranks):
    """accelerate repeats the first rows so that each rank has a full last batch; the loss is that
    of one process.
    """
    model = tiny.llama(dtype=torch.float64).eval()
    hfpatch.apply(model, logits=False)
    args = TrainArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to="none", per_device_eval_batch_size=2,
        disable_tqdm=True,
    )  # fmt: skip
    run = trainer.Trainer(
        model, args, data_collator=dataset.Collator(), eval_dataset=(rows() * 3)[:5]
    )
    wanted, parts = run.evaluate(), []
    # As over ranks, whose rows are not equally long: transformers then divides by their mean.
    monkeypatch.setattr(run, "_get_num_items_in_batch", lambda *_: torch.tensor(7.0), raising=False)
    monkeypatch.setattr(run.accelerator, "reduce", lambda x, reduction: parts.append(x) or x)
    for rank in range(ranks):
        deal = functools.partial(prepare_data_loader, num_processes=ranks, process_index=rank)
        monkeypatch.setattr(
            run.accelerator, "prepare_data_loader", lambda loader, deal=deal, **_: deal(loader)
        )
        run.evaluate()
    total, count = sum(parts)
    assert total / count == pytest.approx(wanted["eval_loss"], rel=1e-6)  # float32 losses
