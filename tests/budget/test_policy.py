"""What is kept and where: the settings' errors, the choice from free memory, the readers of that
memory.
"""

import copy
import dataclasses
import os
import pickle
import re
from functools import partial
from itertools import combinations, pairwise, product
from random import Random

import pytest
import torch

from hfpatch.budget import free as memory
from hfpatch.budget.adapters import Adapters
from hfpatch.budget.choice import (
    HOST_SHARE,
    PINNED_MOST,
    SAME,
    Budget,
    Search,
    best_interval,
    choose,
    frontier,
    reserve,
)
from hfpatch.budget.copies import link_bytes
from hfpatch.budget.cuts import tile_bounds
from hfpatch.budget.formula import ModelShape, step_memory
from hfpatch.budget.hardware import GPUS
from hfpatch.budget.ladder import TILES
from hfpatch.budget.policy import (
    KEEPABLE,
    Checkpointing,
    Policy,
    auto_tile,
    parse_checkpointing,
    time_tile,
)
from hfpatch.lab.presets import preset_config
from hfpatch.planner.machine import gpu_limit, host_limit

GiB = 2**30
LOSSES = (512 << 20, 1 << 30, 2 << 30)  # of every model; a small one has smaller ones too
LLAMA_8B = ModelShape.from_config(preset_config("llama-3.1-8b"))


def chosen(tokens=131072, batch=1, **sizes):
    settings = sizes.pop("settings", Checkpointing())
    return choose(settings, LLAMA_8B, batch=batch, tokens=tokens, **sizes)


@pytest.mark.parametrize("fields, word", [
    ({"offload": ""}, "offload"), ({"offload": "nowhere"}, "offload"), ({"offload": 3}, "offload"),
    ({"every": 0}, "every"), ({"every": True}, "every"), ({"every": "two"}, "every"),
    ({"every": 1.5}, "every"),
    ({"tile": -1}, "tile"), ({"tile": "big"}, "tile"), ({"save_attention": "yes"},
                                                        "save_attention"),
    ({"save_attention": 1}, "save_attention"), ({"plain": -1}, "plain"), ({"plain": True}, "plain"),
    ({"keep": "qkv"}, "keep"), ({"keep": ("gate",)}, "keep"), ({"aim": "slow"}, "aim"),
])  # fmt: skip
def test_settings_refuse_in_one_sentence(fields, word):
    with pytest.raises(ValueError, match=f"^hfpatch: {word} must be .* came; [^\n]*$"):
        Checkpointing(**fields)


def test_settings_take_a_directory(tmp_path):
    assert Checkpointing(offload=str(tmp_path)).directory == str(tmp_path)
    assert Checkpointing(offload="./not/yet/there").directory == "./not/yet/there"
    assert Checkpointing(offload="host").directory is None
    # In Python, in a file and behind a `=` no shell has written the user's folder out.
    assert Checkpointing(offload="~/fast").directory == os.path.expanduser("~/fast")
    assert chosen(settings=Checkpointing(offload=str(tmp_path)), host_free=0).offload == "disk"


def test_nothing_known_is_offloaded_and_saved():
    # which costs nothing at this length
    assert chosen() == Policy("host", 1, True, 8192)


# The host's room falls: attention outputs go first, then every other layer, and so on; the GPU is
# the last resort.
def test_host_memory_is_saved_in_the_order_of_its_cost():
    inputs, outputs = 32 * GiB, 32 * (GiB + 131072 * 32 * 4)
    seen = []
    for room in (
        inputs + outputs,
        inputs + outputs - 1,
        inputs + 8 * outputs // 32 - 1,
        inputs,
        inputs - 1,
        inputs // 2 - 1,
    ):
        policy = chosen(host_free=int(room / HOST_SHARE) + 1, gpu_free=20 * GiB)
        seen.append((policy.offload, policy.every, policy.save_attention and 32 - policy.again))
    assert seen == [
        ("host", 1, 32),
        ("host", 1, 31),
        ("host", 1, 7),
        ("host", 1, False),
        ("host", 2, False),
        ("host", 3, False),
    ]
    assert chosen(host_free=GiB, gpu_free=60 * GiB).offload == "gpu"
    assert chosen(host_free=GiB).offload == "gpu"


