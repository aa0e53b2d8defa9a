"""Mixers in tiles through time: states handed on, their gradients handed back (layer/time_tiles.py).

Tiles are of 64 tokens, the delta rule's chunk, over rows of 165: two tiles and an odd rest.
"""

import copy
from collections import defaultdict

import families
import pytest
import tiny
import torch
from numerics import lifted

import hfpatch
from hfpatch.decoder.find import find_decoder
from tests.decoder.test_families import batch, step

pytestmark = tiny.not_before_transformers((5, 16), "hands mixers their states by other ways")
TOKENS = 165
TILE = hfpatch.Checkpointing(offload="host", tile=64)
UNFUSED = {"rms_norm": False, "rope": False, "mlp": False, "loss": False}
DELTA = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp_text", "olmo_hybrid")
KEYED = ("kimi_linear", "glm5_next", "bailing_hybrid")  # a decay a channel, which is slow here
MAMBA2 = ("bamba", "falcon_h1", "granitemoehybrid", "nemotron_h", "mamba2", "zamba2")
CONVOLUTIONS = ("lfm2", "lfm2_moe", "lfm3")
ROUTED = ("qwen3_next", "qwen4_exp_text")  # whose gradients follow the scores of experts closely
TIMED = DELTA + KEYED + MAMBA2 + CONVOLUTIONS
SHORT = ("qwen3_5_text", "falcon_h1")


def names(short=SHORT):
    return [n if n in short else pytest.param(n, marks=pytest.mark.long) for n in TIMED]


def timed_mixers(model):
    layers = find_decoder(model).layers
    return [m.get_submodule(name) for m in layers for name, _ in m._hfpatch.traits.timed]


def lengths(model) -> list[int]:
    """How many tokens the projections of each mixer that runs in time are given, from now on."""
    found = []

    def note(module, args):
        found.append(args[0].shape[1])

    for mixer in timed_mixers(model):
        inside = next(m for m in mixer.modules() if isinstance(m, torch.nn.Linear))
        inside.register_forward_pre_hook(tiny.OfAnEngine(note))
    return found


def patched(stock, checkpointing=TILE):
    ours = copy.deepcopy(stock)
    report = hfpatch.apply(ours, checkpointing=checkpointing, **UNFUSED)
    return ours, str(report)


def assert_same(got: dict, wanted: dict, within: float) -> None:
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        error = ((got[name] - value).norm() / value.norm().clamp_min(1e-3)).item()
        assert error <= within, f"{name}: {error:.1e}"


def padded(given: dict) -> dict:
    """A batch with padding on the left of one row and on the right of the other."""
    mask = torch.ones_like(given["input_ids"])
    mask[0, :70], mask[1, -9:] = 0, 0
    labels = given["labels"].masked_fill(mask == 0, -100)
    labels[0, 70] = -100  # its prediction sees nothing
    return given | {"attention_mask": mask, "labels": labels}


@pytest.mark.parametrize("name", names())
def test_gradients_are_those_of_whole_rows(name):
    """To rounding in float64, also with padding. Other layers of the family take theirs as ever."""
    stock = families.small_model(name)
    ours, report = patched(stock)
    assert timed_mixers(ours) and "run in tiles through time" in report
    step(ours, padded(batch(TOKENS)))  # the first padded one runs untiled
    runs = lengths(ours)
    for given in (batch(TOKENS), padded(batch(TOKENS))):
        with lifted():
            _, loss, grads = step(ours, given)
            _, wanted_loss, wanted = step(stock, given)
            if wanted_loss != wanted_loss:  # Qwen4 with padding, in transformers 5.19
                continue
            step_of_weights = moved_by_rounding(stock, given, wanted)
        assert abs(loss - wanted_loss) <= 1e-12 * abs(wanted_loss)
        assert_same(grads, wanted, max(1e-12, step_of_weights))
    assert max(runs) == 64 and 37 in runs


def moved_by_rounding(stock, given: dict, wanted: dict) -> float:
    """The most that any gradient moves as each weight moves by a step of rounding, where these are
    many: scores of experts that are near each other tell more than 1e-12 of them apart.
    """
    if stock.config.model_type not in ROUTED:
        return 0.0
    other, eps = copy.deepcopy(stock), torch.finfo(torch.float64).eps
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1 + eps * torch.randn_like(p).sign())
    grads = step(other, given)[2]
    return max(((grads[n] - x).norm() / x.norm().clamp_min(1e-3)).item() for n, x in wanted.items())


CUTS = ((0, 1, 65, 66, 165), (0, 100, 164, 165))  # documents of one token, of a tile, and longer


