"""TRL's trainers on a patched model: losses, rewards and weights as without hfpatch, its fused head
through ops.linear_log_prob.
"""

import copy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import torch
import transformers
from accelerate.state import AcceleratorState
from torch import nn

import hfpatch
from hfpatch.context.classes import is_patched
from hfpatch.decoder.small_instance import TOKENS
from hfpatch.decoder.unpadded import PackedRow
from hfpatch.loss import log_probs as log_probs_module

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
peft = pytest.importorskip("peft")
from transformers import LlamaForSequenceClassification, PreTrainedTokenizerFast  # noqa: E402

add_fused_lm_head = getattr(trl.trainer.utils, "add_fused_lm_head", None)
of_the_head = pytest.mark.skipif(
    add_fused_lm_head is None, reason=f"trl {trl.__version__} has no fused head"
)
# TRL's and datasets' own, about settings that tiny runs do not have
pytestmark = pytest.mark.filterwarnings("ignore")
STEPS = 4
ORDERS = ("apply first", "trainer first")
OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


@pytest.fixture(autouse=True)
def no_precision_left_behind():
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def tokenizer():
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    inner = Tokenizer(WordLevel({f"t{i}": i for i in range(tiny.VOCAB)}, unk_token="t3"))
    inner.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="t0", eos_token="t2", unk_token="t3"
    )


def words(seed: int, n: int) -> str:
    return " " + " ".join(f"t{i}" for i in tiny.ids(1, n, seed=seed)[0].tolist())


def rows(**columns):
    """16 rows; each column is a function of the row's number, its texts of uneven lengths."""
    return datasets.Dataset.from_dict(
        {name: [of(i) for i in range(16)] for name, of in columns.items()}
    )


PROMPT = {"prompt": lambda i: words(i, 3 + i % 3)}
PAIRS = PROMPT | {
    "chosen": lambda i: words(50 + i, 4 + i % 5),
    "rejected": lambda i: words(90 + i, 3 + i % 7),
}
TRAINERS = {
    "SFT": {"prompt": PROMPT["prompt"], "completion": PAIRS["chosen"]},
    "DPO": PAIRS,
    "KTO": PROMPT | {"completion": PAIRS["chosen"], "label": lambda i: bool(i % 2)},
    "Reward": PAIRS,
    "GRPO": PROMPT,
    "RLOO": PROMPT,
}


def reward(completions, **kwargs):
    return [sum(map(len, c.split())) / 7.0 for c in completions]


def base(name: str, **changes) -> nn.Module:
    if name == "Reward":
        return tiny.llama(LlamaForSequenceClassification, num_labels=1, **changes)
    return tiny.llama(**changes)


