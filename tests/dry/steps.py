"""Training steps on the dry device: a model, its rows, and what each step took.

A Case says what to train. `run` yields a row per step: memory of the real caching allocator,
launches, copies, host waits and host seconds. Seconds of the device do not exist here.
"""

import collections
import contextlib
import copy
import gc
import io
import re
import sys
import time
from dataclasses import dataclass, field
from itertools import product
from unittest import mock

import stub
import torch
from seconds import Priced

import hfpatch
from hfpatch.lab.hardware import GPUS
from hfpatch.layer.traits import layers_in

GiB = 2**30
TRULY = re.compile(r"garbage\.py:\d+ on_host")  # a wait for a true answer, which no GPU has
COPYING = collections.Counter()  # of the step: seconds of the host in the calls of copies


@dataclass
class Case:
    """A run. The defaults are full fine-tuning of the preset in bfloat16, without an optimizer.

    Attributes:
        model: a preset of hfpatch.lab.presets, or a family of scripts/families.py.
        changes: to the configuration.
        rows: (batch, tokens) of each step.
        way: "hfpatch", "stock", "stock checkpointed", "liger" or "liger checkpointed".
        checkpointing: hfpatch.apply's; a dict gives a Checkpointing's fields.
        adapters: "" for none; "lora" and words: qv, dropout, float32 (as PEFT makes them), experts,
            dora, saved (embedding and head train as a whole).
        four_bits: stand-ins for bitsandbytes' linear layers, where it is not installed.
        float8: the layers' products as `hfpatch train --fp8` has them.
        fsdp2: each layer and the model are sharded over one rank.
        card: GiB of the device that the process may take from the first step on.
        autocast: forward runs under autocast to bfloat16.
        optimizer: "", "adamw", "adamw8bit" or "in backward".
        micro_steps: forward and backward passes of a step, which keep .grad.
        keep_gradients: .grad also stays between steps.
        batch: "", "packed" or "padded".
        tracked: torch's MemTracker follows the last step too.
        before: actions of ACTIONS, with commas, just before each step, which are part of it.
        log: the path of a log of the last step, for order.py; of apply too if it is the only one.
        priced: a card of hfpatch.lab.hardware, whose seconds the log has too (seconds.py).
        without_wait: [file's end, line] of a call of hfpatch's Device.wait or synchronize that does
            nothing.
    """

    model: str
    layers: int = 0
    rows: list = field(default_factory=lambda: [(1, 8192)] * 2)
    changes: dict = field(default_factory=dict)
    dtype: str = "bfloat16"
    way: str = "hfpatch"
    checkpointing: object = "auto"
    adapters: str = ""
    four_bits: bool = False
    float8: bool = False
    fsdp2: bool = False
    card: float = 0
    autocast: bool = False
    optimizer: str = ""
    micro_steps: int = 1
    keep_gradients: bool = False
    batch: str = ""
    tracked: bool = False
    before: str = ""
    log: str = ""
    priced: str = ""
    without_wait: list = field(default_factory=list)


# --- the model ------------------------------------------------------------------------------------