def packed():
    """Rows of several documents, and the batches of one document."""
    given = batch(TOKENS)
    pairs = [list(zip(cuts, cuts[1:])) for cuts in CUTS]
    given["position_ids"] = torch.stack(
        [torch.cat([torch.arange(b - a) for a, b in row]) for row in pairs]
    )
    given["labels"].masked_fill_(given["position_ids"] == 0, -100)
    n = {"num_items_in_batch": (given["labels"] != -100).sum()}
    spans = [(r, a, b) for r, row in enumerate(pairs) for a, b in row]
    pieces = [{k: given[k][r : r + 1, a:b] for k in ("input_ids", "labels")} for r, a, b in spans]
    return given | n, [piece | n for piece in pieces if (piece["labels"] != -100).any()]


@pytest.mark.parametrize("name", names(("lfm2",)))
def test_documents_are_cut_from_their_own_start(name):
    """Wherever they begin in their row, and those of one token."""
    stock = families.small_model(name)
    ours, _ = patched(stock)
    given, pieces = packed()
    runs = lengths(ours)
    with lifted():
        wanted = step(stock, None, pieces)[2]
        assert_same(step(ours, given)[2], wanted, 1e-12)
    assert {1, 64} <= set(runs) and max(runs) <= 65  # the last tile takes a single token along


@tiny.not_before_transformers((5, 19), "makes NaN of GLM-5-Next's plain batch")
def test_streams_behind_the_tokens():
    """Hidden states are [B, T, S, D] in GLM-5-Next, whose attention makes a mask of its own."""
    stock = families.small_model("glm5_next")
    ours, report = patched(stock)
    assert timed_mixers(ours) and "untiled" not in report and "refused" not in report
    step(ours, padded(batch(99)))  # the first padded one runs untiled
    runs = lengths(ours)
    with lifted():
        assert_same(step(ours, padded(batch(99)))[2], step(stock, padded(batch(99)))[2], 1e-12)
    assert {64, 35} <= set(runs)


@pytest.mark.parametrize(
    "settings",
    [
        {"keep": "input"},
        {"every": 2},
        {"offload": "gpu", "tile": 37},  # no multiple of the chunk
        {"tile": 100},
    ],
    ids=str,
)
def test_ways_of_keeping(settings):
    """First states wait with the checkpoints, or are found again; a tile is cut to its chunk."""
    stock = families.small_model("qwen3_5_text")
    how = {"offload": "host", "tile": 64} | settings
    ours, _ = patched(stock, hfpatch.Checkpointing(**how))
    runs = lengths(ours)
    with lifted():
        assert_same(step(ours, batch(TOKENS))[2], step(stock, batch(TOKENS))[2], 1e-12)
    assert max(runs) == 64


@pytest.mark.parametrize("name", ["falcon_h1", "qwen3_5_text"])
def test_a_graph_is_walked_twice(name):
    ours, _ = patched(families.small_model(name))
    loss = ours(**batch(TOKENS), use_cache=False).loss
    found = []
    for keep in (True, False):
        ours.zero_grad(set_to_none=True)
        loss.backward(retain_graph=keep)
        found.append({n: p.grad for n, p in ours.named_parameters() if p.grad is not None})
    assert_same(*found, 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", names(("qwen3_5_text",)))
def test_errors_are_those_of_whole_rows(name, dtype):
    """Unmodified, one document a row and packed: at most twice as far from float64. Where rounding
    sends tokens to other experts, the geometric mean over several draws of the tokens.
    """
    exact = families.small_model(name)
    stock = copy.deepcopy(exact).to(dtype)
    ours, _ = patched(stock)
    draws = 6 if dtype == torch.bfloat16 and name in ROUTED else 1
    for mine, theirs in ((batch(TOKENS), None), packed()):
        errors: dict = defaultdict(float)
        for seed in range(draws):
            got, plain = (
                step(m, *others(seed, mine, theirs))[2]
                for m, theirs in ((ours, None), (stock, theirs))
            )
            with lifted():
                true = step(exact, *others(seed, mine, theirs))[2]
            for way in (got, plain):
                assert way.keys() == true.keys()
            norm = torch.stack([g.norm() for g in true.values()]).max()
            for what, value in true.items():
                far, allowed = ((way[what].double() - value).norm() for way in (got, plain))
                step_of_all = torch.finfo(dtype).eps * max(value.norm(), 1e-3 * norm)
                errors[what] += (far / (2 * allowed + step_of_all)).log() / draws
        assert not {what: error for what, error in errors.items() if not error <= 0}


def others(seed: int, given: dict, pieces: list | None) -> tuple:
    """The same rows of other tokens; those as they are of seed 0."""
    if not seed:
        return given, pieces
    drawn = torch.randperm(63, generator=torch.Generator().manual_seed(seed)) + 1

    def of(part: dict) -> dict:
        moved = {n: part[n] for n in ("input_ids", "labels")}
        return part | {
            n: torch.where(x > 0, drawn[x.clamp_min(1) - 1], x) for n, x in moved.items()
        }

    return of(given), pieces and [of(piece) for piece in pieces]


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("lfm2", ["in_proj", "out_proj", "w1"]),
        ("qwen3_5_text", ["in_proj_z", "out_proj", "up_proj"]),
    ],
)
def test_random_numbers_of_a_tile_come_again(name, targets):
    """LoRA with dropout inside the mixers, under autocast: gradients are those of finite
    differences in the one direction that tells.
    """
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    stock = families.small_model(name)
    lora = LoraConfig(r=4, lora_dropout=0.3, target_modules=targets)
    model = get_peft_model(stock, lora)
    hfpatch.apply(model, checkpointing=TILE, **UNFUSED)
    assert timed_mixers(model.base_model.model)
    moved = {n: p for n, p in model.named_parameters() if p.requires_grad}
    for p in moved.values():
        p.data.normal_(std=0.1)
    direction = {n: torch.randn_like(p) for n, p in moved.items()}

    def loss():
        torch.manual_seed(3)
        return model(**batch(TOKENS), use_cache=False).loss

    with lifted():
        loss().backward()
        slope = sum((p.grad * direction[n]).sum().item() for n, p in moved.items())
        ends = []
        for sign in (1, -2):
            for n, p in moved.items():
                p.data.add_(direction[n], alpha=sign * 1e-8)
            ends.append(loss().item())
    assert abs((ends[0] - ends[1]) / 2e-8 - slope) <= 1e-4 * abs(slope)


