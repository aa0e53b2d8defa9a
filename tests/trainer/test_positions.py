"""The evaluation loss by position: the same from logits and from the fused head, packed or not, and
it adds up.
"""

import functools
import math

import pytest
import tiny
import torch
from accelerate.data_loader import prepare_data_loader
from transformers import GraniteConfig, GraniteForCausalLM

import hfpatch
from hfpatch.trainer import dataset, positions, trainer
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


def by_hand(model, width):
    sums = {}
    for row in rows():
        batch = {name: value[None] for name, value in row.items() if name != "labels"}
        scores = model(**batch, use_cache=False).logits[0].log_softmax(-1)
        for t in range(1, T):
            if row["labels"][t] != -100:
                start = (
                    0
                    if row["position_ids"][t] < width
                    else width * 2 ** int(math.log2(row["position_ids"][t] / width))
                )
                sums.setdefault(start, []).append(-scores[t - 1, row["labels"][t]].item())
    return {f"eval_loss_at_{start}": sum(v) / len(v) for start, v in sums.items()}


def granite():
    """A family that scales its logits behind the head."""
    small = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = GraniteConfig(
        vocab_size=V, num_key_value_heads=2, logits_scaling=0.1, pad_token_id=0, **small
    )
    return GraniteForCausalLM(config).double()


@pytest.mark.parametrize("kind", ["stock", "fused", "fused, logits", "granite"])
def test_loss_by_position(tmp_path, kind):
    model = granite().eval() if kind == "granite" else tiny.llama(dtype=torch.float64).eval()
    model.config.use_cache = False  # as train.py: a cache joins packed documents
    with torch.no_grad():
        expected = by_hand(model, 8)
    if kind.startswith("fused"):
        hfpatch.apply(model, logits=kind == "fused, logits")
    args = TrainArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to="none", per_device_eval_batch_size=2,
        eval_positions=8,
        disable_tqdm=True,
    )  # fmt: skip
    run = trainer.Trainer(
        model, args, data_collator=dataset.Collator(), eval_dataset=rows(), bytes_per_token=0.0
    )
    found = run.evaluate()
    places = {name: value for name, value in found.items() if "_at_" in name}
    assert places.keys() == expected.keys() == {f"eval_loss_at_{n}" for n in (0, 8, 16, 32)}
    # float32 inside the losses and norms of both
    assert places == pytest.approx(expected, rel=1e-5)
    assert not model.get_output_embeddings()._forward_pre_hooks
    one_bucket = run.args
    one_bucket.eval_positions = T
    assert not any("_at_" in name for name in run.evaluate())


@pytest.mark.parametrize("ranks", [2, 3])
def test_rows_that_fill_the_last_batch_count_once(tmp_path, monkeypatch, ranks):
    """accelerate repeats the first rows so that each rank has a full last batch; the loss is that
    of one process.
    """
    model = tiny.llama(dtype=torch.float64).eval()
    hfpatch.apply(model, logits=False)
    args = TrainArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to="none", per_device_eval_batch_size=2,
        eval_positions=8,
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
    by_place, (total, count) = sum(parts[0::2]), sum(parts[1::2])
    assert total / count == pytest.approx(wanted["eval_loss"], rel=1e-6)  # float32 losses
    assert by_place[1].sum() == count and by_place[0, 0] / by_place[1, 0] == pytest.approx(
        wanted["eval_loss_at_0"], rel=1e-6
    )


def test_buckets_double():
    at = positions.buckets(None, torch.zeros(1, 9), 2)[0].tolist()
    assert at == [0, 0, 1, 1, 2, 2, 2, 2, 3] and [positions.first(i, 2) for i in range(4)] == [
        0,
        2,
        4,
        8,
    ]
    assert [positions._bucket(n, 2) for n in range(9)] == at
