"""A scaled-down instance of a decoder stack: the same class, at most 5M parameters, and the first
layers until every kind occurred (one of each kind if those are more than 16).
"""

import copy
import random
from contextlib import contextmanager, suppress
from itertools import product

import numpy
import torch
from torch import nn

from hfpatch.compat import (
    attention_row,
    put,
    run_experts_plainly,
    unwatched,
)
from hfpatch.context.class_code import is_own
from hfpatch.context.classes import home_of, package_of
from hfpatch.decoder.find import list_of_layers
from hfpatch.parts.quantised import WRAPPED, class_of

MOST_PARAMETERS = 5_000_000
MOST_LAYERS = 16
# Longer than the window, the chunk and the original positions below, so that each has an effect.
TOKENS = 40

# Values in a small instance, and the names of the sizes in configs that get them. Absent sizes stay
# absent, None stays None. Where a config has one size under two names, the last one counts.
_NAMES = {
    96: """
        intermediate_size intermediate_size_mlp ffn_hidden_size ffn_dim decoder_ffn_dim
        encoder_ffn_dim
    """,
    0: "pad_token_id bos_token_id eos_token_id",
    1: "n_group topk_group mamba_n_groups n_groups",
    2: """
        num_experts_per_tok num_experts_per_token moe_k moe_topk top_k_experts
        linear_num_key_heads index_n_heads index_topk_blocks index_kpool indexer_n_heads
        indexer_compress_ratio
    """,
    4: """
        num_attention_heads decoder_attention_heads encoder_attention_heads num_experts
        num_local_experts n_routed_experts moe_num_experts linear_num_value_heads
        linear_num_heads
    """,
    8: """
        attention_window_size qk_rope_head_dim sliding_window attention_chunk_size
        linear_key_head_dim linear_value_head_dim mamba_n_heads mamba_num_heads
        mamba_d_state ssm_state_size mamba_chunk_size chunk_size mamba_dt_rank num_heads
        rotary_dim linear_head_dim sliding_window_size index_topk index_block_size
        indexer_budget keep_window_size window_size block_size
    """,
    16: """
        head_dim global_head_dim hidden_size_per_layer_input kv_lora_rank qk_nope_head_dim
        v_head_dim original_max_position_embeddings mamba_d_head mamba_head_dim
        swa_head_dim rel_extent index_head_dim indexer_head_dim local_attention
    """,
    24: "q_lora_rank qk_head_dim",
    32: """
        moe_intermediate_size shared_expert_intermediate_size
        shared_experts_intermediate_size
    """,
    64: """
        hidden_size word_embed_proj_dim lru_width embedding_dim vocab_size
        vocab_size_per_layer_input max_position_embeddings
    """,
    128: "mamba_d_ssm",
}
SIZES = {name: size for size, names in _NAMES.items() for name in names.split()}