def whole(parameter: nn.Parameter) -> torch.Tensor:
    """A copy, gathered from the ranks where an engine shards it."""
    if hasattr(parameter, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()
    return (
        (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter)
        .detach()
        .clone()
    )


def trained(name, path, order="stock", lora=False, dtype=torch.float32, **settings):
    """(trainer, what it logged, the trained weights) of a short run. order: "stock", or whether
    apply or the trainer came first.
    """
    if not (path / "model").exists():
        base(name).save_pretrained(path / "model")
    model = type(base(name)).from_pretrained(path / "model", dtype=dtype).train()
    if order == "apply first":
        hfpatch.apply(model, checkpointing=tiny.TILED)
    more = {}
    if order == "apply first" and name in ("DPO", "KTO") and not lora:
        more["ref_model"] = copy.deepcopy(model)
    if lora:
        kind = "SEQ_CLS" if name == "Reward" else "CAUSAL_LM"
        more["peft_config"] = peft.LoraConfig(
            r=4, target_modules=["q_proj", "up_proj"], task_type=kind
        )
    if name in ("GRPO", "RLOO"):
        more["reward_funcs"] = reward
        settings = {
            "max_completion_length": 6,
            "num_generations": 2,
            "beta": 0.0,
            "use_vllm": False,
            **settings,
        }
    torch.manual_seed(5)
    arguments = getattr(trl, f"{name}Config")(
        output_dir=str(path), max_steps=STEPS, per_device_train_batch_size=4, logging_steps=1,
        report_to=[], use_cpu=True,
        save_strategy="no", disable_tqdm=True, seed=3, dataloader_pin_memory=False, optim="sgd",
        lr_scheduler_type="constant", **{"bf16": False, "gradient_checkpointing": False,
                                         "learning_rate": 1e-2, **settings},
    )  # fmt: skip
    trainer = getattr(trl, f"{name}Trainer")(
        model=model,
        args=arguments,
        train_dataset=rows(**TRAINERS[name]),
        processing_class=tokenizer(),
        **more,
    )
    if order == "trainer first":
        for made in (trainer.model, getattr(trainer, "ref_model", None)):
            if made is not None:
                hfpatch.apply(made, checkpointing=tiny.TILED)
    before = {n: whole(p) for n, p in trainer.model.named_parameters()}
    trainer.train()
    timed = ("runtime", "per_second", "time", "flos")
    logged = [
        {k: v for k, v in e.items() if not any(t in k for t in timed)}
        for e in trainer.state.log_history
        if "loss" in e
    ]
    return trainer, logged, {n: whole(p) - before[n] for n, p in trainer.model.named_parameters()}


def assert_same_run(got, wanted):
    """Each number that a trainer logs, and every weight's step, to rounding of float32 carried
    through four steps.
    """
    (_, ours, steps), (_, stock, plain) = got, wanted
    assert len(ours) == len(stock) == STEPS
    for a, b in zip(ours, stock):
        assert a.keys() == b.keys() and len(a) > 3
        assert all(a[k] == pytest.approx(b[k], rel=2e-3, abs=2e-4) for k in a), {
            k: (a[k], b[k]) for k in a if a[k] != b[k]
        }
    assert any(step.abs().max() > 0 for step in plain.values())
    weights = dict(got[0].model.named_parameters())
    for name, step in plain.items():
        rounding = (
            STEPS * torch.finfo(torch.float32).eps * whole(weights[name]).abs().max()
        )  # of the weight, once a step
        assert (steps[name] - step).abs().max() <= 1e-4 * step.abs().max() + rounding, name


@pytest.fixture
def heads(monkeypatch):
    """Which model answered each call with fused_lm_head=True: counts of ours (by model) and of
    TRL's own; None where there is no such head.
    """
    if add_fused_lm_head is None:
        return None
    ran = {"theirs": 0}
    ours, theirs = log_probs_module.log_probs, trl.trainer.utils._ChunkedLogProbFunction.apply

    def count(model, *args):
        ran[id(model)] = ran.get(id(model), 0) + 1
        return ours(model, *args)

    def count_theirs(*args):
        ran["theirs"] += 1
        return theirs(*args)

    monkeypatch.setattr("hfpatch.loss.causal_model.log_probs", count)
    monkeypatch.setattr(trl.trainer.utils._ChunkedLogProbFunction, "apply", count_theirs)
    return ran


@pytest.fixture
def rows_without_padding(monkeypatch):
    """Of each layer that ran on a packed row in place of padded ones, but for those of a small
    instance: its real tokens, its tokens, and those of the padded rows."""
    ran, padded = [], PackedRow._padded

    def note(row, x, y):
        if x.shape[1] != TOKENS:
            ran.append((row.real, len(row.at_N), x.shape[:2].numel()))
        return padded(row, x, y)

    monkeypatch.setattr(PackedRow, "_padded", note)
    return ran


PACKED = {"packing": True, "max_length": 24, "padding_free": True}
CASES = [
    ("SFT", "apply first", PACKED),
    ("SFT", "trainer first", {"lora": True, "gradient_checkpointing": True}),
    ("DPO", "apply first", {}),
    ("GRPO", "trainer first", {"cast_lm_head_to_fp32": True, "beta": 0.1}),
    *(
        pytest.param(
            name,
            order,
            {"lora": lora, "gradient_checkpointing": checkpointed, **packed},
            marks=pytest.mark.long,
        )
        for name in TRAINERS
        for order in ORDERS
        for lora in (False, True)
        for checkpointed in (False, True)
        for packed in ([{}, PACKED] if name == "SFT" else [{}])
    ),
]


@pytest.mark.parametrize("name, order, settings", CASES)
def test_trainer(name, order, settings, tmp_path, heads, rows_without_padding):
    """Policy and reference run our head, TRL's own never, and GRPO's and DPO's padding costs
    nothing."""
    got = trained(name, tmp_path / "ours", order, **settings)
    if heads is None:
        return assert_same_run(got, trained(name, tmp_path / "stock", **settings))
    if name in ("DPO", "GRPO"):  # a step's rows may be of one length
        assert len(rows_without_padding) >= STEPS - 1
        real, ran, padded = map(sum, zip(*rows_without_padding))
        assert real <= ran <= 1.05 * real and ran < padded, "what is token-wise costs that much"
    trainer = got[0]
    policy = trainer.model.get_base_model() if settings.get("lora") else trainer.model
    models = [m for m in (policy, getattr(trainer, "ref_model", None)) if m is not None]
    assert len(models) == (
        2 if name in ("DPO", "KTO") and not settings.get("lora") or settings.get("beta") else 1
    )
    assert heads == {"theirs": 0} | (
        {id(m): heads.get(id(m)) for m in models} if name != "Reward" else {}
    )
    assert all(heads[id(m)] >= STEPS for m in models if name != "Reward")
    heads["theirs"] = 0
    assert_same_run(got, trained(name, tmp_path / "stock", **settings))
    assert heads["theirs"] >= STEPS or name == "Reward", "the stock run is TRL's"


@of_the_head
@pytest.mark.parametrize("bf16", [True, False], ids=["autocast", "weights"])
def test_equal_policy_and_reference_give_equal_log_probs(bf16, tmp_path):
    """A reference that stays stock differs by bf16's rounding, which the loss takes for a
    reward.
    """
    dtype = torch.float32 if bf16 else torch.bfloat16
    trainer, logged, _ = trained(
        "DPO", tmp_path, "apply first", dtype=dtype, bf16=bf16, learning_rate=0.0
    )
    assert is_patched(trainer.ref_model)
    assert (
        [e["rewards/chosen"] for e in logged]
        == [e["rewards/margins"] for e in logged]
        == [0.0] * STEPS
    )


@of_the_head
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}])
def test_every_field_of_trls_head(order, changes):
    """Values and gradients of all outputs, with a temperature, shifted here or beforehand, against
    TRL's own in float64.
    """
    stock = tiny.llama(**changes)
    true, ours = tiny.exact(stock), copy.deepcopy(stock)
    if order == "apply first":
        hfpatch.apply(ours, checkpointing=tiny.TILED)
    for model in (stock, true, ours):
        add_fused_lm_head(model, temperature=0.7, outputs=OUTPUTS)
    if order == "trainer first":
        hfpatch.apply(ours, checkpointing=tiny.TILED)
    batch = tiny.labelled()
    shifted = nn.functional.pad(batch["labels"], (0, 1), value=-100)[..., 1:]
    weight = torch.randn(2, tiny.TOKENS, generator=torch.Generator().manual_seed(8))

    def run(model, more):
        model.zero_grad()
        out = model(**batch, fused_lm_head=True, **more)
        weighed = (out.log_probs * weight[:, : out.log_probs.shape[1]]).sum()
        (weighed + 0.3 * out.entropy.sum() + out.loss).backward()
        return dict(out.items()) | {n: p.grad for n, p in model.named_parameters()}

    for more in ({}, {"shift_labels": shifted, "num_items_in_batch": 31}):
        got, plain, exact = (run(model, more) for model in (ours, stock, true))
        assert got.keys() == plain.keys() >= set(OUTPUTS)
        for name in got:
            assert (
                got[name].dtype == plain[name].dtype
                and got[name].requires_grad == plain[name].requires_grad
            ), name
            if got[name].dtype == torch.bool:
                assert torch.equal(got[name], plain[name]), name
            else:
                tiny.numerics.assert_close(
                    got[name].detach(), plain[name].detach(), exact[name].detach(), name
                )
    assert ours(**batch).logits is None
    tiny.numerics.assert_close(*(m(tiny.ids()).logits.detach() for m in (ours, stock, true)))
    hfpatch.undo(ours)
    assert tiny.classes(ours) == tiny.classes(stock)
    got, plain = run(ours, {}), run(stock, {})
    assert all(torch.equal(got[n], plain[n]) for n in plain), "undo gives TRL's head back"
    hfpatch.apply(ours, checkpointing=tiny.TILED)
    assert "forward" not in vars(ours)
    tiny.numerics.assert_close(*(run(m, {})["log_probs"].detach() for m in (ours, stock, true)))


