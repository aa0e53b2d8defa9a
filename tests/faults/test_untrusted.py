"""Folders from somebody else: nothing in them runs, nothing leads out of them, and what lies beside
stays as it was.
"""

import json
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from hfpatch.cli import consolidate, export_gguf
from hfpatch.cli.main import main


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def zero_checkpoint(folder: Path, extra=None) -> Path:
    """A ZeRO-2 checkpoint of one weight, as DeepSpeed names its parts."""
    tag = folder / "global_step1"
    tag.mkdir(parents=True)
    (folder / "latest").write_text("global_step1")
    shapes = [{"w": torch.Size([4])}]
    torch.save(
        {"module": {"w": torch.zeros(4)}, "buffer_names": [], "param_shapes": shapes,
         "shared_params": {},
         "ds_version": "0.19.8", "frozen_param_shapes": None, "frozen_param_fragments": None,
         "extra": extra},
        tag / "mp_rank_00_model_states.pt",
    )  # fmt: skip
    state = {
        "zero_stage": 2,
        "partition_count": 1,
        "single_partition_of_fp32_groups": [torch.arange(4.0)],
    }
    torch.save({"optimizer_state_dict": state}, tag / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    return folder


def fsdp_checkpoint(folder: Path) -> Path:
    dcp.save(
        {"model": {"w": torch.arange(4.0)}},
        checkpoint_id=str(folder / "pytorch_model_fsdp_0"),
        no_dist=True,
    )
    return folder


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_of_tensors_is_read(tmp_path):
    for name, make in (("zero", zero_checkpoint), ("fsdp", fsdp_checkpoint)):
        beside = tmp_path / f"{name}-out.part"
        beside.mkdir()
        (beside / "mine").touch()
        made = consolidate.consolidate(str(make(tmp_path / name)), str(tmp_path / f"{name}-out"))
        assert torch.equal(load_file(made)["w"], torch.arange(4.0))
        assert [p.name for p in beside.iterdir()] == ["mine"], (
            "a .part that is not ours was touched"
        )
        assert not list(tmp_path.glob(".*")), "something of ours is left"


@pytest.mark.filterwarnings("ignore")
def test_code_in_a_checkpoint_does_not_run(tmp_path, capsys):
    ran = tmp_path / "ran"
    zero = zero_checkpoint(tmp_path / "zero", extra=Touch(ran))
    fsdp = fsdp_checkpoint(tmp_path / "fsdp")
    index = fsdp / "pytorch_model_fsdp_0" / ".metadata"
    whole = index.read_bytes()
    index.write_bytes(pickle.dumps(Touch(ran)))
    for folder in (zero, fsdp):
        assert main(["consolidate", str(folder), str(tmp_path / "out")]) == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert (
            said.startswith("hfpatch: the checkpoint holds more than tensors")
            and "--allow_pickle" in said
        )
        assert not ran.exists() and not (tmp_path / "out").exists()
    # The flag is what the sentence says it is.
    assert main(["consolidate", str(zero), str(tmp_path / "out"), "--allow_pickle"]) == 0
    assert ran.exists()
    # A tensor of the FSDP checkpoint somewhere else.
    metadata = pickle.loads(whole)
    assert {Path(i.relative_path).name for i in metadata.storage_data.values()} == {"__0_0.distcp"}
    for info in metadata.storage_data.values():
        info.relative_path = "../../elsewhere/__0_0.distcp"
    index.write_bytes(pickle.dumps(metadata))
    assert main(["consolidate", str(fsdp), str(tmp_path / "third")]) == 2
    assert "leads out of it" in capsys.readouterr().err


def test_names_that_lead_out_of_the_folder(tmp_path, capsys):
    zero = zero_checkpoint(tmp_path / "zero")
    for tag in ("../other", "/etc", "..", ""):
        (zero / "latest").write_text(tag)
        assert main(["consolidate", str(zero), str(tmp_path / "out")]) == 2
        assert "expected a folder's name" in capsys.readouterr().err
    pytest.importorskip("gguf")
    index = {"weight_map": {"model.norm.weight": "../secret.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(
        ValueError, match="names '../secret.safetensors', which leads out of its folder"
    ):
        export_gguf._tensor_files(tmp_path)
