"""Private names of torch, transformers, accelerate and DeepSpeed: all in compat/, each with what
happens without it.
"""

import ast
import builtins
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hfpatch import compat
from hfpatch.lab import compat as of_lab
from hfpatch.trainer import compat as of_trainer

PACKAGE = Path(compat.__file__).parents[1]
# Names of the standard library, of JSON, of datasets and TRL, and what a Trainer's subclass
# overrides.
NOT_THEIRS = {
    "_exit",
    "_getframe",
    "_actions",
    "_option_string_actions",
    "_fields",
    "_name_or_path",
    "_fingerprint",
    "_load_best_model",
    "_is_sac_wrapped",
}


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith(("__", "_hfpatch"))


def foreign_names(tree: ast.AST, own: set) -> set[str]:
    """Private attributes and imports of a module's text that the package does not define itself."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and private(node.attr) and node.attr not in own:
            of_aten = isinstance(node.value, ast.Name) and node.value.id == "aten"
            found |= set() if of_aten else {node.attr}
        elif isinstance(node, ast.ImportFrom) and node.module.split(".")[0] in (
            "torch",
            "transformers",
            "accelerate",
            "deepspeed",
        ):
            found |= {
                n for n in [*node.module.split("."), *(a.name for a in node.names)] if private(n)
            }
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in (
            "getattr",
            "hasattr",
            "setattr",
            "delattr",
        ):
            name = node.args[1]
            if isinstance(name, ast.Constant) and private(name.value) and name.value not in own:
                found.add(name.value)
    return found


def test_private_names_stand_in_compat_alone():
    trees = {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    own = set()
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                own |= {node.attr} if getattr(node.value, "id", "") in ("self", "cls") else set()
    ours = [trees.pop(path) for path in list(trees) if "compat" in (path.stem, path.parent.name)]
    inside = set().union(*(foreign_names(tree, own) for tree in ours))
    assert len(inside) > 15  # the scan sees them
    outside = {
        f"{path.relative_to(PACKAGE)}: {n}"
        for path, t in trees.items()
        for n in foreign_names(t, own) - NOT_THEIRS
    }
    assert not outside


# --- each name taken away -------------------------------------------------------------------------


class Config:
    pass


def without_imports(monkeypatch, *modules):
    real = builtins.__import__

    def refuse(name, globals=None, locals=None, fromlist=(), level=0):
        if name in modules or any(f"{name}.{n}" in modules for n in fromlist or ()):
            raise ImportError(name)
        return real(name, globals, locals, fromlist, level)

    monkeypatch.setattr(builtins, "__import__", refuse)


def read_anew(path: str) -> dict:
    """The names of a module of compat, read again in a torch that lacks what a test took away."""
    found = {"__name__": "anew"}
    exec(compile(Path(path).read_text(), path, "exec"), found)
    return found


def test_what_was_put_somewhere_twice_goes_back_to_what_was_there():
    table = {"a": 1}
    with compat.values_for_now(
        [(table, "a", 2), (table, "a", 3), (table, "b", 4), (table, "b", 5)]
    ):
        assert table == {"a": 3, "b": 5}
    assert table == {"a": 1}


def test_autograd_names(monkeypatch):
    x = torch.ones(2)
    with monkeypatch.context() as patch:  # torch's own functions need them
        patch.delattr(torch._C._autograd, "_get_current_graph_task_keep_graph")
        patch.delattr(torch._C, "_current_graph_task_id")
        names = read_anew(compat.tensors.__file__)
    assert names["keeps_graph"]() is True  # held longer, never freed too early
    assert names["graph_task"]() == -1
    y = x.clone().requires_grad_()
    assert not compat.gradient_is_watched(y)
    y.register_hook(lambda grad: None)
    assert compat.gradient_is_watched(y) and not compat.gradient_is_watched(x)
    monkeypatch.delattr(torch._C, "_storage_Use_Count")
    assert compat.holders(x) == (sys.maxsize, sys.maxsize)
    from hfpatch.layer.privacy import is_private

    held = sys.getrefcount(x), *compat.holders(x)
    assert not is_private(x, held, held)  # copied, never overwritten
    monkeypatch.delattr(torch._C, "_AutoDispatchBelowAutograd")
    assert compat.below_autograd() is None
    monkeypatch.delattr(torch, "_assert_async")
    compat.assert_async(torch.tensor(False), "not said then")
    monkeypatch.delattr(torch, "_int_mm")
    a = torch.randint(-127, 127, (3, 5), dtype=torch.int8)
    assert torch.equal(
        of_lab.int8_product(a, a.t()), (a.int()[:, None] * a.int()).sum(2, dtype=torch.int32)
    )
    monkeypatch.delattr(torch._C, "_current_autograd_node")
    with pytest.raises(RuntimeError, match=r"^hfpatch: torch must have [^\n]*\.$"):
        of_lab.autograd_node()


def test_ops_are_registered_by_the_public_function_where_the_dispatcher_has_other_names():
    code = (
        "import torch; from hfpatch import compat; compat.below_autograd = lambda: None\n"
        "from hfpatch import ops\n"
        "x = torch.randn(3, 8, requires_grad=True); y = torch.randn(3, 8)\n"
        "ops.swiglu(x, y).sum().backward(); g = x.grad.clone(); x.grad = None\n"
        "(torch.nn.functional.silu(x) * y).sum().backward()\n"
        "assert torch.allclose(g, x.grad, atol=1e-6)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-1500:]


def test_fake_tensors_modes_and_trees(monkeypatch):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(2)
    without_imports(
        monkeypatch,
        "torch._subclasses.fake_tensor",
        "torch.utils._python_dispatch",
        "torch.utils._pytree",
    )
    is_fake = read_anew(compat.tensors.__file__)["is_fake"]
    assert is_fake is not compat.is_fake and is_fake(fake) and not is_fake(torch.ones(2))
    with compat.real_tensors():
        pass
    for parts in (of_lab.simulation_parts, compat.pytree):
        with pytest.raises(RuntimeError, match=r"^hfpatch: torch must have [^\n]*\.$"):
            parts()


def test_kernels_that_are_gone():
    with pytest.raises(
        RuntimeError, match=r'^hfpatch: torch must have aten::no_such[^\n]*"off"\)\.$'
    ):
        getattr(compat.aten, "no_such")  # noqa: B009
    assert (
        compat.aten.mm is torch.ops.aten.mm
        and compat.has_kernel("mm")
        and not compat.has_kernel("no_such")
    )


def test_attention_without_the_cpu_kernel_is_exact(monkeypatch):
    import tiny

    from hfpatch.attention import backends

    stock = tiny.llama()
    ours = tiny.patched(stock)
    monkeypatch.setattr(backends, "has_kernel", lambda name: False)
    monkeypatch.setitem(backends.BACKENDS, "cpu", None)
    tiny.assert_as_good(ours, stock, tiny.labelled())


def test_storages_are_told_apart_without_their_names():
    class Nameless(torch.Tensor):
        def untyped_storage(self):
            return object()

    x = torch.ones(4)
    assert compat.same_memory(x, x[:2]) and not compat.same_memory(x, x[1:])
    a, b = x.as_subclass(Nameless), x[:2].as_subclass(Nameless)
    assert compat.storage_of(a) is None
    assert compat.same_memory(a, a) and not compat.same_memory(a, b)


def test_modules():
    module = nn.Linear(2, 2)
    bare = type("Bare", (), {})()
    assert compat.parameters_of(module)["weight"] is module.weight
    assert (
        compat.forward_hooks(bare) == compat.other_hooks(bare) == []
        and compat.buffers_of(bare) == {}
    )
    with pytest.raises(RuntimeError, match=r"^hfpatch: torch must have Module._parameters"):
        compat.parameters_of(bare)
    del vars(module)["_modules"]
    module.named_children = lambda: [("child", None)]
    assert compat.modules_of(module) == {"child": None}


def test_a_gpu_is_kept_busy_where_it_can_be(monkeypatch):
    waits = []
    monkeypatch.setattr(torch.cuda, "_sleep", waits.append, raising=False)
    of_lab.keep_busy(5)
    monkeypatch.delattr(torch.cuda, "_sleep")
    of_lab.keep_busy(6)
    assert waits == [5]


def test_history_of_allocations(monkeypatch, tmp_path):
    monkeypatch.delattr(torch.cuda.memory, "_record_memory_history")
    monkeypatch.delattr(torch.cuda.memory, "_dump_snapshot")
    of_lab.record_allocations(True)
    assert of_lab.dump_allocations(str(tmp_path / "x")) is False


def test_names_of_transformers(monkeypatch):
    from transformers import LlamaConfig, MambaModel

    config = LlamaConfig()
    config._attn_implementation = "sdpa"
    assert (
        compat.name_attention(config, "other") == "sdpa" and compat.attention_of(config) == "other"
    )
    plain = Config()
    plain._attn_implementation = "sdpa"
    assert compat.name_attention(plain, "other") == "sdpa" and compat.attention_of(plain) == "other"
    assert compat.attention_of(Config()) is None and not compat.names_attention(Config())
    assert not compat.carries_states(Config) and compat.carries_states(MambaModel)
    compat.run_experts_plainly(plain)
    assert not hasattr(plain, "_experts_implementation_internal")
    assert compat.own_loss(nn.Linear(1, 1)) is None
    without_imports(monkeypatch, "transformers.modeling_utils._CAN_RECORD_REGISTRY",
                    "transformers.utils.output_capturing._active_collector")  # fmt: skip
    compat.record_outputs_like(Config, Config)
    monkeypatch.setattr(compat.models, "_collector", compat.models._collector.__wrapped__)
    assert compat.collected_now() == {}
    with compat.collecting({"router_logits": []}):
        assert compat.collected_now() == {}


def test_experts_without_their_names(monkeypatch):
    """transformers without its table of experts' functions is left alone; torch without grouped
    products goes expert by expert.
    """
    from hfpatch.ops import experts

    config = SimpleNamespace(_experts_implementation_internal="eager")
    assert compat.experts_of(config) == "eager" and compat.experts_of(SimpleNamespace()) == ""
    without_imports(monkeypatch, "transformers.integrations.moe")
    monkeypatch.setattr(compat.models, "_expert_tables", compat.models._expert_tables.__wrapped__)
    assert compat.experts_of(config) == ""
    x, w, offs = torch.ones(8, 16), torch.ones(2, 16, 8), torch.tensor([3, 8], dtype=torch.int32)
    monkeypatch.delattr(torch, "_grouped_mm")
    assert compat.grouped_mm() is None and (experts.product(x, w, offs) == 16).all()


def test_names_of_the_engines(monkeypatch):
    module = nn.Linear(2, 2)
    assert compat.hooked_forward(module) == "forward"
    assert compat.engine_hook(module) is None and compat.forward_before_wrapping(module) is None
    assert (
        not compat.under_zero3(module)
        and not compat.is_shard(module.weight)
        and not compat.is_view_of_flat(module.weight)
    )
    assert of_lab.local_part(module.weight) is module.weight
    compat.gather_as_one(module, False)
    monkeypatch.setitem(
        sys.modules, "deepspeed.runtime.zero.partition_parameters", type(sys)("renamed")
    )
    with compat.plain_construction():
        pass
    for name in (
        "_attach_context_parallel_hooks",
        "_refuse_recurrent_layers_under_sequence_parallelism",
    ):
        monkeypatch.delattr(f"accelerate.accelerator.{name}", raising=False)
    before = vars(sys.modules["accelerate.accelerator"]).copy()
    with of_trainer.unless_shared(lambda model: True):
        assert vars(sys.modules["accelerate.accelerator"]) == before


LESS = """
import torch
from torch._C import _autograd
for owner, names in (
    (torch._C, ("_current_graph_task_id", "_storage_Use_Count")), (_autograd, ("_get_current_graph_task_keep_graph",)),
    (torch, ("_assert_async",)), (torch.cuda.memory, ("_record_memory_history", "_dump_snapshot")),
):
    for name in names:
        delattr(owner, name)
