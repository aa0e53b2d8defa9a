"""Layers that mix tokens by something other than attention: the mixer runs untiled, the rest tile by
tile, documents apart.
"""

import copy
from dataclasses import replace

import families
import peft
import pytest
import tiny
import torch
from numerics import lifted

import hfpatch
from hfpatch.decoder.find import find_decoder
from hfpatch.layer.why_whole import why
from tests.decoder.test_families import assert_close, batch, step

TILE = hfpatch.Checkpointing(offload="host", tile=16)
# Delta rules and scans compute in float32 whatever comes in, and pass its rounding on enlarged:
#     what is fused is tested elsewhere.
UNFUSED = {"rms_norm": False, "rope": False, "mlp": False, "loss": False}
HYBRIDS = {  # the mixer of its first layer, a module behind it
    "lfm2": ("conv", "feed_forward.w1"),
    "falcon_h1": ("mamba", "feed_forward.gate_proj"),
    "qwen3_next": ("linear_attn", "mlp"),
    "qwen3_5_text": ("linear_attn", "mlp.gate_proj"),
    "granitemoehybrid": ("mamba", "shared_mlp.input_linear"),
    # a layer is a mixer, an attention, an MLP or experts, and no two of them
    "nemotron_h": ("mixer", None),
    "jamba": ("mamba", "feed_forward.gate_proj"),
    "bamba": ("mamba", "feed_forward.gate_proj"),
    "minimax": ("self_attn", "mlp"),  # gives a pair, output and state
    # Attention that is written out, or whose mask is its own:
    "doge": ("self_attn", "mlp.gate_proj"),
    "gpt_neo": ("attn.attention", "mlp.c_fc"),
    "deepseek_v32": ("self_attn", "mlp"),
    "xlstm": ("mlstm_layer", "ffn.proj_up"),
    # convolutions before its attention; a state of its routers goes from layer to layer
    "zaya": ("self_attn", "mlp"),
}
SHORT = ("falcon_h1", "doge", "gpt_neo", "zaya")


def names():
    return [n if n in SHORT else pytest.param(n, marks=pytest.mark.long) for n in HYBRIDS]


def layers_of(model):
    return find_decoder(model).layers


def lengths(module, found):
    """Notes in `found` how many tokens each call of the module is given."""
    count = lambda m, args, kwargs: found.append((*args, *kwargs.values())[0].shape[1])  # noqa: E731
    return module.register_forward_pre_hook(tiny.OfAnEngine(count), with_kwargs=True)


@pytest.fixture(scope="module")
def falcon():
    return families.small_model("falcon_h1")


@pytest.mark.parametrize("name", names())
def test_the_mixer_runs_whole_and_the_rest_by_tiles(name):
    """Twice, forward and backward, as with any checkpointing. With holes in the mask all runs untiled,
    and is exact.
    """
    stock = families.small_model(name)
    ours = copy.deepcopy(stock)
    report = hfpatch.apply(ours, checkpointing=TILE, **UNFUSED)
    assert not any("run untiled" in note for note in report.notes), report
    mixer, behind = HYBRIDS[name]
    first = layers_of(ours)[0]
    assert list(first._hfpatch.traits.mixers) == [mixer]
    kind = type(first.get_submodule(mixer)).__name__
    assert f"{kind} mixers {first._hfpatch.traits.in_time(mixer)}" in str(report)
    plain = batch()
    holes = {**plain, "attention_mask": torch.ones(2, 40, dtype=torch.long)}
    holes["attention_mask"][0, 11:13], holes["attention_mask"][1, -5:] = 0, 0
    runs, tiles = [], []
    inside = next(m for m in first.get_submodule(mixer).modules() if isinstance(m, torch.nn.Linear))
    handles = [lengths(inside, runs)]
    if behind:
        handles.append(lengths(first.get_submodule(behind), tiles))
    for given in (plain, holes):
        _, loss, grads = step(ours, given)
        _, wanted_loss, wanted = step(stock, given)
        assert abs(loss - wanted_loss) <= 1e-5 * abs(wanted_loss)
        assert_close(grads, wanted)
        assert runs == [40, 40] and (given is holes or max(tiles, default=0) <= 16)
        runs.clear(), tiles.clear()
    for handle in handles:
        handle.remove()


def packed_and_apart(rows: int):
    """A batch whose rows hold two documents each, cut elsewhere, and the batches of one
    document.
    """
    given = batch()
    given = {k: v[:rows] for k, v in given.items()}
    cuts = (17, 9)[:rows]
    given["position_ids"] = torch.stack(
        [torch.cat([torch.arange(c), torch.arange(40 - c)]) for c in cuts]
    )
    for row, cut in enumerate(cuts):
        given["labels"][row, [0, cut]] = -100
    n = {"num_items_in_batch": (given["labels"] != -100).sum()}
    spans = [(row, a, b) for row, cut in enumerate(cuts) for a, b in ((0, cut), (cut, 40))]
    pieces = [
        {k: given[k][r : r + 1, a:b] for k in ("input_ids", "labels")} | n for r, a, b in spans
    ]
    return given | n, pieces


