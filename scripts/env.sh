# Sourced by quickstart.sh and test.sh: makes .venv beside the repository and installs hfpatch in it. A torch that is
# already there is used; otherwise the pinned one is installed, and said so first.
#
#   HFPATCH_TORCH   what to give pip where no torch is found (default torch==2.13.0; the index decides CPU or CUDA build)
#   HFPATCH_VENV    the environment's folder (default .venv)
#   PYTHON          the Python to start from (default python3)

HFPATCH_TORCH=${HFPATCH_TORCH:-torch==2.13.0}
HFPATCH_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
HFPATCH_VENV=${HFPATCH_VENV:-$HFPATCH_ROOT/.venv}
PYTHON=${PYTHON:-python3}

# make_env EXTRA: the environment with `pip install -e .[EXTRA]`; afterwards `python` is the environment's.
make_env() {
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
        echo "hfpatch: expected Python 3.10 or newer, $("$PYTHON" --version 2>&1) came; set PYTHON=/path/to/python3." >&2
        return 2
    }
    if [ ! -x "$HFPATCH_VENV/bin/python" ]; then
        # A venv made from a venv sees the base interpreter's packages, not that venv's: link those too.
        "$PYTHON" -m venv --system-site-packages "$HFPATCH_VENV" || {
            echo "hfpatch: $PYTHON cannot make a virtual environment; install its venv module (python3-venv)." >&2
            return 2
        }
        "$PYTHON" - "$HFPATCH_VENV" <<'PY'
import glob, sys, sysconfig
if sys.prefix != sys.base_prefix:
    [site] = glob.glob(f"{sys.argv[1]}/lib/python*/site-packages")
    open(f"{site}/_parent.pth", "w").write(sysconfig.get_path("purelib") + "\n")
PY
    fi
    export VIRTUAL_ENV="$HFPATCH_VENV" PATH="$HFPATCH_VENV/bin:$PATH"
    hash -r
    if python -c 'import torch' 2>/dev/null; then
        python -c 'import torch; print(f"hfpatch: using the torch that is here: {torch.__version__}")'
    else
        echo "hfpatch: no torch here; installing $HFPATCH_TORCH (set HFPATCH_TORCH to choose another)"
        python -m pip install -q "$HFPATCH_TORCH" numpy || return 2
    fi
    # Again only when setup.cfg changed: pip is slow to find that nothing is to be done.
    local stamp="$HFPATCH_VENV/.hfpatch-$1"
    if [ ! -f "$stamp" ] || [ "$HFPATCH_ROOT/setup.cfg" -nt "$stamp" ]; then
        echo "hfpatch: installing hfpatch[$1] and what it needs into $HFPATCH_VENV"
        python -m pip install -q -e "$HFPATCH_ROOT[$1]" || return 2
        touch "$stamp"
    fi
}
