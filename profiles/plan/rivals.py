"""Liger's and TRL's training steps on fake tensors, as comparisons that need no GPU.

    python profiles/plan/rivals.py --impl liger-tiled-offload --seq-len 8192    # as simulate.py

The Python code is their own. A Triton kernel writes into what torch allocated and allocates nothing
itself, so on fake tensors leaving the launch out changes no figure. Both rebind names in
transformers' modules: use a process for one implementation and nothing else.
"""

import ast
import inspect
import sys
import textwrap

import torch
from torch import nn

from hfpatch.lab.simulate import implementations
from hfpatch.lab.simulate.follow import current
from hfpatch.lab.simulate.implementations import enable_checkpointing

LIGER = ("liger", "liger-off", "liger-tiled-offload", "hf-ckpt-chunked")
TRL = ("trl-offload", "trl-selective", "trl-hfpatch", "liger-selective")
IMPLEMENTATIONS = (*implementations.IMPLEMENTATIONS, *LIGER, *TRL)


def prepare(model: nn.Module, implementation: str) -> nn.Module:
    """Turns the stock model into one of IMPLEMENTATIONS, in place."""
    if implementation in implementations.IMPLEMENTATIONS:
        return implementations.prepare(model, implementation)
    if implementation in TRL:
        apply_trl(model, implementation)
        return model
    if implementation in ("liger", "hf-ckpt-chunked"):
        enable_checkpointing(model)
    apply_liger(
        model,
        tiled=implementation == "liger-tiled-offload",
        loss_only=implementation == "hf-ckpt-chunked",
    )
    return model


# -- Liger -----------------------------------------------------------------------------------------


class _NoKernel:
    """Stands for a Triton kernel: kernel[grid](...) does nothing, and counts as reading each tensor
    that its source loads from once, and as writing each that it stores to once: the least that it
    moves.
    """

    def __init__(self, kernel):
        self.passes = _passes(kernel)

    def __getitem__(self, grid):
        return self._launched

    def _launched(self, *args, **kwargs):
        follower = current()
        if follower is not None:
            given = (*zip(self.passes, args), *kwargs.items())
            follower.moves(
                [
                    x
                    for name, x in given
                    for _ in range(self.passes.get(name, 0))
                    if isinstance(x, torch.Tensor)
                ]
            )


