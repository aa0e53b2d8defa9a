# Sourced by quickstart.sh and test.sh: makes .venv beside the repository and installs hfpatch in it. A torch that is
# already there is used and never replaced; otherwise the pinned one is installed, and said so first.
#
#   HFPATCH_TORCH   what to give pip where no torch is found (default torch==2.13.0; the index decides CPU or CUDA build)
#   HFPATCH_VENV    the environment's folder (default .venv)
#   HFPATCH_BARE    1: an environment of its own that sees none of the packages of PYTHON
#   PYTHON          the Python to start from (default python3)

HFPATCH_TORCH=${HFPATCH_TORCH:-torch==2.13.0}
HFPATCH_OLDEST_TORCH=2.11 # setup.cfg's
HFPATCH_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
HFPATCH_VENV=${HFPATCH_VENV:-$HFPATCH_ROOT/.venv}
PYTHON=${PYTHON:-python3}

# make_env EXTRA: the environment with `pip install -e .[EXTRA]`; afterwards `python` is the environment's.
make_env() {
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
        echo "hfpatch: Python must be 3.10 or newer, got $("$PYTHON" --version 2>&1). Set PYTHON=/path/to/python3." >&2
        return 2
    }
    if [ ! -x "$HFPATCH_VENV/bin/python" ]; then
        # A venv made from a venv sees the base interpreter's packages, not that venv's: link those too.
        local seen=--system-site-packages
        [ "${HFPATCH_BARE:-0}" = 1 ] && seen=
        "$PYTHON" -m venv $seen "$HFPATCH_VENV" || {
            echo "hfpatch: $PYTHON cannot make a virtual environment. Install its venv module (python3-venv)." >&2
            return 2
        }
        [ -z "$seen" ] || "$PYTHON" - "$HFPATCH_VENV" <<'PY'
import glob, sys, sysconfig
if sys.prefix != sys.base_prefix:
    [site] = glob.glob(f"{sys.argv[1]}/lib/python*/site-packages")
    open(f"{site}/_parent.pth", "w").write(sysconfig.get_path("purelib") + "\n")
PY
    fi
    export VIRTUAL_ENV="$HFPATCH_VENV" PATH="$HFPATCH_VENV/bin:$PATH"
    hash -r
    local torch
    if torch=$(python -c 'import torch; print(torch.__version__)' 2>/dev/null); then
        if [ "$(printf '%s\n' "$HFPATCH_OLDEST_TORCH" "$torch" | sort -V | head -1)" != "$HFPATCH_OLDEST_TORCH" ]; then
            echo "hfpatch: torch must be $HFPATCH_OLDEST_TORCH or newer, got $torch, which is not replaced. Update it, or set" \
                "HFPATCH_BARE=1 HFPATCH_VENV=/a/new/folder for an environment of its own." >&2
            return 2
        fi
        echo "hfpatch: using the torch that is here: $torch"
    else
        echo "hfpatch: no torch here; installing $HFPATCH_TORCH (set HFPATCH_TORCH to choose another)"
        python -m pip install -q "$HFPATCH_TORCH" numpy || return 2
        torch=$(python -c 'import torch; print(torch.__version__)') || return 2
    fi
    # Whatever a package asks for, pip then fails with a sentence rather than put another build in its place.
    HFPATCH_KEEP=$HFPATCH_VENV/.hfpatch-torch
    # As pip knows it: torch.__version__ may name a CUDA version that the package's own version lacks.
    local known
    known=$(python -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null)
    echo "torch==${known:-$torch}" >"$HFPATCH_KEEP"
    # Again only when setup.cfg changed: pip is slow to find that nothing is to be done.
    local stamp="$HFPATCH_VENV/.hfpatch-$1"
    if [ ! -f "$stamp" ] || [ "$HFPATCH_ROOT/setup.cfg" -nt "$stamp" ]; then
        echo "hfpatch: installing hfpatch[$1] and what it needs into $HFPATCH_VENV"
        # One at a time: a build leaves files in this folder.
        local alone=()
        command -v flock >/dev/null && alone=(flock "$HFPATCH_ROOT/setup.cfg")
        "${alone[@]}" python -m pip install -q -c "$HFPATCH_KEEP" -e "$HFPATCH_ROOT[$1]" || return 2
        touch "$stamp"
    fi
}
