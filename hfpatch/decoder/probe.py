"""Probes one layer of a small instance: its attention calls and mixers, and which Linears' values no
gradient reads.

    captured    records the arguments with which the stack calls the layer
    _asked      finds the modules that mix tokens: attention, and mixers (layer/mixers.py)
    _Probe      runs the two parts of the layer. Compares gradients bit for bit, with and without
                a Linear's value
"""

from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from hfpatch.compat import Snapshot, buffers_of, pytree, version
from hfpatch.context.classes import forwards_for_now
from hfpatch.context.current import Asked, NotStopped, asking, our_attention
from hfpatch.context.masks import Batch
from hfpatch.layer.arguments import Arguments
from hfpatch.layer.condition import Condition
from hfpatch.layer.mixers import find_mixers, standing_in
from hfpatch.layer.residual_streams import by_rows, joined, streams_of
from hfpatch.layer.shared_keys import of_its_own
from hfpatch.layer.traced import Traced
from hfpatch.layer.traits import LayerTraits
from hfpatch.layer.why_whole import OTHER_MIXER, Why, why
from hfpatch.parts.unread import can_go_without, skippable, skipping

TOKENS = 12
MORE_THAN_HIDDEN = why("more results")


class _Counting:
    """Records every attention call and answers it with a constant (NaN by default).

    independent: the inputs of all calls were finite, so no call reads another call's NaN.
    """

    def __init__(self, value: float = float("nan")):
        self.modules, self.inputs, self.reasons = [], [], []
        self.independent, self.value, self.softcap = True, value, None

    def __call__(self, asked: Asked) -> Tensor:
        inputs = (asked.q_BHTE, asked.k_BKTE, asked.v_BKTE)
        self.independent &= all(bool(torch.isfinite(x).all()) for x in inputs)
        self.modules.append(asked.module)
        self.inputs += [x.transpose(1, 2) for x in inputs]
        self.softcap = asked.softcap or self.softcap
        self.reasons += [reason] if (reason := asked.why_not_tiled()) else []
        q, v = asked.q_BHTE, asked.v_BKTE
        return q.new_full((q.shape[0], q.shape[2], q.shape[1], v.shape[3]), self.value)

    def mixer(self, name, args, kwargs) -> Tensor:
        x = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        self.independent &= bool(torch.isfinite(x).all())
        return torch.full_like(x, self.value)


class _Captured(Exception):
    pass


def captured(stack: nn.Module, layer: nn.Module, tokens: int = TOKENS) -> tuple:
    """The stack's call of this layer: (the layer's forward, hidden states [1, tokens, D], other
    arguments, keyword arguments, the batch that their mask describes)."""
    ids = torch.arange(tokens)[None] % stack.config.vocab_size
    batch = Batch(1, tokens, ids.device)
    found = {}

    def note(module, args, kwargs):
        found["call"] = (args, kwargs)
        raise _Captured

    handle = layer.register_forward_pre_hook(note, with_kwargs=True)
    try:
        with our_attention((stack.config,), batch), torch.no_grad():
            stack(
                input_ids=ids,
                attention_mask=torch.ones(1, tokens, dtype=torch.bool),
                use_cache=False,
            )
    except _Captured:
        pass
    finally:
        handle.remove()
    (x, *args), kwargs = found["call"]
    streams = streams_of(x, 1, tokens)
    forward = by_rows(type(layer).forward.__get__(layer), streams)
    return forward, joined(x.detach(), streams), args, of_its_own(kwargs), batch


@contextmanager
def buffers_copied(layer: nn.Module):
    """A context in which the layer writes to copies of its buffers.

    Yields a function that returns the names of the buffers that were written to.
    """
    own = [(name, buffers_of(m), dict(buffers_of(m))) for name, m in layer.named_modules()]
    for _, buffers, before in own:
        buffers.update({n: b if b is None else b.detach().clone() for n, b in before.items()})
    copied = [dict(buffers) for _, buffers, _ in own]

    def written():
        for (name, buffers, _), copies in zip(own, copied):
            for n, b in copies.items():
                if buffers.get(n) is not b or b is not None and version(b):
                    yield f"{name}.{n}".lstrip(".")

    try:
        yield written
    finally:
        for _, buffers, before in own:
            buffers.update(before)


