"""What is kept and where: the settings' errors, the choice from free memory, the readers of that memory."""

import pytest

from hfpatch.memory import free as memory
from hfpatch.memory.formula import ModelShape, Policy, step_memory
from hfpatch.memory.policy import HOST_SHARE, TILE_LEAST, Checkpointing, auto_tile, best_interval, choose
from hfpatch.memory.presets import preset_config

GiB = 2**30
LLAMA_8B = ModelShape.from_config(preset_config("llama-3.1-8b"))


def chosen(tokens=131072, batch=1, **sizes):
    settings = sizes.pop("settings", Checkpointing())
    return choose(settings, LLAMA_8B, batch=batch, tokens=tokens, **sizes)


@pytest.mark.parametrize("fields, word", [
    ({"offload": ""}, "offload"), ({"offload": "nowhere"}, "offload"), ({"offload": 3}, "offload"),
    ({"every": 0}, "every"), ({"every": True}, "every"), ({"every": "two"}, "every"), ({"every": 1.5}, "every"),
    ({"tile": -1}, "tile"), ({"tile": "big"}, "tile"), ({"save_attention": "yes"}, "save_attention"),
    ({"save_attention": 1}, "save_attention"),
])  # fmt: skip
def test_settings_refuse_in_one_sentence(fields, word):
    with pytest.raises(ValueError, match=f"^hfpatch: {word} must be .* came; [^\n]*$"):
        Checkpointing(**fields)


def test_settings_take_a_directory(tmp_path):
    assert Checkpointing(offload=str(tmp_path)).directory == str(tmp_path)
    assert Checkpointing(offload="./not/yet/there").directory == "./not/yet/there"
    assert Checkpointing(offload="host").directory is None
    assert chosen(settings=Checkpointing(offload=str(tmp_path)), host_free=0).offload == "disk"


def test_nothing_known_is_offloaded_and_saved():
    assert chosen() == Policy("host", 1, True, False, 8192)


