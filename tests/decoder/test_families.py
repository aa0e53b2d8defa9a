"""Whole models of many families, patched, against transformers: loss and every gradient."""

import copy

import families
import pytest
import torch
import transformers

import hfpatch

SHORT = (
    "qwen3_moe",
    "gpt_oss",
    "gemma3_text",
    "phi3",
    "deepseek_v3",
    "falcon",  # calls torch's attention itself
)
TILE = hfpatch.Checkpointing(offload="host", tile=16)
# Norms, rotations and routers compute in float32 also in a float64 model.
CLOSE = 3e-4


def names():
    return [
        n if n in SHORT else pytest.param(n, marks=pytest.mark.long)
        for n in families.TILED + families.MORE
    ]


def step(model, batch, pieces=None):
    """(loss, gradients by name). pieces: the batches whose summed loss stands for the batch's."""
    model.zero_grad(set_to_none=True)
    total = 0.0
    for piece in pieces or [batch]:
        out = model(**piece, use_cache=False)
        out.loss.backward()
        total += out.loss.item()
    return (
        out,
        total,
        {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None},
    )


def assert_close(got, wanted):
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        error = (got[name] - value).norm() / value.norm().clamp_min(1e-3)
        assert error <= CLOSE, f"{name}: {error:.1e}"


def batch(tokens=40, vocab=64):
    ids = torch.randint(1, vocab, (2, tokens), generator=torch.Generator().manual_seed(5))
    labels = ids.clone()
    labels[0, :6] = -100
    return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize("name", names())
def test_loss_and_gradients(name):
    """Tiled in every layer, the loss fused with the family's scale, soft cap and router loss; also
    with holes in the mask.
    """
    stock = families.small_model(name)
    ours = copy.deepcopy(stock)
    report = hfpatch.apply(ours, checkpointing=TILE)
    assert not any("run untiled" in note for note in report.notes), report
    assert len(str(report).splitlines()) <= 11
    plain = batch()
    holes = {**plain, "attention_mask": torch.ones(2, 40, dtype=torch.long)}
    holes["attention_mask"][0, 11:13], holes["attention_mask"][1, -5:] = 0, 0
    for given in (plain, holes):
        out, loss, grads = step(ours, given)
        _, wanted_loss, wanted = step(stock, given)
        assert out.logits is None, "the loss is fused"
        assert abs(loss - wanted_loss) <= 1e-5 * abs(wanted_loss)
        assert_close(grads, wanted)
    hfpatch.undo(ours)
    assert [type(m) for m in ours.modules()] == [type(m) for m in stock.modules()]


@pytest.mark.parametrize("head_dim", [256, 512])
def test_wide_heads(head_dim):
    """As wide as a GPU's kernels take (Gemma), and as none takes (Gemma 4): tiled, and layers as
    they are with our attention.
    """
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=head_dim, vocab_size=64, attn_implementation="eager",
    )  # fmt: skip
    stock = transformers.LlamaForCausalLM(config).double().train()
    given = {**batch(), "attention_mask": torch.ones(2, 40, dtype=torch.long)}
    given["attention_mask"][0, 11:13], given["attention_mask"][1, -5:] = 0, 0
    _, loss, wanted = step(stock, given)
    for checkpointing in (TILE, "off"):
        ours = copy.deepcopy(stock)
        hfpatch.apply(ours, checkpointing=checkpointing)
        _, got_loss, got = step(ours, given)
        assert abs(got_loss - loss) <= 1e-5 * abs(loss)
        assert_close(got, wanted)


@pytest.mark.parametrize(
    "name",
    [
        "mistral",
        "gpt_oss",
        "llama4_text",
        *(pytest.param(n, marks=pytest.mark.long) for n in ("gemma3_text", "falcon")),
    ],
)
def test_packed_documents_are_isolated(name):
    """gpt-oss tells transformers nothing of positions, so there documents see each other; here one
    rule holds for all. Llama 4's chunks are counted inside a document.
    """
    stock = families.small_model(name)
    ours = copy.deepcopy(stock)
    hfpatch.apply(ours, checkpointing=TILE)
    given = {k: v[:1] for k, v in batch().items()}
    positions = torch.cat([torch.arange(17), torch.arange(23)])[None]
    given["labels"][:, [0, 17]] = -100
    count = (given["labels"] != -100).sum()
    pieces = [
        {k: v[:, a:b] for k, v in given.items()} | {"num_items_in_batch": count}
        for a, b in ((0, 17), (17, 40))
    ]
    for mask in (None, torch.ones(1, 40, dtype=torch.long)):
        _, loss, grads = step(ours, {**given, "position_ids": positions, "attention_mask": mask})
        _, wanted_loss, wanted = step(stock, None, pieces)
        assert abs(loss - wanted_loss) <= 1e-5 * abs(wanted_loss)
        assert_close(grads, wanted)


def test_a_family_that_our_attention_cannot_serve_keeps_its_own():
    """Bloom adds a bias to scores and reads the mask itself: with our masks it would raise."""
    stock = families.small_model("bloom")
    ours = copy.deepcopy(stock)
    assert "run untiled" in str(hfpatch.apply(ours, checkpointing=TILE))
    out, loss, grads = step(ours, batch())
    _, wanted_loss, wanted = step(stock, batch())
    assert out.logits is None and abs(loss - wanted_loss) <= 1e-5 * abs(wanted_loss)
    assert_close(grads, wanted)
    hfpatch.apply(ours, checkpointing="off")
    assert_close(step(ours, batch())[2], wanted)


# Angles that stay float32 (OLMo 2), norms of heads, norms and rotations in float32. A router may
# take another expert by rounding.
@pytest.mark.parametrize("name", [
    "olmo2", "gemma3_text", "cohere2",
    *(pytest.param(n, marks=pytest.mark.long) for n in ("llama", "olmo3", "phi3", "glm4",
                                                        "smollm3")),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_as_exact_as_transformers(name, dtype):
    """Gradients of a model in 16 bits: as far from float64's as stock's are."""
    model = families.small_model(name).to(dtype)
    ours = copy.deepcopy(model)
    hfpatch.apply(ours, checkpointing=TILE)
    exact, stock, got = (step(m, batch())[2] for m in (copy.deepcopy(model).double(), model, ours))

    def error(grads):
        assert grads.keys() == exact.keys()
        return sum((grads[n].double() - exact[n]).square().sum() for n in exact).sqrt()

    assert error(got) <= 1.25 * error(stock)


def test_attention_weights_are_the_familys_own():
    """granite_swa gives them before its sinks take their share, gpt_oss after."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if "granite_swa" not in CONFIG_MAPPING:
        pytest.skip("unknown to this transformers")
    stock = families.small_model("granite_swa", torch.float32)
    ours = copy.deepcopy(stock)
    hfpatch.apply(ours, checkpointing=TILE)
    ids, shown = torch.arange(80).view(2, 40) % 60, torch.ones(2, 40, dtype=torch.long)
    shown[0, :7] = 0
    got, true = (m(ids, attention_mask=shown, output_attentions=True) for m in (ours, stock))
    assert len(got.attentions) == len(true.attentions) == len(stock.model.layers)
    for ours_BHTT, theirs_BHTT in zip(got.attentions, true.attentions):
        # What padding attends to is nobody's.
        torch.testing.assert_close(
            ours_BHTT[:, :, 7:], theirs_BHTT[:, :, 7:], rtol=CLOSE, atol=CLOSE
        )
    torch.testing.assert_close(got.logits[:, 7:], true.logits[:, 7:], rtol=CLOSE, atol=CLOSE)