def test_ranks_of_a_machine_share_its_memory():
    room = int(66 * GiB / HOST_SHARE)
    assert chosen(host_free=room).save_attention
    assert not chosen(host_free=room, n_ranks=2).save_attention
    assert chosen(host_free=2 * room, n_ranks=2).save_attention


@pytest.mark.parametrize("settings", [Checkpointing(offload="host", save_attention=True),
                                      Checkpointing(offload="host", every=1)])  # fmt: skip
def test_too_little_host_memory_says_what_would_do(settings):
    with pytest.raises(
        ValueError, match=r"^hfpatch: checkpoints need [\d.]+ GiB .* saves [\d.]+ GiB[^\n]*$"
    ):
        chosen(settings=settings, host_free=8 * GiB)


def test_segments_keep_no_attention_outputs_whatever_is_said_of_them():
    sizes, shape = {"batch": 1, "tokens": 32768}, LLAMA_8B
    ways = (dataclasses.replace(Policy("host", 2), save_attention=save) for save in (True, False))
    assert (
        len({link_bytes(step_memory(shape, way, **sizes), way, shape, **sizes) for way in ways})
        == 1
    )


def test_what_was_set_is_kept():
    settings = Checkpointing(offload="gpu", every=4, save_attention=False, tile=777)
    policy = chosen(settings=settings, host_free=GiB, gpu_free=GiB)
    assert policy == Policy("gpu", 4, False, 777)


def test_what_was_asked_to_be_kept_is_kept_over_a_slow_link():
    """Segments of layers keep none of it, and copy less."""
    sizes = {
        "gpu": dataclasses.replace(GPUS["a100-80gb"], link=1e9),
        "gpu_free": 4 * GiB,
        "host_free": 200 * GiB,
    }
    assert chosen(16384, **sizes).every > 1
    assert chosen(16384, settings=Checkpointing(keep=KEEPABLE), **sizes).keep == KEEPABLE


def test_small_checkpoints_stay_on_the_device():
    assert chosen(tokens=4096, gpu_free=60 * GiB, host_free=200 * GiB).offload == "gpu"
    assert chosen(tokens=131072, gpu_free=60 * GiB, host_free=200 * GiB).offload == "host"


def test_a_short_device_shrinks_tiles():
    def beyond(policy):
        return step_memory(LLAMA_8B, policy, batch=1, tokens=131072).beyond

    plain = chosen()
    shorter = chosen(gpu_free=beyond(plain) - 1, host_free=200 * GiB)
    assert shorter.tile < plain.tile and beyond(shorter) < beyond(plain)
    policy = chosen(gpu_free=GiB, host_free=200 * GiB)  # nothing fits: the least comes closest
    assert beyond(policy) <= beyond(
        chosen(settings=Checkpointing(aim="least"), host_free=200 * GiB)
    )


def test_where_nothing_fits_the_lack_is_the_smaller_one():
    with pytest.raises(ValueError, match="of host memory"):
        chosen(
            host_free=int(1.0 * GiB / HOST_SHARE), gpu_free=6 * GiB, settings=Checkpointing(every=1)
        )
    assert (
        chosen(
            host_free=int(1.0 * GiB / HOST_SHARE),
            gpu_free=37 * GiB,
            settings=Checkpointing(every=1),
        ).offload
        == "gpu"
    )


# What the ladder's choice may take longer than the fastest policy: of few layers, where one more or
# less that keeps everything counts for much, and of models of real depth.
SLOWER, SLOWER_DEEP = 1.06, 1.03