def scaled_config(config, n_layers: int, at=None):
    """A copy of a text config with the values of SIZES and n_layers layers.

    at: the indices that lists with one entry a layer keep; by default the first n_layers.
    """
    at = range(n_layers) if at is None else at
    # [Step 1] Copy the config. Read the real sizes that are needed below, before they change.
    small = copy.deepcopy(config)
    real_layers = _value(small, "num_hidden_layers")
    kv_heads = _value(small, "num_key_value_heads")
    heads = _value(small, "num_attention_heads")
    # [Step 2] Give each size its small value. Latent attention's head dim and the KV heads depend
    # on other sizes.
    for name, size in SIZES.items():
        value = _value(small, name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            with suppress(AttributeError):  # a property that follows from others
                setattr(small, name, size)
        elif isinstance(value, (list, tuple)) and len(value) == real_layers:
            setattr(small, name, type(value)(size for _ in at))
    latent = all(isinstance(_value(small, name), int) for name in ("qk_rope_head_dim", "head_dim"))
    if latent:
        # With latent attention, head_dim is the rotated part alone.
        small.head_dim = SIZES["qk_rope_head_dim"]
    if isinstance(kv_heads, int):
        heads = heads if isinstance(heads, int) else kv_heads
        small.num_key_value_heads = _kv_heads(kv_heads, heads, 4)
    # [Step 3] Turn randomness off, and cut lists with one entry a layer to the layers that are
    # kept.
    for name, value in list(vars(small).items()):
        draws = any(word in name for word in ("dropout", "pdrop", "jitter"))
        by_layer = any(word in name for word in ("layer", "type", "block", "pattern"))
        if draws and isinstance(value, float):
            setattr(small, name, 0.0)  # random results cannot be compared
        elif by_layer and isinstance(value, (list, tuple)) and len(value) == real_layers:
            setattr(small, name, type(value)(value[i] for i in at))
    # [Step 4] Set the number of layers, and how many of them share keys.
    small.num_hidden_layers = n_layers
    # Other names of the number of layers: LongCat's (its num_hidden_layers counts a layer with two
    # attentions twice), xLSTM's, and BART's (its num_hidden_layers counts the encoder's layers).
    for name in ("num_layers", "num_blocks", "decoder_layers"):
        if isinstance(vars(small).get(name), int):
            setattr(small, name, n_layers)
    sharing = getattr(small, "num_kv_shared_layers", None)
    if sharing:  # the last layers use keys of earlier ones
        small.num_kv_shared_layers = sum(i >= real_layers - sharing for i in at)
    # [Step 5] Scale the rotation and the overrides of single layers. Then choose plain attention
    # and plain experts, which run in float64.
    for rope in _rope_tables(small):
        _scale_rotation(small, rope, latent)
    by_layer = config.to_dict().get("per_layer_config")
    if by_layer:  # sizes of single layers that differ from the config
        overrides = {int(i): values for i, values in by_layer.items()}
        small.per_layer_config = {
            i: _scaled_override(overrides[n], config) for i, n in enumerate(at) if n in overrides
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
        side = pairs * 3 // 8
        rope["mrope_section"] = [side, side, pairs - 2 * side]


def _scaled_override(values: dict, config) -> dict:
    """The scaled sizes of one layer that overrides the config's: twice those of SIZES where the
    override is larger than the config's size."""
    scaled = dict(values)
    heads = values.get("num_attention_heads", _value(config, "num_attention_heads"))
    for name, value in values.items():
        if name in SIZES and isinstance(value, int):
            scaled[name] = SIZES[name] * (1 + (value > (_value(config, name) or value)))
    if "num_key_value_heads" in values:
        n = values["num_key_value_heads"]
        scaled["num_key_value_heads"] = _kv_heads(n, heads, scaled.get("num_attention_heads", 4))
    return scaled


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
    named = (getattr(config, name, None) for name in ("rope_parameters", "rope_scaling"))
    tables = [table for table in named if isinstance(table, dict)]
    return tables + [x for table in tables for x in table.values() if isinstance(x, dict)]


_NO_KIND = {"training", "gradient_checkpointing", "layer_idx", *SIZES}


def kind_of(layer: nn.Module) -> tuple:
    """A key for the kind of a layer: the classes in it, and the settings that their forwards branch
    on."""

    # Adapters, quantised projections and torch's own modules do not change a layer's kind.
    home = type(layer).__module__.split(".")[0]
    rows = []
    for name, module in _without_adapters("", layer):
        kind = class_of(module)
        if kind.__module__.split(".")[0] == home and "experts." not in name:
            base = vars(kind).get("_hfpatch_base", kind)
            rows.append((name, base, _settings(module, home != "transformers")))
    return tuple(rows)


def _settings(module: nn.Module, own: bool) -> tuple:
    """The (name, value) pairs of a module's settings. own: of a user's class, whose floats count by
    whether they are 0. An integer counts by whether it is None.
    """
    settings = {}
    for name, value in vars(module).items():
        number = own and isinstance(value, float) and "drop" not in name
        if (
            name[0] == "_"
            or name in _NO_KIND
            or not (number or isinstance(value, str | int | None))
        ):
            continue
        switch = name.startswith(("use", "is", "has", "no")) or "rope" in name
        if number:
            settings[name] = value == 0
        elif isinstance(value, bool | str) or (switch and value in (0, 1)):  # 0 as False, 1 as True
            settings[name] = value
        else:
            settings[name] = value is None
    return tuple(sorted(settings.items()))


def numbers_of(layer: nn.Module) -> dict[tuple[str, str], int]:
    """(module, attribute) -> value, of the integers in a user's own layer that are no sizes."""
    return {
        (name, attribute): value
        for name, module in (_without_adapters("", layer) if is_own(layer) else ())
        if home_of(class_of(module)) != "torch" and "experts." not in name
        for attribute, value in vars(module).items()
        if type(value) is int and attribute[0] != "_" and attribute not in SIZES
    }


def _without_adapters(name: str, module: nn.Module):
    """(name, module) of a module and of all in it. A wrapped module has its wrapper's name. What else
    is in PEFT's wrappers (adapters, trained copies) is skipped."""
    yield name, module
    for inner, m in module.named_children():
        if inner in WRAPPED:
            yield from _without_adapters(name, m)
        elif package_of(module) != "peft":
            yield from _without_adapters(f"{name}.{inner}" if name else inner, m)


def other_generators() -> tuple:
    """The states of Python's and of NumPy's random number generator."""
    return random.getstate(), numpy.random.get_state()


@contextmanager
def quiet_process():
    """A context for probes: without the caller's random state of torch, default dtype and device,
    inference mode, autocast and global hooks, on one thread."""
    dtype = torch.get_default_dtype()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)  # on tiny tensors threads would only wait for each other
        torch.set_default_dtype(torch.float32)
        with (
            torch.device("cpu"),
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast("cpu", enabled=False),
            torch.random.fork_rng(devices=[]),
            unwatched(),
        ):
            torch.default_generator.manual_seed(0)
            yield
    finally:
        torch.set_default_dtype(dtype)
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
    bases = [c for c in stack_class.__mro__ if getattr(c, "forward", None) is stack_class.forward]
    first_error = None
    tries = ((False, False), (True, False), (True, True))
    for base, (derived, twice) in product(bases, tries):
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
    # [Step 1] Choose the layers: the first of each kind, with `twice` also the second. Where these
    # are among the first MOST_LAYERS, all layers up to the last of them stay.
    times = (0, 1) if twice else (0,)
    at = [i for i, kind in enumerate(kinds) if kinds[:i].count(kind) in times]
    n_layers = max(at[-1] + 1, 1 + derived)
    exact = exact and n_layers <= MOST_LAYERS
    if n_layers <= MOST_LAYERS:
        at = range(n_layers)
    # [Step 2] Build the stack without memory, and refuse one that is too large or made of other
    # modules.
    small = scaled_config(config, len(at), at)
    if derived:
        small.__post_init__()
    with torch.device("meta"):
        empty = stack_class(small)
    parameters = sum(p.numel() for p in empty.parameters())
    if parameters > MOST_PARAMETERS:
        raise ValueError(f"a small instance would have {parameters:,} parameters")
    real = {module for kind in kinds for _, module, _ in kind}
    made = {module for layer in list_of_layers(empty) for _, module, _ in kind_of(layer)}
    if not exact and not real <= made:
        raise ValueError(
            f"its kinds of layers, first occurring in the first {n_layers}, are made of other "
            "modules"
        )
    # [Step 3] Build it with weights of ordinary size, and try it once.
    stack = stack_class(small)
    ids = torch.zeros(1, 4, dtype=torch.long)
    with torch.no_grad():
        for p in stack.parameters():
            noise = torch.randn_like(p)
            if p.dim() < 2:
                p.add_(0.1 * noise)
            else:
                p.copy_(noise * min(p.shape[-2:]) ** -0.5)
        # Sizes that do not fit raise here. A copy runs, because a family may keep states from call
        # to call (RecurrentGemma).
        copy.deepcopy(stack.train())(input_ids=ids, use_cache=False)
    return stack