def ask(stack: nn.Module, layer: nn.Module) -> LayerTraits:
    """The LayerTraits of a small stack's layer, from runs of its own forward on a few tokens."""
    forward, *call, batch = captured(stack, layer)
    with buffers_copied(layer) as written:
        try:
            answers = _asked(layer, forward, *call, (stack.config,), batch)
        except Exception as error:  # a family's own code
            answers = LayerTraits(reason=_said(error))
        # In tiles, the layer would write the buffer once a tile, each time from a part of the row.
        return replace(
            answers,
            reason=answers.reason or next((why("buffer", name) for name in written()), None),
        )


def _said(error: Exception) -> Why:
    if isinstance(error, NotStopped):
        return why("not stopped", str(error))
    return why("raised", f"{type(error).__name__} ({' '.join(str(error).split())[:80]})")


def _asked(layer, forward, x_BTD, args, kwargs, configs, batch) -> LayerTraits:
    run = lambda x: forward(x, *args, **of_its_own(kwargs))  # noqa: E731
    # 1. The modules that call attention, and why a call cannot be tiled.
    count = _Counting(0.0)
    with torch.no_grad(), our_attention(configs, batch), asking(count):
        run(x_BTD)
    attention = tuple(module or _calls_torchs_own(layer) for module in count.modules)
    given = {id(x) for x in pytree.tree_leaves((args, kwargs))}

    def told(x):  # (the layer's output, the inputs of its attention calls)
        with asking(_Counting(0.0)) as count:
            return run(x), count.inputs

    # 2. Answer attention with constants: does anything else mix tokens?
    with torch.no_grad(), our_attention(configs, batch), asking(_Counting(0.0)):
        found = find_mixers(layer, told, x_BTD, given)
    traits = _with_mixers(layer, run, x_BTD, configs, batch, attention, found, count.reasons)
    # 3. If that stays unexplained, let attention run inside modules, and look again.
    if traits.reason is not None:
        if traits.reason == MORE_THAN_HIDDEN or not attention:
            return traits
        try:
            with torch.no_grad(), our_attention(configs, batch), asking(None):
                found = find_mixers(layer, run, x_BTD, given)
            inside = _with_mixers(layer, run, x_BTD, configs, batch, (), found, count.reasons)
        except Exception:  # attention that needs all ranks fails on a few tokens
            return traits
        if inside.reason is not None:
            return traits
        traits = replace(inside, attends=not traits.mixers and traits.reason != OTHER_MIXER)
    # 4. Compare values and gradients of the two parts around attention.
    try:
        return _Probe(layer, forward, x_BTD, args, kwargs, configs, batch, traits).answers()
    except Exception as error:  # a family's own code
        return replace(traits, reason=_said(error))


def _calls_torchs_own(layer) -> nn.Module:
    """The module whose forward calls torch's attention itself, which names no module (Falcon's)."""
    codes = ((m, getattr(type(m).forward, "__code__", None)) for m in layer.modules())
    return next(m for m, code in codes if code and "scaled_dot_product_attention" in code.co_names)


def _with_mixers(
    layer, run, x_BTD, configs, batch, attention: tuple, found, reasons: list[str]
) -> LayerTraits:
    """The traits of a layer whose tokens mix in the modules `attention` and in the mixers `found`
    (None: the mixers were not identified)."""
    if found is None:
        return LayerTraits(reason=OTHER_MIXER, looked=True)
    names = {id(m): n for n, m in layer.named_modules()}
    known = LayerTraits(tuple(names[id(m)] for m in attention), found, looked=True)
    count = _Counting()
    with (
        torch.no_grad(),
        our_attention(configs, batch),
        asking(count),
        standing_in(layer, found, count.mixer),
    ):
        out = run(x_BTD)
    if isinstance(out, tuple) and any(
        isinstance(x, Tensor) and x.shape[:2] != x_BTD.shape[:2] for x in out[1:]
    ):
        return replace(known, reason=MORE_THAN_HIDDEN)
    if attention and reasons:
        return replace(known, reason=why("probed attention", reasons[0]))
    if len(count.modules) != len(attention):  # a mixer makes some of the attention calls
        return LayerTraits(reason=OTHER_MIXER, looked=True)
    if not count.independent:
        return replace(known, reason=why("dependent mixers"))
    return replace(known, softcap=count.softcap)


