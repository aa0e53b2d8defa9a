"""What is kept and where: the settings' errors, the choice from free memory, the readers of that
memory.
"""

import copy
import os
import pickle
import re

import pytest
import torch

from hfpatch.budget import free as memory
from hfpatch.budget.limits import GiB
from hfpatch.budget.policy import (
    Checkpointing,
    parse_checkpointing,
)
from hfpatch.planner.machine import gpu_limit, host_limit


def test_settings_take_a_directory(tmp_path):
    assert Checkpointing(offload=str(tmp_path)).directory == str(tmp_path)
    assert Checkpointing(offload="./not/yet/there").directory == "./not/yet/there"
    assert Checkpointing(offload="host").directory is None
    # In Python, in a file and behind a `=` no shell has written the user's folder out.
    assert Checkpointing(offload="~/fast").directory == os.path.expanduser("~/fast")


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


def test_plans_and_steps_have_the_host_memory_that_is_given(monkeypatch):
    monkeypatch.setenv("HFPATCH_HOST_MEMORY", str(1 << 40))
    assert host_limit() == 1 << 40 == memory.host_free() + memory.held()


def test_what_a_first_step_will_take_is_counted():
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    model[0].requires_grad_(False)
    host, meta = torch.device("cpu"), torch.device("meta")
    assert memory.to_come(model.parameters(), host) == 4 * 72
    assert memory.to_come(model.parameters(), meta) == 0
    # a shard, as ZeRO-3 holds it on the host or the device
    model[1].weight.ds_tensor = torch.empty(3, device="meta")
    assert memory.to_come(model.parameters(), meta) == 4 * 3
    model(torch.ones(1, 8)).sum().backward()
    assert memory.to_come(model.parameters(), host) == 0


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
    + [("keep", w) for w in ("qkv", ("gate_up",), [3], -2, 1.5, None, True)]
    + [("frozen_weights", w) for w in (1, "disk", None)]
    + [("aim", w) for w in ("slowest", 1, None)],
)  # fmt: skip
def test_a_field_out_of_range_is_refused_by_name(field, wrong):
    said = f"^hfpatch: {field} must be [^\n]*, got [^\n]*{re.escape(str(wrong))}[^\n]*[.?]$"
    with pytest.raises(ValueError, match=said):
        Checkpointing(**{field: wrong})


@pytest.mark.parametrize(
    "value, wanted",
    [
        ("auto", Checkpointing()), ([], Checkpointing()), ("least", Checkpointing(aim="least")),
        ("gpu", Checkpointing(offload="gpu")), ("/tmp", Checkpointing(offload="/tmp")),
        (Checkpointing(tile=8), Checkpointing(tile=8)), ("off", Checkpointing("off")),
        (["off"], Checkpointing("off")),
        ("least,tile=4k,keep=gate_up,frozen-weights=host,plain=0",
         Checkpointing(aim="least", tile=4096, keep="gate_up", frozen_weights="host",
                       plain=0)),
        ({"aim": "least", "tile": 8}, Checkpointing(aim="least", tile=8)),
        ("least,host", Checkpointing(aim="least", offload="host")),
        ("least,/tmp,tile=8", Checkpointing(aim="least", offload="/tmp", tile=8)),
        (["host", "every=2", "keep=input"], Checkpointing(offload="host", every=2, keep="input")),
        ("keep=12", Checkpointing(keep=12)), ("keep=0", Checkpointing(keep="attention")),
    ],
)  # fmt: skip
def test_checkpointing_means_the_same_everywhere(value, wanted):
    assert parse_checkpointing(value) == wanted
    assert parse_checkpointing(wanted.words()) == wanted


@pytest.mark.parametrize(
    "value",
    [
        True, False, None, 3, {"tile": "x"}, [3], "tile=x", "off,tile=8", "gpu,host", "keep=",
        b"/tmp", [{"offload": "/tmp"}], [Checkpointing(offload="/tmp")],
    ],
)  # fmt: skip
def test_what_checkpointing_does_not_mean_is_one_sentence(value):
    with pytest.raises(ValueError, match="^hfpatch: [^\n]*[.]$"):
        parse_checkpointing(value)


@pytest.mark.parametrize("ask", [
    lambda: parse_checkpointing("offlod=host"),
    lambda: parse_checkpointing({"offlod": "host"}),
    lambda: Checkpointing(offlod="host"),
])  # fmt: skip
def test_a_misspelt_field_names_the_nearest(ask):
    with pytest.raises(
        ValueError,
        match=r"^hfpatch: .* must be one of offload, every, .*, got offlod. Did you mean offload\?$",
    ):
        ask()
    assert copy.deepcopy(pickle.loads(pickle.dumps(Checkpointing(tile=8)))) == Checkpointing(tile=8)


@pytest.mark.parametrize("argument, ask, word, meant", [
    ("checkpointing", parse_checkpointing, "lest", "least"),
    ("checkpointing", parse_checkpointing, "cpu", "host"),
    ("offload", lambda word: Checkpointing(offload=word), "cpu", "host"),
    ("offload", lambda word: Checkpointing(offload=word), "hots", "host"),
])  # fmt: skip
def test_a_misspelt_place_names_the_nearest(argument, ask, word, meant):
    with pytest.raises(
        ValueError, match=f"^hfpatch: {argument} must be .*, got '{word}'. Did you mean {meant}\\?$"
    ):
        ask(word)
