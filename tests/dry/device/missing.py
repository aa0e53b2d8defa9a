"""Writes C for what torch's libraries import, or look up by name, and no file here defines.

Such a function of the driver and the runtime says that it is not modelled and answers "not
supported"; one of cuBLAS counts as a launch.

    missing.py SITE_PACKAGES OUT.c FILES.c...
"""

import re
import subprocess
import sys
from pathlib import Path

VERSIONED = re.compile(r"@lib(cudart|cublas|cublasLt|cudnn)\.")
DRIVER = re.compile(r"cu[A-Z]\w+")
DEFINED = re.compile(r"^[a-zA-Z_].*?[ *]((?:__)?(?:cu|nvml)[a-zA-Z]\w+)\(", re.M)
# cublas.c makes these with a macro.
BY_MACRO = {f"cublas{t}{name}" for t in "SD" for name in ("gemm_v2", "gemmStridedBatched")}


def imported(library: Path) -> set[str]:
    """The names of CUDA's interfaces that a library imports."""
    command = ["nm", "-D", "--undefined-only", str(library)]
    lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    names = {line.split()[-1] for line in lines if line.strip()}
    found = {n for n in names if VERSIONED.search(n) or DRIVER.fullmatch(n.split("@")[0])}
    return {n.split("@")[0] for n in found if not n.startswith("cuFile")}


def looked_up(library: Path) -> set[str]:
    """The names of the driver's functions that a library holds as text, for dlsym."""
    words = re.findall(rb"\bcu[A-Z][A-Za-z0-9]+\b", library.read_bytes())
    return {word.decode() for word in words if not word.startswith(b"cublas")}


def stand_in(name: str) -> str:
    if name.startswith("cublasLt"):
        return f'int {name}(void) {{ dry_unmodelled("{name}"); return 15; }}'
    if name.startswith("cudnn"):
        return f'int {name}(void) {{ dry_unmodelled("{name}"); return 3000; }}'
    if name.startswith("cublas"):
        return f'int {name}(void *handle) {{ return dry_cublas_other(handle, "{name}"); }}'
    once = f'static int said; if (!said++) dry_unmodelled("{name}");'
    return f"int {name}(void) {{ {once} return NOT_SUPPORTED; }}"


def main(site: str, out: str, *sources: str) -> None:
    site_packages = Path(site)
    libraries = [*site_packages.glob("torch/lib/*.so"), *site_packages.glob("torchao/*.so")]
    libraries += site_packages.glob("bitsandbytes/libbitsandbytes_cuda130.so")
    wanted = set().union(*map(imported, libraries))
    wanted |= looked_up(site_packages / "torch/lib/libc10_cuda.so")
    text = "\n".join(Path(source).read_text() for source in sources)
    missing = sorted(wanted - set(DEFINED.findall(text)) - BY_MACRO)
    head = ['#include "dry.h"', "int dry_cublas_other(void *handle, const char *name);"]
    Path(out).write_text("\n".join([*head, *map(stand_in, missing)]) + "\n")
    print(len(missing), "functions without a model")


main(*sys.argv[1:])
