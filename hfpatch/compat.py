"""Every private name of torch, transformers, accelerate and DeepSpeed that the package needs: a function each, with what
happens where the name is gone (tests/test_compat.py takes each away, and finds private names elsewhere).

Names are looked up when they are used: one that is gone costs what needs it, never `import hfpatch`.
"""

import sys
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor, nn


def _gone(name: str, instead: str) -> RuntimeError:
    return RuntimeError(f"hfpatch: expected a torch that has {name}, {torch.__version__} has not; {instead}.")


# --- torch: autograd and storages ----------------------------------------------------------------------------------------


def keeps_graph() -> bool:
    """Whether the backward under way was called with retain_graph; True, which only holds memory longer, where unknown."""
    try:
        return torch._C._autograd._get_current_graph_task_keep_graph()
    except AttributeError:
        return True


def transforming() -> bool:
    """Whether a transform of torch.func (grad, vjp, vmap) runs; False where unknown."""
    return getattr(torch._C, "_are_functorch_transforms_active", lambda: False)()


def graph_task() -> int:
    """Tells one backward pass from another; -1 outside of one, and where unknown."""
    return getattr(torch._C, "_current_graph_task_id", lambda: -1)()


def autograd_node():
    """The node of the backward graph that runs now, None outside of a backward. Of simulations. RuntimeError where gone."""
    try:
        return torch._C._current_autograd_node()
    except AttributeError:
        raise _gone("_current_autograd_node", "simulate with another version") from None


def sequence_number(node=None) -> int:
    """That of a node, or of the next node that a forward makes. Of simulations. RuntimeError where gone."""
    try:
        return torch.autograd._get_sequence_nr() if node is None else node._sequence_nr()
    except AttributeError:
        raise _gone("_sequence_nr", "simulate with another version") from None


def holders(x: Tensor) -> tuple[int, int]:
    """How many hold this tensor and its storage in C++; numbers that nothing is below where unknown."""
    try:
        return x._use_count(), torch._C._storage_Use_Count(x.untyped_storage()._cdata)
    except AttributeError:
        return sys.maxsize, sys.maxsize


def version(x: Tensor) -> int:
    """How often x was written to in place; inference tensors do not count, 0 where unknown."""
    return 0 if x.is_inference() else getattr(x, "_version", 0)


def storage_of(x: Tensor) -> int | None:
    """Which storage x lies in, as a number; None where unknown (a simulated tensor's, another library's class)."""
    try:
        return x.untyped_storage()._cdata
    except (AttributeError, NotImplementedError, RuntimeError):
        return None


def same_storage(a: Tensor, b: Tensor) -> bool:
    """Whether both are views of one storage; a simulated tensor has no address."""
    try:
        return a.untyped_storage()._cdata == b.untyped_storage()._cdata
    except AttributeError:
        return a is b or a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() != 0


# --- torch: the dispatcher -------------------------------------------------------------------------------------------------


def below_autograd():
    """(context, keys, backends) with which an op's autograd registration calls its implementation, directly where a backend's
    key is the first that is left (no mode, no subclass looks on); None where torch has no such thing."""
    try:
        key = torch._C.DispatchKey
        return torch._C._AutoDispatchBelowAutograd, torch._C._after_autograd_keyset, (key.CPU, key.CUDA)
    except AttributeError:
        return None


def applying(function):
    """An autograd function's `apply`, without its look at each argument for what torch.func has left behind: that of the class
    above torch.autograd.Function, or the function's own where a transform is active or torch has other names."""
    active, plain = (
        getattr(torch._C, "_are_functorch_transforms_active", None),
        super(torch.autograd.Function, function),
    )
    if active is None or not hasattr(plain, "apply"):
        return function.apply
    plain = plain.apply
    return lambda *args: function.apply(*args) if active() else plain(*args)


def backward_from(outputs: tuple, grads: tuple) -> None:
    """torch.autograd.backward with a gradient for each output, without its checks, which take longer than a small graph."""
    engine = getattr(torch.autograd.Variable, "_execution_engine", None)
    if engine is None:
        torch.autograd.backward(outputs, grads)
    else:
        engine.run_backward(outputs, grads, False, False, (), allow_unreachable=True, accumulate_grad=True)


