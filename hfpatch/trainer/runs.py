"""A run's folder: which checkpoint a run goes on from, and whether it is the same run."""

import json
from pathlib import Path

RUN_FILE = "run.json"  # what a resume must match
STATE_FILE = "trainer_state.json"
_MODEL = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
          "rope_parameters")  # fmt: skip
_DATA = ("seq_len", "packing", "long_rows", "validation_split", "streaming")
# The optimizer's own come back with its state, whatever a flag says.
_ARGS = ("seed", "data_seed", "learning_rate", "optim", "weight_decay", "adam_beta1", "adam_beta2",
         "adam_epsilon")  # fmt: skip


def checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints, newest first: Trainer writes the state last."""
    found = [p.parent for p in folder.glob(f"checkpoint-*/{STATE_FILE}")]
    return sorted(found, key=lambda p: int(p.name.rpartition("-")[2]), reverse=True)


def begin(folder: str, resume) -> str | None:
    """The checkpoint to go on from, None for none. Raises ValueError."""
    path = Path(folder)
    word = str(resume or "false").lower()
    found = checkpoints(path)
    if word == "false":
        held = [*found, *path.glob("*.safetensors")]
        if held:
            raise ValueError(
                f"hfpatch: {path} holds another run ({held[0].name}). Go on with "
                "--resume_from_checkpoint True, or name another --output_dir."
            )
        return None
    if word != "true":
        if not (Path(resume) / STATE_FILE).is_file():
            raise ValueError(
                f"hfpatch: {resume} is no whole checkpoint: {STATE_FILE} is missing. Check the "
                "path."
            )
        return str(resume)
    if not found and not any(path.glob("checkpoint-*")):  # not killed in its first checkpoint
        raise ValueError(
            f"hfpatch: there is no whole checkpoint in {folder} to resume from. Check --output_dir."
        )
    return str(found[0]) if found else None


def record(config, model, data, args, digest: str) -> dict:
    """What a resumed run must share with the earlier one."""
    as_text = lambda value: str(getattr(value, "value", value))  # noqa: E731
    together = getattr(args.parallelism_config, "non_data_parallel_size", 1)
    batch = args.per_device_train_batch_size * args.gradient_accumulation_steps
    found = {name: getattr(config, name, None) for name in _MODEL}
    found |= {name: getattr(data, name) for name in _DATA}
    found |= {name: as_text(getattr(args, name)) for name in _ARGS}
    found |= {name: getattr(model, name) for name in ("lora_r", "load_in_4bit", "load_in_8bit")}
    return found | {"data": digest, "batch": batch * (args.world_size // together)}


def expect_same(checkpoint: str, now: dict) -> None:
    """ValueError if the checkpoint is of another model, other data or another optimizer."""
    file = Path(checkpoint) / RUN_FILE
    before = json.loads(file.read_text()) if file.is_file() else {}
    said = [f"{k} {before[k]} there, {v} here" for k, v in now.items() if before.get(k, v) != v]
    if said:
        raise ValueError(
            f"hfpatch: {checkpoint} does not match this run: {'; '.join(said)}. Use the same flags "
            "and data, or start a new run with --model set to the checkpoint."
        )
