"""A run's folder: which checkpoint a run goes on from, and whether it is the same run."""

import json
from pathlib import Path

from huggingface_hub import save_torch_state_dict

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
    path, word = Path(folder), str(resume or "false").lower()
    if path.exists() and not path.is_dir():
        raise ValueError(
            f"hfpatch: --output_dir must be a folder, and {folder} is a file. Name another."
        )
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
    plain = lambda value: str(getattr(value, "value", value))  # noqa: E731
    together = getattr(args.parallelism_config, "non_data_parallel_size", 1)
    batch = args.per_device_train_batch_size * args.gradient_accumulation_steps
    found = {name: getattr(config, name, None) for name in _MODEL}
    found |= {name: getattr(data, name) for name in _DATA}
    found |= {name: plain(getattr(args, name)) for name in _ARGS}
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


class RunCheckpoints:
    """A mixin of Trainer: writes `record` into each checkpoint."""

    record: dict = {}

    def _save_checkpoint(self, model, trial, *args, **kwargs):
        super()._save_checkpoint(model, trial, *args, **kwargs)
        if self.args.should_save:
            folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
            (folder / RUN_FILE).write_text(json.dumps(self.record))

    def save_model(self, output_dir=None, _internal_call=False):
        """As Trainer's, which saves nothing where FSDP's state_dict_type is sharded. Checkpoints
        then hold shards. The model of the run is whole."""
        super().save_model(output_dir, _internal_call)
        kind = self.is_fsdp_enabled and self.accelerator.state.fsdp_plugin.state_dict_type
        if not _internal_call and "SHARDED" in str(kind):
            self._save(output_dir, self.accelerator.get_state_dict(self.model))

    def _save(self, output_dir=None, state_dict=None):
        """As Trainer's. If a config or the tokenizer cannot be written, the weights still are."""
        try:
            super()._save(output_dir, state_dict)
        except Exception:
            weights = self.model.state_dict() if state_dict is None else state_dict
            if self.args.should_save and weights:  # save_pretrained empties what it has written
                save_torch_state_dict(weights, output_dir or self.args.output_dir)
            raise