class _Aten:
    """torch.ops.aten; an operator that is gone raises RuntimeError, which is how a backend that cannot run says so."""

    def __getattr__(self, name: str):
        try:
            return getattr(torch.ops.aten, name)
        except AttributeError:
            raise _gone(f"aten::{name}", 'use apply(model, checkpointing="off")') from None


aten = _Aten()


def has_kernel(name: str) -> bool:
    """Whether torch has the operator aten::name."""
    return hasattr(torch.ops.aten, name)


def flex_operators() -> tuple | None:
    """(forward, backward, BlockMask) of flex_attention, as operators that can be called apart; None where torch has them not."""
    try:
        from torch.nn.attention.flex_attention import BlockMask

        return torch.ops.higher_order.flex_attention, torch.ops.higher_order.flex_attention_backward, BlockMask
    except (ImportError, AttributeError):
        return None


def compiled_for(function, args: list[Tensor], backend: str = "inductor"):
    """A function of tensors without a gradient, compiled for tensors shaped like these. RuntimeError where names are gone.

    torch.compile cannot be asked: it takes the backward of flex_attention from its own forward alone.
    """
    try:
        from torch._dynamo import lookup_backend
        from torch.fx.experimental.proxy_tensor import make_fx
    except ImportError as error:
        raise _gone(str(error), "use another version") from None
    return lookup_backend(backend)(make_fx(function, tracing_mode="fake")(*args), args)


def flash3():
    """FlashAttention-3's functions under the names of the operators that they stand for, as torch would register them for the
    whole process. RuntimeError, which is how a backend that cannot run says so, where its package is not installed."""
    try:
        from torch.nn.attention import _fa3

        _fa3._fa3_import_module("flash_attn_interface")
        forward = _fa3._fa3_scaled_dot_product_flash_attention_forward_impl_default
        backward = _fa3._fa3_scaled_dot_product_flash_attention_backward_impl
    except (ImportError, AttributeError) as error:
        raise _gone(f"FlashAttention-3 ({error})", "install flash_attn_interface") from None
    return SimpleNamespace(
        _scaled_dot_product_flash_attention=forward, _scaled_dot_product_flash_attention_backward=backward
    )


def int8_product(a: Tensor, b: Tensor) -> Tensor:
    """int8 [m, k] times int8 [k, n]: int32 [m, n]. Of simulations; without torch's own, by way of float64, exact too."""
    product = getattr(torch, "_int_mm", None)
    return (a.double() @ b.double()).to(torch.int32) if product is None else product(a, b)


def assert_async(holds: Tensor, message: str) -> None:
    """A check on the device that the host does not wait for; none where torch has no such thing."""
    check = getattr(torch, "_assert_async", None)
    if check is not None:
        check(holds, message)


def is_fake(x) -> bool:
    """Whether a tensor has no data, as in a simulation."""
    try:
        from torch._subclasses.fake_tensor import is_fake as found
    except ImportError:
        return type(x).__name__ == "FakeTensor"
    return found(x)


def real_tensors():
    """A context in which torch computes, also under a dispatch mode that only follows shapes (a simulation on fake tensors)."""
    try:
        from torch.utils._python_dispatch import _disable_current_modes
    except ImportError:
        return nullcontext()
    return _disable_current_modes()


def schema_of(op):
    """An operator's schema."""
    return op._schema


@contextmanager
def shapes_of_out_dtype():
    """Within, addmm with out_dtype into a given tensor can be followed on fake tensors.

    torch 2.11 decomposes it with the dtype in beta's place. Without torch's tables of shape functions nothing is changed.
    """
    try:
        from torch._decomp import meta_table
        from torch._subclasses.fake_impls import op_implementations_dict as fakes
    except ImportError:
        yield
        return
    op = getattr(torch.ops.aten.addmm, "dtype_out", None)
    if op is None or op in meta_table or op in fakes:
        yield
        return
    # What stands in the first table is not decomposed; the second says what it gives.
    meta_table[op], fakes[op] = None, lambda mode, func, *args, out, **kwargs: out
    try:
        yield
    finally:
        del meta_table[op], fakes[op]


