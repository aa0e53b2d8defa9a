"""Traps of those who call the model: Trainer, PEFT, TRL, autocast, accelerate."""

import copy
import inspect
import os
import warnings

import pytest
import tiny
import torch
from accelerate.state import AcceleratorState
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

import hfpatch
from hfpatch.loss import causal_model as loss_module


@pytest.fixture(autouse=True)
def no_precision_left_behind():
    """accelerate keeps the mixed precision of the first Trainer for the process, 4.57's arguments
    in the environment.
    """
    yield
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)
    AcceleratorState._reset_state(reset_partial_state=True)


class Rows(Dataset):
    """Rows whose labels are ignored unevenly, so that a mean of means is not the mean."""

    def __init__(self, n=8, tokens=tiny.TOKENS):
        self.ids = tiny.ids(n, tokens, seed=4)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        labels = self.ids[i].clone()
        labels[: (5 * i) % 17] = -100
        return {
            "input_ids": self.ids[i],
            "attention_mask": torch.ones_like(labels),
            "labels": labels,
        }


def train(model, path, trainer=Trainer, **arguments):
    """Two optimizer steps and an evaluation on the CPU. Returns the trainer and the training
    losses.
    """
    settings = {
        "output_dir": str(path), "max_steps": 2, "per_device_train_batch_size": 2,
        "logging_steps": 1, "report_to": [],
        "use_cpu": True, "learning_rate": 1e-2, "save_strategy": "no", "disable_tqdm": True,
        "seed": 3,
        "dataloader_pin_memory": False,
    }  # fmt: skip
    more = {
        n: arguments.pop(n)
        for n in ("callbacks", "compute_metrics", "preprocess_logits_for_metrics")
        if n in arguments
    }
    made = trainer(
        model=model,
        args=TrainingArguments(**{**settings, **arguments}),
        train_dataset=Rows(),
        eval_dataset=Rows(4),
        **more,
    )
    made.train()
    return made, [entry["loss"] for entry in made.state.log_history if "loss" in entry]


def same_training(stock, ours, tmp_path, **arguments):
    """Losses, and every weight after two steps as long as its gradients, err at most as
    numerics.budget allows.
    """
    # clipping hides a factor
    arguments |= {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0}
    true = tiny.exact(stock)
    runs = [(model, train(model, tmp_path / "run", **arguments)) for model in (ours, stock, true)]
    got, plain, _ = (losses for _, (_, losses) in runs)
    # Trainer logs four decimals
    assert len(got) == 2 and got == pytest.approx(plain, rel=0, abs=1e-4)
    tiny.assert_within(*({n: p.detach() for n, p in model.named_parameters()} for model, _ in runs))


@pytest.mark.parametrize("way", tiny.WAYS)
def test_gradient_accumulation(tmp_path, way):
    """num_items_in_batch ignored: a loss of 19.4 instead of 4.85."""
    stock = tiny.llama()
    same_training(
        stock,
        tiny.patched(stock, checkpointing=tiny.WAYS[way]),
        tmp_path,
        gradient_accumulation_steps=2,
    )


def test_num_items_in_batch_counts():
    """The same at the model: an int, a 0-d and a 1-element tensor."""
    stock = tiny.llama()
    ours = tiny.patched(stock)
    for n in (37, torch.tensor(37), torch.tensor([37])):
        got = tiny.step(ours, {**tiny.labelled(), "num_items_in_batch": n})
        true = tiny.step(tiny.exact(stock), {**tiny.labelled(), "num_items_in_batch": 37})
        plain = tiny.step(stock, {**tiny.labelled(), "num_items_in_batch": torch.tensor(37)})
        for name in got:
            tiny.numerics.assert_close(
                got[name].reshape(true[name].shape), plain[name], true[name], name
            )


def test_shift_labels():
    """Sequence parallelism shifts beforehand: shifting again is a wrong loss and no error."""
    stock = tiny.llama()
    batch = tiny.labelled()
    shifted = nn.functional.pad(batch["labels"], (0, 1), value=-100)[..., 1:].contiguous()
    ours = tiny.patched(stock)
    tiny.assert_as_good(ours, stock, {**batch, "shift_labels": shifted})
    tiny.assert_as_good(ours, stock, {**batch, "shift_labels": shifted}, against=batch)


def test_label_smoothing_factor(tmp_path):
    """Trainer looks the class name up to know whether to shift: a renamed class gives 5.220 for
    4.851.
    """
    stock = tiny.llama()
    same_training(stock, tiny.patched(stock), tmp_path, label_smoothing_factor=0.1)


