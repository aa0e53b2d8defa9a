"""What changes from step to step in one process: layouts of attention's tensors, lengths, and free
memory.

python scripts/gpu/17_changes.py --out $OUT
"""

import contextlib
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import common
import step
import torch
from cases import LLAMA_8B, TINY, Error
from watch import policy_of

import hfpatch
from hfpatch.attention import heads
from hfpatch.attention.attention import attention_backward, attention_forward
from hfpatch.lab.checks import batch_of, compared, ways
from hfpatch.lab.watch import pinned_gib

WORDS = """
cuDNN keeps its plans by q, k and v (up to torch 2.13): a backward of the same q, k, v with another
layout of dout or out may take a wrong plan. `layouts`: attention of Llama-3.1-8B's heads, all at
once (wide) and one KV head (group), its backward with one layout of dout and out after the other in
one process, then the first again, against float64. `model`: a narrow model over as many tokens, its
layers in one tile and in several, one way after the other, the backend forced. `share` is the worst
error over what is allowed, and `where` names it. `lengths`: steps of Llama-3.1-8B's widths, each of
a length that was not there before; `pinned_gib` must not grow without end, and `step_s` of a new
length is that of cuDNN's plan too. `memory`: after a step the process may take less memory than
that step did; the next one fails or not, and the one after must run and give the first one's
gradients (`apart`: the worst relative distance).
"""
COLUMNS = (
    "check backend what tokens passed share where again step_s ms pinned_gib peak_gib planted_gib "
    "apart policy error"
).split()
CHECKS = ("layouts", "model", "memory", "lengths")


@contextlib.contextmanager
def backend(key: str | None):
    """Within, layers take this backend of attention; None: their own choice."""
    real = heads.pick
    if key:
        heads.pick = lambda *args: key
    try:
        yield
    finally:
        heads.pick = real


def exact(q, k, v, dout, scale: float, chunk: int) -> list:
    """[out, dq, dk, dv] in float64: a KV head and `chunk` queries at a time, so that scores never
    exist whole.
    """
    repeat, T = q.shape[2] // k.shape[2], q.shape[1]
    found = [torch.zeros(t.shape, dtype=torch.float64, device=t.device) for t in (q, q, k, v)]
    for h in range(k.shape[2]):
        mine = slice(h * repeat, (h + 1) * repeat)
        for a in range(0, T, chunk):
            b = min(a + chunk, T)
            given = q[:, a:b, mine], k[:, :b, h : h + 1], v[:, :b, h : h + 1]
            leaves = [t.double().requires_grad_() for t in given]
            one_q, one_k, one_v = (t.transpose(1, 2) for t in leaves)
            later = torch.arange(b, device=q.device) > torch.arange(a, b, device=q.device)[:, None]
            p = (
                (one_q @ one_k.transpose(2, 3) * scale)
                .masked_fill(later, float("-inf"))
                .softmax(-1)
            )
            out = (p @ one_v).transpose(1, 2)
            dq, dk, dv = torch.autograd.grad(out, leaves, dout[:, a:b, mine].double())
            found[0][:, a:b, mine], found[1][:, a:b, mine] = out.detach(), dq
            found[2][:, :b, h : h + 1] += dk
            found[3][:, :b, h : h + 1] += dv
    return found


def laid_out(x: torch.Tensor) -> dict:
    """The same values [B, T, H, E] as the layers have them: part of a wider tensor, a tensor of its
    own, heads before tokens.
    """
    wider = torch.cat((x, x), 2)[:, :, : x.shape[2]]
    return {
        "slice": wider,
        "whole": x.contiguous(),
        "heads first": x.transpose(1, 2).contiguous().transpose(1, 2),
    }


