"""The Trainer callback: tokens per second, MFU and peak memory in each log line, and `apply` on
init if asked for.
"""

import resource
import sys
import time
import warnings
import weakref
from collections.abc import Mapping

import torch
from transformers import TrainerCallback

from hfpatch.budget.limits import GiB
from hfpatch.budget.policy import names_the_nearest
from hfpatch.compat import parallelism_config
from hfpatch.context.classes import inner_model, is_patched
from hfpatch.lab.hardware import gpu_named
from hfpatch.planner.measure import matmul_rate
from hfpatch.planner.show import beyond_positions
from hfpatch.report import say
from hfpatch.trainer import memory
from hfpatch.trainer.footprint import against
from hfpatch.trainer.marks import first_to_say
from hfpatch.trainer.model_flops import Work
from hfpatch.trainer.optimizers import rounded_to_nearest, say_compiling


class Callback(TrainerCallback):
    """Adds `tokens_per_second`, `mfu`, `step_seconds`, `peak_gpu_gib` and `peak_host_gib` to each
    log line of any Trainer.

    Columns:
        tokens_per_second: of all ranks.
        mfu: the model's own FLOPs (without recomputation, causal attention by half) over the GPU's
            peak. The peak is published, or a matmul measured at the start. A CPU has no mfu.
        step_seconds: the mean over the steps since the last line.
        peak_gpu_gib, peak_gpu_reserved_gib: allocated memory, and memory that the allocator holds.
        peak_host_gib: the process's largest resident set.

    Warns once if 16-bit weights are the only copy and the optimizer rounds them to the nearest, and
    if a sequence is longer than the model's positions. `attach` gives it the Trainer, for what no
    callback sees; `hfpatch run` and `hfpatch train` do so.

    Args:
        apply: call `hfpatch.apply` on the model when the Trainer is made, before an engine wraps
            it. A dict holds its options.
        attention_share: the share of a full row's attention that packed documents need, 0 to 1, for
            mfu.
        plan: a hfpatch.plan of this run. After the second step a line compares it with the run.

    Raises:
        ValueError: an argument has another value.
    """

    @names_the_nearest
    def __init__(self, apply: bool | dict = False, *, attention_share: float = 1.0, plan=None):
        if not isinstance(apply, (bool, dict)):
            raise ValueError(
                "hfpatch: apply must be True, False or a dict of hfpatch.apply's options, got "
                f"{type(apply).__name__}. Pass True."
            )
        if not isinstance(attention_share, (int, float)) or not 0 <= attention_share <= 1:
            raise ValueError(
                f"hfpatch: attention_share must be from 0 to 1, got {attention_share!r}. Leave it "
                "out."
            )
        self.apply = apply or isinstance(apply, dict)  # no options are none, and no refusal
        self.attention_share = attention_share
        self.plan = plan
        self.report = None  # of apply
        self._applied = lambda: None
        self._hook = None
        self._trainer = lambda: None
        self._warned = False
        self._last = None
        self._longest = 0
        self._positions = None

    def attach(self, trainer) -> None:
        """Gives the callback its Trainer, once both are made.

        TensorBoard, W&B and other reporters then get the columns. An out-of-memory error says what
        to change, and the next start keeps less. Where ranks share rows, runs under DeepSpeed's
        Ulysses take rows of any length and resume inside an epoch, and accelerate does not refuse
        layers that passed the probe.
        """
        self._trainer = weakref.ref(trainer)
        step = trainer.training_step

        def training_step(*positional, **named):
            try:
                return step(*positional, **named)
            except Exception as error:
                if isinstance(error, torch.OutOfMemoryError) and self._last:
                    memory.explain(trainer.model, trainer.args, self._last, error)
                raise

        trainer.training_step = training_step
        if _parallelism(trainer.args) is not None:
            from hfpatch.trainer.sequence import share_rows

            share_rows(trainer)

    def on_init_end(self, args, state, control, model=None, **kwargs):
        if not self.apply or model is None:
            return
        if args.use_liger_kernel:
            raise ValueError(
                "hfpatch: use_liger_kernel and hfpatch cannot be combined. Leave out one of them."
            )
        import hfpatch

        model = _with_config(model)
        options = self.apply if isinstance(self.apply, dict) else {}
        self.report = hfpatch.apply(model, **options)
        self._applied = weakref.ref(model)
        if args.process_index == 0 and first_to_say(str(self.report)):
            print(self.report, file=sys.stderr)

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        # [Step 1] Move this callback to the front.
        trainer = self._trainer()
        if trainer is not None:
            # Trainer puts reporters before a user's callbacks. A loop runs over the old list.
            handler = trainer.callback_handler
            handler.callbacks = [self, *(c for c in handler.callbacks if c is not self)]
        # [Step 2] With `apply`, refuse a model that is not patched. FSDP1 and compile wrap the
        # model. model_init makes another one, which it may have patched.
        patched = (module is self._applied() or is_patched(module) for module in model.modules())
        if self.apply and not any(patched):
            raise ValueError(
                "hfpatch: the model that trains is not the one that Trainer was made with. Pass "
                "Callback(apply=True) in Trainer(callbacks=[...]), and with model_init call "
                "hfpatch.apply inside it."
            )
        # [Step 3] Note what the throughput figures need: ranks, the model's FLOPs, the GPU's peak.
        parallel = _parallelism(args)
        tp, sp, cp = (getattr(parallel, f"{name}_size", None) or 1 for name in ("tp", "sp", "cp"))
        self._ranks = args.world_size // tp
        self._sharing = max(sp, cp)  # ranks, of a row
        # TRL's DPO and KTO have one of these settings, its GRPO and RLOO the other.
        if self._sharing > 1 and {"precompute_ref_log_probs", "num_generations"} & {*vars(args)}:
            raise ValueError(
                f"hfpatch: {type(args).__name__}'s trainer must get whole sequences, got sp_size={sp} "
                f"and cp_size={cp}: its loss is made of sums over each sequence. Set both to 1."
            )
        inner = _with_config(model)
        config = getattr(inner, "config", None)
        self._shape = Work.of(inner) if hasattr(config, "model_type") else None
        self._peak = peak_flops(args.device, _compute_dtype(args, model)) if self._shape else None
        if self._shape is not None:
            self._positions = getattr(config.get_text_config(), "max_position_embeddings", None)
        # [Step 4] Warn about an optimizer that loses small updates, or compiles first.
        optimizer = kwargs.get("optimizer")
        while hasattr(optimizer, "optimizer"):  # accelerate's and DeepSpeed's wrappers
            optimizer = optimizer.optimizer
        words = rounded_to_nearest(optimizer)
        if words and args.process_index == 0 and not self._warned:
            self._warned = True
            warnings.warn(words, stacklevel=2)
        if type(optimizer).__module__.startswith("torchao.optim") and args.process_index == 0:
            say_compiling(type(optimizer).__name__)
        # [Step 5] Start to count. A run that searches for its batch size begins again without an
        # end.
        self.on_train_end(args, state, control)
        self._trained = _trained_share(model)
        self._hook = model.register_forward_pre_hook(self._count, with_kwargs=True)
        if memory.runtimes_in(model):
            memory.begin(model, args)
        self._ends: list[float] = []
        self._start(state)

    def _count(self, model, positional, named):
        if not model.training or not torch.is_grad_enabled():  # DPO's reference is no training
            return
        # sentence-transformers gives all features in one mapping.
        features = next((one for one in positional[:1] if isinstance(one, Mapping)), named)
        first = features.get("inputs_embeds")
        if positional and features is named:
            first = positional[0]
        ids = features.get("input_ids", first)
        if ids is None:
            return
        B, T = self._last = ids.shape[:2]  # nothing waits for the device
        if T > self._longest:
            self._longest = T
            self._say_positions(features.get("position_ids"), T)
        self._tokens += B * T
        if self._shape:
            self._flops += self._shape.flops(
                B, T, self._sharing, self.attention_share, self._trained
            )

    def _say_positions(self, position_ids, tokens: int) -> None:
        """A line if the sequence is longer than the model's positions, for the longest so far."""
        if self._positions is None or tokens <= self._positions:
            return
        if position_ids is not None:  # of packed documents, which may be shorter
            tokens = int(position_ids.max()) + 1
        longer = beyond_positions(tokens, self._positions)
        if longer:
            self._positions = None  # once a run
            say(longer)

    def on_step_end(self, args, state, control, **kwargs):
        if self.plan is None or len(self._ends) == 2 or args.process_index:
            return
        if torch.device(args.device).type == "cuda":
            torch.cuda.synchronize(args.device)  # twice a run
        self._ends.append(time.perf_counter())
        if len(self._ends) == 2:
            took = (self._ends[1] - self._ends[0]) / args.gradient_accumulation_steps
            say(against(self.plan, memory_columns(args.device).get("peak_gpu_gib"), took))

    def on_evaluate(self, args, state, control, **kwargs):
        # Evaluation is no training time. The log line of earlier steps came before it.
        self._start(state)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs is None:
            return
        extra = memory_columns(args.device)
        if "loss" in logs and self._hook is not None and self._tokens:
            seconds = time.perf_counter() - self._since
            steps = state.global_step - self._steps
            extra["tokens_per_second"] = round(self._tokens * self._ranks / seconds, 1)
            if self._peak:
                extra["mfu"] = round(self._flops / seconds / self._peak, 4)
            if steps:
                extra["step_seconds"] = round(seconds / steps, 4)
            self._start(state)
        logs.update(extra)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(extra)

    def on_save(self, args, state, control, model=None, **kwargs):
        if args.process_index == 0 and model is not None:
            memory.write(model, args)
            memory.write(model, args, f"{args.output_dir}/checkpoint-{state.global_step}")

    def on_train_end(self, args, state, control, **kwargs):
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _start(self, state):
        self._since = time.perf_counter()
        self._tokens = 0
        self._flops = 0.0
        self._steps = state.global_step


