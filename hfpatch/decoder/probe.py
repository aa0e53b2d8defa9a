"""Probes one layer of a small instance: its attention calls and mixers, and which Linears' values no
gradient reads.

    captured         records the call that the stack makes of the layer
    _where_it_mixes  finds the modules that mix tokens: attention, and mixers (layer/mixers.py)
    _Probe           runs the two parts of the layer. Compares gradients bit for bit, with and
                     without a Linear's value
"""

from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from hfpatch.compat import Snapshot, pytree, values_for_now, version
from hfpatch.context.class_code import is_own, reached, wrote
from hfpatch.context.classes import forwards_for_now
from hfpatch.context.current import AttentionCall, Stopped, in_role, our_attention
from hfpatch.context.masks import Batch
from hfpatch.decoder.small_instance import other_generators
from hfpatch.layer.arguments import Arguments, axes_of
from hfpatch.layer.condition import Condition
from hfpatch.layer.mixers import calls_in, find_mixers, standing_in
from hfpatch.layer.residual_streams import by_rows, joined, streams_of
from hfpatch.layer.shared_keys import of_its_own
from hfpatch.layer.traced import Traced
from hfpatch.layer.traits import LayerTraits
from hfpatch.layer.why_whole import OTHER_MIXER, why
from hfpatch.parts.unread import can_go_without, skippable, skipping

TOKENS = 12
MORE_THAN_HIDDEN = why("more results")
NAN = float("nan")


@dataclass
class _Counting:
    """A role that records every attention call, and answers it with a constant.

    Attributes:
        value: the constant.
        modules: the module of each call.
        inputs: q, k and v of each call, with tokens on axis 1.
        independent: the inputs of all calls were finite, so no call reads another call's NaN.
        reason: why one of the calls cannot be tiled, or None.
    """

    value: float
    modules: list = field(default_factory=list)
    inputs: list = field(default_factory=list)
    independent: bool = True
    reason: str | None = None

    def __call__(self, call: AttentionCall) -> Tensor:
        q = call.q_BHTE
        v = call.v_BKTE
        for x in (q, call.k_BKTE, v):
            self.independent &= bool(torch.isfinite(x).all())
            self.inputs.append(x.transpose(1, 2))
        self.modules.append(call.module)
        self.reason = self.reason or call.why_not_tiled()
        return q.new_full((q.shape[0], q.shape[2], q.shape[1], v.shape[3]), self.value)

    def mixer(self, name, args, kwargs) -> Tensor:
        x = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        self.independent &= bool(torch.isfinite(x).all())
        return torch.full_like(x, self.value)


def captured(stack: nn.Module, layer: nn.Module, tokens: int = TOKENS) -> tuple[Traced, Tensor]:
    """The stack's call of this layer on a row of so many tokens, without traits of the layer; and
    its hidden states [1, tokens, D]."""
    ids = torch.arange(tokens)[None] % stack.config.vocab_size
    mask = torch.ones(1, tokens, dtype=torch.bool)
    batch = Batch(1, tokens, ids.device)

    def stop(module, args, kwargs):
        raise Stopped(args, kwargs)

    handle = layer.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        with our_attention((stack.config,), batch), torch.no_grad():
            stack(input_ids=ids, attention_mask=mask, use_cache=False)
    except Stopped as stopped:
        (x, *args), kwargs = stopped.args
    finally:
        handle.remove()
    streams = streams_of(x, 1, tokens)
    forward = by_rows(type(layer).forward.__get__(layer), streams)
    arguments = Arguments(args, of_its_own(kwargs), 1, tokens)
    condition = Condition(Snapshot(layer), LayerTraits())
    call = Traced(layer, arguments, condition.traits, (stack.config,), batch, condition, forward)
    return call, joined(x.detach(), streams)


def with_traits(call: Traced, traits: LayerTraits) -> Traced:
    """The same call of a layer of which these traits are known."""
    condition = Condition(Snapshot(call.layer), traits)
    return replace(call, traits=traits, condition=condition, found={})


@contextmanager
def _answered(call: Traced, role: _Counting | None):
    """A context without gradients, in which `role` answers attention; None: attention runs."""
    with torch.no_grad(), our_attention(call.configs, call.batch), in_role(role):
        yield role


def _run(call: Traced, x_BTD: Tensor):
    """What the layer returns."""
    args, kwargs = call.arguments.tile(0, x_BTD.shape[1])
    return call.forward(x_BTD, *args, **kwargs)


