"""`hfpatch consolidate`: makes one model.safetensors, with its config, from a Trainer's checkpoint
folder that ZeRO or FSDP sharded.

    hfpatch consolidate runs/my-run/checkpoint-500 final --base meta-llama/checkout

One process, no GPU; needs host memory for one copy of the weights. ZeRO gives the float32 master
weights, FSDP the weights in the dtype they were kept in.
"""

import os
import pickle
import shutil
import tempfile
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from hfpatch.trainer import folders

BESIDE = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
          "special_tokens_map.json",
          "chat_template.jinja")  # fmt: skip
# The names that the index of an FSDP checkpoint, a pickle, may use. torch's dtypes are among them.
_INDEX = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value,
                                                                                  torch.dtype))},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "collections": {"OrderedDict"},
}  # fmt: skip


def consolidate(
    checkpoint: str,
    target: str,
    *,
    dtype: str | None = None,
    base: str | None = None,
    allow_pickle: bool = False,
) -> Path:
    """Writes target/model.safetensors, with the config and tokenizer of base or of the checkpoint.

    Args:
        checkpoint: the sharded checkpoint's folder.
        target: the folder to write.
        dtype: "bfloat16", "float16" or "float32" casts floating weights; None keeps their dtype.
        base: the model folder of config and tokenizer; None for the checkpoint's own.
        allow_pickle: also reads files that may run code, if their origin is trusted.

    Raises:
        ValueError: checkpoint is not a sharded checkpoint of a whole model, leads out of its folder
            or holds code, or target already holds weights.
    """
    source, out = Path(checkpoint), Path(target)
    if not source.is_dir():
        raise ValueError(
            f"hfpatch: expected a checkpoint folder, {source} is none; give runs/NAME/checkpoint-N."
        )
    if list(out.glob("*.safetensors")):
        raise ValueError(f"hfpatch: {out} already holds weights; give another folder.")
    if base and not (Path(base) / "config.json").is_file():
        raise ValueError(
            f"hfpatch: expected a model's folder as --base, {base} holds no config.json; check "
            "the path."
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    # A unique name, so that another process's .part stays untouched.
    with tempfile.TemporaryDirectory(
        prefix=f".{out.name}.", suffix=".part", dir=out.parent
    ) as scratch:
        with nullcontext() if allow_pickle else weights_only():
            weights = _weights(source, Path(scratch) / "merged", allow_pickle)
        if any(name.startswith("base_model.") for name in weights):
            raise ValueError(
                f"hfpatch: {source} is of a LoRA run, whose adapter Trainer saves itself; use "
                "that file."
            )
        kept = {name: _cast(tensor, dtype) for name, tensor in _without_ties(weights).items()}
        made = Path(scratch) / "made"
        made.mkdir()
        save_file(kept, made / "model.safetensors", metadata={"format": "pt"})
        for name in BESIDE:
            for folder in [Path(base)] if base else (source, source.parent):
                if (
                    (folder / name).is_file()
                    and not (out / name).exists()
                    and not (made / name).exists()
                ):
                    shutil.copyfile(folder / name, made / name)
        folders.publish(made, out)
    return out / "model.safetensors"


def _weights(source: Path, scratch: Path, allow_pickle: bool) -> dict[str, torch.Tensor]:
    if (source / "latest").is_file():
        tag = (source / "latest").read_text(encoding="utf-8").strip()
        if not folders.plain_name(tag):
            raise ValueError(
                f"hfpatch: expected a folder's name in {source / 'latest'}, {tag!r} came; mend "
                "the file."
            )
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        return get_fp32_state_dict_from_zero_checkpoint(str(source), tag=tag)
    shards = source / "pytorch_model_fsdp_0"
    if not shards.is_dir():
        raise ValueError(
            f"hfpatch: {source} holds neither ZeRO nor sharded FSDP weights; give "
            "runs/NAME/checkpoint-N."
        )
    from accelerate.utils import merge_fsdp_weights

    if not allow_pickle:
        with open(shards / ".metadata", "rb") as file:
            index = _Index(file).load()
        for info in (index.storage_data or {}).values():
            if not folders.plain_name(info.relative_path):
                raise ValueError(
                    f"hfpatch: {shards} names {info.relative_path!r}, which leads out of it; do "
                    "not use it."
                )
    merge_fsdp_weights(str(shards), str(scratch), safe_serialization=True)
    return load_file(scratch / "model.safetensors")


class _Index(pickle.Unpickler):
    """Reads an FSDP checkpoint's index, and creates objects of the classes in _INDEX only."""

    def find_class(self, module, name):
        if name not in _INDEX.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


@contextmanager
def weights_only():
    """A context in which torch loads only tensors and plain values, although DeepSpeed requests
    full pickles. ValueError if a file holds more.
    """
    with (
        _environment(TORCH_FORCE_WEIGHTS_ONLY_LOAD="1"),
        torch.serialization.safe_globals(_deepspeed_classes()),
    ):
        try:
            yield
        except pickle.UnpicklingError as error:
            reason = str(error).splitlines()[0].rstrip(".")
            raise ValueError(
                "hfpatch: the checkpoint holds more than tensors, which could run code "
                f"({reason[:120]}); where you trust "
                "its origin, pass --allow_pickle."
            ) from error


@contextmanager
def _environment(**values):
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _deepspeed_classes() -> list:
    """The classes that ZeRO pickles besides tensors: the loss scalers and an enumeration."""
    try:
        from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
        from deepspeed.runtime.zero.config import ZeroStageEnum
    except ImportError:
        return []
    return [LossScaler, DynamicLossScaler, ZeroStageEnum]


def _without_ties(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A tied head is the embedding under a second name, equal to the bit: safetensors holds it
    once.
    """
    head, embedding = weights.get("lm_head.weight"), weights.get("model.embed_tokens.weight")
    if head is None or embedding is None or not torch.equal(head, embedding):
        return weights
    return {name: tensor for name, tensor in weights.items() if name != "lm_head.weight"}


def _cast(tensor: torch.Tensor, dtype: str | None) -> torch.Tensor:
    tensor = tensor.detach().contiguous()
    return tensor.to(getattr(torch, dtype)) if dtype and tensor.is_floating_point() else tensor


def add_arguments(parser) -> None:
    """The arguments of `hfpatch consolidate` on an argparse parser."""
    parser.add_argument(
        "checkpoint", help="a checkpoint-N folder that Trainer wrote under ZeRO or FSDP"
    )
    parser.add_argument("target", help="the folder to write")
    parser.add_argument(
        "--dtype",
        choices=["bfloat16", "float16", "float32"],
        help="cast the weights; default keeps them",
    )
    parser.add_argument(
        "--base", help="folder whose config.json and tokenizer go beside the weights"
    )
    parser.add_argument(
        "--allow-pickle",
        action="store_true",
        help="read files that could run code; trust their origin",
    )


def main(args) -> int:
    """Runs the command; returns its exit code."""
    print(
        consolidate(
            args.checkpoint,
            args.target,
            dtype=args.dtype,
            base=args.base,
            allow_pickle=args.allow_pickle,
        )
    )
    return 0