def plain(q, k, v, dout, scale) -> list:
    """What a model calls, in the same dtype; not cuDNN, which is what is asked about."""
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    one_q, one_k, one_v = (t.transpose(1, 2) for t in leaves)
    repeat = q.shape[2] // k.shape[2]
    one_k, one_v = (t.repeat_interleave(repeat, 1) for t in (one_k, one_v))
    sdpa, kinds = torch.nn.functional.scaled_dot_product_attention, torch.nn.attention.SDPBackend
    with torch.nn.attention.sdpa_kernel([kinds.FLASH_ATTENTION, kinds.MATH]):
        out = sdpa(one_q, one_k, one_v, is_causal=True, scale=scale).transpose(1, 2)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def layouts(sheet, key: str, T: int, widths) -> None:
    device, scale, repeat = (
        sheet.args.device,
        widths.head_dim**-0.5,
        widths.heads // widths.kv_heads,
    )
    g = torch.Generator(device=device).manual_seed(0)
    sizes = (widths.heads, widths.kv_heads, widths.kv_heads, widths.heads)
    whole = [
        torch.randn(1, T, n, widths.head_dim, device=device, generator=g).to(torch.bfloat16)
        for n in sizes
    ]
    for what, kv in (("wide", widths.kv_heads), ("group", 1)):
        q, k, v, dout = (
            t[:, :, -(kv if i in (1, 2) else kv * repeat) :] for i, t in enumerate(whole)
        )
        true = exact(q, k, v, dout, scale, min(T, 1024))
        usual = plain(q, k, v, dout, scale)
        out, lse, state = attention_forward(q, k, v, scale=scale, backend=key)
        douts, outs = laid_out(dout), laid_out(out)
        # Every pair of layouts, and at last the first again, which then meets the others' plans.
        pairs = [(a, b) for a in douts for b in outs]
        for i, (a, b) in enumerate([*pairs, pairs[0]]):
            clock = common.Clock()
            clock.mark()
            grads = attention_backward(
                douts[a], q, k, v, outs[b], lse, state, scale=scale, backend=key
            )
            clock.mark()
            found = {name: Error() for name in ("out", "dq", "dk", "dv")}
            for error, *values in zip(found.values(), (out, *grads), usual, true):
                error.see(*values)
            worst = max(found, key=lambda name: found[name].share(torch.bfloat16))
            share = found[worst].share(torch.bfloat16)
            sheet.add(
                check="layouts", backend=key, what=f"{what}: dout {a}, out {b}", tokens=T,
                passed=share <= 1.0, share=share,
                where=worst, again=i == len(pairs), ms=clock.gaps_ms()[0],
            )  # fmt: skip