# The host's room falls: attention outputs go first, then every other layer, and so on; the GPU is the last resort.
def test_host_memory_is_saved_in_the_order_of_its_cost():
    inputs, outputs = 32 * GiB, 32 * (GiB + 131072 * 32 * 4)
    seen = []
    for room in (inputs + outputs, inputs + outputs - 1, inputs, inputs - 1, inputs // 2 - 1):
        policy = chosen(host_free=int(room / HOST_SHARE) + 1, gpu_free=60 * GiB)
        seen.append((policy.offload, policy.every, policy.save_attention))
    assert seen == [("host", 1, True), ("host", 1, False), ("host", 1, False), ("host", 2, False), ("host", 3, False)]
    assert chosen(host_free=GiB, gpu_free=60 * GiB).offload == "gpu"


def test_ranks_of_a_machine_share_its_memory():
    room = int(66 * GiB / HOST_SHARE)
    assert chosen(host_free=room).save_attention
    assert not chosen(host_free=room, n_ranks=2).save_attention
    assert chosen(host_free=2 * room, n_ranks=2).save_attention


@pytest.mark.parametrize("settings", [Checkpointing(offload="host", save_attention=True),
                                      Checkpointing(offload="host", every=1)])  # fmt: skip
def test_too_little_host_memory_says_what_would_do(settings):
    with pytest.raises(ValueError, match=r"^hfpatch: checkpoints need [\d.]+ GiB .* saves [\d.]+ GiB[^\n]*$"):
        chosen(settings=settings, host_free=8 * GiB)


def test_what_was_set_is_kept():
    settings = Checkpointing(offload="gpu", every=4, save_attention=False, tile=777)
    assert chosen(settings=settings, host_free=GiB, gpu_free=GiB) == Policy("gpu", 4, False, False, 777)


def test_small_checkpoints_stay_on_the_device():
    assert chosen(tokens=4096, gpu_free=60 * GiB, host_free=200 * GiB).offload == "gpu"
    assert chosen(tokens=131072, gpu_free=60 * GiB, host_free=200 * GiB).offload == "host"


def test_a_short_device_streams_attention_then_shrinks_tiles():
    def beyond(policy):
        return step_memory(LLAMA_8B, policy, batch=1, tokens=131072).beyond

    plain = chosen()
    policy = chosen(gpu_free=beyond(plain) - 1, host_free=200 * GiB)
    assert policy.stream_attention and policy.tile == plain.tile
    policy = chosen(gpu_free=beyond(policy) - 1, host_free=200 * GiB)
    assert policy.tile < plain.tile
    assert chosen(gpu_free=GiB, host_free=200 * GiB).tile >= TILE_LEAST


@pytest.mark.parametrize("n, u, v", [(32, 1.0, 1.0), (32, 1.0, 4.0), (80, 1.0, 7.3), (2, 1.0, 9.0), (1, 5.0, 1.0)])
def test_best_interval_keeps_the_fewest_bytes(n, u, v):
    def kept(interval):
        return n / interval * u + interval * v

    best = min(range(1, n + 1), key=kept)
    assert kept(best_interval(n, u, v)) <= kept(best) * 1.05


def test_tiles_are_at_most_8192_rows():
    assert [auto_tile(n) for n in (1, 8192, 8193, 32768, 32769, 1 << 20)] == [8192, 8192, 4096, 4096, 8192, 8192]


# --- the readers, on a root folder of our making ---------------------------------------------------------------------


def machine(tmp_path, *, total=64, available=48, cgroup="0::/box", files=()):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: {total << 20} kB\nMemAvailable: {available << 20} kB\n")
    (tmp_path / "proc/self/cgroup").write_text(cgroup + "\n")
    for name, text in files:
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return str(tmp_path)


def test_no_cgroup_is_the_machine(tmp_path):
    root = machine(tmp_path)
    assert memory.host_limit(root) == 64 * GiB
    assert memory.host_free(root=root) == 48 * GiB
    assert memory.host_free(4, root) == 12 * GiB


# v2: a limit at the leaf, one at a parent, none ("max"), and page cache that counts as free.
@pytest.mark.parametrize("files, limit, free", [
    ([("box/memory.max", 16 * GiB), ("box/memory.current", 4 * GiB)], 16, 12),
    ([("box/memory.max", "max"), ("box/memory.current", 4 * GiB), ("memory.max", 8 * GiB), ("memory.current", GiB)],
     8, 7),
    ([("box/memory.max", "max"), ("box/memory.current", 4 * GiB)], 64, 48),
    ([("box/memory.max", 16 * GiB), ("box/memory.current", 15 * GiB),
      ("box/memory.stat", f"anon {GiB}\ninactive_file {10 * GiB}")], 16, 11),
])  # fmt: skip
def test_cgroup_v2(tmp_path, files, limit, free):
    root = machine(tmp_path, files=files)
    assert memory.host_limit(root) == limit * GiB
    assert memory.host_free(root=root) == free * GiB


def test_cgroup_v1_with_its_way_of_saying_no_limit(tmp_path):
    files = [("memory/box/memory.limit_in_bytes", 2**63 - 4096), ("memory/box/memory.usage_in_bytes", GiB),
             ("memory/memory.limit_in_bytes", 32 * GiB), ("memory/memory.usage_in_bytes", 30 * GiB),
             ("memory/memory.stat", f"total_inactive_file {5 * GiB}")]  # fmt: skip
    root = machine(tmp_path, cgroup="5:cpu,memory:/box\n0::/", files=files)
    assert memory.host_limit(root) == 32 * GiB
    assert memory.host_free(root=root) == 7 * GiB


def test_a_container_sees_its_limit_at_the_root_of_its_view(tmp_path):
    files = [("memory.max", 16 * GiB), ("memory.current", GiB)]
    root = machine(tmp_path, cgroup="0::/../../pod/container", files=files)
    assert memory.host_limit(root) == 16 * GiB


def test_this_machine_has_memory():
    assert 0 < memory.host_free() <= memory.host_limit()