def simulation_parts():
    """(FakeTensorMode, FakeTensor, the context of a kernel on fake tensors, TorchDispatchMode). RuntimeError where gone."""
    try:
        from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
        from torch.utils._python_dispatch import TorchDispatchMode
    except ImportError as error:
        raise _gone(f"fake tensors ({error})", "simulate with another version") from None
    return FakeTensorMode, FakeTensor, in_kernel_invocation_manager, TorchDispatchMode


def record_allocations(start: bool) -> None:
    """Starts, or ends, the CUDA allocator's own history; none where torch has no such thing."""
    record = getattr(torch.cuda.memory, "_record_memory_history", None)
    if record is not None:
        record(max_entries=1_000_000, stacks="python") if start else record(enabled=None)


def dump_allocations(path: str) -> bool:
    """Writes that history; False where torch has no such thing."""
    dump = getattr(torch.cuda.memory, "_dump_snapshot", None)
    if dump is None:
        return False
    dump(path)
    return True


# --- torch: modules and trees ------------------------------------------------------------------------------------------------


def parameters_of(module: nn.Module) -> dict:
    """The module's own parameters by name, to read and to write. RuntimeError where torch keeps them otherwise."""
    try:
        return vars(module)["_parameters"]
    except KeyError:
        raise _gone("Module._parameters", "use another version") from None


def buffers_of(module: nn.Module) -> dict:
    """The same of buffers."""
    return vars(module).get("_buffers", {})


def modules_of(module: nn.Module) -> dict:
    """The module's children by name, those that are None too."""
    return vars(module).get("_modules") or dict(module.named_children())


def twin_of(module: nn.Module, parameters: dict, modules: dict) -> nn.Module:
    """A module of the same class and settings with other parameters and children."""
    twin = module.__class__.__new__(module.__class__)
    vars(twin).update(vars(module))
    vars(twin).update(_parameters=dict(parameters), _modules=dict(modules))
    return twin


def forward_hooks(module: nn.Module) -> list:
    """Hooks that run behind the module's forward."""
    return list(vars(module).get("_forward_hooks", {}).values())


