"""What a model says to a part of each row that it cannot share with other ranks."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import tiny
import torch
import torch.distributed as dist
import torch.distributed.tensor.experimental._attention

from hfpatch.context import ranks as parallel
from hfpatch.context.ranks import sharded
from hfpatch.decoder import batch as batches
from hfpatch.lab.simulate.sequence import LoneRank
from hfpatch.layer import policies
from hfpatch.loss import causal_model as loss
from hfpatch.parallel.shards import least_of, tensor_parallel_group
from tests.layer.devices import Told, on_device


def given(**more) -> dict:
    ids = tiny.ids(1, 12)
    return {"input_ids": ids, "labels": ids, "position_ids": torch.arange(12)[None], **more}


def mixing(model):
    model.model._hfpatch.traits = replace(model.model._hfpatch.traits, mixers=True)
    return model


@pytest.mark.parametrize("make, more, said", [
    (lambda: mixing(tiny.patched(tiny.llama())), {},
     "a LlamaModel must get whole sequences"),
    (lambda: tiny.patched(tiny.llama()), {"position_ids": None},
     "sequences on several ranks need position_ids"),
    (lambda: tiny.patched(tiny.llama()), {"attention_mask": torch.ones(1, 1, 12, 12)},
     "an attention mask of the caller's own does not work"),
    (lambda: tiny.patched(tiny.llama(attention_dropout=0.1)), {},
     "attention dropout does not work"),
])  # fmt: skip
def test_what_cannot_be_shared_is_refused(make, more, said):
    with sharded(LoneRank(2)), pytest.raises(ValueError, match=f"^hfpatch: {said}"):
        make()(**given(**more))


@pytest.mark.parametrize("engine", ["ulysses_group", "parallelism_config"])
def test_a_graph_of_whole_rows_may_run_where_ranks_share_them(engine, monkeypatch):
    """Traced in an evaluation before, it would take this rank's part for the row."""
    assert not parallel.may_share_rows()
    monkeypatch.setattr(parallel, engine, lambda: SimpleNamespace(cp_enabled=True))
    monkeypatch.setattr(parallel.dist, "get_world_size", lambda group: 2)
    assert parallel.may_share_rows()


def test_no_mask_is_built_from_a_parts_positions(monkeypatch):
    """Chunks from both ends of a row look like two documents; their [t, t] mask would take 16 GiB
    at a million tokens on eight.
    """
    t, masks, model = 53, [], tiny.patched(tiny.llama())
    note = lambda layer, args, kwargs: masks.append(kwargs["attention_mask"])  # noqa: E731
    for layer in model.model.layers:
        layer.register_forward_pre_hook(note, with_kwargs=True)
    monkeypatch.setattr(batches, "row_ranks_now", lambda *_: LoneRank(2))
    ids, positions = tiny.ids(1, t), torch.cat([torch.arange(30), torch.arange(100, 123)])[None]
    model(input_ids=ids, labels=ids, position_ids=positions)
    assert len(masks) == 2 and not [m for m in masks if isinstance(m, torch.Tensor)]


def test_labels_that_transformers_takes_out_are_said(monkeypatch):
    """For label smoothing and compute_loss_func under context parallelism, where it hands on those
    of this rank's part.
    """
    monkeypatch.setattr(loss, "context_parallel", lambda: ("group", True))
    with pytest.warns(
        UserWarning,
        match=("^hfpatch: context parallelism needs the model's own loss, got compute_loss_func"),
    ):
        tiny.patched(tiny.llama(num_hidden_layers=1))(
            **given(shift_labels=given()["labels"], labels=None)
        )


def test_numbers_for_the_host_travel_over_a_gloo_group_of_their_own(tmp_path, monkeypatch):
    """Over the layers' communicator the host would wait until the device is idle."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    reduce, groups = dist.all_reduce, []
    note = lambda *args, group: groups.append(group) or reduce(*args, group=group)  # noqa: E731
    monkeypatch.setattr(dist, "all_reduce", note)
    assert least_of(None, [3, None]) == [3, None]
    assert len(set(groups)) == 1 and dist.group.WORLD not in groups
    assert dist.get_backend(groups[0]) == "gloo"


def test_shards_that_fsdp2_gathers_inside_a_layer_are_no_group():
    """Its ranks have rows of their own: one that asks the others to choose alike would wait."""
    mesh = SimpleNamespace(ndim=1, size=lambda: 2, get_group=lambda: "ranks")
    split = SimpleNamespace(is_shard=lambda: True)
    for kind, group in (("FSDPModule", None), ("Linear", "ranks")):
        inside = type(kind, (torch.nn.Linear,), {})(2, 2)
        vars(inside.weight).update(placements=[split], device_mesh=mesh)
        assert tensor_parallel_group(torch.nn.Sequential(inside)) == group


def test_lengths_that_are_close_ask_the_other_ranks_no_more_than_one_length(monkeypatch):
    """A question is a wait for the slowest rank; collators give a new length in almost any step."""
    questions = []
    # a rank of a group whose others answer as it does
    rank = LoneRank(2)
    rank.group = "ranks"
    least = lambda group, numbers: questions.append(group) or numbers  # noqa: E731
    monkeypatch.setattr(policies, "least_of", least)

    def asked(lengths):
        ours = tiny.patched(tiny.llama()).train()
        questions.clear()
        for t in lengths:
            ids = torch.ones(1, t, dtype=torch.long)
            with sharded(rank):
                ours(ids, labels=ids, position_ids=torch.arange(t)[None]).loss.backward()
        return len(questions)

    on_device(monkeypatch, Told)
    alike = asked([256] * 4)
    assert alike and asked(range(253, 257)) == alike < asked(range(64, 257, 64))
