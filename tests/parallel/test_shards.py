"""What a model says to a part of each row that it cannot share with other ranks."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import numerics
import pytest
import tiny
import torch
import torch.distributed.tensor.experimental._attention
from transformers import MixtralConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hfpatch
from hfpatch import compat
from hfpatch.context import ranks as parallel
from hfpatch.context import router_balance as balance
from hfpatch.context.current import current
from hfpatch.context.ranks import sharded
from hfpatch.decoder import stack
from hfpatch.lab.simulate.sequence import LoneRank
from hfpatch.loss import causal_model as loss
from hfpatch.loss import shared_rows


def given(**more) -> dict:
    ids = tiny.ids(1, 12)
    return {"input_ids": ids, "labels": ids, "position_ids": torch.arange(12)[None], **more}


def mixing(model):
    model.model._hfpatch_traits = replace(model.model._hfpatch_traits, mixers=True)
    return model


@pytest.mark.parametrize("make, more, said", [
    (lambda: mixing(tiny.patched(tiny.llama())), {},
     "expected whole rows, a part of each came to a LlamaModel"),
    (lambda: tiny.patched(tiny.llama()), {"position_ids": None},
     "expected position_ids where a row's tokens lie on several"),
    (lambda: tiny.patched(tiny.llama()), {"attention_mask": torch.ones(1, 1, 12, 12)},
     "expected attention that can be exchanged .*, an attention mask of the caller's own came"),
    (lambda: tiny.patched(tiny.llama(attention_dropout=0.1)), {},
     "expected attention that can be exchanged"),
])  # fmt: skip
def test_what_cannot_be_shared_is_refused(make, more, said):
    with sharded(LoneRank(2)), pytest.raises(ValueError, match=f"^hfpatch: {said}"):
        make()(**given(**more))


def test_an_attention_of_another_library_is_left_alone(monkeypatch):
    """It runs, and is given what transformers gives it, packed rows' mask too."""
    called = []

    def theirs(module, query, key, value, attention_mask=None, **kwargs):
        called.append(attention_mask)
        return query.transpose(1, 2), None

    theirs.__module__ = "another.library"
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", theirs)
    model = tiny.patched(tiny.llama())
    model(**given())
    assert called and called[0] is None
    model(**given(position_ids=torch.arange(12)[None] % 5))
    assert not called[-1][0, 0, 5, 4] and called[-1][0, 0, 9, 5]


@pytest.mark.parametrize("engine", ["ulysses_group", "context_parallel_group"])
def test_a_graph_of_whole_rows_may_run_where_ranks_share_them(engine, monkeypatch):
    """Traced in an evaluation before, it would take this rank's part for the row."""
    assert not parallel.shared_in_a_graph("sdpa", training=False)
    monkeypatch.setattr(parallel, engine, lambda: "group")
    monkeypatch.setattr(parallel.dist, "get_world_size", lambda group: 2)
    assert parallel.shared_in_a_graph("sdpa", training=False)


def test_without_torchs_private_names_no_context_is_seen(monkeypatch):
    module = sys.modules["torch.distributed.tensor.experimental._context_parallel._attention"]
    assert compat.context_parallel() is None
    monkeypatch.delattr(module, "_replaced_functions")
    assert compat.context_parallel() is None