def model(sheet, key: str | None, T: int, small: bool) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 112, "vocab_size": 97} if small else {
        "hidden_size": 512, "intermediate_size": 1024, "vocab_size": 1024, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 128,
    }  # fmt: skip
    case = {
        "preset": "llama-tiny",
        "layers": 2,
        "tokens": T,
        "changes": sizes | {"initializer_range": 0.05},
    }
    made = step.build(case, sheet.args.device, torch.bfloat16)
    chosen = {
        way: how
        for way, how in ways(max(16, T // 4)).items()
        if way in ("host", "one tile", "gpu, all kept")
    }
    again = {"host, again": chosen["host"], "one tile, again": chosen["one tile"]}
    with backend(key):
        batch = batch_of(made, T, sheet.args.device)
        for way, share, where in compared(made, batch, chosen | again, torch.bfloat16):
            sheet.add(
                check="model", backend=key or "chosen", what=way, tokens=T, passed=share <= 1.0,
                share=share, where=where,
                again="again" in way,
            )  # fmt: skip


def big(sheet, T: int):
    (case,) = step.small(sheet, [{"layers": 8, "tokens": T}])
    return step.build(case, sheet.args.device)


def one_step(model, T: int, seed: int = 0, keep: bool = False) -> tuple[float, dict]:
    """Seconds of a step over T random tokens, and its gradients on the host where they are kept."""
    batch = batch_of(model, T, next(model.parameters()).device, seed)
    common.synchronize()
    began = time.perf_counter()
    model(**batch, use_cache=False).loss.backward()
    common.synchronize()
    took = time.perf_counter() - began
    grads = {n: p.grad.cpu() for n, p in model.named_parameters()} if keep else {}
    model.zero_grad(set_to_none=True)
    return took, grads


def lengths(sheet, key: str | None, low: int, high: int, count: int) -> None:
    """Steps of lengths that differ; the same ones for every backend."""
    drawn = random.Random(0)
    made = big(sheet, high)
    hfpatch.apply(made)
    with backend(key):
        for i in range(count):
            T = drawn.randrange(low, high)
            if sheet.late(f"lengths {key or 'chosen'} from step {i}"):
                break
            took, _ = one_step(made, T, i)
            sheet.add(
                check="lengths", backend=key or "chosen", what=f"step {i}", tokens=T, passed=True,
                step_s=took,
                pinned_gib=pinned_gib(made), policy=policy_of(made),
            )  # fmt: skip
    hfpatch.undo(made)


def memory(sheet, T: int, leave: float = 0.85) -> None:
    """Steps before and after the process is allowed no more than `leave` of the memory that a step
    took.
    """
    cuda, wanted, planted = sheet.args.cuda, {}, None
    made = big(sheet, T)
    hfpatch.apply(made)
    try:
        for what in ("before", "first after", "second after"):
            row = {"check": "memory", "what": what, "tokens": T, "planted_gib": planted}
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            try:
                row["step_s"], grads = one_step(made, T, keep=True)
                wanted = wanted or grads
                row["apart"] = max(step_distance(grads[n], wanted[n]) for n in wanted)
            except torch.OutOfMemoryError:
                row["error"] = "out of memory"
            made.zero_grad(set_to_none=True)
            common.clean()
            peak = torch.cuda.max_memory_reserved() if cuda else 0
            # Sums in another order: some rounding steps of bfloat16, never another token's data.
            near = row.get("apart", 0.0) <= 0.05
            ran = "error" not in row or what == "first after"
            sheet.add(
                **row, passed=near and ran, peak_gib=peak / common.GiB, policy=policy_of(made)
            )
            if cuda and planted is None:
                planted = leave * peak / common.GiB
                total = torch.cuda.get_device_properties(0).total_memory
                torch.cuda.set_per_process_memory_fraction(leave * peak / total)
    finally:
        if cuda:
            torch.cuda.set_per_process_memory_fraction(1.0)
        hfpatch.undo(made)


def step_distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-30)).item()


def main(argv=None) -> int:
    made = common.parser("17_changes", __doc__)
    made.add_argument("--checks", nargs="+", default=list(CHECKS), choices=CHECKS)
    args = common.parse(made, argv)
    sheet = common.Sheet(args)
    keys = ("cudnn", "flash") if args.cuda else ("cpu",)
    T, widths = (45, TINY) if args.small else (8192, LLAMA_8B)
    spread = (16, 48, 3) if args.small else (8192, 32768, 8)
    jobs = {
        "layouts": [(f"layouts {key}", layouts, (key, T, widths)) for key in keys],
        "model": [(f"model {key}", model, (key, T, args.small)) for key in keys],
        "memory": [("memory", memory, (48 if args.small else 32768,))],
        "lengths": [(f"lengths {key}", lengths, (key, *spread)) for key in keys],
    }
    for name, job, arguments in [one for check in args.checks for one in jobs[check]]:
        if sheet.late(name):
            continue
        try:
            job(sheet, *arguments)
        except RuntimeError as error:  # cuDNN may be absent; what it computes wrongly is a row
            if not common.is_out_of_memory(error) and "cudnn" not in name:
                raise
            sheet.skip(name, common.one_line(error))
        common.clean()
    failed = [row for row in sheet.rows if not row["passed"]]
    rows = [row for row in sheet.rows if row["check"] == "lengths"]

    def draw(axes):
        for key in dict.fromkeys(row["backend"] for row in rows):
            mine = [row for row in rows if row["backend"] == key]
            for axis, column in zip(axes, ("step_s", "pinned_gib")):
                axis.plot([row[column] for row in mine], marker="o", label=key)
                axis.set(title=f"{column} by step", xlabel="step")
                axis.legend(fontsize=7)

    picture = sheet.picture(draw, wide=2) if rows else None
    sheet.page(
        f"Changes in one process: {len(failed)} of {len(sheet.rows)} fail", WORDS, COLUMNS, picture
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
