"""hfpatch plan --sp-size: GPUs that share each sequence."""

import json

import pytest
import tiny
from tiny import LONG

import hfpatch
from hfpatch.budget.first import first_policy
from hfpatch.budget.policy import Checkpointing
from hfpatch.cli import main as cli
from hfpatch.lab.adapters import Adapters
from hfpatch.lab.hardware import LINK_SHARE, SOCKET_RATE, gpu_row
from hfpatch.lab.simulate.implementations import build, prepare
from hfpatch.lab.simulate.simulator import simulate

M = 1 << 20
EIGHT = {"gpus": 8, "gpu": "h100", "host_ram": "2048GiB"}


def shared(seq_len=M, **more):
    return hfpatch.plan("llama-3.1-8b", seq_len=seq_len, sp_size=8, **EIGHT, **more)


@LONG
def test_a_million_tokens_fit_on_eight():
    plan = shared()
    assert plan.policy.plain == 2  # memory is left to run some layers once
    assert plan.fits and plan.run.seq_len == M and ", 8 GPUs a sequence): fits" in str(plan)
    assert plan.time.tokens_per_second == pytest.approx(M / plan.time.step_seconds)
    part = hfpatch.plan("llama-3.1-8b", seq_len=M // 8, **EIGHT)
    assert plan.time.parts["matmul"] == pytest.approx(part.time.parts["matmul"], rel=0.1)


@LONG
def test_sharing_rows_is_offered_where_whole_ones_do_not_fit():
    rows = hfpatch.plan("llama-3.1-8b", seq_len=M, **EIGHT)
    assert not rows.fits and "--sp-size 2" in [s["change"] for s in rows.advice.suggestions]


def test_what_goes_between_the_gpus():
    assert gpu_row("h100").peer_rate == LINK_SHARE * 450e9
    assert gpu_row("l40s").peer_rate == SOCKET_RATE < gpu_row("l40s").link_rate


@pytest.mark.parametrize("arguments, said", [
    ({"sp_size": 3, "gpus": 8}, "--sp-size must divide --gpus"),
    ({"sp_size": 64, "gpus": 64, "placement": "zero3"}, "do not go evenly.*another --sp-size.$"),
    ({"sp_size": 64, "gpus": 64, "adapters": Adapters(16)},
     "do not go evenly.*another --sp-size.$"),
    ({"sp_size": 0}, "sp_size must be a whole number, got 0"),
])  # fmt: skip
def test_sizes_that_cannot_be_are_refused(arguments, said):
    with pytest.raises(ValueError, match=f"^hfpatch: .*{said}"):
        hfpatch.plan("llama-3.1-8b", seq_len=M, **arguments)


def test_ranks_that_do_not_divide_the_heads_are_refused():
    """28 query and 4 KV heads over eight GPUs."""
    with pytest.raises(ValueError, match="^hfpatch: .* heads"):
        hfpatch.plan("Qwen/Qwen2.5-7B", seq_len=M, sp_size=8, **EIGHT)


OTHERS = {"model_type": "helium", "hidden_size": 256, "intermediate_size": 512,
          "num_hidden_layers": 2, "head_dim": 64,
          "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 512,
          "max_position_embeddings": 1 << 17}  # fmt: skip


@LONG  # a hybrid's, below, is the harder one
def test_a_model_is_simulated_on_one_rank():
    """A quarter of the matmuls and, with heads shared out, of attention over the whole row."""
    four = {"gpus": 4, "seq_len": 1 << 14, "placement": "fsdp2", "checkpointing": "least"}
    one, shared = (hfpatch.plan(OTHERS, sp_size=size, **four) for size in (1, 4))
    assert shared.run.seq_len == 1 << 14 and shared.run.sp_size == 4
    assert 4 * shared.time.flops == pytest.approx(one.time.flops, rel=0.01)
    # Once for all ranks, not once a rank.
    assert one.host.peak_bytes > shared.host.peak_bytes


DELTA = {"model_type": "qwen3_5_text", "hidden_size": 256, "intermediate_size": 512,
         "num_hidden_layers": 4, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 4,
         "vocab_size": 512, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
         "linear_key_head_dim": 32, "linear_value_head_dim": 32}  # fmt: skip


@tiny.not_before_transformers((5, 16), "hands mixers their states by other ways")
def test_the_plan_of_a_hybrid_is_that_of_one_of_its_ranks(tmp_path, capsys):
    """Each of four does a quarter of the row's work, in less memory."""
    (tmp_path / "config.json").write_text(json.dumps(DELTA))

    def simulated(ranks):
        model, tokens = prepare(build(DELTA), "hfpatch"), 8192 // ranks
        sizes = {"tokens": tokens, "width": DELTA["hidden_size"]}
        policy = first_policy(Checkpointing(aim="least"), **sizes, chains=True)
        return vars(simulate(model, 1, tokens, policy=policy, ranks=ranks))

    def asked(*words):
        arguments = [*words, "--model", str(tmp_path), "--seq-len", "8192", "--json"]
        assert cli.main([*arguments, "--checkpointing", "least"]) == 0
        return json.loads(capsys.readouterr().out)

    one, four = (simulated(size) for size in (1, 4))
    assert (
        four["whole"] == {} and four["whole_row_layers"] == 0
    )  # every mixer in tiles through time
    for kind in ("matmul", "attention"):
        for way in ("forward", "backward"):
            assert 4 * four["flops"][kind][way] == pytest.approx(one["flops"][kind][way], rel=0.05)
    assert four["most_beyond_bytes"] < one["most_beyond_bytes"]
    planned = asked("plan", "--gpus", "4", "--sp-size", "4", "--placement", "fsdp2")
    assert planned["run"]["sp_size"] == 4 and planned["fits"]
    taken = four["peak_bytes"] - four["categories"]["parameters"]
    assert planned["gpu"]["parts"]["activations"] <= taken


@pytest.mark.parametrize("config, more, said", [
    (OTHERS, {"checkpointing": "stock"},
     "stock steps and --sp-size 4 cannot be combined"),
    ({"model_type": "mamba", "num_hidden_layers": 2}, {},
     "a MambaModel must get whole sequences, got a part on each rank, and it mixes tokens by something other than attention"),
])  # fmt: skip
def test_what_shares_no_rows_is_not_planned(config, more, said):
    with pytest.raises(ValueError, match=f"^hfpatch: .*{said}"):
        hfpatch.plan(config, seq_len=4096, gpus=4, sp_size=4, **more)