class _Probe:
    """Runs the two parts of one layer and compares their values and gradients."""

    def __init__(self, layer, forward, x_BTD, args, kwargs, configs, batch, known: LayerTraits):
        self.layer, self.forward, self.configs = layer, forward, configs
        self.x, self.batch = x_BTD, batch
        self.arguments = Arguments(args, of_its_own(kwargs), *x_BTD.shape[:2])
        self.known = known
        self.T = x_BTD.shape[1]
        with torch.no_grad():
            parts = self._ask().before(self.x, 0, self.T)
        self.dparts = [torch.randn_like(p) for p in parts]
        n = 3 * len(known.attention)
        like = [
            q[..., :1].expand(*q.shape[:3], v.shape[3]) for q, v in zip(parts[:n:3], parts[2:n:3])
        ] + parts[n:]
        self.outs = [torch.randn_like(x) for x in like]
        with torch.no_grad():
            made = self._ask().after(self.x, self.outs, 0, self.T)
        self.dys = [torch.randn_like(y) if y.is_floating_point() else None for y in made]

    def _ask(self, **known) -> Traced:
        answers = replace(self.known, **known)
        condition = Condition(Snapshot(self.layer), answers)
        return Traced(
            self.layer, self.arguments, answers, self.configs, self.batch, condition, self.forward
        )

    def _gradients(self, run) -> list[Tensor | None]:
        x = self.x.clone().requires_grad_()
        wanted = [x, *(p for p in self.layer.parameters() if p.requires_grad)]
        outs, douts, more = run(x)
        pairs = [(o, d) for o, d in zip(outs, douts) if o.requires_grad]
        if not pairs:
            return []
        outs, douts = zip(*pairs)
        return torch.autograd.grad(outs, wanted + more, douts, allow_unused=True)

    def _gradients_after(self, **known):
        def run(x):
            outs = [o.clone().requires_grad_() for o in self.outs]
            return self._ask(**known).after(x, outs, 0, self.T, unread=True), self.dys, outs

        return self._gradients(run)

    def _gradients_before(self, **known):
        return self._gradients(
            lambda x: (self._ask(**known).before(x, 0, self.T, unread=True), self.dparts, [])
        )

    def answers(self) -> LayerTraits:
        with torch.enable_grad():
            after, before = self._gradients_after(), self._gradients_before()
            # Modules inside mixers run in neither part.
            inside = tuple(f"{name}." for name in self.known.mixers)
            names = [
                n
                for n, m in self.layer.named_modules()
                if can_go_without(m) and not n.startswith(inside)
            ]
            called_after = self._called(names, self._gradients_after)
            called_before = self._called(names, self._gradients_before)
            unread_after = tuple(
                n for n in called_after if self._no_gradient_reads(n, self._gradients_after, after)
            )
            unread_before = tuple(
                n
                for n in called_before
                if self._no_gradient_reads(n, self._gradients_before, before)
            )
            unread = tuple(n for n in unread_after if self._output_ignores(n))
            together = {
                "unread_after": unread_after,
                "unread_before": unread_before,
                "unread_always": unread,
            }
            if not (
                _equal(self._gradients_after(**together), after)
                and _equal(self._gradients_before(**together), before)
            ):
                together = {}
        return replace(self.known, **together)

    def _called(self, names: list[str], run) -> list[str]:
        """The modules among `names` that run() calls. Skipping an uncalled module saves nothing."""
        modules = {name: self.layer.get_submodule(name) for name in names}
        called = set()
        handles = [
            module.register_forward_pre_hook(lambda module, _: called.add(module))
            for module in modules.values()
        ]
        run()
        for handle in handles:
            handle.remove()
        return [name for name, module in modules.items() if module in called]

    def _no_gradient_reads(self, name: str, run, expected) -> bool:
        """Whether no gradient reads this module's value: with NaN and with 3 in place of the value,
        all gradients stay the same."""
        for value in (float("nan"), 3.0):
            try:
                with forwards_for_now(skipping(skippable(self.layer, (name,)), value=value)):
                    if not _equal(run(), expected):
                        return False
            except RuntimeError:  # for example a value that is written to in place
                return False
        return True

    def _output_ignores(self, name: str) -> bool:
        """Whether the output of `after` does not depend on this module's value."""
        with torch.no_grad():
            expected = self._ask().after(self.x, self.outs, 0, self.T)
            with forwards_for_now(skipping(skippable(self.layer, (name,)), value=float("nan"))):
                return _equal(self._ask().after(self.x, self.outs, 0, self.T), expected)


def _equal(ours, theirs) -> bool:
    return all(
        a is b or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(ours, theirs, strict=True)
    )
