"""`apply(model)` gives this model's modules their fused classes; `undo(model)` hands the old ones back.

Nothing but `module.__class__` and a few `_hfpatch_*` attributes changes: parameters, hooks, names and checkpoints stay.
"""

from dataclasses import dataclass, field

from torch import nn

from hfpatch.checkpoint.session import Session
from hfpatch.memory.formula import ModelShape, step_memory
from hfpatch.memory.policy import Checkpointing, choose
from hfpatch.models.fused import fuse, is_fused_head, runs_its_own_way
from hfpatch.models.generic import WholeLayer, whole_layer_class
from hfpatch.ops._library import HAS_TRITON
from hfpatch.spec import EMBEDDING, HEAD, SPECS, Swap

FUSED = ("rope", "rms_norm", "mlp", "loss")
OPTIONS = (*FUSED, "checkpointing")
_TOO_LATE = {
    "DeepSpeedEngine": "deepspeed.initialize()",
    "FullyShardedDataParallel": "FSDP wraps the model",
    "DistributedDataParallel": "DistributedDataParallel wraps the model",
    "FSDPModule": "fully_shard()",
    "OptimizedModule": "torch.compile()",
}
_MARKS = ("_hfpatch_session", "_hfpatch_eval_logits", "_hfpatch_head_told", "_hfpatch_report")


@dataclass
class Report:
    """What `hfpatch.apply` did; print it to read it.

    model: class name of the model.
    swaps: (option, class name of the modules, how many of them) for each option that took effect.
    skipped: (option, reason) for each that did not.
    notes: further sentences: the kernels' path, what is kept for backward, the memory expected.

    >>> report = hfpatch.apply(model)
    >>> report.count("rms_norm")  # 0 where the option was skipped
    65
    """

    model: str
    swaps: list[tuple[str, str, int]] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def count(self, option: str) -> int:
        """How many modules an option ("rope", "rms_norm", "mlp", "loss", "checkpointing") swapped."""
        return sum(n for o, _, n in self.swaps if o == option)

    def __str__(self):
        lines = [f"hfpatch on {self.model}:"]
        lines += [f"  {option:<13} {n} x {name}" for option, name, n in self.swaps]
        lines += [f"  {option:<13} left as it is: {reason}" for option, reason in self.skipped]
        lines += [f"  {note}" for note in self.notes]
        return "\n".join(lines)


def _refuse_wrapped(model: nn.Module) -> None:
    for module in model.modules():
        for kind in type(module).__mro__:
            if kind.__name__ in _TOO_LATE and kind.__module__.split(".")[0] in ("torch", "deepspeed", "accelerate"):
                raise ValueError(
                    f"hfpatch: expected a model before {_TOO_LATE[kind.__name__]}, found {type(module).__name__}; "
                    f"call apply() before {_TOO_LATE[kind.__name__]}."
                )


def _refuse_liger(model: nn.Module) -> None:
    for module in model.modules():
        forward = vars(module).get("forward")
        places = (type(module).__module__, getattr(getattr(forward, "__func__", forward), "__module__", None))
        if any((place or "").split(".")[0] == "liger_kernel" for place in places):
            raise ValueError(
                f"hfpatch: expected transformers' own modules, found Liger's in {type(module).__name__}; "
                "drop use_liger_kernel (apply_liger_kernel_to_...), or do not call apply()."
            )


def _unpin(module: nn.Module) -> None:
    """Drops a `forward` on the instance that is no more than its class's own, or a wrapper around ours.

    transformers 4.57 leaves the first after output_hidden_states=True, accelerate's mixed precision the second.
    """
    forward, inner = vars(module).get("forward"), vars(module).get("_original_forward")
    if getattr(forward, "__func__", None) is type(module).forward:
        del module.forward
    elif getattr(inner, "__func__", None) is type(module).forward and type(module).__module__.startswith("hfpatch."):
        del module.forward, module._original_forward


def _decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The layers of an unknown decoder: the longest ModuleList of modules that transformers can checkpoint."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m)]
    able = [m for m in lists if all(hasattr(layer, "gradient_checkpointing") for layer in m)]
    return list(max(able, key=len)) if able else []


def _base_config(model: nn.Module):
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "model_type"):
        raise ValueError(
            f"hfpatch: expected a transformers model (with a config), {type(model).__name__} came; "
            "pass the model that from_pretrained() or from_config() returned."
        )
    return config


