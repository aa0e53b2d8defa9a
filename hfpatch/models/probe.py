"""Asking one layer: how often it calls attention, whether it is the common block, whose values no gradient reads."""

import torch
from torch import Tensor, nn

from hfpatch.models.answers import Answers, looks_like_a_block
from hfpatch.models.asking import Asked, asking, our_attention
from hfpatch.models.dead import can_go_without, idle, without_values
from hfpatch.models.layer import Arguments, Ask
from hfpatch.models.masks import Batch

TOKENS = 12
OTHER_MIXER = "it mixes tokens by something else than attention"


class _Counting:
    """Answers every call with NaN and remembers whether a later call saw one."""

    def __init__(self):
        self.modules, self.independent, self.reasons = [], True, []

    def __call__(self, asked: Asked) -> Tensor:
        inputs = (asked.q_BHTE, asked.k_BKTE, asked.v_BKTE)
        self.independent &= all(bool(torch.isfinite(x).all()) for x in inputs)
        self.modules.append(asked.module)
        self.reasons += [reason] if (reason := asked.why_not_tiled()) else []
        q, v = asked.q_BHTE, asked.v_BKTE
        return q.new_full((q.shape[0], q.shape[2], q.shape[1], v.shape[3]), float("nan"))


class _Captured(Exception):
    pass


def captured(stack: nn.Module, layer: nn.Module) -> tuple[tuple, dict, Batch]:
    """(args, kwargs) with which the stack calls this layer, and the batch that its mask describes."""
    ids = torch.arange(TOKENS)[None] % stack.config.vocab_size
    batch = Batch(1, TOKENS, ids.device)
    found = {}

    def note(module, args, kwargs):
        found["call"] = (args, kwargs)
        raise _Captured

    handle = layer.register_forward_pre_hook(note, with_kwargs=True)
    try:
        with our_attention((stack.config,), batch), torch.no_grad():
            mask = torch.ones(1, TOKENS, dtype=torch.bool)
            stack(input_ids=ids, attention_mask=mask, use_cache=False)
    except _Captured:
        pass
    finally:
        handle.remove()
    return *found["call"], batch


def ask(stack: nn.Module, layer: nn.Module) -> Answers:
    """The Answers of a small stack's layer."""
    args, kwargs, batch = captured(stack, layer)
    return ask_layer(layer, type(layer).forward.__get__(layer), args[0], args[1:], kwargs, (stack.config,), batch)


def ask_layer(layer, forward, x_BTD: Tensor, args, kwargs, configs, batch) -> Answers:
    """The Answers of one layer, by running `forward` (its own) on a few tokens."""
    count = _Counting()
    x_BTD = x_BTD.detach()
    try:
        with torch.no_grad(), our_attention(configs, batch), asking(count):
            out = forward(x_BTD, *args, **kwargs)
    except Exception as error:  # a family's own code
        return Answers(reason=f"asked, it raised {type(error).__name__}")
    if isinstance(out, tuple) and any(isinstance(x, Tensor) for x in out[1:]):
        return Answers(reason="it returns more than hidden states")
    if not count.modules:
        return Answers(reason=OTHER_MIXER)
    if count.reasons:
        return Answers(reason=count.reasons[0])
    if not count.independent:
        return Answers(reason="its attention calls depend on each other")
    names = {id(m): n for n, m in layer.named_modules()}
    attention = tuple(names[id(m)] for m in count.modules)
    return _Probe(layer, forward, x_BTD, args, kwargs, configs, batch, attention).answers()


class _Probe:
    """Runs `pre` and `post` of one layer and compares gradients bit for bit."""

    def __init__(self, layer, forward, x_BTD, args, kwargs, configs, batch, attention):
        self.layer, self.forward, self.x, self.batch, self.configs = layer, forward, x_BTD, batch, configs
        self.arguments = Arguments(args, kwargs, *x_BTD.shape[:2])
        self.attention = attention
        self.T = x_BTD.shape[1]
        with torch.no_grad():
            parts = self._ask().pre(self.x, 0, self.T)
        self.dparts = [torch.randn_like(p) for p in parts]
        self.outs = [torch.randn(*q.shape[:3], v.shape[3], dtype=q.dtype) for q, v in zip(parts[::3], parts[2::3])]
        self.dy = torch.randn_like(x_BTD)

    def _ask(self, **known) -> Ask:
        answers = Answers(attention=self.attention, **known)
        return Ask(self.layer, self.arguments, answers, self.configs, self.batch, forward=self.forward)

    def _gradients(self, run) -> list[Tensor | None]:
        x = self.x.clone().requires_grad_()
        wanted = [x, *(p for p in self.layer.parameters() if p.requires_grad)]
        outs, douts, more = run(x)
        pairs = [(o, d) for o, d in zip(outs, douts) if o.requires_grad]
        outs, douts = zip(*pairs)
        return torch.autograd.grad(outs, wanted + more, douts, allow_unused=True)

    def _post(self, **known):
        def run(x):
            outs = [o.clone().requires_grad_() for o in self.outs]
            return self._ask(**known).post(x, outs, 0, self.T, dead=True), [self.dy], outs

        return self._gradients(run)

    def _pre(self, **known):
        return self._gradients(lambda x: (self._ask(**known).pre(x, 0, self.T, dead=True), self.dparts, []))

    def answers(self) -> Answers:
        with torch.enable_grad():
            block = looks_like_a_block(self.layer) and self._same_as_block()
            post, pre = self._post(), self._pre()
            names = [n for n, m in self.layer.named_modules() if can_go_without(m)]
            dead_post = tuple(n for n in names if self._dead(n, self._post, post))
            dead_pre = tuple(n for n in names if self._dead(n, self._pre, pre))
            together = {"dead_post": dead_post, "dead_pre": dead_pre}
            if not (_equal(self._post(**together), post) and _equal(self._pre(**together), pre)):
                together = {}
        return Answers(attention=self.attention, block=block, **together)

    def _dead(self, name: str, run, expected) -> bool:
        """Whether no gradient reads this module's value: NaN and 3 in its place change none."""
        for value in (float("nan"), 3.0):
            try:
                with without_values(idle(self.layer, (name,), value=value)):
                    if not _equal(run(), expected):
                        return False
            except RuntimeError:  # written to in place, for one
                return False
        return True

    def _same_as_block(self) -> bool:
        try:
            with torch.no_grad():
                pairs = [
                    (self._ask(block=True).pre(self.x, 0, self.T), self._ask().pre(self.x, 0, self.T)),
                    (self._ask(block=True).post(self.x, self.outs, 0, self.T), self._ask().post(self.x, self.outs, 0, self.T)),
                ]  # fmt: skip
            values = all(_equal(ours, theirs) for ours, theirs in pairs)
            return (
                values and _equal(self._post(block=True), self._post()) and _equal(self._pre(block=True), self._pre())
            )
        except Exception:  # a layer that only looks like one may raise anything
            return False


def _equal(ours, theirs) -> bool:
    return all(
        a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in zip(ours, theirs, strict=True)
    )
