"""Training steps of a tiny Llama in every way that copies go: what the checker watches, one row
each.
"""

import contextlib
import dataclasses
import sys
from unittest import mock

import tiny
import torch

import hfpatch
from hfpatch.attention import heads
from hfpatch.budget.policy import KEEPABLE
from hfpatch.context.ranks import sharded
from hfpatch.lab.simulate.sequence import LoneRank
from hfpatch.layer.runtime import LayerRuntime
from hfpatch.store import disk
from hfpatch.store.device import ToHost, beside, mark_batch_ready
from tests.faults.checker import standing_in
from tests.layer.deep import tiny_llama, tokens


class Stop(Exception):
    """Raised from a hook in the middle of a step."""


def loss(model, T=22, seed=0, **inputs):
    ids = tokens(2, T, seed=seed)
    return model(ids, labels=ids, **inputs).loss


def step(model, device):
    for _ in range(2):
        loss(model).backward()


def packed(model, device):
    positions = torch.cat([torch.arange(n) for n in (9, 1, 10, 2)])[None].expand(2, -1).contiguous()
    for _ in range(2):
        batch = {"position_ids": positions, "attention_mask": torch.ones(2, 22, dtype=torch.long)}
        mark_batch_ready(batch)
        loss(model, **batch).backward()


def padded(model, device):
    """Rows whose padding is left out."""
    for real in (9, 20):
        mask = (torch.arange(22) < torch.tensor([[22], [real]])).long()
        labels = tokens(2, 22).masked_fill(mask == 0, -100)
        batch = {"labels": labels, "attention_mask": mask}
        mark_batch_ready(batch)
        model(tokens(2, 22), **batch).loss.backward()


def retain(model, device):
    for _ in range(2):
        value = loss(model)
        value.backward(retain_graph=True)
        value.backward()


def two_forwards(model, device):
    for _ in range(2):
        (loss(model) + loss(model, seed=1)).backward()


def other_order(model, device):
    values = [loss(model, seed=i) for i in range(3)]
    for i in (1, 2, 0):
        values[i].backward()


def side_stream(model, device):
    """Steps on streams of the caller's own, each after the one before."""
    done = device.mark()
    for _ in range(3):
        own = device.stream()
        device.wait(done, own)
        with device.on(own):
            loss(model).backward()
            model.zero_grad()  # the gradients' memory is this stream's
            done = device.mark()
    device.wait(done)


def lengths(model, device):
    for T in (22, 13, 22, 40):
        loss(model, T).backward()


def decoded(model) -> torch.Tensor:
    """Hidden states. Ranks that share rows want to know where their tokens are."""
    positions = torch.arange(22).repeat(2, 1)
    return model.model(tokens(2, 22), position_ids=positions).last_hidden_state


def partial(model, device):
    """A backward that ends at a middle layer, and graphs that are dropped."""
    for _ in range(2):
        hidden = decoded(model)
        torch.autograd.grad(hidden.sum(), model.model.layers[-1].mlp.up_proj.weight)
        del hidden
        loss(model)
    loss(model).backward()


def cut_short(model, device):
    """Forwards that end before the last layer, and a backward from there."""
    given: list = []

    def stop(module, args):
        given.append(args[0])
        raise Stop

    handle = model.model.layers[-1].register_forward_pre_hook(tiny.OfAnEngine(stop))
    for _ in range(2):
        with contextlib.suppress(Stop):
            loss(model)
        given.pop().sum().backward()
    handle.remove()


def handed_over(model, device):
    """A fetch that another stream than its own waits for, values for the host that nobody asks for,
    others made beside.
    """
    loss(model).backward()
    transfers, x = model.model._hfpatch_runtime.transfers, torch.randn(2, 8, 64)
    saved = transfers.save(x)
    transfers.settle()
    ticket, other = transfers.fetch([(saved, 0, 8, None)]), device.stream()
    device.wait(device.mark(), other)
    with device.on(other):
        ticket.wait()[0].mul(2)
    ticket.done()
    del ticket, saved
    if transfers.tier == "gpu":
        device.wait(device.mark(other))  # the tensor itself is the caller's
    ToHost(x.mul(2))
    (made,) = beside(lambda t: [t.add(1)], x)
    made.mul(2)


def written_at_rest(model, device):
    """Frozen weights are written to right behind a backward, whole or ended early: merged, loaded,
    decayed.

    Of one ended early those of the layers that ran: a copy ahead of that is thrown away.
    """
    for ran in (model.model.layers, model.model.layers[-1:], model.model.layers):
        hidden = decoded(model)
        torch.autograd.grad(hidden.sum(), ran[0].mlp.up_proj.weight)
        del hidden
        for parameter in ran.parameters():
            if not parameter.requires_grad:
                parameter.data.mul_(0.5)