def ask(stack: nn.Module, layer: nn.Module, numbers=()) -> LayerTraits:
    """The LayerTraits of a small stack's layer, from runs of its own forward on a few tokens.
    numbers: (module, attribute) -> the integers by which layers of its kind differ."""
    traits = LayerTraits()
    drawn = None
    before = _buffers(layer)
    try:
        call, x_BTD = captured(stack, layer)
        drawn = repr(other_generators())
        traits = _where_it_mixes(call, x_BTD)
        traits = _probed(call, x_BTD, traits)
        if is_own(layer):
            traits = _of_a_user(call, x_BTD, traits, numbers)
    except Exception as error:  # a family's own code
        traits = replace(traits, reason=why("raised", said(error)))
    if drawn is not None and repr(other_generators()) != drawn:
        return replace(traits, reason=why("other generator"))
    names = [name for name, now in _buffers(layer).items() if before.get(name) != now]
    if names and traits.reason is None:
        # In tiles, the layer would write the buffer once a tile, each time from a part of the row.
        return replace(traits, reason=why("buffer", names[0]))
    return traits


def _buffers(layer: nn.Module) -> dict[str, tuple]:
    # With the buffer itself, so that no other gets its id.
    named = layer.named_buffers(remove_duplicate=False)
    return {name: (id(buffer), version(buffer), buffer) for name, buffer in named}


def _probed(call: Traced, x_BTD: Tensor, traits: LayerTraits) -> LayerTraits:
    return traits if traits.reason else _Probe(call, x_BTD, traits).answers()


def _of_a_user(call: Traced, x_BTD: Tensor, traits: LayerTraits, numbers) -> LayerTraits:
    """The traits of a user's own layer, which may do other things where transformers' do not: by
    further arguments, in eval mode, by its place among the layers."""
    axes = axes_of(call.arguments.args, call.arguments.kwargs, *x_BTD.shape[:2])
    before = [(reached(module), module) for module in call.layer.modules()]
    values = _values(call, x_BTD)
    with _answered(call, None), torch.enable_grad():  # code may ask for it
        _run(call, x_BTD.detach().requires_grad_())
    # The innermost module first: what it holds is reached from those around it too.
    reasons = [
        why("buffer", f"more than the output of its {type(m).__name__}")
        for made, m in reversed(before)
        if wrote(made, m)
    ]
    for (name, what), places in dict(numbers).items():
        rows = [(vars(call.layer.get_submodule(name)), what, n) for n in places]
        if any(_other_by(call, x_BTD, traits, values, [row]) for row in rows):
            reasons.append(why("number", what))
    evaluated = _values(call, x_BTD, [(vars(m), "training", False) for m in call.layer.modules()])
    return replace(
        traits,
        reason=traits.reason or next(iter(reasons), None),
        arguments=axes,
        evaluates=_equal(values, evaluated),
    )


def _other_by(call: Traced, x_BTD: Tensor, traits: LayerTraits, values: list, change) -> bool:
    """Whether the layer has other traits with this change, not only other values. Where it then
    raises, the number is a size, which is another here."""
    with suppress(Exception):
        if not _equal(values, _values(call, x_BTD, change)):
            with values_for_now(change):
                return _probed(call, x_BTD, _where_it_mixes(call, x_BTD)) != traits
    return False


def _values(call: Traced, x_BTD: Tensor, changes=()) -> list:
    """What the layer returns, with these (table, name, value) changes."""
    # From the same state each time: dropout in it draws the same.
    with _answered(call, None), values_for_now(changes), torch.random.fork_rng(devices=[]):
        return [x for x in pytree.tree_leaves(_run(call, x_BTD)) if isinstance(x, Tensor)]


def said(error: Exception) -> str:
    """The class and the message of an error of a family's own code, on one line."""
    return f"{type(error).__name__} ({' '.join(str(error).split())[:80]})"


def _where_it_mixes(call: Traced, x_BTD: Tensor) -> LayerTraits:
    """The traits of a layer as far as they name what mixes its tokens."""
    run = partial(_run, call)
    # [Step 1] Find the modules that call attention, and why a call cannot be tiled.
    with _answered(call, _Counting(0.0)) as count:
        run(x_BTD)
    attention = tuple(module or _calls_torchs_own(call.layer) for module in count.modules)
    given = {id(x) for x in call.arguments.leaves}

    def answered(x_BTD):  # (the layer's output, the inputs of its attention calls)
        with in_role(_Counting(0.0)) as inner:
            return run(x_BTD), inner.inputs

    # [Step 2] Answer attention with constants, and find what else mixes tokens.
    with _answered(call, _Counting(0.0)):
        found = find_mixers(call.layer, answered, x_BTD, given)
    traits = _with_mixers(call, x_BTD, attention, found, count.reason)
    if traits.reason is None or traits.reason == MORE_THAN_HIDDEN or not attention:
        return traits
    # [Step 3] If that stays unexplained, let attention run inside modules, and look again.
    try:
        with _answered(call, None):
            found = find_mixers(call.layer, run, x_BTD, given)
        inside = _with_mixers(call, x_BTD, (), found)
    except Exception:  # attention that needs all ranks fails on a few tokens
        return traits
    if inside.reason is not None:
        return traits
    return replace(inside, attends=not traits.mixes_outside)


def _calls_torchs_own(layer) -> nn.Module:
    """The module whose forward calls torch's attention itself, which names no module (Falcon's)."""
    codes = ((m, getattr(type(m).forward, "__code__", None)) for m in layer.modules())
    return next(m for m, code in codes if code and "scaled_dot_product_attention" in code.co_names)