def test_columns_are_detected(tmp_path):
    """Trainer drops the dataset's columns that forward's signature lacks."""
    ours = tiny.patched(tiny.llama())
    names = set(inspect.signature(ours.forward).parameters)
    # Up to 5.3 generate() passes cache_position; it travels in **kwargs and is no column of a
    # dataset.
    assert set(inspect.signature(tiny.llama().forward).parameters) - {"cache_position"} <= names
    trainer = Trainer(
        model=ours, args=TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    )
    trainer._set_signature_columns_if_needed()
    assert {"input_ids", "attention_mask", "position_ids", "labels"} <= set(
        trainer._signature_columns
    )
    assert trainer.model_accepts_loss_kwargs, (
        "else Trainer divides the loss by the accumulation once more"
    )


def assert_evaluated(got: float, plain: float, stock, tmp_path):
    """A loss over Rows(4), within the budget of its float64 twin."""
    exact = train(tiny.exact(stock), tmp_path / "exact", max_steps=1, learning_rate=0.0)[
        0
    ].evaluate()["eval_loss"]
    losses = (torch.tensor(loss, dtype=torch.float64) for loss in (got, plain, exact))
    tiny.numerics.assert_close(*losses, "loss", torch.float32)


@pytest.mark.parametrize("logits", ["auto", True])
def test_predict_and_compute_metrics(tmp_path, logits):
    """Logits always None break both."""
    stock = tiny.llama()
    ours = tiny.patched(stock, logits=logits)
    seen = []

    def metrics(p):
        seen.append(p.predictions.shape)
        return {"accuracy": float((p.predictions.argmax(-1)[:, :-1] == p.label_ids[:, 1:]).mean())}

    results = []
    for model, name in ((stock, "stock"), (ours, "ours")):
        trainer, _ = train(
            model, tmp_path / name, max_steps=1, learning_rate=0.0, compute_metrics=metrics
        )
        predicted = trainer.predict(Rows(4))
        results.append((trainer.evaluate(), predicted.metrics, predicted.predictions.shape))
    (plain, plain_predicted, shape), (got, got_predicted, got_shape) = results
    assert got_shape == shape == (4, tiny.TOKENS, tiny.VOCAB) and set(seen) == {shape}
    assert got["eval_accuracy"] == plain["eval_accuracy"]
    assert_evaluated(got["eval_loss"], plain["eval_loss"], stock, tmp_path)
    assert_evaluated(got_predicted["test_loss"], plain_predicted["test_loss"], stock, tmp_path)


def test_evaluation_without_logits_beyond_a_size(tmp_path, monkeypatch):
    """Loss-only evaluation at 128k would need 63 GiB of logits."""
    stock = tiny.llama()
    ours = tiny.patched(stock).eval()
    assert ours(**tiny.labelled()).logits is not None, "small ones are given"
    size = 2 * tiny.TOKENS * tiny.VOCAB * loss_module.BYTES_OF_A_LOGIT
    for limit, given in ((size, True), (size - 1, False)):
        monkeypatch.setattr(loss_module, "EVAL_LOGITS_BYTES", limit)
        assert (ours(**tiny.labelled()).logits is not None) == given
    monkeypatch.setattr(loss_module, "EVAL_LOGITS_BYTES", 0)
    plain = train(stock, tmp_path / "stock", max_steps=1, learning_rate=0.0)[0].evaluate()[
        "eval_loss"
    ]
    ours.train()
    got = train(ours, tmp_path / "ours", max_steps=1, learning_rate=0.0, prediction_loss_only=True)[
        0
    ].evaluate()
    assert_evaluated(got["eval_loss"], plain, stock, tmp_path)


def test_logits_settings():
    for setting, given in ((True, True), (False, False)):
        ours = tiny.patched(tiny.llama(), logits=setting).eval()
        assert (ours(**tiny.labelled()).logits is not None) == given
        assert ours(tiny.ids()).logits is not None, "without labels logits are the answer"
        assert (ours.train()(**tiny.labelled()).logits is not None) == given
    assert tiny.patched(tiny.llama()).train()(**tiny.labelled()).logits is None


def test_skip_logits():
    ours = tiny.patched(tiny.llama()).eval()
    assert ours(**tiny.labelled(), skip_logits=True).logits is None