@pytest.mark.parametrize(
    "name",
    [
        "falcon_h1",
        "doge",
        *(
            pytest.param(n, marks=pytest.mark.long)
            for n in HYBRIDS
            if n not in ("falcon_h1", "doge")
        ),
    ],
)
@pytest.mark.parametrize("way", ["tiled", "whole"])
def test_packed_documents_do_not_see_each_other(name, way, falcon):
    """On the kernels that are there, none of which is told of documents; with a mask of ones,
    offsets, and in evaluation.
    """
    stock = falcon if name == "falcon_h1" else families.small_model(name)
    ours = copy.deepcopy(stock)
    hfpatch.apply(ours, checkpointing=TILE, **UNFUSED)
    if way == "whole":
        for layer in layers_of(ours):
            layer._hfpatch.traits = replace(
                layer._hfpatch.traits, reason=why("untried", "asked for")
            )
    given, pieces = packed_and_apart(2)
    _, wanted_loss, wanted = step(stock, None, pieces)
    for mask in (None, torch.ones(2, 40, dtype=torch.long)):
        _, loss, grads = step(ours, {**given, "attention_mask": mask})
        assert abs(loss - wanted_loss) <= 1e-5 * abs(wanted_loss)
        assert_close(grads, wanted)
    offsets = torch.tensor([0, 17, 40, 49, 80], dtype=torch.int32)
    with torch.no_grad():
        loss = ours.eval()(
            **given, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets, use_cache=False
        ).loss.item()
    assert abs(loss - wanted_loss) <= 1e-5 * abs(wanted_loss)


def test_positions_that_jump_inside_a_document_part_it_as_in_transformers():
    """Attention that runs inside a mixer took what stands between two restarts for one document."""
    stock = families.small_model("gpt_neo")
    ours = copy.deepcopy(stock)
    hfpatch.apply(ours, checkpointing=TILE, **UNFUSED)
    jumps = torch.cat([torch.arange(9), torch.arange(20, 28), torch.arange(23)])
    given = batch() | {"position_ids": torch.stack([jumps, jumps.roll(23)])}
    assert_close(step(ours, given)[2], step(stock, given)[2])


@pytest.mark.parametrize("name", ["bloom", pytest.param("inkling_text", marks=pytest.mark.long)])
def test_packed_rows_are_refused_where_no_way_of_running_keeps_documents_apart(name):
    """Found by asking the small instance: Bloom drops positions, Inkling mixes tokens in its
    projections of keys.
    """
    stock = families.small_model(name)
    given, _ = packed_and_apart(2)
    counted = given | {"position_ids": torch.arange(40).expand(2, -1)}
    wanted = step(stock, counted)[2]
    for settings in (TILE, "off"):
        ours = copy.deepcopy(stock)
        report = hfpatch.apply(ours, checkpointing=settings, **UNFUSED | {"loss": True})
        assert "refused" in str(report)
        for mask in (None, torch.ones(2, 40, dtype=torch.long)):
            with pytest.raises(ValueError, match="hfpatch: a .* must get one document a sequence"):
                ours(**given, attention_mask=mask)
        assert_close(step(ours, counted)[2], wanted)


@pytest.mark.parametrize(
    "name",
    [
        "trocr",
        pytest.param("bart", marks=pytest.mark.long),
        pytest.param("mpt", marks=pytest.mark.long),
    ],
)
def test_what_takes_no_positions_is_tiled_and_refuses_packed_rows(name):
    """A document would stand further on in its row than alone, or see the others: no reason to run
    rows of one document whole.
    """
    stock = families.small_model(name)
    ours = copy.deepcopy(stock)
    report = str(hfpatch.apply(ours, checkpointing=TILE, **UNFUSED))
    assert "refused" in report and "untiled" not in report
    assert_close(step(ours, batch())[2], step(stock, batch())[2])
    with pytest.raises(ValueError, match="hfpatch: a .* must get one document a sequence"):
        ours(**packed_and_apart(2)[0])


def test_what_a_mixer_kept_of_a_step_is_no_weight_of_the_next():
    """RecurrentGemma's blocks leave their last state in themselves, with the graph that it came of,
    and begin from none.
    """
    stock = families.small_model("recurrent_gemma")
    ours = copy.deepcopy(stock)
    hfpatch.apply(ours, checkpointing=TILE, **UNFUSED)
    for _ in range(2):
        assert_close(step(ours, batch())[2], step(stock, batch())[2])


def test_packed_rows_are_refused_where_no_small_instance_tells(monkeypatch):
    """LFM2's convolutions, which transformers marks by nothing, would see across: what was not seen
    to be apart is not trusted.
    """

    def none(*_):
        raise ValueError("it has none")

    monkeypatch.setattr("hfpatch.decoder.verdict.small_stack", none)
    monkeypatch.setattr("hfpatch.decoder.verdict._verdicts", {})
    stock = families.small_model("lfm2")
    given, _ = packed_and_apart(2)
    for settings in (TILE, "off"):
        ours = copy.deepcopy(stock)
        hfpatch.apply(ours, checkpointing=settings)
        with pytest.raises(ValueError, match="hfpatch: a .* must get one document a sequence"):
            ours(**given)
        ours(**given | {"position_ids": torch.arange(40).expand(2, -1)})


