"""Private names of torch, transformers, accelerate and DeepSpeed: all in compat/."""

import ast
import builtins
import sys
from pathlib import Path
from types import SimpleNamespace

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
    "_replace",
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


# --- names that a version in the range lacks -------------------------------------------------------


class Config:
    pass


def without_imports(monkeypatch, *modules):
    real = builtins.__import__

    def refuse(name, globals=None, locals=None, fromlist=(), level=0):
        if name in modules or any(f"{name}.{n}" in modules for n in fromlist or ()):
            raise ImportError(name)
        return real(name, globals, locals, fromlist, level)

    monkeypatch.setattr(builtins, "__import__", refuse)


def test_what_was_put_somewhere_twice_goes_back_to_what_was_there():
    table = {"a": 1}
    with compat.values_for_now(
        [(table, "a", 2), (table, "a", 3), (table, "b", 4), (table, "b", 5)]
    ):
        assert table == {"a": 3, "b": 5}
    assert table == {"a": 1}


def test_storages_are_told_apart_without_their_names():
    class Nameless(torch.Tensor):
        def untyped_storage(self):
            return object()

    x = torch.ones(4)
    assert compat.same_memory(x, x[:2]) and not compat.same_memory(x, x[1:])
    a, b = x.as_subclass(Nameless), x[:2].as_subclass(Nameless)
    assert compat.storage_of(a) is None
    assert compat.same_memory(a, a) and not compat.same_memory(a, b)


def test_names_of_transformers(monkeypatch):
    from transformers import LlamaConfig, MambaModel

    config = LlamaConfig()
    config._attn_implementation = "sdpa"
    assert (
        compat.name_attention(config, "other") == "sdpa" and compat.attention_of(config) == "other"
    )
    assert compat.attention_of(Config()) is None and not compat.names_attention(Config())
    assert not compat.carries_states(Config) and compat.carries_states(MambaModel)
    plain = Config()
    compat.run_experts_plainly(plain)
    assert not hasattr(plain, "_experts_implementation_internal")
    assert compat.own_loss(nn.Linear(1, 1)) is None
    without_imports(monkeypatch, "transformers.utils.output_capturing._active_collector")
    monkeypatch.setattr(compat.models, "_collector", compat.models._collector.__wrapped__)
    assert compat.collected_now() == {}
    with compat.collecting({"router_logits": []}):
        assert compat.collected_now() == {}


def test_experts_without_their_names(monkeypatch):
    """transformers without its table of experts' functions is left alone."""
    config = SimpleNamespace(_experts_implementation_internal="eager")
    assert compat.experts_of(config) == "eager" and compat.experts_of(SimpleNamespace()) == ""
    without_imports(monkeypatch, "transformers.integrations.moe")
    monkeypatch.setattr(compat.models, "_expert_tables", compat.models._expert_tables.__wrapped__)
    assert compat.experts_of(config) == ""


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