def other_hooks(module: nn.Module) -> list:
    """Hooks that run before the module's forward, and around its backward."""
    names = ("_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [hook for name in names for hook in vars(module).get(name, {}).values()]


_SERVE_ANY_OUTPUT = ("torch.distributed", "deepspeed", "accelerate", "transformers", "hfpatch")


def _home(hook) -> str:
    """The module in which a hook was written."""
    while isinstance(hook, partial):
        hook = hook.func
    inner = getattr(hook, "__func__", hook)
    return getattr(inner, "__globals__", {}).get("__name__") or type(inner).__module__


def user_hooks(module: nn.Module, hooks=None) -> list:
    """Hooks on this module (or of `hooks`) but for those of engines and transformers, which read no values."""
    hooks = forward_hooks(module) + other_hooks(module) if hooks is None else hooks
    return [h for h in hooks if not _home(h).startswith(_SERVE_ANY_OUTPUT)]


def pytree():
    """torch's functions over nested containers. RuntimeError where gone."""
    try:
        from torch.utils import _pytree
    except ImportError:
        raise _gone("torch.utils._pytree", "use another version") from None
    return _pytree


# --- transformers --------------------------------------------------------------------------------------------------------------


def record_outputs_like(made: type, base: type) -> None:
    """What output_hidden_states and its like record is looked up by the class's full name: `made` records what `base` does.

    Without the registry, recording is by attribute, which a subclass inherits.
    """
    try:
        from transformers.modeling_utils import _CAN_RECORD_REGISTRY
    except ImportError:
        return
    found = getattr(base, "_can_record_outputs", None)
    if found is not None:
        dict.__setitem__(_CAN_RECORD_REGISTRY, str(made), found)


def _collector():
    """transformers' variable that holds what output_hidden_states, output_router_logits and their like collect, or None."""
    try:
        from transformers.utils.output_capturing import _active_collector
    except ImportError:
        return None
    return _active_collector


def collected_now() -> dict:
    """The lists that recorded outputs are added to in the forward under way; empty where nothing is recorded."""
    collector = _collector()
    return (None if collector is None else collector.get()) or {}


@contextmanager
def collecting(lists: dict):
    """Within, recorded outputs are added to these lists."""
    collector = _collector()
    if collector is None:
        yield
        return
    token = collector.set(lists)
    try:
        yield
    finally:
        collector.reset(token)


def attention_of(config) -> str | None:
    """Which attention a config names; None where it names none."""
    return getattr(config, "_attn_implementation", None)


def names_attention(config) -> bool:
    """Whether models read from this config which attention to run."""
    return hasattr(config, "_attn_implementation")


def name_attention(config, name: str | None) -> str | None:
    """Lets this config alone name another attention (the property's setter writes into its sub-configs); the one before."""
    field = "_attn_implementation_internal"
    if not hasattr(config, field):
        field = "_attn_implementation"
    before = getattr(config, field, None)
    setattr(config, field, name)
    return before


def run_experts_plainly(config) -> None:
    """Experts one by one: grouped matmuls know no float64."""
    if hasattr(config, "_experts_implementation_internal"):
        config._experts_implementation_internal = "eager"


def asks_inputs_for_gradients(module: nn.Module) -> bool:
    """Whether enable_input_require_grads() was called on this model and not taken back."""
    known = vars(module)
    return bool(known.get("_require_grads_hooks")) or "_require_grads_hook" in known


def own_loss(model: nn.Module):
    """The loss function that somebody set on this model, None where none was."""
    return vars(model).get("_loss_function")


def set_own_loss(model: nn.Module, function) -> None:
    """The same, as transformers' own setter has it."""
    vars(model)["_loss_function"] = function


# --- accelerate, DeepSpeed, FSDP ------------------------------------------------------------------------------------------------


def engine_hook(module: nn.Module):
    """accelerate's hook on a module, or None."""
    return vars(module).get("_hf_hook")


def hooked_forward(module: nn.Module) -> str:
    """The attribute that holds the forward which a call of the module runs in the end: accelerate's hooks set it aside."""
    own = vars(module)
    return "_old_forward" if "_hf_hook" in own and "_old_forward" in own else "forward"


def forward_before_wrapping(module: nn.Module):
    """The forward that accelerate's mixed precision wrapped on this instance, or None."""
    return vars(module).get("_original_forward")


def drop_wrapped_forward(module: nn.Module) -> None:
    """Takes such a wrapper away."""
    del module.forward, module._original_forward


def under_zero3(module: nn.Module) -> bool:
    """Whether DeepSpeed holds shards of this module's parameters."""
    return any(map(is_sharded_by_zero3, module.parameters()))


def is_sharded_by_zero3(parameter: Tensor) -> bool:
    """Whether DeepSpeed holds shards of this parameter."""
    return hasattr(parameter, "ds_id")


def gather_as_one(layer: nn.Module, wanted: bool) -> None:
    """ZeRO-3 then gathers the layer once, not for every tile (deepspeed.utils.set_z3_leaf_modules sets the same); or no more."""
    if wanted:
        layer._z3_leaf = True
    else:
        vars(layer).pop("_z3_leaf", None)


def local_part(parameter: Tensor) -> Tensor:
    """The rank's own part: FSDP2's local tensor, DeepSpeed's partition, or the tensor itself."""
    parameter = getattr(parameter, "ds_tensor", parameter)
    return getattr(parameter, "_local_tensor", parameter)


def not_for_ddp(model: nn.Module, names=None) -> None:
    """DistributedDataParallel asks the model for names of tensors that it neither broadcasts nor wants on its device; a set of
    somebody else's stays. names: an iterable, which is asked anew each time; None takes back what was set here."""
    own, name = vars(model), "_ddp_params_and_buffers_to_ignore"
    if names is not None:
        own.setdefault(name, names)
    elif hasattr(own.get(name), "_hfpatch"):
        del own[name]


def is_flat(parameter: Tensor) -> bool:
    """Whether FSDP1 holds this parameter as one of many in a row."""
    return hasattr(parameter, "_is_flat_param")


def is_view_of_flat(tensor: Tensor) -> bool:
    """Whether a tensor is FSDP1's view into such a row."""
    return hasattr(tensor, "_fsdp_flattened")


@contextmanager
def plain_construction():
    """Within, modules are made as torch makes them, also under DeepSpeed's zero.Init."""
    partition = sys.modules.get("deepspeed.runtime.zero.partition_parameters")
    active = partition is not None and getattr(partition, "zero_init_context", None)
    if not active:
        yield
        return
    partition.shutdown_init_context()
    try:
        yield
    finally:
        partition.restore_init_context()


def _variable(function, name: str):
    """What a closure holds under a name, or None."""
    code = getattr(function, "__code__", None)
    if code is None or name not in code.co_freevars:
        return None
    return function.__closure__[code.co_freevars.index(name)].cell_contents


def ulysses(attention):
    """(process group, whether evaluation is left alone) of an attention function that DeepSpeed's Ulysses put in place; None for
    any other."""
    found = _variable(attention, "uattn")
    if found is None or not hasattr(found, "process_group"):
        return None
    return found.process_group, bool(getattr(found, "disable_in_eval", False))


def context_parallel():
    """(process group, whether shards are zigzag) of torch's context_parallel that is entered now; None outside."""
    for name in ("_context_parallel._attention", "_attention"):
        module = sys.modules.get(f"torch.distributed.tensor.experimental.{name}")
        if hasattr(module, "_replaced_functions"):
            sdpa = sys.modules["torch.nn.functional"].scaled_dot_product_attention
            if sdpa not in module._replaced_functions:
                return None
            mesh = _variable(sdpa, "device_mesh")
            return None if mesh is None else (mesh.get_group(), bool(module._cp_options.enable_load_balance))
    return None


def deepspeed_config() -> dict:
    """DeepSpeed's settings as accelerate holds them; empty where it runs without DeepSpeed, or not at all."""
    state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    if state is None or not getattr(state, "_shared_state", None):
        return {}
    plugin = getattr(state(), "deepspeed_plugin", None)
    return getattr(plugin, "deepspeed_config", None) or {}


def skips_by_itself(kind: type) -> None:
    """Resuming in the middle of an epoch, Trainer asks loaders of this kind for `skipping(n)`, others as ever."""
    from transformers import trainer

    before = getattr(trainer, "skip_first_batches", None)
    if before is None or hasattr(before, "_hfpatch"):
        return

    def skip_first_batches(loader, num_batches=0):
        return loader.skipping(num_batches) if isinstance(loader, kind) else before(loader, num_batches)

    skip_first_batches._hfpatch = True
    trainer.skip_first_batches = skip_first_batches


# --- TRL and PEFT ---------------------------------------------------------------------------------------------------------------


def trl_fused_head(forward) -> tuple | None:
    """What TRL's add_fused_lm_head was asked for, where `forward` is the bound method that it made; None for any other.

    In this order: the class of what it returns, outputs, temperature, scale, softcap, whether in float32, the backbone's attribute,
    the text config. They stand in its closure alone; where a later TRL calls them otherwise, its own head runs.
    """
    function = getattr(forward, "__func__", None)
    if getattr(function, "__globals__", {}).get("__name__") != "trl.trainer.utils":
        return None
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
    names = ("outputs", "temperature", "logit_scale", "final_logit_softcapping", "cast_lm_head_to_fp32", "backbone_attr",
             "text_config")  # fmt: skip
    if "FusedCausalLMOutput" not in function.__globals__ or not set(names) <= set(cells):
        return None
    return function.__globals__["FusedCausalLMOutput"], *(cells[n].cell_contents for n in names)


def asks_for_input_gradients(hook) -> bool:
    """Whether a forward hook on an embedding is that of enable_input_require_grads(); under another name it stays in force."""
    of = (getattr(hook, "__module__", None) or "").partition(".")[0]
    return of in ("transformers", "peft", "trl") and hook.__name__ in (
        "make_inputs_require_grads",
        "make_inputs_require_grad",
    )


def caller_reads_logits() -> bool:
    """Whether the forward under way was called by PEFT's CPT, which computes its loss from outputs.logits itself."""
    frame = sys._getframe(1) if "peft" in sys.modules else None
    while frame is not None:
        if frame.f_code.co_name == "_cpt_forward" and frame.f_globals.get("__name__") == "peft.peft_model":
            return True
        frame = frame.f_back
    return False