def _passes(kernel) -> dict[str, int]:
    """Of each argument of a Triton kernel: 0, or 1 where it is loaded from or stored to, 2 where
    both.
    """
    while not inspect.isfunction(kernel.fn):  # autotuned ones hold another
        kernel = kernel.fn
    body = ast.parse(textwrap.dedent(inspect.getsource(kernel.fn))).body[0]
    points = {name: {name} for name in kernel.arg_names}  # what addresses are made of
    touched = {"load": set(), "store": set()}
    behind = lambda tree: set().union(  # noqa: E731
        *(points.get(n.id, ()) for n in ast.walk(tree) if isinstance(n, ast.Name))
    )
    is_call = lambda tree: any(  # noqa: E731
        isinstance(n, ast.Call) and ast.unparse(n.func) == "tl.load" for n in ast.walk(tree)
    )
    # assignments of one level come before those inside loops, which is all that is needed
    for node in ast.walk(body):
        if isinstance(node, (ast.Assign, ast.AugAssign)) and not is_call(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    points[target.id] = points.get(target.id, set()) | behind(node.value)
    for node in ast.walk(body):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("tl.load", "tl.store"):
            touched[ast.unparse(node.func)[3:]] |= behind(node.args[0])
    return {name: sum(name in names for names in touched.values()) for name in kernel.arg_names}


def _drop_kernels() -> None:
    import triton

    for module in [
        module for name, module in sys.modules.items() if name.startswith("liger_kernel")
    ]:
        for attribute, value in list(vars(module).items()):
            if isinstance(value, triton.runtime.jit.KernelInterface):
                setattr(module, attribute, _NoKernel(value))


def apply_liger(model: nn.Module, *, tiled: bool = False, loss_only: bool = False) -> None:
    """Liger's kernels on a Llama model. tiled: its TiledMLP too, with layer inputs checkpointed
    into host memory.

    Raises ImportError where liger-kernel is not installed.
    """
    try:
        from liger_kernel.transformers import apply_liger_kernel_to_llama
    except ImportError as error:
        raise ImportError(
            "hfpatch: the comparison needs liger-kernel, which is absent. Run: pip install liger-kernel."
        ) from error
    rest = not loss_only
    apply_liger_kernel_to_llama(
        rope=rest, rms_norm=rest, swiglu=rest, fused_linear_cross_entropy=True, model=model
    )
    if tiled:
        from liger_kernel.transformers.tiled_mlp import LigerTiledSwiGLUMLP

        for layer in model.model.layers:
            layer.mlp.__class__ = LigerTiledSwiGLUMLP
            layer.mlp.num_shards = None
            # Liger bound its untiled forward on the instance
            layer.mlp.__dict__.pop("forward", None)
        _offload_inputs(model)
    _head_as_on_cuda()
    _drop_kernels()


def _head_as_on_cuda() -> None:
    """Liger's head asks its tensors whether they are on CUDA, where it adds to the weight's
    gradient inside the matmul; elsewhere it makes two more tensors of the weight's size. Its
    functions are compiled anew with the answer of an A100.
    """
    from liger_kernel.ops import fused_linear_cross_entropy as head

    answers = (
        ('.device.type == "cuda"', '.device.type != "cuda"'),
        ('_input.device.type != "cuda"', "False"),
        ("torch.cuda.get_device_capability(grad_weight.device)[0]", "8"),
    )  # fmt: skip
    for name in ("fused_linear_cross_entropy_forward", "_can_use_mm_out"):
        source = inspect.getsource(vars(head)[name])
        for asked, answer in answers:
            source = source.replace(asked, answer)
        exec(compile(source, head.__file__, "exec"), vars(head))


def _offload_inputs(model: nn.Module) -> None:
    """Non-reentrant checkpointing under saved-tensor hooks that copy layer inputs to host memory:
    the ALST recipe.
    """
    enable_checkpointing(model)
    body = model.model
    forward = body.forward

    def offloaded(*args, **kwargs):
        with offloading():
            return forward(*args, **kwargs)

    body.forward = offloaded


def offloading():
    """A context in which what autograd saves is copied to host memory and back."""
    return torch.autograd.graph.saved_tensors_hooks(_to_host, _to_device)


def _to_host(tensor):
    follower = current()
    if follower is None or isinstance(tensor, nn.Parameter):
        return tensor
    with follower.host():
        return tensor.detach().clone()


def _to_device(tensor):
    if isinstance(tensor, nn.Parameter):
        return tensor
    return tensor.detach().clone()


# -- TRL -------------------------------------------------------------------------------------------


def apply_trl(model: nn.Module, implementation: str) -> None:
    """Turns a stock model into one of TRL, in place: checkpoints in host memory with TRL's fused
    head, the same with its selective checkpointing, its call of the head on a model that hfpatch
    has patched, or Liger's kernels and head with selective checkpointing.

    Raises ImportError where trl is not installed, or too old for it.
    """
    try:
        from trl.trainer.utils import add_fused_lm_head

        if implementation.endswith("selective"):
            from trl.models import enable_selective_activation_checkpointing
    except ImportError as error:
        raise ImportError(
            f"hfpatch: the comparison needs a newer trl ({error}). Run: pip install -U trl."
        ) from error
    if implementation == "liger-selective":
        apply_liger(model)
    else:
        if implementation == "trl-hfpatch":
            import hfpatch

            hfpatch.apply(model)
        add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
        forward = model.forward
        model.forward = lambda *args, **kwargs: forward(*args, fused_lm_head=True, **kwargs)
    if implementation == "trl-hfpatch":
        return
    if implementation.endswith("selective"):
        enable_selective_activation_checkpointing(model)
    _enable_offload(model)


def _enable_offload(model: nn.Module) -> None:
    """transformers' checkpointing with offload=True; what its hooks keep is host memory to the
    follower.
    """
    import transformers.modeling_utils as theirs

    # a machine without an accelerator pins nothing
    theirs.save_on_cpu = lambda **kwargs: offloading()
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if not getattr(enable, "_is_sac_wrapped", False):
        enable = model.activation_checkpointing_enable
    enable({"use_reentrant": False}, offload=True)


def main(argv) -> int:
    import simulate

    return simulate.run(simulate.parser_of(IMPLEMENTATIONS).parse_args(argv), prepare)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