def _with_mixers(
    call: Traced, x_BTD: Tensor, attention: tuple, found, reason: str | None = None
) -> LayerTraits:
    """The traits of a layer whose tokens mix in the modules `attention` and in the mixers `found`
    (None: the mixers were not identified). reason: why a call of attention cannot be tiled."""
    if found is None:
        return LayerTraits(reason=OTHER_MIXER, looked=True)
    names = {id(m): n for n, m in call.layer.named_modules()}
    traits = LayerTraits(tuple(names[id(m)] for m in attention), found, looked=True)
    count = _Counting(NAN)
    with _answered(call, count), standing_in(call.layer, found, count.mixer):
        out = _run(call, x_BTD)
    for x in out[1:] if isinstance(out, tuple) else ():
        if isinstance(x, Tensor) and x.shape[:2] != x_BTD.shape[:2]:
            return replace(traits, reason=MORE_THAN_HIDDEN)
    if attention and reason is not None:
        return replace(traits, reason=why("probed attention", reason))
    if len(count.modules) != len(attention):  # a mixer makes some of the attention calls
        return LayerTraits(reason=OTHER_MIXER, looked=True)
    if not count.independent:
        return replace(traits, reason=why("dependent mixers"))
    return traits


class _Probe:
    """Runs the two parts of one layer, "before" and "after" attention, and compares their values and
    gradients.

    Attributes:
        outs: random outputs of attention and of mixers.
        douts: part -> random gradients of its outputs, None for those that have none.
    """

    def __init__(self, call: Traced, x_BTD: Tensor, traits: LayerTraits):
        self.call = call
        self.x = x_BTD
        self.traits = traits
        self.outs = []
        n = 3 * len(traits.attention)
        with torch.no_grad():
            parts = self._run("before", x_BTD, (), traits)
            for q, v in zip(parts[:n:3], parts[2:n:3]):
                self.outs.append(q.new_empty(*q.shape[:3], v.shape[3]).normal_())
            self.outs += map(torch.randn_like, parts[n:])
            ys = self._run("after", x_BTD, self.outs, traits)
        self.douts = {
            "before": [torch.randn_like(part) for part in parts],
            "after": [torch.randn_like(y) if y.is_floating_point() else None for y in ys],
        }

    def _run(
        self, part: str, x_BTD: Tensor, outs, traits: LayerTraits, unread=False
    ) -> list[Tensor]:
        """The outputs of a part, for these outputs of attention and of mixers."""
        call = with_traits(self.call, traits)
        tokens = x_BTD.shape[1]
        if part == "before":
            return call.before(x_BTD, 0, tokens, unread)
        return call.after(x_BTD, outs, 0, tokens, unread)

    def _gradients(self, part: str, traits: LayerTraits):
        """The gradients of a part's inputs and of the layer's weights."""
        x_BTD = self.x.clone().requires_grad_()
        outs = [out.clone().requires_grad_() for out in self.outs]
        ys = self._run(part, x_BTD, outs, traits, unread=True)
        pairs = [(y, dy) for y, dy in zip(ys, self.douts[part]) if y.requires_grad]
        if not pairs:
            return []
        ys, dys = zip(*pairs)
        weights = [p for p in self.call.layer.parameters() if p.requires_grad]
        return torch.autograd.grad(ys, [x_BTD, *outs, *weights], dys, materialize_grads=True)

    def _output(self, traits: LayerTraits) -> list[Tensor]:
        with torch.no_grad():
            return self._run("after", self.x, self.outs, traits)

    def answers(self) -> LayerTraits:
        before = partial(self._gradients, "before")
        after = partial(self._gradients, "after")
        names = [n for n, m in self.call.layer.named_modules() if can_go_without(m)]
        with torch.enable_grad():
            unread_after = self._unread(names, after)
            traits = replace(
                self.traits,
                unread_after=unread_after,
                unread_before=self._unread(names, before),
                unread_always=self._unread(unread_after, self._output),
            )
            for gradients in (before, after):  # without all these values at once
                if not _equal(gradients(traits), gradients(self.traits)):
                    return self.traits
        return traits

    def _unread(self, names, results) -> tuple[str, ...]:
        """Those of the named modules whose values no result of results(traits) reads."""
        wanted = results(self.traits)
        # Skipping a module that is not called saves nothing.
        called = calls_in(self.call.layer, results, self.traits)
        return tuple(n for n in names if n in called and self._unread_in(n, results, wanted))

    def _unread_in(self, name: str, results, wanted) -> bool:
        """Whether all results stay the same with NaN and with 3 in place of a module's values."""
        for value in (NAN, 3.0):
            constant = skipping(skippable(self.call.layer, (name,)), value=value)
            try:
                with forwards_for_now(constant):
                    found = results(self.traits)
            except RuntimeError:  # for example a value that is written to in place
                return False
            if not _equal(found, wanted):
                return False
        return True


def _equal(ours, theirs) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
