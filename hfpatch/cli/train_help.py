"""`hfpatch train --help`: our own flags in groups, and those of transformers that most runs set."""

import textwrap
from dataclasses import fields

_MEMORY = "impl checkpointing placement sp_size nvme_path dtype fp8 attn_implementation"
_ADAPTERS = (
    "lora_r lora_alpha lora_dropout lora_target_modules load_in_4bit load_in_8bit "
    "bnb_4bit_quant_type use_bnb_nested_quant"
)
_OFTEN = (
    "per_device_train_batch_size gradient_accumulation_steps learning_rate num_train_epochs "
    "lr_scheduler_type max_steps optim output_dir logging_steps save_steps eval_strategy report_to "
    "resume_from_checkpoint"
)
_HEAD = """hfpatch train [RUN.yaml] --model M --data D [flags]
hfpatch train qwen3-8b-qlora-24g.yaml --data my.jsonl"""


def groups() -> dict[str, list[str]]:
    """A title -> the names of its flags."""
    from hfpatch.trainer.flags import DataArguments, ModelArguments, TrainArguments

    memory = _MEMORY.split()
    adapters = _ADAPTERS.split()
    model = [f.name for f in fields(ModelArguments) if f.name not in memory + adapters]
    run = [*_OFTEN.split(), *vars(TrainArguments)["__annotations__"]]
    data = [f.name for f in fields(DataArguments)]
    return {"model": model, "data": data, "memory": memory, "adapters": adapters, "run": run}


def text() -> str:
    from hfpatch.trainer.flags import CLASSES

    metadata = {f.name: f.metadata for cls in CLASSES for f in fields(cls)}
    lines = [_HEAD]
    for title, names in groups().items():
        lines += ["", f"{title}:"]
        for name in names:
            choices = "|".join(metadata[name].get("choices", ()))
            said = f"{metadata[name].get('help', '').split('. ')[0]} {choices and f'({choices})'}"
            words = f"{'--' + name:<30} {said}"
            lines += textwrap.wrap(words, 98, initial_indent="  ", subsequent_indent=" " * 33)
    return "\n".join([*lines, "", "--help-all lists all flags of transformers too."])