def _settings(checkpointing) -> Checkpointing | None:
    if isinstance(checkpointing, Checkpointing):
        return checkpointing
    if checkpointing in ("auto", True):
        return Checkpointing()
    if checkpointing in ("off", False, None):
        return None
    raise ValueError(
        f'hfpatch: checkpointing must be "auto", "off" or a hfpatch.Checkpointing, {checkpointing!r} came; '
        'for example apply(model, checkpointing=hfpatch.Checkpointing(offload="host")).'
    )


def apply(
    model: nn.Module,
    *,
    rope: bool = True,
    rms_norm: bool = True,
    mlp: bool = True,
    loss: bool = True,
    checkpointing: "str | Checkpointing" = "auto",
    eval_logits: "str | bool" = "auto",
) -> Report:
    """Gives this model fused kernels and tiled, offloaded activation checkpointing, in place; returns a Report.

    Parameters, their names, hooks, `state_dict` and `save_pretrained` stay as they were, and so do other models.
    Gradients are exact. `hfpatch.undo(model)` takes it back. Calling it again replaces the settings.

    model: a transformers model, plain or wrapped by PEFT, on any device; before FSDP, DDP, DeepSpeed or torch.compile
        wrap it.
    rope: fused rotary embedding of q and k, one launch for both.
    rms_norm: fused RMSNorm, and residual add with the norm after it.
    mlp: fused SiLU (or GELU) times up.
    loss: head and cross-entropy by chunks of tokens, logits never whole; outputs.logits is then None in training.
    checkpointing: "auto" chooses from free memory at the first step; "off" leaves transformers' own checkpointing as
        it is; a hfpatch.Checkpointing says what to keep and where.
    eval_logits: whether evaluation with labels also returns logits: True, False, or "auto": up to 2 GiB of them.

    Raises ValueError, a sentence that says what to do, on a model that is wrapped already, one of Liger's modules, one
    without decoder layers, and on settings out of range.

    >>> model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.1-8B", dtype="bfloat16")
    >>> print(hfpatch.apply(model))
    """
    settings = _settings(checkpointing)
    if eval_logits not in ("auto", True, False):
        raise ValueError(f'hfpatch: eval_logits must be "auto", True or False, {eval_logits!r} came; leave it "auto".')
    _refuse_wrapped(model)
    _refuse_liger(model)
    config = _base_config(model)
    undo(model)
    report = Report(type(model).__name__)
    wanted = {"rope": rope, "rms_norm": rms_norm, "mlp": mlp, "loss": loss, "checkpointing": settings is not None}
    rows = SPECS.get(config.model_type)
    if rows is None:
        _apply_whole(model, config, settings, wanted, report)
    else:
        _apply_rows(model, config, rows, settings, wanted, eval_logits, report)
    model._hfpatch_report = report
    return report


def _apply_rows(model, config, rows: tuple[Swap, ...], settings, wanted, eval_logits, report: Report) -> None:
    found = {row: [m for m in model.modules() if type(m) is row.theirs] for row in rows}
    layers = [m for row, modules in found.items() if row.option == "checkpointing" for m in modules]
    if not layers:
        expected = next(row.theirs.__name__ for row in rows if row.option == "checkpointing")
        raise ValueError(
            f"hfpatch: expected decoder layers of class {expected}, found none in {type(model).__name__}; "
            "call apply() on the model as transformers made it."
        )
    reasons = {row: next((r for r in map(row.refuses, modules) if r), None) for row, modules in found.items()}
    tiled = settings is not None and not any(reasons[row] for row in found if row.option == "checkpointing")
    session = Session(settings, ModelShape.from_config(config), len(layers)) if tiled else None
    for row, modules in found.items():
        if row.option != "model" and not wanted[row.option]:
            report.skipped.append((row.option, "not asked for"))
            continue
        if not modules:
            if row.option != "model":
                report.skipped.append((row.option, f"no {row.theirs.__name__} in this model"))
            continue
        if reasons[row]:
            report.skipped.append((row.option, reasons[row]))
            continue
        for module in modules:
            _swap(module, row, session, eval_logits, report)
        if row.option != "model":
            report.swaps.append((row.option, row.theirs.__name__, len(modules)))
    if any(option in FUSED for option, _, _ in report.swaps):
        report.notes.append(_path_note())
    if session is not None:
        report.notes.append(_checkpointing_note(settings, len(layers)))
        report.notes.append(_memory_note(config, settings, next(model.parameters()).element_size()))
        dropout = getattr(config, "attention_dropout", 0.0)
        if dropout:
            report.notes.append(
                f"attention_dropout is {dropout}: in training, layers are checkpointed whole instead of tile by tile."
            )