import hfpatch
import tiny
stock = tiny.llama()
ours = tiny.patched(stock)
tiny.assert_as_good(ours, stock, tiny.labelled())
print("exact")
"""


def called_by(trainer: str):
    """step_under_ulysses() as transformers' own loss for Ulysses sees it, below a Trainer's loop of
    these lines.
    """
    loss, loop = (
        {"__name__": "transformers.integrations.deepspeed"},
        {"__name__": "transformers.trainer"},
    )
    exec("def deepspeed_sp_compute_loss(ask): return ask()", loss)
    exec(f"def loop(self, loss, ask):\n {trainer}", loop)
    found = loop["loop"](
        SimpleNamespace(args="arguments"),
        loss["deepspeed_sp_compute_loss"],
        compat.step_under_ulysses,
    )
    return found and (found[0], getattr(found[1], "args", None))


def test_the_group_of_context_parallelism(monkeypatch):
    """From accelerate's state, also where its context is not entered."""
    mesh = type("Mesh", (dict,), {"mesh_dim_names": ("cp",)})(
        cp=SimpleNamespace(get_group=lambda: "group")
    )
    state = type("State", (), {"_shared_state": {"there": True}, "device_mesh": mesh})
    monkeypatch.setattr("accelerate.state.AcceleratorState", state)
    assert compat.context_parallel_group() is None  # no ParallelismConfig at all
    for state.parallelism_config, wanted in (
        (SimpleNamespace(cp_enabled=n), n and "group") for n in (False, True)
    ):
        assert compat.context_parallel_group() == (wanted or None)


def test_a_step_is_exact_where_private_names_are_gone():
    """All of them at once that torch itself can go without, before hfpatch is imported."""
    tests = Path(__file__).parent
    paths = os.pathsep.join([str(tests), str(tests.parent)])
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", LESS], capture_output=True,
                          text=True,
                          env=os.environ | {"PYTHONPATH": paths})  # fmt: skip
    assert done.stdout.strip().endswith("exact"), done.stderr[-2000:]
