#!/usr/bin/env bash
# One part of the measurements in one short slot on a GPU machine: HFPATCH_COMMIT=abc1234 bash scripts/gpu/slot.sh PART
#
# PART is 1 to 4 (slot.py says what each holds). Ends by itself within nine minutes; $OUT gets three files.
# Wheels that `bash scripts/gpu/wheels.sh` left in .whl/ are used beside the machine's own packages; none of those is replaced.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
PYTHON=${PYTHON:-python3}
shopt -s nullglob
wheels=(.whl/*.whl)
[ "${1:-}" != 4 ] || wheels+=(.whl/engines/*.whl) # of the engines' part alone: whoever finds DeepSpeed imports it
if [ ${#wheels[@]} -gt 0 ]; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    install() { "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$@"; }
    # An environment that uv made has no pip; a wheel is a zip of what goes there.
    "$PYTHON" -m pip --version >/dev/null 2>&1 ||
        install() { for wheel; do "$PYTHON" -m zipfile -e "$wheel" "$site" || return; done; }
    # All at once is quickest; one that does not fit this machine must not keep the others out.
    install "${wheels[@]}" 2>/dev/null || for wheel in "${wheels[@]}"; do
        install "$wheel" 2>/dev/null || echo "hfpatch: $wheel does not install here; what needs it is left out." >&2
    done
    export PYTHONPATH=$PWD:$site${PYTHONPATH:+:$PYTHONPATH}
fi
"$PYTHON" scripts/gpu/slot.py "$@"
