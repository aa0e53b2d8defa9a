"""What --sp_size is made of, in one process: the engine's settings, rows dealt out, batches
skipped.
"""

from types import SimpleNamespace

import accelerate
import families
import pytest
import torch

import hfpatch
from hfpatch.lab.simulate.sequence import LoneRank
from hfpatch.trainer import sequence
from hfpatch.trainer.arguments import DataArguments, ModelArguments, _share_rows
from hfpatch.trainer.compat import unless_shared
from hfpatch.trainer.dataset import Collator
from hfpatch.trainer.sequence import parallelism, shares_exactly
from hfpatch.trainer.shared_rows import part_of


def rank_of(rank: int, size: int = 2, zigzag: bool = False) -> LoneRank:
    one = LoneRank(size)
    one.rank, one.zigzag = rank, zigzag
    return one


OWN = "DeepSpeedSequenceParallelConfig"
ULYSSES = pytest.mark.skipif(
    not hasattr(accelerate.utils, OWN), reason="accelerate before 1.12 has no Ulysses"
)


def test_an_accelerate_without_ulysses_is_refused_by_a_sentence(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delattr(accelerate.utils, OWN, raising=False)
    with pytest.raises(
        ValueError,
        match="^hfpatch: --sp_size under DeepSpeed needs accelerate 1.12 or newer, got .* pip",
    ):
        config = SimpleNamespace(engine="deepspeed", values={"zero_optimization": {"stage": 3}})
        parallelism(config, size=2, attention="sdpa")


@ULYSSES
@pytest.mark.parametrize("engine, values, multiple", [
    ("deepspeed", {"zero_optimization": {"stage": 3}}, 6), ("fsdp", {"version": 2}, 12),
])  # fmt: skip
def test_rows_are_padded_to_go_evenly_over_the_ranks(engine, values, multiple, monkeypatch):
    """To a chunk a rank, of context parallelism two; and to what was asked for besides."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    arguments, config = {}, SimpleNamespace(engine=engine, values=values)
    data = _share_rows(ModelArguments(sp_size=2), DataArguments(pad_multiple=3), arguments, config)
    assert data.pad_multiple == multiple
    assert (
        max(arguments["parallelism_config"].sp_size, arguments["parallelism_config"].cp_size) == 2
    )


@pytest.mark.parametrize("engine, values, size, said", [
    (None, {}, 2, "needs an engine"), ("fsdp", {"version": 1}, 2, "needs FSDP2"),
    ("fsdp", {"version": 2}, 3, "must divide the"),
    ("deepspeed", {"zero_optimization": {"stage": 2}}, 2, "2 times too large"),
    ("deepspeed", {"zero_optimization": {"stage": 3, "reduce_scatter": False}}, 4,
     "4 times too large"),
])  # fmt: skip
def test_what_cannot_share_rows_is_refused(engine, values, size, said, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=f"^hfpatch: .*{said}"):
        config = SimpleNamespace(engine=engine, values=values) if engine else None
        parallelism(config, size=size, attention="sdpa")


def test_smoothed_labels_are_refused():
    with pytest.raises(
        ValueError,
        match="^hfpatch: --label_smoothing_factor and --sp_size 2 cannot be combined",
    ):
        _share_rows(
            ModelArguments(sp_size=2), DataArguments(), {"label_smoothing_factor": 0.1}, None
        )


def accelerates_looks(model) -> dict[str, str]:
    """What accelerate says of a model before it shares its rows, by the name of its look; and
    whether it hooked its attention.
    """
    said = {}
    for name in ("_attach_context_parallel_hooks",
                 "_refuse_recurrent_layers_under_sequence_parallelism"):  # fmt: skip
        if hasattr(accelerate.accelerator, name):
            try:
                getattr(accelerate.accelerator, name)(model)
            except ValueError as error:
                said[name] = str(error)
    hooked = any(module._forward_pre_hooks for module in model.modules())
    return said | ({"hooked": "yes"} if hooked else {})


def test_layers_are_refused_by_what_the_probe_saw_not_by_their_types():
    """Windows: not where the probe saw attention that is exchanged. What it did not see, and what
    mixes tokens by more than attention: as accelerate has it. Afterwards its own look again.
    """
    stock, ours = (families.small_model("mistral", torch.float32) for _ in range(2))
    hybrid = families.small_model("minimax", torch.float32)
    before = accelerates_looks(stock)
    assert before  # hooks, or since 1.15 a refusal
    for model in (ours, hybrid):
        hfpatch.apply(model)
    with unless_shared(shares_exactly):
        assert accelerates_looks(ours) == {}
        ours.model.layers[0].self_attn.forward = lambda *args, **kwargs: None
        for model in (stock, ours, hybrid):
            assert accelerates_looks(model)
    assert accelerates_looks(stock) == before


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_step_has_the_same_rows_however_many_ranks_share_them(size):
    """Eight batches on four ranks: in each round of the groups those that one process reads."""
    found = {}
    for rank in range(4):
        sampler = accelerate.data_loader.BatchSamplerShard(
            torch.utils.data.BatchSampler(range(8), 1, False), 4, rank
        )
        loader = torch.utils.data.DataLoader(range(8), batch_sampler=sampler)
        found[rank] = [int(x) for x in sequence.in_order(loader, rank_of(rank % size, size)).loader]
    groups = [range(first, first + size) for first in range(0, 4, size)]
    turns = [[found[rank][i] for i in range(2) for rank in group] for group in groups]
    assert [row for turn in zip(*turns) for row in turn] == list(range(8))


def test_labels_are_shifted_before_rows_are_cut():
    batch = Collator(multiple=2, positions=True)(
        [{"input_ids": torch.arange(7), "labels": torch.arange(7)}]
    )
    parts = [part_of(rank_of(rank), batch) for rank in range(2)]
    assert [p["shift_labels"].tolist() for p in parts] == [[[1, 2, 3, 4]], [[5, 6, -100, -100]]]
    assert [p["position_ids"].tolist() for p in parts] == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]
    assert part_of(rank_of(0, zigzag=True), batch)["position_ids"].tolist() == [[0, 1, 6, 7]]


def test_rows_that_do_not_go_evenly_are_made_longer():
    """By tokens behind all others, without a label, hidden where there is a mask, that are no
    document of their own; what is no row goes as it is.
    """
    rows = {"input_ids": torch.arange(7)[None], "labels": torch.arange(7)[None],
            "position_ids": torch.tensor([[0, 1, 2, 3, 4, 0, 1]]),
            "attention_mask": torch.ones(1, 7), "n": torch.tensor([5])}  # fmt: skip
    first, last = (part_of(rank_of(rank), rows) for rank in range(2))
    assert last["input_ids"].tolist() == [[4, 5, 6, 6]]
    assert last["position_ids"].tolist() == [[4, 0, 1, 2]]
    assert first["shift_labels"].tolist() == [[1, 2, 3, 4]]
    assert last["shift_labels"].tolist() == [[5, 6, -100, -100]]
    assert last["attention_mask"].tolist() == [[1, 1, 1, 0]] and last["n"].tolist() == [5]