def test_autocast_reaches_every_tile():
    """As far from float64 as whole rows under autocast."""
    exact = families.small_model("qwen3_5_text")
    stock = copy.deepcopy(exact).float()
    ours, _ = patched(stock)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, plain = step(ours, batch(TOKENS))[2], step(stock, batch(TOKENS))[2]
    with lifted():
        true = step(exact, batch(TOKENS))[2]
    assert got.keys() == plain.keys()
    for what, value in true.items():
        far, allowed = ((way[what].double() - value).norm() for way in (got, plain))
        assert far <= 2 * allowed + 2**-8 * value.norm(), f"{what}: {far:.1e}, {allowed:.1e}"


# --- who carries states ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "why"),
    [
        pytest.param("jamba", "in tiles it differs from whole rows", marks=pytest.mark.long),
        ("falcon_mamba", "in tiles it differs from whole rows"),
        ("minimax", "given states, it raised AttributeError"),
        ("xlstm", "it takes no states"),
    ],
)
def test_a_mixer_that_cannot_runs_whole_and_the_report_says_why(name, why):
    """Mamba 1 drops its last state's gradient without a word, Lightning attention has a cache of
    its own.
    """
    ours, report = patched(families.small_model(name))
    assert not timed_mixers(ours) and f"run over whole rows, and again in backward: {why}" in report


@pytest.fixture
def rule(monkeypatch):
    """What puts another gated delta rule in the place of Qwen3-Next's."""
    from transformers.models.qwen3_next import modeling_qwen3_next as file

    from hfpatch.decoder.verdict import _verdicts

    stock = file.torch_chunk_gated_delta_rule

    def put(change):
        monkeypatch.setattr(file, "torch_chunk_gated_delta_rule", change(stock))
        _verdicts.clear()

    yield put
    _verdicts.clear()


def takes_one_without_a_graph(stock):
    def run(*args, initial_state=None, **kwargs):
        state = None if initial_state is None else initial_state.detach()
        return stock(*args, initial_state=state, **kwargs)

    return run


def forgets_at_once(stock):
    """No state matters here: that tiles agree would say nothing."""

    def run(query, key, value, *, g, **kwargs):
        return stock(query, key, value, g=g - 50.0, **kwargs)

    return run


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            lambda stock: lambda *x, initial_state=None, **kwargs: stock(*x, **kwargs),
            "in tiles it differs",
        ),
        (takes_one_without_a_graph, "in tiles it differs"),
        (forgets_at_once, "its recurrent state changes too little to compare"),
    ],
)
def test_a_rule_that_drops_states_in_silence_is_seen(change, why, rule):
    rule(change)
    ours, report = patched(families.small_model("qwen3_next"))
    assert not timed_mixers(ours) and why in report