def test_windows_are_those_of_whole_rows():
    """A window wider than this rank's part still ends within the row."""
    from transformers import AutoModelForCausalLM, MistralConfig

    import hfpatch
    from hfpatch.parallel import exchange

    config = MistralConfig(
        vocab_size=97, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2, sliding_window=16,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    hfpatch.apply(model, checkpointing=tiny.TILED)
    seen, inner = [], exchange.attention_forward
    with pytest.MonkeyPatch.context() as patch, sharded(LoneRank(2)):
        patch.setattr(
            exchange,
            "attention_forward",
            lambda *a, **k: seen.append(k["pattern"].window) or inner(*a, **k),
        )
        model(**given())
    assert seen == [16]


def test_no_mask_is_built_from_a_parts_positions(monkeypatch):
    """Chunks from both ends of a row look like two documents; their [t, t] mask would take 16 GiB
    at a million tokens on eight.
    """
    t, masks, model = 53, [], tiny.patched(tiny.llama())
    note = lambda layer, args, kwargs: masks.append(kwargs["attention_mask"])  # noqa: E731
    for layer in model.model.layers:
        layer.register_forward_pre_hook(note, with_kwargs=True)
    monkeypatch.setattr(stack, "sequence_now", lambda *_: LoneRank(2))
    ids, positions = tiny.ids(1, t), torch.cat([torch.arange(30), torch.arange(100, 123)])[None]
    model(input_ids=ids, labels=ids, position_ids=positions)
    assert len(masks) == 2 and not [m for m in masks if isinstance(m, torch.Tensor)]


def test_a_mean_over_rows_becomes_one_over_tokens(monkeypatch):
    """Two pairs of ranks, two rows each: Trainer's mean over ranks, rows and pairs, of sums over
    what they are to be over.
    """
    # of a pair's rows, by rank
    world, labels = object(), torch.tensor([[[5, 3], [2, 6]], [[0, 4], [1, 1]]])
    sums = torch.rand(2, 2, 2, dtype=torch.float64).masked_fill(labels == 0, 0)
    ranks = SimpleNamespace(group=SimpleNamespace(WORLD=world), get_world_size=lambda group: 4)
    monkeypatch.setattr(parallel, "dist", ranks)
    args, mean = SimpleNamespace(average_tokens_across_devices=True), 0.0
    for pair, of_pair in enumerate(labels):
        for row, of_row in enumerate(of_pair):
            ranks.all_reduce = lambda x, group, n=of_row: x.fill_(
                (labels if group is world else n).sum()
            )
            for rank, n in enumerate(of_row.tolist()):
                given = torch.tensor([1] * n + [-100] * (9 - n))
                items, rows = parallel.items_of_a_mean_over_rows(
                    LoneRank(2), given, [{"shift_labels": given}] * 2, args, -100
                )
                mean += sums[pair, row, rank] / items * n / of_row.sum() / rows
    assert mean.item() == pytest.approx((sums.sum() / labels.sum()).item(), rel=1e-6)


def test_experts_are_balanced_over_whole_rows(monkeypatch):
    """Two layers, two ranks, masked tokens: what the ranks add up gives transformers' loss of whole
    rows and its gradient, of which each loss holds a share where losses are added up, and all of it
    where they are a mean.
    """
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func as stock

    gates = torch.randn(2, 12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 1, 6).index_fill(2, torch.tensor([5]), 0)
    parts, others = gates.view(2, 2, 6, 4).unbind(1), []
    whole = gates.clone().requires_grad_()
    wanted = stock(tuple(whole), 4, 2, mask.flatten()[None])
    wanted.backward()
    true = gates.clone().requires_grad_()  # transformers rounds to float32 on its way
    likely, seen = true.softmax(-1), mask.double().reshape(1, 12, 1)
    picked = torch.zeros_like(true).scatter(-1, likely.topk(2).indices, 1.0).detach()
    exact = (
        4
        * ((seen * picked).sum((0, 1)) * (seen * likely).sum((0, 1))).sum()
        / (2 * seen.sum()) ** 2
    )
    exact.backward()
    monkeypatch.setattr(balance._Summed, "apply", lambda x, _: others.append(x) or x)
    balance.of_whole_rows(LoneRank(2), tuple(parts[1]), 4, 2, mask[1])
    monkeypatch.setattr(balance._Summed, "apply", lambda x, _: x + others[0])
    for times, share in ((0, 0.5), (1, 1), (3, 3)):
        mine = parts[0].clone().requires_grad_()
        with balance.counted(times):
            balance.shares_balance(torch.nn.Linear, LoneRank(2))
            found = balance.balance(stock, tuple(mine), 4, 2, mask[0])
            found.backward()
            numerics.assert_close(balance.once(found), wanted, exact)
        numerics.assert_close(found, share * wanted, share * exact)
        numerics.assert_close(mine.grad, share * whole.grad[:, :6], share * true.grad[:, :6])


def test_experts_are_balanced_in_every_forward_with_labels():
    """In one that evaluates by hand, or trains a model without its dropout, too."""
    model, seen = tiny.patched(tiny.llama(num_hidden_layers=1)), []
    model.eval().model.norm.register_forward_hook(lambda *_: seen.append(current.balance.times))
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            model(**given())
            model(**given(), num_items_in_batch=torch.tensor(5))
    assert seen == [1, 0, 1, 0] and current.balance is None


def test_undo_takes_the_balance_of_whole_rows_back():
    from transformers.models.mixtral import modeling_mixtral

    stock, config = modeling_mixtral.load_balancing_loss_func, tiny.config().to_dict()
    model = tiny.patched(
        modeling_mixtral.MixtralForCausalLM(MixtralConfig(**config | {"num_hidden_layers": 1}))
    )
    with balance.counted(1):
        balance.shares_balance(type(model.model), LoneRank(2))
    assert modeling_mixtral.load_balancing_loss_func is not stock
    hfpatch.undo(model)
    assert modeling_mixtral.load_balancing_loss_func is stock


def test_a_balance_of_another_kind_is_said():
    from transformers.models.doge.modeling_doge import DogeModel

    with (
        balance.counted(1),
        pytest.warns(UserWarning, match="balancing loss of experts .* DogeModel's own came"),
    ):
        balance.shares_balance(DogeModel, LoneRank(2))


@pytest.mark.parametrize("name", ["compute_loss_func", "label_smoother"])
def test_a_loss_that_transformers_leaves_out_is_said(name, monkeypatch):
    monkeypatch.setattr(
        loss, "step_under_ulysses", lambda: ([], SimpleNamespace(args=None, **{name: print}))
    )
    with pytest.warns(UserWarning) as caught:
        tiny.patched(tiny.llama(num_hidden_layers=1))(**given())
    said = (
        f"hfpatch: expected the model's own loss under sequence parallelism, {name} came, which "
        "transformers leaves out"
    )
    assert [w for w in caught if str(w.message).startswith(said)]


def test_trls_head_counts_a_steps_tokens_too(monkeypatch):
    """Its loss under Ulysses is the model's own, which the Trainer takes a mean of rows of."""
    utils = pytest.importorskip("trl.trainer.utils")
    if not hasattr(utils, "add_fused_lm_head"):
        pytest.skip("a TRL without a fused head")
    batch = given(shift_labels=given()["labels"])
    monkeypatch.setattr(loss, "step_under_ulysses", lambda: ([batch], SimpleNamespace(args=None)))
    monkeypatch.setattr(loss, "sequence_now", lambda *_: LoneRank(2))
    monkeypatch.setattr(loss, "items_of_a_mean_over_rows", lambda *_: (torch.tensor(5.0), 1))
    model = tiny.patched(tiny.llama(num_hidden_layers=1))
    utils.add_fused_lm_head(model, outputs=("log_probs",))
    out = model(**batch, fused_lm_head=True)
    assert out.loss.item() == pytest.approx(-out.log_probs.sum().item() / 5, rel=1e-6)


def test_labels_that_transformers_takes_out_are_said(monkeypatch):
    """For label smoothing and compute_loss_func under context parallelism, where it hands on those
    of this rank's part.
    """
    monkeypatch.setattr(loss, "context_parallel", lambda: ("group", True))
    with pytest.warns(
        UserWarning,
        match=(
            "^hfpatch: expected the model's own loss under context parallelism, compute_loss_func"
        ),
    ):
        tiny.patched(tiny.llama(num_hidden_layers=1))(
            **given(shift_labels=given()["labels"], labels=None)
        )


def evaluated(
    monkeypatch, others=(1, 1), change=lambda model: None, least=None, **more
) -> list[tuple]:
    """[B, t] of each forward of a sharded model's layers, where two ranks evaluate the same rows of
    12 tokens. others: what the ranks of other groups say, when all are asked.
    """
    model, seen, said = (
        tiny.patched(tiny.llama(num_hidden_layers=1), logits=False).eval(),
        [],
        iter(others),
    )
    change(model)
    alone = lambda *_: None if parallel.current.sequence else LoneRank(2)  # noqa: E731
    monkeypatch.setattr(shared_rows, "left_alone_in_evaluation", alone)
    monkeypatch.setattr(shared_rows, "is_sharded", lambda _: True)
    monkeypatch.setattr(shared_rows, "of_all_ranks", lambda _, batch: [dict(batch)] * 2)
    monkeypatch.setattr(shared_rows, "_mean", lambda _, x: x)

    def everybody(group, mine, _):
        return [min(next(said), mine[0]), *mine[1:]] if group is None else None

    monkeypatch.setattr(shared_rows, "least_of", least or everybody)
    model.model.layers[0].register_forward_pre_hook(
        lambda _, args: seen.append(tuple(args[0].shape[:2]))
    )
    with torch.no_grad():
        model(**{"input_ids": tiny.ids(2, 12), "labels": tiny.ids(2, 12), **more})
    return seen


@pytest.mark.parametrize(
    "others, forwards", [((1, 1), [(2, 6)]), ((1, 0), [(2, 6)] * 2), ((0,), [(2, 12)])]
)
def test_ranks_of_every_group_run_as_many_forwards(others, forwards, monkeypatch):
    """For each an engine gathers weights over all of them: one that runs one forward less would
    leave the others waiting.
    """
    assert evaluated(monkeypatch, others) == forwards


@pytest.mark.parametrize("labels", [tiny.ids(2, 12), None])
def test_labels_on_some_ranks_alone_are_refused_on_all(labels, monkeypatch):
    """In evaluation by Trainer: those with labels would wait for the others, whose forward asks for
    no loss.
    """
    names = {"__name__": "transformers.trainer"}
    exec("def prediction_step(run): return run()", names)
    monkeypatch.setattr("hfpatch.parallel.shards.dist", SimpleNamespace(
        ReduceOp=SimpleNamespace(MIN=min), all_reduce=lambda x, *_,
        **__: x.copy_(x.new_zeros(3))))  # fmt: skip
    least = shared_rows.least_of
    with pytest.raises(
        ValueError, match="^hfpatch: expected labels on all ranks or on none in evaluation"
    ):
        names["prediction_step"](lambda: evaluated(monkeypatch, labels=labels, least=least))


@pytest.mark.parametrize("positions", [None, torch.arange(12)[None]])
def test_positions_may_be_none_or_of_one_row(positions, monkeypatch):
    assert evaluated(monkeypatch, position_ids=positions) == [(2, 6)]


@pytest.mark.parametrize("more", [
    {"attention_mask": torch.ones(2, 1, 12, 12).tril().bool()}, {"output_hidden_states": True},
    {"use_cache": True},
    {"ignore_index": 0}, {"token_type_ids": torch.zeros(2, 12)}, {"change": mixing},
    {"change": lambda model: setattr(model.config, "output_hidden_states", True)},
])  # fmt: skip
def test_more_than_a_loss_of_rows_is_each_ranks_own(more, monkeypatch):
    assert evaluated(monkeypatch, **more) == [(2, 12)]


def test_evaluation_of_whole_rows_asks_for_no_caller(monkeypatch):
    monkeypatch.setattr(
        parallel, "evaluated_by_trainer", lambda: pytest.fail("it walks through the frames")
    )
    with torch.no_grad():
        assert tiny.patched(tiny.llama(num_hidden_layers=1)).eval()(**given()).loss > 0


def test_a_tuple_of_a_parts_evaluation(monkeypatch):
    parts = lambda: None if parallel.current.sequence else LoneRank(2)  # noqa: E731
    monkeypatch.setattr(shared_rows, "parts_of_trainers_evaluation", parts)
    monkeypatch.setattr(shared_rows, "_mean", lambda _, x: torch.full_like(x, 3))
    with torch.no_grad():
        out = tiny.patched(tiny.llama(num_hidden_layers=1)).eval()(**given(), return_dict=False)
    assert isinstance(out, tuple) and out[0] == 3