@of_the_head
@pytest.mark.parametrize("family", ["Gemma2", "Mixtral", "Cohere", "Granite"])
def test_what_a_family_does_to_its_logits(family):
    """A soft cap, a scale, a divisor, and the experts' load balance beside the loss: read from the
    config as TRL reads them.
    """
    extra = {"Gemma2": {"final_logit_softcapping": 5.0, "head_dim": 16},
             "Mixtral": {"output_router_logits": True},
             "Cohere": {"logit_scale": 0.25},
             "Granite": {"logits_scaling": 3.0}}[family]  # fmt: skip
    sizes = {
        "vocab_size": tiny.VOCAB,
        "hidden_size": 64,
        "intermediate_size": 80,
        "num_hidden_layers": 1,
        "pad_token_id": 0,
    }
    made = getattr(transformers, f"{family}Config")(
        **sizes, num_attention_heads=4, num_key_value_heads=2, **extra
    )
    torch.manual_seed(0)
    stock = getattr(transformers, f"{family}ForCausalLM")(made).train()
    ours = tiny.patched(stock)
    for model in (ours, stock):
        add_fused_lm_head(model, temperature=0.9, outputs=OUTPUTS)
    outs = [model(**tiny.labelled(), fused_lm_head=True) for model in (ours, stock)]
    for out in outs:
        (out.log_probs.sin().sum() + out.entropy.sum() + out.loss).backward()
    got, plain = (
        dict(o.items()) | {n: p.grad for n, p in m.named_parameters()}
        for o, m in zip(outs, (ours, stock))
    )
    assert got.keys() == plain.keys() and ("aux_loss" in got) == (family == "Mixtral")
    for name, value in plain.items():
        value, close = value.detach().float(), 50 * torch.finfo(torch.float32).eps
        assert (got[name].detach().float() - value).abs().max() <= close * value.abs().max(), name


