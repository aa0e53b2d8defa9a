"""Turns a sharded checkpoint folder of Trainer (ZeRO or FSDP) into one model.safetensors beside its config.

    python scripts/consolidate.py runs/my-run/checkpoint-500 final --base meta-llama/checkout

One process, no GPU; needs host memory for one copy of the weights. ZeRO gives the float32 master weights, FSDP the
weights in the dtype they were kept in.
"""

import argparse
import shutil
import sys
from pathlib import Path

# This folder has a profile.py, which cProfile must not find in place of the standard one; its parent has hfpatch.
_HERE = Path(__file__).resolve().parent
sys.path[:] = [str(_HERE.parent), *(p for p in sys.path if Path(p or ".").resolve() != _HERE)]

import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

BESIDE = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
          "chat_template.jinja")  # fmt: skip


def consolidate(checkpoint: str, target: str, *, dtype: str | None = None, base: str | None = None) -> Path:
    """Writes target/model.safetensors, and beside it the config and tokenizer of base or of the checkpoint.

    dtype: "bfloat16", "float16" or "float32" casts floating weights; None keeps them. ValueError where checkpoint is
    no sharded checkpoint of a whole model or target already holds weights.
    """
    source, out = Path(checkpoint), Path(target)
    if not source.is_dir():
        raise ValueError(f"hfpatch: expected a checkpoint folder, {source} is none; give runs/NAME/checkpoint-N.")
    if list(out.glob("*.safetensors")):
        raise ValueError(f"hfpatch: {out} already holds weights; give another folder.")
    if (source / "latest").is_file():
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        weights = get_fp32_state_dict_from_zero_checkpoint(str(source))
    elif (source / "pytorch_model_fsdp_0").is_dir():
        weights = _fsdp_weights(source / "pytorch_model_fsdp_0", out)
    else:
        raise ValueError(f"hfpatch: {source} holds neither ZeRO nor sharded FSDP weights; give runs/NAME/checkpoint-N.")
    if any(name.startswith("base_model.") for name in weights):
        raise ValueError(f"hfpatch: {source} is of a LoRA run, whose adapter Trainer saves itself; use that file.")
    kept = {name: _cast(tensor, dtype) for name, tensor in _without_ties(weights).items()}
    out.mkdir(parents=True, exist_ok=True)
    save_file(kept, out / "model.safetensors", metadata={"format": "pt"})
    for name in BESIDE:
        for folder in [Path(base)] if base else (source, source.parent):
            if (folder / name).is_file() and not (out / name).exists():
                shutil.copyfile(folder / name, out / name)
    return out / "model.safetensors"


def _fsdp_weights(shards: Path, out: Path) -> dict[str, torch.Tensor]:
    from accelerate.utils import merge_fsdp_weights

    part = out.with_name(out.name + ".part")
    try:
        merge_fsdp_weights(str(shards), str(part), safe_serialization=True)
        return load_file(part / "model.safetensors")
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _without_ties(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A tied head is the embedding under a second name, equal to the bit: safetensors holds it once."""
    head, embedding = weights.get("lm_head.weight"), weights.get("model.embed_tokens.weight")
    if head is None or embedding is None or not torch.equal(head, embedding):
        return weights
    return {name: tensor for name, tensor in weights.items() if name != "lm_head.weight"}


def _cast(tensor: torch.Tensor, dtype: str | None) -> torch.Tensor:
    tensor = tensor.detach().contiguous()
    return tensor.to(getattr(torch, dtype)) if dtype and tensor.is_floating_point() else tensor


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", help="a checkpoint-N folder that Trainer wrote under ZeRO or FSDP")
    parser.add_argument("target", help="the folder to write")
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float16", "float32"], help="cast the weights; default keeps them"
    )
    parser.add_argument("--base", help="folder whose config.json and tokenizer go beside the weights")
    args = parser.parse_args(argv)
    try:
        print(consolidate(args.checkpoint, args.target, dtype=args.dtype, base=args.base))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
