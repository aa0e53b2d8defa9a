#!/usr/bin/env bash
# The peers that a bare GPU machine lacks, as wheels in .whl/ (ignored by git): bash scripts/gpu/wheels.sh [PACKAGE...]
#
# Needs a network; pure Python or for Python 3.12 on x86-64, without dependencies: torch, triton and transformers are the
# machine's own. Others, such as bitsandbytes (it unpacks to 125 MB), are arguments.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
[ $# -gt 0 ] || set -- liger-kernel torchao peft
platforms=()
for tag in 2_28 2_27 2_24 2_17; do platforms+=(--platform "manylinux_${tag}_x86_64"); done
rm -f .whl/*.whl # one version of each: two would stop the installation
python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp "${platforms[@]}" \
    --platform manylinux2014_x86_64 -d .whl "$@"
du -ch .whl/*.whl