# --- autocast -------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", tiny.WAYS)
def test_autocast_has_the_dtypes_of_stock(way):
    """bf16=True with float32 weights, the most common setting of all."""
    stock = tiny.llama()
    ours = tiny.patched(stock, checkpointing=tiny.WAYS[way])
    seen = {}
    for label, model in (("stock", stock), ("ours", ours)):
        hooks = [
            model.get_submodule(n).register_forward_hook(
                lambda m, i, o, k=(label, n): seen.__setitem__(k, o.dtype)
            )
            for n in ("model.norm", "model.embed_tokens")
        ]
        with torch.autocast("cpu", torch.bfloat16):
            seen[label, "loss"] = model(**tiny.labelled()).loss.dtype
            seen[label, "logits"] = model(tiny.ids()).logits.dtype
            seen[label, "hidden"] = model.model(tiny.ids()).last_hidden_state.dtype
        for hook in hooks:
            hook.remove()
    by_model = {
        label: {k: v for (which, k), v in seen.items() if which == label}
        for label in ("stock", "ours")
    }
    assert by_model["ours"] == by_model["stock"]

    def run(model, autocast=True):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(**tiny.labelled()).loss
        loss.backward()
        return {"loss": loss.detach()} | {n: p.grad for n, p in model.named_parameters()}

    got, plain, true = run(ours), run(stock), run(tiny.exact(stock), autocast=False)
    for name in got:
        assert got[name].dtype == plain[name].dtype
        tiny.numerics.assert_close(got[name], plain[name], true[name], name, dtype=torch.bfloat16)


