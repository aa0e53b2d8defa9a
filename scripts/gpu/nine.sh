#!/usr/bin/env bash
# The decisive rows of one GPU in nine minutes: HFPATCH_COMMIT=abc1234 bash scripts/gpu/nine.sh [ARGS of nine.py]
#
# $OUT (default runs/gpu/nine) gets nine.jsonl, a row as soon as it is known, and nine.log.
# .whl/ (scripts/gpu/wheels.sh) may hold wheels that the machine lacks, .triton/ compiled kernels (README.md).
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export OUT=${OUT:-runs/gpu/nine} PYTHONUNBUFFERED=1
PYTHON=${PYTHON:-python3}
mkdir -p "$OUT"
shopt -s nullglob
wheels=(.whl/*.whl)
if [ ${#wheels[@]} -gt 0 ]; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" "${wheels[@]}" &&
        export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
fi
if [ -f .triton/cache.tar.gz ]; then
    export TRITON_CACHE_DIR=$(mktemp -d)
    tar xzf .triton/cache.tar.gz -C "$TRITON_CACHE_DIR"
fi
"$PYTHON" scripts/gpu/nine.py --out "$OUT" "$@" 2>&1 | tee "$OUT/nine.log"
