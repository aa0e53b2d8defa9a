"""What TRL's SFTTrainer does with a model today, as a comparison: its fused head, its selective
checkpointing, and transformers' offload of what checkpointing keeps. All of it is their own code;
host memory is only told apart.
"""

from torch import nn

from hfpatch.lab.simulate import liger

IMPLEMENTATIONS = ("trl-offload", "trl-selective", "trl-hfpatch", "liger-selective")


def apply(model: nn.Module, implementation: str) -> nn.Module:
    """Turns a stock model into one of IMPLEMENTATIONS, in place: checkpoints in host memory with
    TRL's fused head, the same with its selective checkpointing, its call of the head on a model
    that hfpatch has patched, or Liger's kernels and head with selective checkpointing. ImportError
    where trl is not installed, or too old for it.
    """
    try:
        from trl.trainer.utils import add_fused_lm_head

        if implementation.endswith("selective"):
            from trl.models import enable_selective_activation_checkpointing
    except ImportError as error:
        raise ImportError(
            f"hfpatch: the comparison needs a newer trl ({error}); pip install -U trl."
        ) from error
    if implementation == "liger-selective":
        liger.apply(model)
    else:
        if implementation == "trl-hfpatch":
            import hfpatch

            hfpatch.apply(model)
        add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
        forward = model.forward
        model.forward = lambda *args, **kwargs: forward(*args, fused_lm_head=True, **kwargs)
    if implementation == "trl-hfpatch":
        return model
    if implementation.endswith("selective"):
        enable_selective_activation_checkpointing(model)
    _enable_offload(model)
    return model


def _enable_offload(model: nn.Module) -> None:
    """transformers' checkpointing with offload=True; what its hooks keep is host memory to the
    follower.
    """
    import transformers.modeling_utils as theirs

    # a machine without an accelerator pins nothing
    theirs.save_on_cpu = lambda **kwargs: liger.offloading()
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if not getattr(enable, "_is_sac_wrapped", False):
        enable = model.activation_checkpointing_enable
    enable({"use_reentrant": False}, offload=True)
