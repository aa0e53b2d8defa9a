"""Finds the checkpoint to resume from, locks the run's folder, and compares a resumed run's
settings.
"""

import json
from contextlib import contextmanager
from pathlib import Path

import torch

from hfpatch.trainer import folders

# The sizes of a model, the flags that decide its rows, and those whose values come back with the
# optimizer's state.
_SIZES = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings",
    "max_position_embeddings", "rope_parameters", "rope_scaling",
)  # fmt: skip
_ROWS = ("seq_len", "packing", "long_rows", "validation_split", "streaming")
_OPTIMIZER = ("learning_rate", "optim", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
# These take effect in the resumed run, so they may differ; a line says that they do.
_MAY_DIFFER = (
    "max_steps", "num_train_epochs", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps",
    "max_grad_norm", "bf16", "fp16",
)  # fmt: skip


def begin(folder: str, resume) -> tuple[str | None, list[str]]:
    """The checkpoint to resume from (None: none), and the folders to set aside first.

    resume: a folder, or "true" for the newest whole checkpoint of `folder`. Raises ValueError if
    there is none, or if `folder` holds another run.
    """
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise ValueError(
            f"hfpatch: expected a folder for --output_dir, {folder} is a file; name another."
        )
    if str(resume or "false").lower() == "false":
        _no_other_run(path)
        return None, list(map(str, folders.checkpoints(path)))
    if str(resume).lower() != "true":
        chosen = Path(resume)
        why = folders.flaw(chosen)
        if why:
            whole = next(
                (p for p in folders.checkpoints(chosen.parent) if not folders.flaw(p)), None
            )
            fix = f"{whole} is whole" if whole else "check the path"
            raise ValueError(
                f"hfpatch: expected a checkpoint at {resume} to resume from, {why}; {fix}."
            )
        if chosen.resolve().parent != path.resolve():
            _no_other_run(path)
    else:
        found = {p: folders.flaw(p) for p in folders.checkpoints(path)}
        chosen = next((p for p, why in found.items() if not why), None)
        if chosen is None and any((p / folders.STATE_FILE).exists() for p in found):
            listed = "; ".join(f"{p.name}: {why}" for p, why in found.items())
            raise ValueError(
                f"hfpatch: no checkpoint in {folder} is whole ({listed}); name another one, or "
                "start in another --output_dir."
            )
        if chosen is None and not found and not (path / folders.SAVING).is_dir():
            raise ValueError(
                f"hfpatch: expected a checkpoint in {folder} to resume from, none came; check "
                "--output_dir."
            )
    if chosen is None:  # killed while it wrote its first checkpoint
        return None, list(map(str, folders.checkpoints(path)))
    step = folders.step_of(chosen)
    later = [p for p in folders.checkpoints(path) if p.resolve() != chosen.resolve()]
    later = [p for p in later if step is None or folders.step_of(p) > step]
    return str(chosen), list(map(str, later))


def _no_other_run(path: Path) -> None:
    """ValueError where the folder holds a model or a checkpoint that was once finished."""
    held = [p.name for p in folders.checkpoints(path) if (p / folders.STATE_FILE).exists()]
    if path.is_dir():
        held += sorted(p.name for p in path.iterdir() if p.suffix == ".safetensors")
    if held:
        raise ValueError(
            f"hfpatch: {path} holds another run ({held[0]}); go on with --resume_from_checkpoint "
            "True, or name another --output_dir."
        )


def agreed(args, look):
    """The result of look() on rank 0, for all ranks: the disk may change before the others look.

    Raises its ValueError on all ranks.
    """
    if args.world_size <= 1:
        return look()
    found = [None, None]
    if args.process_index == 0:
        try:
            found[0] = look()
        except ValueError as error:
            found[1] = str(error)
    torch.distributed.broadcast_object_list(found, src=0, device=args.device)
    if found[1]:
        raise ValueError(found[1])
    return found[0]


@contextmanager
def writing_to(args, aside: list[str]):
    """Holds the lock of --output_dir and moves the folders `aside` away; yields their names.

    Raises ValueError if another run holds the lock.
    """
    held = []

    def take():
        held.append(folders.Lock(args.output_dir))
        return folders.set_aside(map(Path, aside))

    try:
        yield agreed(args, take)
        if args.world_size > 1:
            # A rank that ends first may end the launcher, and with it the others.
            torch.distributed.barrier()
    finally:
        for lock in held:
            lock.close()


def checkpoint_matches(checkpoint: str, record: dict) -> str | None:
    """Compares the record saved with a checkpoint to the record of this run.

    Returns one sentence on the differences that may be, None without any. Raises ValueError with
    the others: another model, other data or another order of them, other settings of the optimizer.
    """
    file, config = Path(checkpoint) / folders.RUN_FILE, Path(checkpoint) / "config.json"
    if file.is_file():
        before = json.loads(file.read_text(encoding="utf-8"))
    elif config.is_file():  # another script's checkpoint: only the model can be compared
        values = json.loads(config.read_text(encoding="utf-8"))
        before = {"model": {k: values[k] for k in record["model"] if k in values}}
    else:
        return None
    _same_files(checkpoint, before.get("samples", {}), record.get("samples", {}))
    different, allowed = [], []
    for key, value in record.items():
        old, new = (v if isinstance(v, dict) else {key: v} for v in (before.get(key, {}), value))
        said = [f"{k} {old[k]} there, {v} here" for k, v in new.items() if k in old and old[k] != v]
        (allowed if key == "may_differ" else different).extend(said)
    if different:
        raise ValueError(
            f"hfpatch: {checkpoint} does not match this run: {'; '.join([*different, *allowed])}; "
            "use the same flags and data, or start anew with --model set to the checkpoint."
        )
    return (
        f"going on with what differs from the saved run: {'; '.join(allowed)}." if allowed else None
    )


def _same_files(checkpoint: str, before: dict[str, str], now: dict[str, str]) -> None:
    """ValueError where a file that --streaming reads on is another than when the run began."""
    changed = [name for name in now if before.get(name, now[name]) != now[name]]
    if changed:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise ValueError(
            f"hfpatch: {changed[0]}{more} changed since the checkpoint {checkpoint}, and "
            "--streaming goes on where it stood in the file; restore the file, or start anew with "
            "--model set to the checkpoint."
        )


def run_record(config, model, data, args, datasets) -> dict:
    """The settings that a resumed run must share with the earlier one: model, data, batches,
    optimizer.

    Those under "may_differ" take effect in the resumed run. The optimizer's settings come back with
    its state, so another value of a flag would be ignored.
    """
    together = getattr(args.parallelism_config, "non_data_parallel_size", 1)
    batch = args.per_device_train_batch_size * args.gradient_accumulation_steps
    batch *= args.world_size // together
    ranks = {"world_size": args.world_size}
    return {
        "model": {
            name: getattr(config, name)
            for name in _SIZES
            if getattr(config, name, None) is not None
        },
        "lora_r": model.lora_r,
        "lora": {
            "lora_target_modules": list(model.lora_target_modules),
            "load_in_4bit": model.load_in_4bit,
            "load_in_8bit": model.load_in_8bit,
        },
        "data": datasets.fingerprint,
        "samples": datasets.samples,
        "rows": {name: getattr(data, name) for name in _ROWS},
        "seed": args.seed,
        "data_seed": args.data_seed,
        "batch": batch,
        "optimizer": {name: _plain(getattr(args, name)) for name in _OPTIMIZER},
        "engine": {"engine": "deepspeed" if args.deepspeed else "fsdp" if args.fsdp else "none"}
        | (ranks if args.deepspeed else {}),
        "may_differ": ({} if args.deepspeed else ranks)
        | {"sp_size": together}
        | {name: _plain(getattr(args, name)) for name in _MAY_DIFFER},
    }


def _plain(value) -> str:
    return str(getattr(value, "value", value))  # the word of an enumeration