@of_the_head
def test_where_our_head_cannot_serve_trls_does():
    """LoRA on the head: TRL's own head, which reads the base's weight alone, and a sentence that
    says so.
    """
    stock = tiny.llama()
    ours = tiny.patched(stock)
    models = [ours, stock, tiny.exact(stock)]
    for model in models:
        add_fused_lm_head(model, outputs=OUTPUTS)
        model.lm_head = nn.Sequential(model.lm_head)
        for name in ("weight", "bias"):
            setattr(model.lm_head, name, getattr(model.lm_head[0], name))
    with pytest.warns(
        UserWarning,
        match=(
            "hfpatch: TRL's own fused head runs, as lm_head is a "
            "torch.nn.modules.container.Sequential"
        ),
    ):
        got = ours(**tiny.labelled(), fused_lm_head=True)
    plain, exact = (m(**tiny.labelled(), fused_lm_head=True).loss.detach() for m in models[1:])
    tiny.numerics.assert_close(got.loss.detach(), plain, exact)


@of_the_head
def test_a_trl_that_asks_otherwise_keeps_its_head(monkeypatch):
    """Where the closure has other names, TRL's forward stays on the model, and the report says
    whose it is.
    """
    monkeypatch.delattr(trl.trainer.utils, "FusedCausalLMOutput")
    model = tiny.llama()
    add_fused_lm_head(model)
    report = hfpatch.apply(model, checkpointing=tiny.TILED)
    assert ("loss", "its forward is trl.trainer.utils's") in report.skipped
    ours = tiny.patched(tiny.llama())
    add_fused_lm_head(ours)
    assert vars(ours)["forward"].__globals__["__name__"] == "trl.trainer.utils"


