"""Copies between host and device: their bytes are those that the policy says, their number is small."""

import pytest

GiB, MiB = 2**30, 2**20
MODEL = "llama-3.1-8b"
ROW = 4096 * 2  # bytes of a token's hidden state


def link(step: dict) -> tuple[int, int]:
    return step["bytes"]["d2h"], step["bytes"]["h2d"]


@pytest.mark.parametrize("tokens", [8192, pytest.param(131072, marks=pytest.mark.long)])
def test_each_kept_byte_leaves_once_and_comes_back_as_often_as_it_is_read(tokens, dry, table):
    """A layer keeps its input and attention's output. Backward reads the input three times (for the
    part behind attention, for q, k, v, and for their gradients) and the output once; attention's
    log-sum-exp goes and comes whole.
    """
    layers, tile = 4, 1024
    settings = {"offload": "host", "every": 1, "plain": 0, "tile": tile}
    settings |= {"keep": "attention"}
    ran = dry.run(MODEL, layers=layers, rows=[(1, tokens)] * 3, checkpointing=settings)
    assert ran.end == "ok"
    step = ran.last
    out, back = link(step)
    lse = 32 * 4 * tokens
    hidden = ROW * tokens
    case = f"{tokens} tokens, tiles of {tile}"
    table("copies", case, "to the host, GiB", out / GiB, layers * (2 * hidden + lse) / GiB)
    table("copies", case, "to the device, GiB", back / GiB, layers * (4 * hidden + lse) / GiB)
    assert out == pytest.approx(layers * (2 * hidden + lse), rel=0.01)
    assert back == pytest.approx(layers * (4 * hidden + lse), rel=0.01)
    number = step["copies"]["d2h"] + step["copies"]["h2d"]
    table("copies", case, "over the link", number)
    assert (out + back) / number > 1 * MiB, "copies of less than 1 MiB on average"


@pytest.mark.long
def test_the_least_policy_at_131072_tokens_makes_few_copies(dry, table):
    ran = dry.run(MODEL, layers=32, rows=[(1, 131072)] * 2, checkpointing="least")
    assert ran.end == "ok"
    step, case = ran.last, "least, 131072 tokens, 32 layers"
    number = step["copies"]["d2h"] + step["copies"]["h2d"]
    for kind in ("d2h", "h2d", "d2d"):
        table("copies", case, f"{kind} copies", step["copies"][kind])
        table("copies", case, f"{kind}, GiB", step["bytes"][kind] / GiB)
    table("copies", case, "over the link", number, 20000)
    table("copies", case, "stream waits", step["stream_waits"])
    table("copies", case, "host seconds", sum(step["host_seconds"]))
    table("copies", case, "host seconds of copies and their waits", step["copying_seconds"], 2)
    assert number <= 20000 and step["copying_seconds"] <= 2
