"""hfpatch in verl: actor, reference and critic of its FSDP2 engine.

    actor_rollout_ref.model.external_lib=hfpatch.trainer.plugins.verl
    actor_rollout_ref.model.use_fused_kernels=True

verl imports this file in each worker in one of two ways: as the model's `external_lib`, for that
model, or as the entry point `hfpatch` of the group `verl.plugins`, for all models under
VERL_USE_EXTERNAL_PLUGINS=hfpatch. Without either an installed hfpatch changes no training. The file
imports nothing of verl, and waits until verl imports its registry of engines.
"""

import functools
import os
import sys

from hfpatch.trainer.hook.sitecustomize import Watch

REGISTRY = "verl.workers.engine.base"
POLICIES = "VERL_USE_EXTERNAL_PLUGINS", "VERL_USE_EXTERNAL_MODULES"
# Settings of verl's model config that replace what hfpatch replaces.
RIVALS = "use_liger", "enable_activation_offload"


def asked(model_config) -> bool:
    """Whether this model, or every model of this process, is to train with hfpatch."""
    named = getattr(model_config, "external_lib", None) or ()
    named = [named] if isinstance(named, str) else list(named)
    named += [name.strip() for policy in POLICIES for name in os.environ.get(policy, "").split(",")]
    return not {__name__, "hfpatch"}.isdisjoint(named)


def _patch(module) -> None:
    """Makes each later engine of verl patch its model before FSDP2 shards it."""
    registry = module.EngineRegistry
    new = registry.new.__func__

    @functools.wraps(new)
    def patched_new(cls, model_type, backend, *args, **kwargs):
        engine = new(cls, model_type, backend, *args, **kwargs)
        if asked(getattr(engine, "model_config", None)):
            _refuse(engine, backend)
            from hfpatch.trainer.compat import VERL_SHARDS

            build = getattr(engine, VERL_SHARDS)
            setattr(engine, VERL_SHARDS, functools.partial(_shard, engine, build))
        return engine

    registry.new = classmethod(patched_new)


def _refuse(engine, backend: str) -> None:
    """ValueError for settings under which the training would differ, or be stock."""
    from hfpatch.trainer.compat import VERL_SHARDS

    if backend != "fsdp2" or not hasattr(engine, VERL_SHARDS):
        raise ValueError(
            f"hfpatch: verl's engine must be fsdp2, got {backend}. Set strategy=fsdp2, or drop "
            "hfpatch from external_lib."
        )
    model = engine.model_config
    ranks = engine.engine_config.ulysses_sequence_parallel_size
    for rival in RIVALS:
        if getattr(model, rival, False):
            raise ValueError(
                f"hfpatch: model.{rival} and hfpatch cannot be combined. Leave one out."
            )
    if ranks > 1:
        raise ValueError(
            f"hfpatch: ulysses_sequence_parallel_size must be 1, got {ranks}. Set it to 1."
        )
    if model.model_type == "language_model" and not model.use_fused_kernels:
        raise ValueError(
            "hfpatch: model.use_fused_kernels must be True, got False: verl would ask for whole "
            "logits. Set it."
        )


def _shard(engine, build, module):
    """Patches the module, gives it a forward without logits, and calls verl's own sharding."""
    from hfpatch.decoder.find import find_decoder
    from hfpatch.trainer import marks
    from hfpatch.trainer.plugins import apply_tiled

    apply_tiled(module, marks.settings().get("options", {}))
    if engine.model_config.model_type == "language_model":
        causal = find_decoder(module).causal
        causal.forward = functools.partial(_scores, causal)
    if not engine.engine_config.forward_only:
        marks.mark_trained()
    return build(module)


def _scores(causal, *, input_ids, temperature=1.0, shift_labels=None, return_dict=True, **kwargs):
    """verl's fused forward: log-probabilities and entropies of the next tokens.

    Args:
        causal: the patched model. input_ids: [B, T]. shift_labels: the token after each one, [B,
        T]. By default, as in verl, the rows rolled by one.

    Returns:
        verl's CausalLMOutputForPPO; log_probs and entropy are float32 [B, T].
    """
    from verl.models.transformers.dense_common import CausalLMOutputForPPO

    from hfpatch.loss.log_probs import TrlHead, log_probs

    if shift_labels is None:
        shift_labels = input_ids.roll(-1, -1)
    config = causal.config.get_text_config()
    softcap = getattr(config, "final_logit_softcapping", None)
    head = TrlHead(
        theirs=None, output=dict, outputs=("log_probs", "entropy"), temperature=float(temperature),
        scale=1.0, softcap=softcap, in_float32=False, backbone=causal.base_model_prefix,
        text_config=config,
    )  # fmt: skip
    kwargs |= {"input_ids": input_ids, "shift_labels": shift_labels}
    found = log_probs(causal, causal.get_output_embeddings(), head, kwargs)
    return CausalLMOutputForPPO(log_probs=found["log_probs"], entropy=found["entropy"])


if REGISTRY in sys.modules:
    _patch(sys.modules[REGISTRY])
else:
    sys.meta_path.insert(0, Watch((REGISTRY,), _patch))
