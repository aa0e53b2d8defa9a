"""A scaled-down instance of a decoder stack: the same class, a few thousand parameters, one layer
of each kind.
"""

import copy
import inspect
from contextlib import contextmanager, suppress
from itertools import product

import torch
from torch import nn

from hfpatch.compat import (
    attention_row,
    put,
    run_experts_plainly,
    unwatched,
)
from hfpatch.context.classes import package_of
from hfpatch.decoder.find import list_of_layers
from hfpatch.parts.quantised import WRAPPED, class_of

MOST_PARAMETERS = 5_000_000
MOST_LAYERS = 16
# Longer than the window, the chunk and the original positions below, so that each has an effect.
TOKENS = 40

# Names of sizes in configs, and their values in a small instance. Absent sizes stay absent, None
# stays None.
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "intermediate_size_mlp": 96, "ffn_hidden_size": 96, "ffn_dim": 96, "word_embed_proj_dim": 64,
    "num_attention_heads": 4,
    "decoder_ffn_dim": 96, "encoder_ffn_dim": 96, "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "shared_experts_intermediate_size": 32, "head_dim": 16, "lru_width": 64,
    "attention_window_size": 8, "global_head_dim": 16,
    "embedding_dim": 64, "vocab_size": 64, "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 16,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2, "moe_k": 2, "moe_topk": 2, "top_k_experts": 2, "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "qk_head_dim": 24, "v_head_dim": 16,
    "sliding_window": 8, "attention_chunk_size": 8, "max_position_embeddings": 64,
    "original_max_position_embeddings": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mamba_n_heads": 8, "mamba_num_heads": 8, "mamba_d_head": 16, "mamba_head_dim": 16,
    "mamba_d_state": 8, "ssm_state_size": 8,
    "mamba_n_groups": 1, "n_groups": 1, "mamba_d_ssm": 128, "mamba_chunk_size": 8, "chunk_size": 8,
    "mamba_dt_rank": 8,
    "num_heads": 8, "rotary_dim": 8, "linear_head_dim": 8, "linear_num_heads": 4,
    "swa_head_dim": 16,
    "sliding_window_size": 8, "rel_extent": 16,
    "index_n_heads": 2, "index_head_dim": 16, "index_topk": 8, "index_block_size": 8,
    "index_topk_blocks": 2, "index_kpool": 2,
    "indexer_n_heads": 2, "indexer_head_dim": 16, "indexer_budget": 8, "indexer_compress_ratio": 2,
    "keep_window_size": 8,
    "window_size": 8, "local_attention": 16, "block_size": 8,
}  # fmt: skip
IDS = ("pad_token_id", "bos_token_id", "eos_token_id")


