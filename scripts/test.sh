#!/usr/bin/env bash
# Makes the environment and runs the whole test suite:
#   bash scripts/test.sh            plain on this machine's devices, then the kernels under Triton's interpreter
#   bash scripts/test.sh --all      also the long grids, then the suite under other transformers versions (own environments)
#   bash scripts/test.sh ARGS...    anything else goes to pytest in the plain run, such as tests/ops -k rope
case ${1:-} in -h | --help) sed -n '2,/^case /{/^case /d;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit 0 ;; esac
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/env.sh
make_env test || exit 2
ALL=()
if [ "${1:-}" = "--all" ]; then
    ALL=(--all)
    shift
fi
export TOKENIZERS_PARALLELISM=false DS_ACCELERATOR=${DS_ACCELERATOR:-$(python -c 'import torch; print("cuda" if torch.cuda.is_available() else "cpu")')}
# Tiny tensors: one thread is as fast alone, and far faster beside other processes (the launches of two).
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
status=0

run() { # run "what" command...: prints the time it took, remembers a failure, goes on
    local began=$SECONDS what=$1
    shift
    echo "hfpatch: $what: $*"
    "$@" || status=1
    echo "hfpatch: $what took $((SECONDS - began)) s"
}

# The interpreter replaces the compiler for the whole process, so its tests run in one of their own.
if [ $# -eq 0 ] && python -c 'import triton' 2>/dev/null; then
    run "kernels under the interpreter" env TRITON_INTERPRET=1 python -m pytest -q tests/ops tests/kernels "${ALL[@]}"
fi
if [ ${#ALL[@]} -gt 0 ]; then
    for version in 4.57.6 '5.0.*' '5.17.*' '5.22.*'; do
        (
            HFPATCH_VENV=$HFPATCH_ROOT/.venv-transformers-${version%.\*}
            # With all that hfpatch needs in one breath: an older transformers wants older companions.
            make_env test && python -m pip install -q -e "$HFPATCH_ROOT[test]" "transformers==$version" &&
                run "transformers $version" python -m pytest -q --ignore=tests/kernels && exit $status
        ) || status=1
    done
fi
[ $status -eq 0 ] || echo "hfpatch: something above failed" >&2
python -m pytest "${ALL[@]}" "$@" || status=1 # last, so that the output ends with the suite's closing line
exit $status