def _with_config(model):
    """The model of transformers inside another library's module (sentence-transformers), else the
    module.
    """
    if hasattr(getattr(model, "config", None), "model_type"):
        return model
    found = inner_model(model)
    return model if found is None else found


def _parallelism(args):
    """accelerate's ParallelismConfig, of the script or of `accelerate launch`; None without one."""
    return getattr(args, "parallelism_config", None) or parallelism_config()


def memory_columns(device) -> dict:
    """Peak memory in GiB: the largest resident set and, on a GPU, allocated and reserved."""
    scale = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes there, in KiB on Linux
    found = {"peak_host_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale}
    if torch.device(device).type == "cuda":
        found["peak_gpu_gib"] = torch.cuda.max_memory_allocated(device)
        found["peak_gpu_reserved_gib"] = torch.cuda.max_memory_reserved(device)
    return {name: round(nbytes / GiB, 3) for name, nbytes in found.items()}


def _trained_share(model) -> float:
    counts = [(getattr(p, "ds_numel", p.numel()), p.requires_grad) for p in model.parameters()]
    return sum(n for n, trained in counts if trained) / max(1, sum(n for n, _ in counts))


def _compute_dtype(args, model) -> torch.dtype:
    if args.bf16:
        return torch.bfloat16
    return torch.float16 if args.fp16 else next(model.parameters()).dtype


def peak_flops(device, dtype: torch.dtype) -> float | None:
    """FLOP/s of the device: the published dense peak of a known GPU in bf16 or fp16, else the rate
    of a large matmul. None for a CPU.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return None
    gpu = gpu_named(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if gpu is None or dtype not in (torch.bfloat16, torch.float16):
        return matmul_rate(device, dtype)
    return gpu.peak_flops