def test_documents_are_apart_also_where_masks_are_made_without_positions():
    """OPT embeds them and tells its masks nothing; its keys' biases have no gradient but rounding,
    which is no difference.
    """
    stock = families.small_model("opt")
    ours = copy.deepcopy(stock)
    assert "untiled" not in str(hfpatch.apply(ours, checkpointing=TILE))
    given, pieces = packed_and_apart(2)
    got, wanted = step(ours, given)[2], step(stock, None, pieces)[2]
    shifts = {n for n in wanted if n.endswith("k_proj.bias")}
    assert max(got[n].norm() for n in shifts) <= 1e-5
    assert_close(*({n: g for n, g in grads.items() if n not in shifts} for grads in (got, wanted)))


def of_shares(stock, given, pieces):
    """Gradients of the pieces, each by its share of the labels: older versions of Mamba's loss take
    no number of items. Takes that number out of `given`.
    """
    stock, count = copy.deepcopy(stock), given.pop("num_items_in_batch")
    for piece in pieces:
        share = (piece["labels"] != -100).sum() / count
        loss = stock(input_ids=piece["input_ids"], labels=piece["labels"], use_cache=False).loss
        (share * loss).backward()
    return {name: weight.grad for name, weight in stock.named_parameters()}


@tiny.not_before_transformers((5, 17), "does more with such a model's logits: they are computed")
def test_documents_are_apart_also_where_the_model_drops_positions():
    """Mamba's causal model takes them and tells its layers nothing; without our layers the mixers
    would see across.
    """
    stock = families.small_model("falcon_mamba")
    ours = copy.deepcopy(stock)
    given, pieces = packed_and_apart(2)
    wanted = of_shares(stock, given, pieces)
    for others in ({}, {"loss": False}):
        hfpatch.apply(ours, checkpointing=TILE, **others)
        assert_close(step(ours, given)[2], wanted)
    for others in ({}, {"loss": False}):
        hfpatch.apply(ours, checkpointing="off", **others)
        with pytest.raises(ValueError, match="hfpatch: a .* must get one document a sequence"):
            ours(**given)
    hfpatch.undo(ours)
    assert type(ours) is type(stock)


@pytest.mark.parametrize("loss", [True, False])
def test_a_cache_that_the_config_asks_for_keeps_no_layer_whole(loss):
    """XGLM's causal model reads it there, and has its stack make one, in training too."""
    ours, found = families.small_model("xglm", torch.float32), []
    hfpatch.apply(ours, checkpointing=TILE, loss=loss)
    lengths(layers_of(ours)[-1].fc1, found)
    assert ours.config.use_cache
    ours(**batch()).loss.backward()
    assert max(found) <= 16
    assert ours(**batch(), use_cache=True).past_key_values is not None, "where it was asked for"


def test_a_mask_made_of_the_mask_is_made_under_our_attention_too():
    """MiniMax M3 hides blocks of keys where attention is "eager" or "sdpa" by name, and nothing
    under another: gradients of full attention came, which no small instance showed whose blocks
    were longer than its rows.
    """
    stock = families.small_model("minimax_m3_vl_text")
    ours = copy.deepcopy(stock)
    report = hfpatch.apply(ours, checkpointing=TILE, **UNFUSED)
    assert "untiled" not in str(report)
    assert [list(layer._hfpatch.traits.mixers) for layer in layers_of(ours)] == [[], ["self_attn"]]
    given = batch(tokens=60)
    wanted = step(stock, given)[2]
    assert_close(step(ours, given)[2], wanted)
    hfpatch.apply(ours, checkpointing="off", **UNFUSED)
    assert_close(step(ours, given)[2], wanted)


@pytest.mark.parametrize("name", ["input_layernorm", "mlp", "linear_attn"])
def test_copies_that_peft_trains_leave_documents_apart(name):
    """PEFT's wrappers from before apply() do not make another kind of layer."""
    model = families.small_model("qwen3_5_text")
    config = peft.LoraConfig(r=2, target_modules=["o_proj"], modules_to_save=[name])
    model = peft.get_peft_model(model, config).double()
    one, two = batch(64), batch(64)
    hfpatch.apply(model, checkpointing=tiny.TILED)
    both = {"input_ids": torch.cat([one["input_ids"], two["input_ids"]], 1)}
    both["position_ids"] = torch.arange(64).repeat(1, 2).expand(len(both["input_ids"]), -1)
    with torch.no_grad(), lifted():
        apart = [model(input_ids=x["input_ids"], use_cache=False).logits for x in (one, two)]
        packed = model(**both, use_cache=False).logits
    torch.testing.assert_close(packed, torch.cat(apart, 1), rtol=1e-9, atol=1e-12)
