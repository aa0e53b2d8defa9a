"""Tile sizes and tiers: a few layers of 8B at 8k, 32k and 128k with each tile, and the rates of
pinning and copying.

python scripts/gpu/12_tiles.py --out $OUT
"""

import mmap
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import common
import step
import torch

from hfpatch.budget.policy import KEEPABLE

WORDS = """
Four layers of Llama-3.1-8B's shape; what a layer costs is the difference to no layers, and is
compared between tiles and tiers, not taken as a step; `keep` rows hold tensors beside inputs and
attention outputs (the policy's order should be theirs). Then the host: seconds to pin a GiB of
memory registered as the pool registers it (shared anonymous pages), and of private pages asked to
be huge, and the rates of copies to and from such memory. The policy's choice of tile and tier
should be the fastest row of its length that its memory allows.
"""
COLUMNS = (
    "what tokens tier tile step_s forward_s backward_s attention_s matmul_s copy_wait_s other_s "
    "beyond_gib "
    "pin_s_per_gib to_host_gb_s to_device_gb_s policy error"
).split()


def private_huge(nbytes: int):
    """Private anonymous pages, huge where the system gives them; a fork would copy them while they
    are pinned.
    """
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        if hasattr(mmap, advice):
            memory.madvise(getattr(mmap, advice))
    return memory


def pinning(sheet, name: str, make, nbytes: int) -> None:
    device, cuda = sheet.args.device, sheet.args.cuda
    torch.zeros(1, device=device)  # the first use of the device takes a second
    common.synchronize()
    start = time.perf_counter()
    memory = make(nbytes)
    host = torch.frombuffer(memory, dtype=torch.uint8)
    if cuda and int(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), nbytes, 0)) != 0:
        sheet.skip(f"pinning {name}", "cudaHostRegister failed")
        return
    seconds = time.perf_counter() - start
    there = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def run(i, mark):
        host.copy_(there, non_blocking=True)
        mark()
        there.copy_(host, non_blocking=True)
        mark()

    out, back = common.timed(run, budget_ms=200, least=3)
    sheet.add(
        what=f"pinning, {name}", pin_s_per_gib=seconds * common.GiB / nbytes,
        to_host_gb_s=nbytes / out / 1e6,
        to_device_gb_s=nbytes / back / 1e6,
    )  # fmt: skip
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaHostUnregister(host.data_ptr())


def main(argv=None) -> int:
    made = common.parser("12_tiles", __doc__)
    made.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768, 131072])
    made.add_argument("--tiles", type=int, nargs="+", default=[2048, 4096, 8192, 16384])
    made.add_argument("--host-gib", type=float, help="host memory to plan with")
    args = common.parse(made, argv)
    sheet = common.Sheet(args)
    cases = [
        {
            "impl": "hfpatch", "layers": 4, "tokens": T, "warmup": 2,
            "steps": 3 if T < 100000 else 1, "split": True,
            "checkpointing": {"offload": tier, "every": 1, "save_attention": True, "tile": tile,
                              "plain": 0, "keep": []},
            "host_gib": args.host_gib, "label": {"what": "tile", "tier": tier, "tile": tile},
        }
        for T in args.tokens
        for tile in args.tiles
        for tier in ("host", "gpu")
        if tile <= T and not (T > 100000 and tier == "gpu" and tile != 8192)
    ]  # fmt: skip
    # What the layers keep beside their input and attention outputs, one thing at a time, and what
    # nobody asked for chooses.
    ways = [{"keep": [n]} for n in KEEPABLE] + [{"keep": list(KEEPABLE)}, {"plain": 4}]
    base = {
        "offload": "gpu",
        "every": 1,
        "save_attention": True,
        "tile": 8192,
        "plain": 0,
        "keep": [],
    }
    kept = [
        {
            "impl": "hfpatch", "layers": 4, "tokens": T, "warmup": 2, "steps": 3,
            "checkpointing": asked,
            "host_gib": args.host_gib, "label": {"what": "keep", "tier": words},
        }
        for T in args.tokens
        if T <= 32768
        for asked, words in [*((base | way, str(way)) for way in [{}, *ways]), ("auto", "auto")]
    ]  # fmt: skip
    if args.small:
        cases, kept = cases[:2], kept[:1] + kept[4:7]
    step.run_cases(sheet, step.small(sheet, cases))
    step.run_cases(sheet, step.small(sheet, kept))
    nbytes = (1 << 20) if args.small else (2 << 30)
    for name, make in (
        ("shared pages", lambda n: mmap.mmap(-1, n)),
        ("private huge pages", private_huge),
    ):
        pinning(sheet, name, make, nbytes)

    def draw(axes):
        rows = [
            {**r, "where": f"{r['tokens']:,} {r['tier']}"}
            for r in sheet.rows
            if r["what"] == "tile" and "step_s" in r
        ]
        for row in rows:
            row["per token, us"] = row["step_s"] / row["tokens"] * 1e6
        common.lines(
            axes[0], rows, "tile", "per token, us", "where", title="step time a token by tile"
        )

    sheet.page("Tiles, tiers and the host's rates", WORDS, COLUMNS, sheet.picture(draw))
    return 0


if __name__ == "__main__":
    sys.exit(main())