def raising(place: str, turn: str):
    """A step cut short in one module's forward, where it runs for the nth time, or in its backward;
    then a whole one.
    """

    def run(model, device):
        module = model.model.layers[1].get_submodule(place)
        for nth in (2, 5, 8):
            count = [0]

            def hook(*args, count=count, nth=nth):
                count[0] += 1
                if count[0] == nth:
                    raise Stop

            register = (
                module.register_forward_hook if turn == "forward" else module.weight.register_hook
            )
            handle = register(tiny.OfAnEngine(hook))
            with contextlib.suppress(Stop):
                loss(model).backward()
            handle.remove()
            model.zero_grad()
            if count[0] < nth:
                break
            loss(model).backward()

    return run


def whole(action):
    """The same with layers that cannot be tiled."""

    def run(model, device):
        for layer in model.model.layers:
            layer.self_attn.register_forward_hook(lambda *args: None)
        action(model, device)

    return run


ACTIONS = {
    "step": step, "packed": packed, "padded": padded, "retain": retain, "two forwards": two_forwards,
    "other order": other_order,
    "side stream": side_stream, "lengths": lengths, "partial": partial,
    "handed over": handed_over, "cut short": cut_short,
    "raise in mlp": raising("mlp", "forward"), "raise in q": raising("self_attn.q_proj", "forward"),
    "raise in gradient": raising("mlp.down_proj", "backward"),
    "whole step": whole(step), "whole partial": whole(partial), "whole retain": whole(retain),
    "whole other order": whole(other_order), "whole raise": whole(raising("mlp", "forward")),
    "whole side stream": whole(side_stream), "written at rest": written_at_rest,
}  # fmt: skip
# name -> (tile, save_attention, every, keep[, again[, weights]])
WAYS = {
    "tiles": (16, True, 1, ()), "tiles again": (16, False, 1, ()), "one": (4096, True, 1, ()),
    "one again": (4096, False, 1, ()), "every 2": (16, False, 2, ()),
    "every 3": (4096, False, 3, ()), "keep": (16, True, 1, KEEPABLE),
    "keep one": (4096, True, 1, KEEPABLE), "keep two": (16, True, 1, ("gate_up",)),
    "plain": (16, True, 1, ()), "one again alone": (16, True, 1, (), 1),
    "one keeps less": (16, True, 1, KEEPABLE, 1), "weights": (16, True, 1, (), 0, "host"),
    "weights every 2": (16, False, 2, (), 0, "host"),
    "weights one": (4096, True, 1, (), 0, "host"),
    "shared": (16, True, 1, KEEPABLE), "shared every 2": (16, False, 2, ()),
}  # fmt: skip
TIERS = ("gpu", "host", "disk")
REFUSED = [way for way, row in WAYS.items() if row[-1] == "host"]  # by layers that run whole


def build(tier: str, way: str, directory, stack: contextlib.ExitStack):
    row = WAYS[way]
    tile, save, every, keep, again, weights = (*row, *(0, "gpu")[len(row) - 4 :])
    where = str(directory) if tier == "disk" else tier
    settings = hfpatch.Checkpointing(
        offload=where,
        tile=tile,
        save_attention=save,
        every=every,
        keep=keep,
        plain=2 if way == "plain" else 0,
        frozen_weights=weights,
    )
    model = tiny_llama(num_attention_heads=8, num_key_value_heads=4, num_hidden_layers=3)
    for name, parameter in model.model.layers.named_parameters():
        parameter.requires_grad_(weights == "gpu" or "up_proj" in name or "down_proj" in name)
    hfpatch.apply(model, checkpointing=settings)
    resolve = LayerRuntime._resolve
    stack.enter_context(mock.patch.object(heads, "heads_per_group", lambda *sizes: 2))
    stack.enter_context(mock.patch.object(disk, "PIECE", 2048))
    stack.enter_context(
        mock.patch.object(
            LayerRuntime,
            "_resolve",
            lambda *a: dataclasses.replace(resolve(*a), again=again),
        )
    )
    stack.enter_context(mock.patch.object(LayerRuntime, "_settle", _late(LayerRuntime._settle)))
    return model


def _late(settle):
    """As on a GPU with room: sources of copies stay until the last layer's forward has ended."""

    def settle_late(runtime, room):
        ends = sys._getframe(1).f_code is LayerRuntime.ended.__code__
        settle(runtime, 0 if ends else 1 << 30)

    return settle_late


def _with_positions(model, args, kwargs):
    ids = args[0] if args else kwargs["input_ids"]
    return args, {**kwargs, "position_ids": torch.arange(ids.shape[1]).repeat(ids.shape[0], 1)}


def run(device, tier: str, way: str, action: str, directory) -> list[str]:
    """What the checker found, each problem once."""
    with contextlib.ExitStack() as stack:
        model = build(tier, way, directory, stack)
        stack.enter_context(standing_in(torch.device("cpu"), device))
        if way.startswith("shared"):  # this rank's part of rows that two ranks share
            stack.enter_context(sharded(LoneRank(2)))
            model.register_forward_pre_hook(_with_positions, with_kwargs=True)
        with device:
            ACTIONS[action](model, device)
        hfpatch.undo(model)
        del model
    return sorted(set(device.problems))