@pytest.mark.parametrize("way", tiny.WAYS)
def test_autocast_leaves_float64_as_it_is(way):
    """As torch has it: a model in float64 computes there what it computes elsewhere."""
    stock = tiny.llama(dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        tiny.assert_equal_in_double(
            tiny.patched(stock, checkpointing=tiny.WAYS[way]), stock, tiny.labelled()
        )


def test_fp32_norms_in_a_bf16_model():
    stock = tiny.llama(dtype=torch.bfloat16)
    for name, module in stock.named_modules():
        if "norm" in name:
            module.float()
    with torch.autocast("cpu", torch.bfloat16):
        got, plain = (m(**tiny.labelled()).loss for m in (tiny.patched(stock), stock))
    assert got.dtype == plain.dtype
    tiny.numerics.assert_close(
        got, plain, tiny.exact(stock)(**tiny.labelled()).loss, dtype=torch.bfloat16
    )


def test_trainer_with_bf16_then_undo(tmp_path):
    """accelerate wraps forward on the instance; undo gives a model that computes as before
    apply.
    """
    stock = tiny.llama()
    ours = tiny.patched(stock)
    train(ours, tmp_path, bf16=True)
    hfpatch.undo(ours)
    assert tiny.classes(ours) == tiny.classes(stock)
    stock.load_state_dict(ours.state_dict())
    tiny.assert_as_good(ours, stock, tiny.labelled())


def test_apply_between_two_trainings(tmp_path):
    """A model that stock Trainer has trained in bf16 carries accelerate's wrapper: the fused
    forward must not hide under it.
    """
    model = tiny.llama()
    train(model, tmp_path / "a", bf16=True)
    plain = copy.deepcopy(model)
    report = hfpatch.apply(model, checkpointing=tiny.TILED)
    assert report.count("loss") == 1 or any(
        o == "loss" and "forward" in why for o, why in report.skipped
    )
    true = tiny.llama()
    true.load_state_dict(plain.state_dict())
    losses = (tiny.step(m, tiny.labelled())["loss"] for m in (model, plain, tiny.exact(true)))
    tiny.numerics.assert_close(*losses, "loss", torch.bfloat16)


# --- PEFT -----------------------------------------------------------------------------------------


ATTENTION = ["q_proj", "v_proj"]
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def adapt(model, adapter="default", **settings):
    """LoRA with weights that matter."""
    from peft import LoraConfig, get_peft_model

    settings = {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ATTENTION,
        "task_type": "CAUSAL_LM",
        **settings,
    }
    torch.manual_seed(2)
    peft = get_peft_model(model, LoraConfig(**settings), adapter_name=adapter)
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for name, p in sorted(peft.named_parameters()):
            if "lora_" in name:
                p.copy_(0.1 * torch.randn(p.shape, generator=generator))
    return peft


def adapted(order, way="tiled", adapter="default", **settings):
    """(ours, stock), both wrapped; `order` says whether apply came before or after."""
    stock = adapt(tiny.llama(), adapter, **settings)
    base = tiny.llama()
    if order == "apply first":
        hfpatch.apply(base, checkpointing=tiny.WAYS[way])
    ours = adapt(base, adapter, **settings)
    if order == "peft first":
        hfpatch.apply(ours, checkpointing=tiny.WAYS[way])
    return ours, stock


@pytest.mark.parametrize("order", ["apply first", "peft first"])
@pytest.mark.parametrize("way", tiny.WAYS)
@pytest.mark.parametrize("targets", [ATTENTION, ALL], ids=["attention", "all"])
def test_lora(order, way, targets):
    ours, stock = adapted(order, way, target_modules=targets)
    tiny.assert_as_good(ours, stock, tiny.labelled())
    assert all("lora_" in n for n, p in ours.named_parameters() if p.grad is not None)


@pytest.mark.parametrize("order", ["apply first", "peft first"])
def test_lora_with_transformers_checkpointing_and_frozen_embeddings(order):
    """The first layer's input needs no gradient: its adapters do."""
    ours, stock = adapted(order)
    for model in (ours, stock):
        tiny.checkpoint(model.get_base_model())
    tiny.assert_as_good(ours, stock, tiny.labelled())


@pytest.mark.parametrize("order", ["apply first", "peft first"])
def test_lora_on_lm_head_falls_back_and_says_so(order):
    """Liger reads lm_head.weight and ignores the adapter."""
    ours, stock = adapted(order, target_modules=[*ATTENTION, "lm_head"])
    with pytest.warns(
        UserWarning, match="hfpatch: the loss runs through whole logits, as lm_head is a peft"
    ):
        ours(**tiny.labelled())
    tiny.assert_as_good(ours, stock, tiny.labelled())
    assert any(
        "lm_head" in n and "lora_" in n and p.grad is not None for n, p in ours.named_parameters()
    )
    if order == "peft first":
        report = hfpatch.apply(ours, checkpointing=tiny.TILED)
        assert not report.count("loss") and any(
            "lm_head is a peft" in why for _, why in report.skipped
        )


@pytest.mark.parametrize("adapter", ["default", "mine"])
@pytest.mark.parametrize("order", ["apply first", "peft first"])
@pytest.mark.parametrize(
    "modules", [["lm_head"], ["lm_head", "embed_tokens"]], ids=["head", "both"]
)
def test_modules_to_save(order, adapter, modules):
    """Under another adapter name Liger raises. The copy that trains gets the gradient."""
    ours, stock = adapted(order, adapter=adapter, modules_to_save=modules)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = tiny.step(ours, tiny.labelled())
    assert f"base_model.model.lm_head.modules_to_save.{adapter}.weight" in got
    if order == "apply first":
        assert ours(**tiny.labelled()).logits is None, "the fused loss serves the copy too"
    tiny.assert_as_good(ours, stock, tiny.labelled())


@pytest.mark.parametrize("order", ["apply first", "peft first"])
def test_adapters_disabled_merged_and_saved(order, tmp_path):
    ours, stock = adapted(order, target_modules=ALL)
    true = tiny.exact(stock)
    with ours.disable_adapter(), stock.disable_adapter(), true.disable_adapter():
        tiny.numerics.assert_close(
            *(m(**tiny.labelled()).loss.detach() for m in (ours, stock, true))
        )
    ours.save_pretrained(tmp_path / "ours")
    stock.save_pretrained(tmp_path / "stock")
    for name in ("adapter_model.safetensors",):
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "stock" / name).read_bytes()
    merged, plain = ours.merge_and_unload(), stock.merge_and_unload()
    assert [k.__name__ for k in tiny.classes(merged)] == [k.__name__ for k in tiny.classes(plain)]
    for p in (*merged.parameters(), *plain.parameters()):
        p.requires_grad_(True)
    tiny.assert_as_good(merged, plain, tiny.labelled())


def test_undo_under_peft():
    ours, stock = adapted("peft first", target_modules=ALL, modules_to_save=["lm_head"])
    tiny.step(ours, tiny.labelled())
    hfpatch.undo(ours)
    assert tiny.classes(ours) == tiny.classes(stock)
    got, plain = tiny.step(ours, tiny.labelled()), tiny.step(stock, tiny.labelled())
    assert all(torch.equal(got[n], plain[n]) for n in plain)


def test_an_adapter_without_the_head_that_another_has():
    peft = pytest.importorskip("peft")
    ours, stock = adapted("peft first", modules_to_save=["lm_head"])
    for model in (ours, stock):
        torch.manual_seed(2)
        model.add_adapter("without", peft.LoraConfig(target_modules=ALL, init_lora_weights=False))
        model.set_adapter("without")
    assert not any("lm_head" in name for name in tiny.step(ours, tiny.labelled()))
    tiny.assert_as_good(ours, stock, tiny.labelled())


# --- Liger ----------------------------------------------------------------------------------------
