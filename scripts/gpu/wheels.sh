#!/usr/bin/env bash
# The peers that a bare GPU machine lacks, as wheels in .whl/ (ignored by git): bash scripts/gpu/wheels.sh [PACKAGE...]
#
# Needs a network; pure Python or for Python 3.12 on x86-64, without dependencies: torch, triton and transformers are the
# machine's own. bitsandbytes is left out: it unpacks to 125 MB, and a tree that travels has 64 MiB.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
[ $# -gt 0 ] || set -- liger-kernel torchao peft
platforms=()
for tag in 2_28 2_27 2_24 2_17; do platforms+=(--platform "manylinux_${tag}_x86_64"); done
rm -f .whl/*.whl # one version of each: two would stop the installation
python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp "${platforms[@]}" \
    --platform manylinux2014_x86_64 -d .whl "$@"
# What travels: the wheels, and every file of the tree that git does not ignore, committed or not.
mib() { du -cm --apparent-size --files0-from=- 2>/dev/null | tail -1 | cut -f1; }
size=$(find .whl -type f -name '*.whl' -print0 | mib)
tree=$(git ls-files -z --cached --others --exclude-standard | mib)
echo "hfpatch: $(find .whl -type f -name '*.whl' | wc -l) wheels, $size MiB; the tree $tree MiB; together they must stay below 64."
[ $((size + tree)) -lt 64 ]
