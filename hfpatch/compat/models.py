"""Private names of transformers, TRL and PEFT."""

import functools
from contextlib import contextmanager

from torch import nn

# --- transformers ---------------------------------------------------------------------------------

# The cache argument of a forward: since 5.24, before 5.24, and in mixers before that.
CACHE_NAMES = ("cache", "past_key_values", "cache_params")


def cache_name(arguments) -> str | None:
    """The name of the cache in `arguments` (keywords, or a model's output), also if it is None."""
    return next((name for name in CACHE_NAMES if name in arguments), None)


def collected_now() -> dict:
    """The lists to which the outputs are added that output_hidden_states, output_router_logits and
    the like record of this forward; empty without any."""
    from transformers.utils.output_capturing import _active_collector

    return _active_collector.get() or {}


@contextmanager
def collecting(lists: dict):
    """A context in which recorded outputs are added to these lists."""
    from transformers.utils.output_capturing import _active_collector

    token = _active_collector.set(lists)
    try:
        yield
    finally:
        _active_collector.reset(token)


def _sizes(model, *names: str) -> list[int]:
    """Numbers from the DistributedConfig that the model was loaded with; 1 without one."""
    asked = getattr(getattr(model, "config", None), "distributed_config", None)
    return [getattr(asked, name, None) or 1 for name in names]


def sharded_while_loaded(model) -> bool:
    """Whether transformers sharded the model by FSDP2 while loading it."""
    return max(_sizes(model, "fsdp_size", "dp_replicate_size")) > 1


def exchanges_tokens(model) -> bool:
    """Whether ranks with different batches send tokens to each other's experts."""
    experts, shared = _sizes(model, "ep_size", "tp_size")
    return hasattr(model, "_mesh_manager") and experts > shared


def attention_of(config) -> str | None:
    """The attention that a config names, or None."""
    return getattr(config, "_attn_implementation", None)


def names_attention(config) -> bool:
    """Whether models read their attention from this config."""
    return hasattr(config, "_attn_implementation")


def attention_row(config, name: str | None) -> tuple:
    """(table, key, name) by which this config alone names that attention; the property's setter
    would write into sub-configs too."""
    return vars(config), "_attn_implementation_internal", name


def run_experts_plainly(config) -> None:
    """Makes experts run one by one: grouped matmuls have no float64."""
    if hasattr(config, "_experts_implementation_internal"):
        config._experts_implementation_internal = "eager"


OUR_EXPERTS = "hfpatch"
# Names in a config whose experts ours may replace.
STANDARD_EXPERTS = (None, "eager", "grouped_mm")


@functools.cache
def _expert_tables() -> tuple:
    """transformers' tables of functions that run fused experts; empty where they need Triton and it
    is missing."""
    try:
        from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError:
        return ()
    return ALL_EXPERTS_FUNCTIONS, ALL_FP8_EXPERTS_FUNCTIONS


def register_experts(function) -> None:
    """Registers the function in these tables as OUR_EXPERTS."""
    for table in _expert_tables():
        table.register(OUR_EXPERTS, function)


def experts_of(config) -> str | None:
    """The name of a config's experts function; "" for a config without that field."""
    return getattr(config, "_experts_implementation_internal", "") if _expert_tables() else ""


def experts_row(config, name: str | None) -> tuple:
    """(table, key, name) by which this config alone names that function."""
    return vars(config), "_experts_implementation_internal", name


def gate_of(module: nn.Module):
    """The function by which experts in two tensors, as these tables run them, combine gate and up;
    None for other modules.
    """
    # is_concatenated came with 5.10, has_post_expert_norm with 5.23
    names = ("has_gate", "has_bias", "is_transposed")
    told = all(name in vars(module) for name in names)
    return getattr(type(module), "_apply_gate", None) if told else None


def own_loss(model: nn.Module):
    """The loss function that the user set on this model, or None."""
    return vars(model).get("_loss_function")


def set_own_loss(model: nn.Module, function) -> None:
    """Sets the model's loss function, as transformers' own setter does."""
    vars(model)["_loss_function"] = function


# --- TRL and PEFT ---------------------------------------------------------------------------------


def trl_fused_head(forward) -> tuple | None:
    """The arguments of TRL's add_fused_lm_head, if `forward` is the bound method that it made, else
    None.

    In this order: the class of the outputs, the outputs, temperature, scale, softcap, whether in
    float32, the backbone's attribute, the text config. TRL keeps them only in the method's closure.
    If a later TRL names them otherwise, its own head runs.
    """
    function = getattr(forward, "__func__", None)
    if getattr(function, "__globals__", {}).get("__name__") != "trl.trainer.utils":
        return None
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
    names = ("outputs", "temperature", "logit_scale", "final_logit_softcapping",
             "cast_lm_head_to_fp32", "backbone_attr",
             "text_config")  # fmt: skip
    if "FusedCausalLMOutput" not in function.__globals__ or not set(names) <= set(cells):
        return None
    return function.__globals__["FusedCausalLMOutput"], *(cells[n].cell_contents for n in names)


def asks_for_input_gradients(hook) -> bool:
    """Whether a forward hook on an embedding is the one of enable_input_require_grads(). Under
    another name it would not be found, and stay in force.
    """
    of = (getattr(hook, "__module__", None) or "").partition(".")[0]
    return of in ("transformers", "peft", "trl") and hook.__name__ in (
        "make_inputs_require_grads",
        "make_inputs_require_grad",
    )


def split_by_hooks(module):
    """The mesh over which transformers before 5.16 split this module: its weights are local tensors,
    and hooks reduce its values in place. None without one."""
    return getattr(module, "_hf_device_mesh", None)