SHARDED = """
import copy, os, sys
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
import tiny, torch, hfpatch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from trl.trainer.utils import add_fused_lm_head
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
stock = tiny.llama()
ours = copy.deepcopy(stock)
hfpatch.apply(ours, checkpointing=tiny.TILED)
true = tiny.exact(stock)
for model in (stock, ours, true):
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
for unit in (*ours.model.layers, ours.lm_head, ours):
    fully_shard(unit)
assert type(ours.lm_head).__name__ == "FSDPLinear" and hasattr(ours.lm_head.weight, "placements")
for model in (stock, ours, true):
    out = model(**tiny.labelled(), fused_lm_head=True)
    (out.log_probs.sin().sum() + out.entropy.sum()).backward()
for (name, p), q, t in zip(stock.named_parameters(), ours.parameters(), true.parameters()):
    tiny.numerics.assert_close(q.grad.full_tensor(), p.grad, t.grad, name)
print("same", getattr(ours, "_hfpatch_warned", None))
sys.stdout.flush()
os._exit(0)
"""


@of_the_head
@pytest.mark.long
def test_a_head_that_fsdp_shards_by_itself():
    """Its weight is whole within a call of the head alone, in forward and, for the logits' second
    time, in backward.
    """
    command, here = [sys.executable, "-W", "ignore", "-c", SHARDED], Path(__file__).parent
    done = subprocess.run(command, cwd=here, capture_output=True, text=True)
    assert done.stdout.strip() == "same None", done.stdout + done.stderr


@of_the_head
@pytest.mark.parametrize("name, order", [
    ("SFT", "trainer first"), pytest.param("SFT", "apply first", marks=pytest.mark.long),
    *(pytest.param(n, o, marks=pytest.mark.long) for n in ("DPO", "KTO", "GRPO", "RLOO", "Reward")
      for o in ORDERS),
])  # fmt: skip
def test_undo_and_a_second_apply_after_training(name, order, tmp_path, heads):
    """What the trainer left on the model (its head, accelerate's forward) runs on with our classes
    gone, and with them back.
    """
    trainer, *_ = trained(name, tmp_path, order)
    model, batch, loss, stock = trainer.model, tiny.labelled(), lambda out: out.loss, base(name)
    if name == "Reward":
        batch, loss = {"input_ids": tiny.ids()}, lambda out: out.logits.square().sum()
    stock.load_state_dict(model.state_dict())
    hfpatch.undo(model)
    assert tiny.classes(model) == tiny.classes(stock)
    model.train()
    got, wanted = tiny.step(model, batch, loss), tiny.step(stock, batch, loss)
    assert got.keys() == wanted.keys() and all(torch.equal(got[n], wanted[n]) for n in wanted)
    heads.clear()
    heads["theirs"] = 0
    trainer.train()
    assert id(model) not in heads and (heads["theirs"] >= STEPS or name == "Reward")
    hfpatch.apply(model, checkpointing=tiny.TILED)
    stock.load_state_dict(model.state_dict())
    model.train()
    tiny.assert_as_good(model, stock, batch, loss)
    heads.clear()
    heads["theirs"] = 0
    trainer.train()
    assert heads["theirs"] == 0 and (heads.get(id(model), 0) >= STEPS or name == "Reward")


@pytest.mark.parametrize("size", ["sp_size", "cp_size"])
def test_pairs_whose_sequences_ranks_share_are_refused(size):
    args = SimpleNamespace(
        precompute_ref_log_probs=False,
        world_size=2,
        parallelism_config=SimpleNamespace(**{size: 2}),
        process_index=0,
    )
    with pytest.raises(ValueError, match=f"must get whole sequences, got .*{size}=2"):
        hfpatch.Callback().on_train_begin(args, None, None, model=tiny.llama())