def scaled_config(config, n_layers: int, at=None):
    """A copy of a text config with the values of SIZES and n_layers layers.

    at: the indices that lists with one entry a layer keep; by default the first n_layers.
    """
    at = range(n_layers) if at is None else at
    small = copy.deepcopy(config)
    real = {
        name: _value(small, name)
        for name in ("num_hidden_layers", "num_key_value_heads", "num_attention_heads")
    }
    for name, size in SIZES.items():
        value = _value(small, name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            with suppress(AttributeError):  # a property that follows from others
                setattr(small, name, size)
        elif isinstance(value, (list, tuple)) and len(value) == real["num_hidden_layers"]:
            setattr(small, name, type(value)(size for _ in at))
    latent = all(isinstance(_value(small, name), int) for name in ("qk_rope_head_dim", "head_dim"))
    if latent:
        # With latent attention, head_dim is the rotated part alone.
        small.head_dim = SIZES["qk_rope_head_dim"]
    for name, value in list(vars(small).items()):
        if isinstance(value, float) and ("dropout" in name or "pdrop" in name or "jitter" in name):
            setattr(small, name, 0.0)  # random results cannot be compared
    n, heads = real["num_key_value_heads"], real["num_attention_heads"]
    if isinstance(n, int):
        small.num_key_value_heads = _kv_heads(n, heads if isinstance(heads, int) else n, 4)
    for name, value in list(vars(small).items()):
        by_layer = any(word in name for word in ("layer", "type", "block", "pattern"))
        if (
            by_layer
            and isinstance(value, (list, tuple))
            and len(value) == real["num_hidden_layers"]
        ):
            setattr(small, name, type(value)(value[i] for i in at))
    small.num_hidden_layers = n_layers
    # Other names of the number of layers: LongCat's (its num_hidden_layers counts a layer with two
    # attentions twice), xLSTM's, and BART's (its num_hidden_layers counts the encoder's layers).
    for name in ("num_layers", "num_blocks", "decoder_layers"):
        if isinstance(vars(small).get(name), int):
            setattr(small, name, n_layers)
    sharing = getattr(small, "num_kv_shared_layers", None)
    if sharing:  # the last layers use keys of earlier ones
        small.num_kv_shared_layers = sum(i >= real["num_hidden_layers"] - sharing for i in at)
    for name in IDS:
        if isinstance(getattr(small, name, None), int):
            setattr(small, name, 0)
    for rope in _rope_tables(small):
        _scale_rotation(small, rope, latent)
    by_layer = config.to_dict().get("per_layer_config")
    if by_layer:  # sizes of single layers that differ from the config
        given = {int(i): values for i, values in by_layer.items()}
        small.per_layer_config = {
            i: _scaled_override(given[n], config) for i, n in enumerate(at) if n in given
        }
    put(*attention_row(small, "eager"))
    run_experts_plainly(small)
    return small


def _scale_rotation(small, rope: dict, latent: bool) -> None:
    """Scales a table of RoPE settings to SIZES. latent: head_dim is the rotated part alone."""
    if "original_max_position_embeddings" in rope:
        rope["original_max_position_embeddings"] = SIZES["original_max_position_embeddings"]
    if latent and "partial_rotary_factor" in rope:
        rope["partial_rotary_factor"] = 1.0
    width = _value(small, "head_dim") or SIZES["hidden_size"] // SIZES["num_attention_heads"]
    share = rope.get("partial_rotary_factor") or _value(small, "partial_rotary_factor") or 1.0
    pairs = max(1, round(width * share / 2))
    if share != 1.0 and isinstance(rope.get("partial_rotary_factor"), float):
        rope["partial_rotary_factor"] = 2 * pairs / width  # whole pairs, as of the real width
    for name, value in rope.items():
        if isinstance(value, (list, tuple)):  # one factor a rotated pair
            rope[name] = value[:pairs]
    if not any(isinstance(inner, dict) for inner in rope.values()):
        # Numbers of rotated pairs for height, width and time. ERNIE needs the first two equal.
        # Models without images do not read mrope_section.
        rope["mrope_section"] = [pairs * 3 // 8, pairs * 3 // 8, pairs - 2 * (pairs * 3 // 8)]


def _scaled_override(values: dict, config) -> dict:
    """The scaled sizes of one layer that overrides the config's: twice those of SIZES where the
    override is larger than the config's size."""
    found = dict(values)
    heads = values.get("num_attention_heads", _value(config, "num_attention_heads"))
    for name, value in values.items():
        if name in SIZES and isinstance(value, int):
            found[name] = SIZES[name] * (1 + (value > (_value(config, name) or value)))
    if "num_key_value_heads" in values:
        n = values["num_key_value_heads"]
        found["num_key_value_heads"] = _kv_heads(n, heads, found.get("num_attention_heads", 4))
    return found


def _kv_heads(n: int, heads: int, small_heads: int) -> int:
    """The KV heads of a small instance: one, as many as query heads, or two, as n of `heads` are."""
    if n == 1:
        return 1
    return small_heads if n == heads else 2


def _value(config, name: str):
    try:
        return getattr(config, name, None)
    except RuntimeError:  # a size that differs from layer to layer
        return vars(config).get(name)


def _rope_tables(config) -> list[dict]:
    tables = [
        t
        for n in ("rope_parameters", "rope_scaling")
        if isinstance(t := getattr(config, n, None), dict)
    ]
    return tables + [
        inner for table in tables for inner in table.values() if isinstance(inner, dict)
    ]


_NO_KIND = {"training", "gradient_checkpointing", "layer_idx", *SIZES}


def kind_of(layer: nn.Module) -> tuple:
    """A key for the kind of a layer: the classes in it, and the settings that their forwards branch
    on."""

    def settings(module):
        plain = (
            (n, v) for n, v in vars(module).items() if not n.startswith("_") and n not in _NO_KIND
        )

        def told(n, v):
            # 0 and 1 used as False and True
            switch = n.startswith(("use", "is", "has", "no")) or "rope" in n
            return v if isinstance(v, (bool, str)) or switch and v in (0, 1) else v is None

        return tuple(sorted((n, told(n, v)) for n, v in plain
                            if isinstance(v, (bool, str, int)) or v is None))  # fmt: skip

    # Adapters, quantised projections and torch's own modules do not change a layer's kind.
    home = type(layer).__module__.split(".")[0]
    own = (
        (name, kind, m)
        for name, m in _without_adapters("", layer)
        if (kind := class_of(m)).__module__.split(".")[0] == home
    )
    return tuple(
        (name, vars(kind).get("_hfpatch_base", kind), settings(m))
        for name, kind, m in own
        if "experts." not in name
    )


def _without_adapters(name: str, module: nn.Module):
    """(name, module) of a module and of all in it. A wrapped module has its wrapper's name; of what
    else is in PEFT's wrappers (adapters, trained copies) there is nothing."""
    yield name, module
    for inner, m in module.named_children():
        if inner in WRAPPED:
            yield from _without_adapters(name, m)
        elif package_of(module) != "peft":
            yield from _without_adapters(f"{name}.{inner}" if name else inner, m)


@contextmanager
def quiet_process():
    """A context without the caller's random state, default dtype and device, autocast and global
    hooks, on one thread."""
    dtype = torch.get_default_dtype()
    cpu_state = torch.get_rng_state()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)  # on tiny tensors threads would only wait for each other
        torch.set_default_dtype(torch.float32)
        quiet = torch.autocast("cpu", enabled=False)
        with torch.device("cpu"), torch.enable_grad(), quiet, unwatched():
            torch.default_generator.manual_seed(0)
            yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_rng_state(cpu_state)
        torch.set_num_threads(threads)


def small_stack(stack_class: type, config, kinds: list[tuple]) -> nn.Module:
    """A stack of class stack_class in training mode, with weights of ordinary size.

    The stack has the first layers of the real one, up to the layer that completes the kinds. If
    those are more than MOST_LAYERS, it has one layer of each kind, by the config's lists. If the
    class cannot be built that way, a base class with the same forward is built.

    Args:
        stack_class: the class of the real stack.
        config: its config.
        kinds: the kinds of the real layers, in order.

    Raises:
        ValueError: an instance would be too large, or made of other modules. Errors of the class
            itself pass through.
    """
    taken = inspect.signature(stack_class.forward).parameters
    if "hidden_states" in taken and "input_ids" not in taken:
        raise ValueError(f"a {stack_class.__name__} takes hidden states, no token ids")
    bases = [c for c in stack_class.__mro__ if getattr(c, "forward", None) is stack_class.forward]
    first_error = None
    for base, (derived, twice) in product(bases, ((False, False), (True, False), (True, True))):
        try:
            return _small_stack(base, config, kinds, base is stack_class, derived, twice)
        except Exception as error:  # a user's own __init__ may need any argument
            first_error = first_error or error
    raise first_error


def _small_stack(
    stack_class: type, config, kinds: list[tuple], exact: bool, derived: bool, twice: bool
) -> nn.Module:
    """One attempt of small_stack.

    Args:
        exact: stack_class is the real stack's class.
        derived: the config computes its derived sizes again (Zamba 2's head sizes), and the stack
            has at least two layers (RWKV initialises weights by a layer's share of the depth).
        twice: the stack has the second layer of each kind too, where there is one (Zamba's share
            weights, and one alone is refused).
    """
    at = {kinds.index(kind) for kind in kinds}
    if twice:
        at |= {i for i in range(len(kinds)) if kinds[:i].count(kinds[i]) == 1}
    at = sorted(at)
    n_layers = max(at[-1] + 1, 1 + derived)
    exact = exact and n_layers <= MOST_LAYERS
    if len(at) > MOST_LAYERS:
        raise ValueError(f"it has {len(at)} kinds of layers")
    small = (
        scaled_config(config, n_layers)
        if n_layers <= MOST_LAYERS
        else scaled_config(config, len(at), at)
    )
    if derived:
        small.__post_init__()
    with torch.device("meta"):
        empty = stack_class(small)
    parameters = sum(p.numel() for p in empty.parameters())
    if parameters > MOST_PARAMETERS:
        raise ValueError(f"a small instance would have {parameters:,} parameters")
    made_of = lambda kinds: {made for kind in kinds for _, made, _ in kind}  # noqa: E731
    if not exact and not made_of(kinds) <= made_of(
        kind_of(layer) for layer in list_of_layers(empty)
    ):
        raise ValueError(
            f"its kinds of layers, first occurring in the first {n_layers}, are made of other "
            "modules"
        )
    made = stack_class(small)
    with torch.no_grad():
        for p in made.parameters():
            if p.dim() < 2:
                p.add_(0.1 * torch.randn_like(p))
            else:
                p.copy_(torch.randn_like(p) * min(p.shape[-1], p.shape[-2]) ** -0.5)
        # Sizes that do not fit raise here. A copy runs, because a family may keep states from call
        # to call (RecurrentGemma).
        copy.deepcopy(made.train())(input_ids=torch.zeros(1, 4, dtype=torch.long), use_cache=False)
    return made