def config_of(case: Case):
    from transformers import AutoConfig

    from hfpatch.lab import made
    from hfpatch.lab.presets import find_preset
    from scripts.families import family_config

    tokens = max(tokens for _, tokens in case.rows)
    changes = dict(case.changes)
    if case.layers:
        changes["num_hidden_layers"] = case.layers
    if find_preset(case.model):
        return made.config_of(case.model, changes, tokens)
    values = family_config(case.model)
    if case.layers:
        values = shortened(values, case.layers)
    values |= case.changes
    values["use_cache"] = False
    # Ids of special tokens are none of the made rows'.
    values |= {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    return AutoConfig.for_model(values.pop("model_type"), **values)


def shortened(values: dict, layers: int) -> dict:
    """The configuration's values with this many layers, at its true width."""
    values = dict(values)
    whole = values.get("num_hidden_layers")
    for name, value in values.items():
        if isinstance(value, dict) and "num_hidden_layers" in value:
            values[name] = shortened(value, layers)
        elif isinstance(value, list) and whole and len(value) == whole:
            values[name] = value[:layers]  # a kind of each layer
    if whole:
        values["num_hidden_layers"] = layers
    by_layer = values.get("per_layer_config")
    if by_layer:
        values["per_layer_config"] = {k: v for k, v in by_layer.items() if int(k) < layers}
    if "depth" in values:  # of a tower
        values["depth"] = min(values["depth"], layers)
    return values


def build(case: Case):
    """The model in training mode on the device."""
    model = model_of(config_of(case), getattr(torch, case.dtype))
    if case.four_bits:
        four_bits(model)
    if case.float8:
        from hfpatch.trainer.float8 import convert

        convert(model, "rowwise")
    if case.adapters:
        model = adapted(model, case.adapters)
    return model


def model_of(config, dtype: torch.dtype):
    """As hfpatch.lab.made makes it, for models with images and for those without sdpa too."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    kind = AutoModelForCausalLM
    if type(config) not in kind._model_mapping:
        kind = AutoModelForImageTextToText
    with torch.device("cuda"):
        try:
            own = copy.deepcopy(config)  # a refusal leaves its name in the configuration
            model = kind.from_config(own, dtype=dtype, attn_implementation="sdpa")
        except ValueError as error:
            if "scaled_dot_product_attention" not in str(error):
                raise
            model = kind.from_config(config, dtype=dtype)
    return model.train()


def adapted(model, adapters: str):
    from peft import LoraConfig, get_peft_model

    words = adapters.split()
    options = {"r": 16, "target_modules": "all-linear"}
    if "qv" in words:
        options["target_modules"] = ["q_proj", "v_proj"]
    if "experts" in words:
        options["target_modules"] = ["q_proj", "v_proj"]
        options["target_parameters"] = ["gate_up_proj", "down_proj"]
    if "dropout" in words:
        options["lora_dropout"] = 0.05
    if "dora" in words:
        options["use_dora"] = True
    if "saved" in words:
        options["modules_to_save"] = ["embed_tokens", "lm_head"]
    # get_peft_model's own default keeps adapters in float32 over a bfloat16 base.
    return get_peft_model(model, LoraConfig(**options), autocast_adapter_dtype="float32" in words)


class Unpacked(torch.autograd.Function):
    """A product with a weight of half a byte an element, unpacked in forward and again in backward,
    as bitsandbytes does."""

    @staticmethod
    def weight(packed, shape, dtype):
        return packed.to(dtype).repeat(2, 1).view(shape)

    @staticmethod
    def forward(ctx, x, packed, shape):
        ctx.save_for_backward(packed)
        ctx.shape = shape
        return torch.nn.functional.linear(x, Unpacked.weight(packed, shape, x.dtype))

    @staticmethod
    def backward(ctx, dy):
        (packed,) = ctx.saved_tensors
        return dy @ Unpacked.weight(packed, ctx.shape, dy.dtype), None, None


class FourBitLinear(torch.nn.Linear):
    """Stands in for bitsandbytes' layer in what it does to memory and launches."""

    def __init__(self, linear: torch.nn.Linear):
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        packed = torch.empty(linear.weight.numel() // 2, 1, dtype=torch.uint8, device="cuda")
        self.weight = torch.nn.Parameter(packed, requires_grad=False)
        self.bias = None

    def forward(self, x):
        return Unpacked.apply(x, self.weight, (self.out_features, self.in_features))


def four_bits(model) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is torch.nn.Linear and name != "lm_head":
                setattr(parent, name, FourBitLinear(child))
    model.requires_grad_(False)


def patch(model, case: Case):
    """Applies hfpatch, Liger or nothing. Returns hfpatch's report, or None."""
    kind, _, checkpointed = case.way.partition(" ")
    if kind == "hfpatch":
        settings = case.checkpointing
        if isinstance(settings, dict):
            settings = hfpatch.Checkpointing(**settings)
        return hfpatch.apply(model, checkpointing=settings)
    if kind == "liger":
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return None


def sharded(model, ranks: int = 1) -> None:
    """FSDP2 over ranks whose exchanges do nothing. Of several, products are in bfloat16."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    half = MixedPrecisionPolicy(torch.bfloat16) if ranks > 1 else MixedPrecisionPolicy()
    for module in (*layers_of(model), model):
        fully_shard(module, mp_policy=half)


def optimizer_of(model, case: Case):
    trained = [p for p in model.parameters() if p.requires_grad]
    if case.optimizer == "adamw":
        return torch.optim.AdamW(trained, lr=1e-5, fused=True)
    if case.optimizer == "adamw8bit":
        from torchao.optim import AdamW8bit

        return AdamW8bit(trained, lr=1e-5, bf16_stochastic_round=True)
    if case.optimizer == "in backward":
        from hfpatch.trainer.step_in_backward import AdamW8bitInBackward

        return AdamW8bitInBackward(trained, lr=1e-5, bf16_stochastic_round=True)
    return None


# --- its rows -------------------------------------------------------------------------------------


def batch_of(case: Case, B: int, T: int) -> dict:
    """Random tokens that are their own labels, as a collator gives them, moved to the device."""
    ids = torch.randint(3, 90, (B, T))
    batch = {"input_ids": ids, "labels": ids}
    if case.batch == "packed":
        thirds = [T // 3, T // 3, T - 2 * (T // 3)]
        positions = torch.cat([torch.arange(n) for n in thirds])
        batch["position_ids"] = positions.expand(B, -1).contiguous()
    if case.batch == "padded":
        mask = torch.ones(B, T, dtype=torch.long)
        for row in range(1, B):
            mask[row, T // 2 :] = 0
        batch["attention_mask"] = mask
        batch["labels"] = ids.masked_fill(mask == 0, -100)
    return {name: x.cuda() for name, x in batch.items()}


# --- what may come before a step ------------------------------------------------------------------


def partial_backward(model, batch: dict) -> None:
    """A backward that ends at the last layer: fetches for the layer before are not used."""
    hidden = model.model(batch["input_ids"]).last_hidden_state
    torch.autograd.grad(hidden.float().sum(), model.model.layers[-1].mlp.up_proj.weight)


def dropped_graph(model, batch: dict) -> None:
    """A forward whose backward never comes."""
    model(**batch, use_cache=False)


def handed_over(model, batch: dict) -> None:
    """Tensors of a fetch that another stream uses."""
    queues = model.model._hfpatch.runtime.queues
    if not queues:
        return  # before the first step
    transfers = next(iter(queues.values())).transfers
    device = transfers.device
    x = torch.ones(2, 4096, 512, device="cuda")
    saved = transfers.save(x)
    transfers.settle()
    ticket, other = transfers.fetch([(saved, 0, 4096, None)]), device.stream()
    device.wait(device.mark(), other)
    with device.on(other):
        ticket.wait()[0].add_(1)
    ticket.done()
    del ticket, saved
    torch.ones(2, 4096, 512, device="cuda")  # takes the memory that the other stream uses


def batch_in_flight(model, batch: dict) -> None:
    """A batch that kernels make on the device. In place, so that its values stay."""
    for x in batch.values():
        x.add_(0)


class Stop(Exception):
    """Raised from a hook in the middle of a step."""


class OfAnEngine:
    """A hook that tiled layers run, as they run those of engines."""

    __module__ = "deepspeed"

    def __init__(self, hook):
        self.hook = hook

    def __call__(self, *args):
        return self.hook(*args)


def layers_of(model) -> list:
    return layers_in(model)


def loss_of(model, batch: dict):
    return model(**batch, use_cache=False).loss


def retained(model, batch: dict) -> None:
    loss = loss_of(model, batch)
    loss.backward(retain_graph=True)
    loss.backward()


def other_order(model, batch: dict) -> None:
    """Three forwards, whose backwards come in another order."""
    losses = [loss_of(model, batch) for _ in range(3)]
    for i in (1, 2, 0):
        losses[i].backward()


def side_stream(model, batch: dict) -> None:
    """Steps on streams of the caller's own, each after the one before."""
    begun = torch.cuda.current_stream()
    for _ in range(2):
        own = torch.cuda.Stream()
        own.wait_stream(begun)
        with torch.cuda.stream(own):
            loss_of(model, batch).backward()
            model.zero_grad()  # the gradients' memory is this stream's
        begun = own
    torch.cuda.current_stream().wait_stream(begun)


def cut_short(model, batch: dict) -> None:
    """Forwards that end before the last layer, and a backward from there."""
    given: list = []

    def stop(module, args):
        given.append(args[0])
        raise Stop

    handle = layers_of(model)[-1].register_forward_pre_hook(OfAnEngine(stop))
    for _ in range(2):
        with contextlib.suppress(Stop):
            loss_of(model, batch)
        given.pop().sum().backward()
    handle.remove()


def raised(place: str, backward: bool = False):
    """An action: a step that an error ends in one module's forward, where it runs for the nth time,
    or in its backward."""

    def act(model, batch: dict) -> None:
        module = layers_of(model)[1].get_submodule(place)
        for nth in (2, 5):
            count = [0]

            def hook(*args, count=count, nth=nth):
                count[0] += 1
                if count[0] == nth:
                    raise Stop

            register = module.weight.register_hook if backward else module.register_forward_hook
            handle = register(OfAnEngine(hook))
            with contextlib.suppress(Stop):
                loss_of(model, batch).backward()
            handle.remove()
            model.zero_grad()

    return act


def undone(model, batch: dict) -> None:
    """undo() right behind a backward gives pinned memory back."""
    loss_of(model, batch).backward()
    hfpatch.undo(model)


def whole(model, batch: dict) -> None:
    """Layers cannot be tiled from now on: a hook of the user's is inside."""
    for layer in layers_of(model):
        if not layer.self_attn._forward_hooks:
            layer.self_attn.register_forward_hook(lambda *args: None)


def written_at_rest(model, batch: dict) -> None:
    """Frozen weights are written to on the host behind a backward, whole or ended early."""
    layers = layers_of(model)
    for ran in (layers, layers[-1:]):
        loss = loss_of(model, batch)
        trained = [p for layer in ran for p in layer.parameters() if p.requires_grad]
        torch.autograd.grad(loss, trained)
        del loss
        for parameter in (p for layer in ran for p in layer.parameters()):
            if not parameter.requires_grad and parameter.device.type == "cpu":
                parameter.data.mul_(0.5)
                stub.host_uses("w", parameter.data)


def from_step(at: int, act):
    """An action that begins with the step of this number."""

    def action(model, batch: dict) -> None:
        number = vars(model).setdefault("_dry_step", 0)
        vars(model)["_dry_step"] = number + 1
        act(model, batch, number >= at)

    return action


def held(model, batch: dict, now: bool, gib: int = 4) -> None:
    """Memory of the user's own, or of another model's."""
    if now and "_dry_held" not in vars(model):
        vars(model)["_dry_held"] = torch.empty(gib * GiB, dtype=torch.uint8, device="cuda")


def held_late(model, batch: dict, now: bool) -> None:
    """The same in the midst of a step, which did not plan for it."""
    if now:
        hook = OfAnEngine(lambda *_: held(model, batch, now, gib=6))
        model.model.norm.register_forward_pre_hook(hook)


def referred(model, batch: dict, now: bool) -> None:
    """A frozen model of the same kind answers first, as DPO's reference does."""
    if "_dry_reference" not in vars(model):
        reference = model_of(model.config, torch.bfloat16).eval().requires_grad_(False)
        vars(model)["_dry_reference"] = reference
    with torch.no_grad():
        vars(model)["_dry_reference"].model(batch["input_ids"], use_cache=False)


def generated(model, batch: dict, now: bool) -> None:
    """Rollouts, as of GRPO."""
    prompts = batch["input_ids"][:, :256].repeat(4, 1)
    mask = torch.ones_like(prompts)
    model.eval().generate(prompts, attention_mask=mask, max_new_tokens=8, do_sample=False)
    model.train()


def half_frozen(model, batch: dict, now: bool) -> None:
    """The lower half of the layers trains from then on."""
    layers = layers_of(model)
    for parameter in (p for layer in layers[: len(layers) // 2] for p in layer.parameters()):
        parameter.requires_grad_(now)


def image(model, batch: dict) -> None:
    """An image through its tower, alone: where a row holds one is not known on this device."""
    side = model.config.vision_config.image_size
    pixels = torch.randn(1, 3, side, side, device="cuda").bfloat16()
    features = model.get_image_features(pixels).pooler_output
    sum(x.float().sum() for x in features).backward()


def evaluated(model, batch: dict, now: bool) -> None:
    with torch.no_grad():
        model.eval()(**batch, use_cache=False)
    model.train()


ACTIONS = {
    "batch in flight": batch_in_flight,
    "partial": partial_backward,
    "dropped": dropped_graph,
    "handed over": handed_over,
    "retained": retained,
    "other order": other_order,
    "side stream": side_stream,
    "cut short": cut_short,
    "raise in mlp": raised("mlp"),
    "raise in q": raised("self_attn.q_proj"),
    "raise in gradient": raised("mlp.down_proj", backward=True),
    "undone": undone,
    "whole": whole,
    "written at rest": written_at_rest,
    "hold": from_step(3, held),
    "hold late": from_step(3, held_late),
    "unfreeze": from_step(3, half_frozen),
    "freeze": from_step(1 << 30, half_frozen),
    "evaluate": from_step(0, evaluated),
    "refer": from_step(0, referred),
    "generate": from_step(0, generated),
    "image": image,
}

# --- steps ----------------------------------------------------------------------------------------


class Both(io.StringIO):
    """Keeps what is written, and writes it to the real stderr too."""

    def write(self, text):
        sys.__stderr__.write(text)
        return super().write(text)


@contextlib.contextmanager
def seen(left_out: list):
    """Within, the log has the host's own uses of pinned memory, and hfpatch's wait or synchronize at
    [file's end, line] does nothing."""
    from hfpatch.layer.streamed_weights import Packed
    from hfpatch.store.device import CudaDevice
    from hfpatch.store.transfers import Ticket, Transfers

    host_bytes, to_host = CudaDevice.host_bytes, Packed._to_host
    values_to_host = CudaDevice.to_host

    def clocked(real):
        """Counts the thread's seconds of every copy's calls."""

        def call(*args, **options):
            began = time.thread_time()
            try:
                return real(*args, **options)
            finally:
                COPYING["seconds"] += time.thread_time() - began

        return call

    def waits(real):
        def wait(self, *args):
            frame = sys._getframe(1)
            here = left_out and frame.f_lineno == left_out[1]
            if not (here and frame.f_code.co_filename.endswith(left_out[0])):
                real(self, *args)

        return wait

    def noted_bytes(self, block, writes):
        stub.host_uses("w" if writes else "r", block)
        return host_bytes(self, block, writes)

    def noted_values(self, values):
        host = values_to_host(self, values)
        stub.host_uses("r", host)
        return host

    def noted_to_host(self, transfers):
        """From here on the user may read the weights."""
        to_host(self, transfers)
        stub.host_uses("r", self.saved.block.bytes)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(Packed, "_to_host", noted_to_host))
        for name in ("wait", "synchronize"):
            real = getattr(CudaDevice, name)
            stack.enter_context(mock.patch.object(CudaDevice, name, waits(real)))
        stack.enter_context(mock.patch.object(CudaDevice, "host_bytes", noted_bytes))
        stack.enter_context(mock.patch.object(CudaDevice, "to_host", noted_values))
        for kind, name in product((Transfers, Ticket), ("save", "settle", "fetch", "wait", "done")):
            if real := vars(kind).get(name):
                stack.enter_context(mock.patch.object(kind, name, clocked(real)))
        yield


def run(case: Case):
    """Yields a row for each step, and first one with the report."""
    torch.manual_seed(0)
    model = build(case)
    sizes = [(p.numel() * p.element_size(), p.requires_grad) for p in model.parameters()]
    said = Both()
    if case.log and len(case.rows) == 1:
        stub.log_to(case.log)
    with contextlib.redirect_stderr(said), seen(case.without_wait):
        report = patch(model, case)
        if case.fsdp2:
            sharded(model)
        if case.card:
            total = torch.cuda.mem_get_info()[1]
            torch.cuda.set_per_process_memory_fraction(case.card * GiB / total)
        yield {
            "parameters": sum(size for size, _ in sizes),
            "trained": sum(size for size, trained in sizes if trained),
            "report": str(report),
            "notes": report.notes if report else [],
            "layers": sum(1 for m in model.modules() if type(m).__name__.endswith("DecoderLayer")),
        }
        optimizer = optimizer_of(model, case)
        for index, (B, T) in enumerate(case.rows):
            if case.log and 0 < index == len(case.rows) - 1:
                stub.log_to(case.log)
            yield measured(model, case, optimizer, index, batch_of(case, B, T), said)
    if case.log:
        stub.log_to(None)


def tracker(model, batch: dict):
    from torch.distributed._tools.mem_tracker import MemTracker

    found = MemTracker()
    found.track_external(model, *batch.values())
    return found


def measured(model, case: Case, optimizer, index: int, batch: dict, said: Both) -> dict:
    """One step. An out-of-memory error is noted in the row."""
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()
    written, complained = said.tell(), stub.complaints()
    stub.reset()
    COPYING.clear()
    stub.mark(f"step {index}")
    row = {"step": index, "shape": list(batch["input_ids"].shape)}
    last = index == len(case.rows) - 1
    tracking = tracker(model, batch) if case.tracked and last else contextlib.nullcontext()
    if case.priced and last:
        tracking = Priced(GPUS[case.priced])
    with stub.HostWaits() as waits, tracking:
        try:
            for action in filter(None, case.before.split(", ")):
                ACTIONS[action](model, batch)
            forward = backward = 0.0
            launched = 0
            for _ in range(case.micro_steps):
                # [Step 1] Launches and host seconds of each direction.
                began, count = time.process_time(), stub.launches()
                with torch.autocast("cuda", torch.bfloat16, enabled=case.autocast):
                    loss = model(**batch, use_cache=False).loss
                between = time.process_time()
                launched += stub.launches() - count
                loss.backward()
                del loss
                forward += between - began
                backward += time.process_time() - between
            row["launches_forward"] = launched
            row["launches_backward"] = stub.launches() - launched
            row["host_seconds"] = [forward, backward]
            if optimizer is not None:
                optimizer.step()
        except torch.OutOfMemoryError as error:
            row["error"] = str(error)
    found, after = stub.counts(), torch.cuda.memory_stats()
    if case.tracked and last:
        snapshot = tracking.get_tracker_snapshot("peak")
        row["tracked_peak"] = snapshot[torch.device("cuda:0")]["Total"]
    own = collections.Counter(
        {where: count for where, count in waits.found.items() if not TRULY.search(where[1])}
    )
    row |= {
        "allocated_before": before["allocated_bytes.all.current"],
        "allocated_peak": after["allocated_bytes.all.peak"],
        "allocated_after": after["allocated_bytes.all.current"],
        "reserved_peak": after["reserved_bytes.all.peak"],
        "gaps": after["inactive_split_bytes.all.peak"],
        "retries": after["num_alloc_retries"] - before["num_alloc_retries"],
        "ooms": after["num_ooms"] - before["num_ooms"],
        "mallocs": found["call"]["cudaMalloc"] + found["call"]["cuMemCreate"],
        "stream_waits": found["call"]["cudaStreamWaitEvent"],
        "copies": dict(found["copies"]),
        "copying_seconds": COPYING["seconds"],
        "bytes": dict(found["bytes"]),
        "waits": sum(own.values()),
        "stacks": [[count, *where] for where, count in own.most_common()],
        "complaints": stub.complaints() - complained,
        "said": said.getvalue()[written:],
    }
    if not case.keep_gradients or optimizer is not None or "error" in row:
        model.zero_grad(set_to_none=True)
    return row


def cleared() -> None:
    """Gives a finished case's memory back."""
    gc.collect()
    torch.cuda.empty_cache()