def every_policy(shape, batch, tokens, coarse=False):
    """All that a session runs, whether they make sense or not. coarse: of many layers, some counts
    of them.
    """
    n = shape.num_layers
    keeps = [
        k for count in range(len(shape.keepable) + 1) for k in combinations(shape.keepable, count)
    ]
    tiles = [t for t in TILES if t < batch * tokens] + (
        [TILES[-1]] if batch * tokens <= TILES[-1] else []
    )
    everys, plains = (
        (1, 2, 4, 8, n) if coarse else range(1, n + 1),
        range(0, n + 1, max(1, n // 16) if coarse else 1),
    )
    for place, every, save, wide, tile, plain, keep in product(
        ("gpu", "host"), everys, (True, False), (True, False), tiles[-2:] if coarse else tiles,
        plains, keeps,
    ):  # fmt: skip
        if every > 1 and (keep or save):
            continue
        agains = range(0, max(1, n - plain), max(1, n // 3) if coarse else 1)
        for again in agains if save and every == 1 and place == "host" else (0,):
            yield Policy(place, every, save, tile, plain, keep, again=again, wide=wide)


def assert_no_policy_is_faster(
    shape, batch, tokens, link, seed=0, budgets=30, slower=SLOWER, policies=every_policy
):
    """Of all policies that fit a budget, from hardly one layer's bytes to all layers', none is more
    than a little faster than the chosen one.
    """
    gpu, random = dataclasses.replace(GPUS["a100-80gb"], link=link), Random(seed)
    search = Search(Checkpointing(), shape, batch=batch, tokens=tokens, gpu=gpu)
    options = [search.price(policy) for policy in policies(shape, batch, tokens)]
    rooms, hosts = sorted({o.device for o in options}), sorted({o.host for o in options})
    for _ in range(budgets):
        room = (
            random.choice(rooms[: random.randint(1, len(rooms))])
            + random.choice((256, 300, 700)) * 2**20
        )
        host = random.choice((0, hosts[-1], random.randint(0, hosts[-1]), random.choice(hosts)))
        budget = Budget(room, host, random.choice((PINNED_MOST, random.choice(hosts))))
        found, fitting = search.best(budget), [o for o in options if budget.admits(o)]
        assert found or not fitting, budget
        if fitting:
            fastest = min(fitting, key=lambda o: o.seconds)
            assert budget.admits(found) and found.device + reserve(found.device) <= room
            assert found.seconds <= slower * fastest.seconds, (budget, found, fastest)


def small(model, layers, **changes):
    """Of a family with few layers, every second of those of two kinds."""
    config = dict(preset_config(model)) | {"num_hidden_layers": layers}
    if config.get("layer_types"):
        config["layer_types"] = ["sliding_attention", "full_attention"] * layers
        config["layer_types"] = config["layer_types"][:layers]
    return dataclasses.replace(ModelShape.from_config(config), **changes)


# A host that is slow to reach, attention that costs little, norms behind it, weights of 4 bits, a
# large vocabulary.
@pytest.mark.parametrize("model, layers, batch, tokens, link, adapters", [
    ("llama-3.1-8b", 3, 1, 4096, 32e9, None), ("llama-3.1-8b", 3, 1, 12000, 1e9, None),
    ("llama-3.1-8b", 2, 1, 40000, 16e9, None),
    ("llama-3.1-8b", 3, 2, 9000, 64e9, None), ("llama-3.1-8b", 3, 1, 4096, 32e9, Adapters(16,
                                                                                          base="4bit")),
    ("google/gemma-3-12b", 3, 1, 26280, 6.4e8, Adapters(16)),
    ("google/gemma-2-9b", 3, 1, 19323, 6.4e9, None),
    ("Qwen/Qwen3-8B", 3, 3, 5400, 1.3e9, None),
    ("CohereLabs/c4ai-command-r-v01", 4, 1, 4702, 96e9, None),
    ("microsoft/phi-4", 1, 1, 5012, 64e9, None),
])  # fmt: skip
def test_no_policy_that_fits_is_faster(model, layers, batch, tokens, link, adapters):
    assert_no_policy_is_faster(small(model, layers, adapters=adapters), batch, tokens, link)


def test_a_plain_layer_that_spares_the_host_is_found_where_none_fits():
    """Without one the host has no room for all of attention's outputs, and running attention again
    takes more of the device.
    """
    gpu = dataclasses.replace(GPUS["a100-80gb"], link=188e9)
    search = Search(
        Checkpointing(),
        small("Qwen/Qwen3-30B-A3B", 4, vocab_size=262208),
        batch=1,
        tokens=17897,
        gpu=gpu,
    )
    budget = Budget(5_299_623_184, 800_000_000, None)
    kept = Policy("host", tile=16384, wide=True)
    none, one = (search.price(dataclasses.replace(kept, plain=n)) for n in (0, 1))
    assert budget.admits(one) and not budget.admits_host(none)
    assert search.best(budget).seconds <= SLOWER * one.seconds


@pytest.mark.long
@pytest.mark.parametrize("seed", range(40))
def test_no_policy_that_fits_is_faster_than_what_is_chosen_of_any_model(seed):
    random = Random(seed)
    models = (
        "llama-3.1-8b", "Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B", "google/gemma-2-9b",
        "google/gemma-3-12b", "microsoft/phi-4",
        "allenai/OLMo-2-1124-7B", "CohereLabs/c4ai-command-r-v01",
    )  # fmt: skip
    shape = small(
        random.choice(models), random.randint(1, 6), vocab_size=random.choice((1000, 32000, 262208))
    )
    shape = dataclasses.replace(
        shape, intermediate_size=shape.intermediate_size * random.choice((1, 1, 4))
    )
    tokens = random.choice((1025, 8192, 16385, int(2 ** random.uniform(10, 16.5))))
    assert_no_policy_is_faster(
        shape, random.randint(1, 3), tokens, 10 ** random.uniform(8.8, 11.3), seed
    )


@pytest.mark.long
@pytest.mark.parametrize(
    "seed, model",
    [*enumerate(("llama-3.1-8b", "Qwen/Qwen3-30B-A3B", "google/gemma-3-12b", "microsoft/phi-4"))],
)
def test_no_policy_that_fits_is_faster_of_real_depth(seed, model):
    shape = ModelShape.from_config(preset_config(model))
    policies = partial(every_policy, coarse=True)
    link = Random(seed).choice((16e9, 32e9, 64e9))
    assert_no_policy_is_faster(
        shape, 1, (8192, 131072)[seed % 2], link, seed, slower=SLOWER_DEEP, policies=policies
    )


def test_layers_keep_less_where_the_link_is_slower_than_they_are():
    """gate and up of 39 of Gemma's layers take the link longer than the layers take."""
    shape = ModelShape.from_config(preset_config("google/gemma-3-12b"))
    search = Search(Checkpointing(), shape, batch=1, tokens=4096, gpu=GPUS["h100"])
    found = search.best(search.budget(10 * GiB, 500 * GiB))
    all_of_them = search.price(dataclasses.replace(found.policy, again=0))
    assert found.policy.keep == ("gate_up",) and 0 < found.policy.again < 20
    assert found.wait < 0.005 * found.seconds and all_of_them.wait > 0.03 * all_of_them.seconds
    assert found.seconds < 0.98 * all_of_them.seconds


def test_what_layers_cannot_keep_is_refused_by_hand_and_not_chosen():
    gemma = ModelShape.from_config(preset_config("google/gemma-3-12b"))
    experts = ModelShape.from_config(preset_config("Qwen/Qwen3-30B-A3B"))
    sizes = {"batch": 1, "tokens": 8192, "gpu_free": 70 * GiB, "host_free": 200 * GiB}
    with pytest.raises(
        ValueError, match="^hfpatch: expected layers that can keep gate_up, this model's cannot"
    ):
        choose(Checkpointing(keep=("gate_up",)), experts, **sizes)
    assert choose(Checkpointing(keep=("gate_up",), plain=0), gemma, **sizes).keep == ("gate_up",)
    assert chosen(8192, gpu_free=70 * GiB, host_free=200 * GiB).plain == 32


def test_what_layers_cannot_keep_as_they_are_is_not_chosen():
    sizes = {"gpu_free": 20 * GiB, "host_free": 480 * GiB, "tokens": 32768}
    kept = [chosen(**sizes, able=able).keep for able in (KEEPABLE, ())]
    assert kept == [KEEPABLE, ()]


def test_attention_takes_all_heads_at_once_where_memory_is_free():
    """Its launches wait for their last blocks: one for all heads waits once; short of memory it
    goes by groups.
    """
    assert chosen(32768, gpu_free=40 * GiB, host_free=200 * GiB).wide
    assert not chosen(
        131072, settings=parse_checkpointing("least"), gpu_free=40 * GiB, host_free=200 * GiB
    ).wide
    assert not chosen(32768).wide  # nobody knows what is free
    narrow, sizes = Policy("host", tile=4096), {"batch": 1, "tokens": 32768}
    one, more = (
        step_memory(LLAMA_8B, dataclasses.replace(narrow, wide=w), **sizes) for w in (True, False)
    )
    assert max(m.beyond for m in one.moments) > max(m.beyond for m in more.moments)
    search = Search(Checkpointing(), LLAMA_8B, **sizes)
    assert (
        search.price(dataclasses.replace(narrow, wide=True)).seconds
        < 0.99 * search.price(narrow).seconds
    )


QUICKSTART = {
    "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "head_dim": 64,
    "vocab_size": 8192, "max_position_embeddings": 16384,
}  # fmt: skip


def test_free_memory_buys_speed():
    rooms = [6, 10, 20, 40, 70]
    search = Search(Checkpointing(), LLAMA_8B, batch=1, tokens=16384)
    found = [search.best(Budget(room * GiB, 200 * GiB)) for room in rooms]
    seconds = [o.seconds for o in found]
    assert all(b <= SAME * a for a, b in pairwise(seconds)) and seconds[-1] < 0.97 * seconds[0]
    long = Search(Checkpointing(), LLAMA_8B, batch=1, tokens=32768)
    seconds = [long.best(Budget(room * GiB, 200 * GiB)).seconds for room in range(20, 80, 10)]
    assert all(b <= SAME * a for a, b in pairwise(seconds))  # more memory is never slower
    assert chosen(16384, gpu_free=40 * GiB, host_free=200 * GiB).tile == 16384


def test_least_is_the_least_with_attention_once():
    for tokens, most in ((8192, 1.7), (32768, 2.25), (131072, 5.46)):
        settings = parse_checkpointing("least")
        policy = chosen(tokens, settings=settings, gpu_free=70 * GiB, host_free=200 * GiB)
        memory = step_memory(LLAMA_8B, policy, batch=1, tokens=tokens)
        assert policy.save_attention and policy.offload == "host" and policy.every == 1
        assert max(m.beyond for m in memory.moments) <= most * GiB
        fewer = [dataclasses.replace(policy, tile=t) for t in TILES]
        assert all(
            max(m.beyond for m in step_memory(LLAMA_8B, p, batch=1, tokens=tokens).moments)
            >= max(m.beyond for m in memory.moments) / 1.02
            for p in fewer
        )


def test_frontier_goes_from_the_least_memory_to_the_fastest():
    search = Search(Checkpointing(), LLAMA_8B, batch=1, tokens=16384)
    budget = Budget(70 * GiB, 200 * GiB)
    points = frontier(search, budget)
    assert len(points) > 4
    assert all(a.device < b.device and a.seconds > b.seconds for a, b in pairwise(points))
    assert points[0].device <= 1.02 * search.least(budget).device
    assert points[-1].seconds <= SAME * search.best(budget).seconds


@pytest.mark.parametrize(
    "n, u, v", [(32, 1.0, 1.0), (32, 1.0, 4.0), (80, 1.0, 7.3), (2, 1.0, 9.0), (1, 5.0, 1.0)]
)
def test_best_interval_keeps_the_fewest_bytes(n, u, v):
    def kept(interval):
        return n / interval * u + interval * v

    best = min(range(1, n + 1), key=kept)
    assert kept(best_interval(n, u, v)) <= kept(best) * 1.05


# One token more than 16 to 128 tiles hold, a few less, a batch, the parts that ranks share: the
#     last tile is no crumb.
@pytest.mark.parametrize(
    "batch, tokens",
    [(1, 131_073), (1, 131_071), (1, 57_345), (3, 43_691), (2, 16_385), (1, 8193), (1, 1025)],
)
@pytest.mark.parametrize("tile", [1024, 2048, 4096, 8192, 16384])
def test_one_token_more_makes_no_tile_of_one_token(batch, tokens, tile):
    bounds = tile_bounds(batch, tokens, tile)
    *others, last = [b - a for a, b in bounds]
    assert [0, *(b for _, b in bounds)] == [*(a for a, _ in bounds), tokens]
    assert len(bounds) == -(-tokens // (tile // batch))
    assert all(n == others[0] and n * batch <= tile for n in others) and (
        not others or others[0] / 2 <= last <= others[0]
    )


def test_tiles_come_in_whole_rows_of_matmuls():
    """Multiples of 128 where the last tile then is none of few tokens, else of as large a power of
    two as leaves it half a tile.
    """
    assert [tile_bounds(1, 131_073, tile)[0][1] for tile in (4096, 8192, 16384)] == [
        4032,
        7808,
        14592,
    ]
    assert tile_bounds(1, 131_072, 8192)[0] == (0, 8192)


def test_tiles_are_at_most_8192_rows():
    assert [auto_tile(n) for n in (1, 8192, 8193, 32768, 32769, 1 << 20)] == [
        8192,
        8192,
        4096,
        4096,
        8192,
        8192,
    ]


# --- the readers, on a root folder of our making --------------------------------------------------


def machine(tmp_path, *, total=64, available=48, cgroup="0::/box", files=()):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(
        f"MemTotal: {total << 20} kB\nMemAvailable: {available << 20} kB\n"
    )
    (tmp_path / "proc/self/cgroup").write_text(cgroup + "\n")
    for name, text in files:
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return str(tmp_path)


def test_no_cgroup_is_the_machine(tmp_path):
    root = machine(tmp_path)
    assert host_limit(root) == 64 * GiB
    assert memory.host_free(root=root) == 48 * GiB


# v2: a limit at the leaf, one at a parent, none ("max"), and page cache that counts as free.
@pytest.mark.parametrize("files, limit, free", [
    ([("box/memory.max", 16 * GiB), ("box/memory.current", 4 * GiB)], 16, 12),
    ([("box/memory.max", "max"), ("box/memory.current", 4 * GiB), ("memory.max", 8 * GiB),
      ("memory.current", GiB)],
     8, 7),
    ([("box/memory.max", "max"), ("box/memory.current", 4 * GiB)], 64, 48),
    ([("box/memory.max", 16 * GiB), ("box/memory.current", 15 * GiB),
      ("box/memory.stat", f"anon {GiB}\ninactive_file {10 * GiB}")], 16, 11),
])  # fmt: skip
def test_cgroup_v2(tmp_path, files, limit, free):
    root = machine(tmp_path, files=files)
    assert host_limit(root) == limit * GiB
    assert memory.host_free(root=root) == free * GiB


def test_cgroup_v1_with_its_way_of_saying_no_limit(tmp_path):
    files = [("memory/box/memory.limit_in_bytes", 2**63 - 4096),
             ("memory/box/memory.usage_in_bytes", GiB),
             ("memory/memory.limit_in_bytes", 32 * GiB), ("memory/memory.usage_in_bytes", 30 * GiB),
             ("memory/memory.stat", f"total_inactive_file {5 * GiB}")]  # fmt: skip
    root = machine(tmp_path, cgroup="5:cpu,memory:/box\n0::/", files=files)
    assert host_limit(root) == 32 * GiB
    assert memory.host_free(root=root) == 7 * GiB


def test_a_container_sees_its_limit_at_the_root_of_its_view(tmp_path):
    files = [("memory.max", 16 * GiB), ("memory.current", GiB)]
    root = machine(tmp_path, cgroup="0::/../../pod/container", files=files)
    assert host_limit(root) == 16 * GiB


def test_this_machine_has_memory():
    assert 0 < memory.host_free() <= host_limit()


def test_what_a_first_step_will_take_is_counted():
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    model[0].requires_grad_(False)
    own = 4 * 72
    assert memory.to_come(model.parameters()) == own
    assert memory.to_come(model.parameters(), states=2) == 3 * own
    model(torch.ones(1, 8)).sum().backward()
    assert memory.to_come(model.parameters(), states=2) == 2 * own
    assert (
        memory.to_come(model.parameters())
        == memory.to_come(model.parameters(), device=torch.device("meta"))
        == 0
    )
    # a shard, as ZeRO-3 holds it on the host or the device
    model[1].weight.ds_tensor = torch.empty(3, device="meta")
    assert memory.to_come(model.parameters(), states=2, device=torch.device("meta")) == 2 * 4 * 3


def test_a_process_with_a_share_of_the_device_has_no_more_to_hand_out(monkeypatch):
    """torch.cuda.set_per_process_memory_fraction: the driver's figure knows nothing of it."""
    figures = {
        "mem_get_info": (60 * GiB, 80 * GiB),
        "memory_reserved": 10 * GiB,
        "memory_allocated": 4 * GiB,
    }
    for name, value in {"is_available": True, **figures}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    for share, left in ((1.0, 66), (0.5, 36), (0.1, 6)):
        monkeypatch.setattr(
            torch.cuda, "get_per_process_memory_fraction", lambda *_, share=share: share
        )
        assert memory.gpu_free() == left * GiB
        assert gpu_limit() == share * 80 * GiB


@pytest.mark.parametrize(
    "field, wrong",
    [("offload", w) for w in ("", None, 1, "gpuu", os.__file__)]
    + [("every", w) for w in (0, -1, 1.5, "2", True, None)]
    + [("tile", w) for w in (0, -1, 1.5, "8", True, None)]
    + [("plain", w) for w in (-1, 1.5, "1", True, None)]
    + [("keep", w) for w in ("qkv", ("q",), [3], 3, None, True)]
    + [("save_attention", w) for w in (1, "no", None)]
    + [("frozen_weights", w) for w in (1, "disk", None)]
    + [("aim", w) for w in ("slowest", 1, None)],
)  # fmt: skip
def test_a_field_out_of_range_is_refused_by_name(field, wrong):
    with pytest.raises(
        ValueError,
        match=f"^hfpatch: {field} must be [^\n]*{re.escape(repr(wrong))} came; [^\n]*[.]$",
    ):
        Checkpointing(**{field: wrong})


@pytest.mark.parametrize(
    "value, wanted",
    [
        ("auto", Checkpointing()), ([], Checkpointing()), ("least", Checkpointing(aim="least")),
        ("gpu", Checkpointing(offload="gpu")), ("/tmp", Checkpointing(offload="/tmp")),
        (Checkpointing(tile=8), Checkpointing(tile=8)), ("off", "off"), (["off"], "off"),
        ("least,tile=4k,keep=gate_up,frozen-weights=host,plain=0",
         Checkpointing(aim="least", tile=4096, keep=("gate_up",), frozen_weights="host",
                       plain=0)),
        ("least,host", Checkpointing(aim="least", offload="host")),
        ("least,/tmp,tile=8", Checkpointing(aim="least", offload="/tmp", tile=8)),
        (["host", "every=2", "save_attention=false"], Checkpointing(offload="host", every=2,
                                                                    save_attention=False)),
    ],
)  # fmt: skip
def test_checkpointing_means_the_same_everywhere(value, wanted):
    assert parse_checkpointing(value) == wanted
    if wanted != "off":
        assert parse_checkpointing(wanted.words()) == wanted


@pytest.mark.parametrize(
    "value",
    [True, False, None, 3, {"tile": 8}, [3], "hots", "tile=x", "off,tile=8", "gpu,host", "keep="],
)
def test_what_checkpointing_does_not_mean_is_one_sentence(value):
    with pytest.raises(ValueError, match="^hfpatch: [^\n]*[.]$"):
        parse_checkpointing(value)


def test_a_misspelt_field_names_the_nearest():
    for ask in (lambda: Checkpointing(offlod="host"), lambda: parse_checkpointing("offlod=host")):
        with pytest.raises(
            ValueError,
            match=r"^hfpatch: .* takes offload, every, .*, offlod came; did you mean offload\?$",
        ):
            ask()
    assert copy.deepcopy(pickle.loads(pickle.dumps(Checkpointing(tile=8)))) == Checkpointing(tile=8)


def test_mixers_take_the_largest_tile_that_fits():
    """Down to the least, which nothing free makes smaller."""
    MiB = 1 << 20
    assert time_tile(8192, 4096, 16384 * MiB) == 8192
    assert time_tile(8192, 4096, 16384 * MiB - 1) == 4096
    assert {time_tile(8192, 4096, free) for free in (0, MiB, None)} == {2048}
    assert time_tile(64, 4096, None) == 64  # never more than the layer's own
    assert time_tile(3000, 4096, 0) == 2048