def _swap(module: nn.Module, row: Swap, session, eval_logits, report: Report) -> None:
    module.__class__ = row.ours
    if row.option == "checkpointing":
        module._hfpatch_session = session
        # ZeRO-3 then gathers the layer once, not for every tile (deepspeed.utils.set_z3_leaf_modules sets the same).
        module._z3_leaf = True
    elif row.option == "model":
        if session is not None:
            module._hfpatch_session = session
            fuse(module.embed_tokens, EMBEDDING.theirs, EMBEDDING.ours)
    elif row.option == "loss":
        module._hfpatch_eval_logits = eval_logits
        fuse(module.lm_head, HEAD.theirs, HEAD.ours)
        if not is_fused_head(module.lm_head):
            head, why = module.lm_head, ""
            if type(head) is HEAD.theirs and runs_its_own_way(head):
                why = " with a forward of another library (tensor parallelism)"
            report.notes.append(
                f"lm_head is a {type(head).__module__}.{type(head).__name__}{why}: the loss runs through whole logits."
            )


def _apply_whole(model, config, settings, wanted, report: Report) -> None:
    layers = _decoder_layers(model)
    if not layers:
        raise ValueError(
            f"hfpatch: expected a decoder with a list of layers, found none in {type(model).__name__} "
            f"({config.model_type}); families with fused parts are: {', '.join(SPECS)}."
        )
    for option in FUSED:
        if wanted[option]:
            report.skipped.append((option, f"no fused parts for model_type {config.model_type!r}"))
    if settings is None:
        report.skipped.append(("checkpointing", "not asked for"))
        return
    session = Session(settings, None, len(layers))
    for layer in layers:
        layer.__class__ = whole_layer_class(type(layer))
        layer._hfpatch_session = session
    report.swaps.append(("checkpointing", type(layers[0]).__name__, len(layers)))
    report.notes.append("layers are checkpointed whole, their inputs offloaded: no tiled form of this architecture.")


def _path_note() -> str:
    if not HAS_TRITON:
        return "fused ops run as plain PyTorch: Triton is not installed."
    return "fused ops run as Triton kernels on a GPU, as plain PyTorch on a CPU."


def _memory_note(config, settings: Checkpointing, itemsize: int) -> str:
    """What the closed form expects of one long sequence on a GPU with the host memory it asks for."""
    shape, tokens = ModelShape.from_config(config), min(config.max_position_embeddings, 131072)
    policy = choose(settings, shape, batch=1, tokens=tokens, itemsize=itemsize)
    memory = step_memory(shape, policy, batch=1, tokens=tokens, itemsize=itemsize)
    return (
        f"expected for one sequence of {tokens:,} tokens on a GPU: {memory.beyond / 2**30:.2f} GiB beyond parameters and "
        f"gradients, {memory.host / 2**30:.2f} GiB of host memory (see `hfpatch plan`)."
    )


def _checkpointing_note(settings: Checkpointing, n_layers: int) -> str:
    where = "chosen at the first step" if settings.offload == "auto" else str(settings.offload)
    return f"checkpoints of {n_layers} layers: {where}; transformers' own gradient checkpointing is replaced."


def undo(model: nn.Module) -> None:
    """Hands every module its own class back and frees the session's host memory. A model never patched stays as it is."""
    back = {row.ours: row.theirs for rows in SPECS.values() for row in rows} | {
        row.ours: row.theirs for row in (HEAD, EMBEDDING)
    }
    sessions = set()
    for module in model.modules():
        _unpin(module)
        if type(module) in back:
            module.__class__ = back[type(module)]
        elif isinstance(module, WholeLayer):
            module.__class__ = module._hfpatch_base
        session = vars(module).get("_hfpatch_session")
        if session is not None:
            sessions.add(session)
            if "_z3_leaf" in vars(module):
                del module._z3_leaf
        for mark in _MARKS:
            vars(module).pop(mark, None)
    for session in sessions:
        session.close()


__all__ = ["OPTIONS", "Report", "apply", "undo"]
